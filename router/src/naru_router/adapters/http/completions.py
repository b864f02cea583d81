"""POST /v1/completions: one answer, or n, to each of the prompts; all prompts run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from naru_router.adapters.admission import Admission
from naru_router.adapters.course import Consumer, Job
from naru_router.adapters.dispatcher import tokens_of
from naru_router.adapters.http.consumers import AnswerConsumer, StreamConsumer
from naru_router.adapters.http.generation import Exchange, GenerationEndpoint
from naru_router.adapters.http.responses import send_json
from naru_router.adapters.together import all_or_none
from naru_router.core.answers import answer_body
from naru_router.core.chunks_completion import CompletionChunks, completion_end, completion_head
from naru_router.core.completion_request import CompletionCall, parse_completion
from naru_router.core.search import sampling_of_best
from naru_router.core.usage import TokenUsage


class CompletionEndpoint(GenerationEndpoint):
    """Serves completions."""

    name = "completion"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the completion and sends its answer."""
        call = parse_completion(body)
        sampling = sampling_of_best(call.sampling, call.best_of)
        jobs = self._edge.jobs.completions(call.model, call.prompts, sampling, exchange.envelope)
        exchange.model = jobs[0].label
        answer_id = f"cmpl-{exchange.answer_id}"
        with exchange.kept_alive(call.stream):
            if call.stream:
                await self._stream(call, jobs, answer_id, exchange)
            else:
                await self._reply(call, jobs, answer_id, exchange)

    async def _stream(self, call: CompletionCall, jobs: list[Job], answer_id: str, exchange: Exchange) -> None:
        head = completion_head(answer_id, exchange.created_s, call.model)
        explains = exchange.envelope.is_explained
        consumers = [
            StreamConsumer(
                exchange.stream,
                _writer_maker(call, head, i, job.n),
                exchange.on_first_byte,
                is_explained=explains,
                is_first=i == 0,
            )
            for i, job in enumerate(jobs)
        ]
        await self._run_all(jobs, consumers)
        usage = TokenUsage()
        for consumer in consumers:
            consumer.writer.check_finished()
            usage += consumer.writer.usage
        exchange.stream.write(completion_end(head, usage if call.include_usage else None))
        exchange.stream.close()

    async def _reply(self, call: CompletionCall, jobs: list[Job], answer_id: str, exchange: Exchange) -> None:
        consumers = [AnswerConsumer(job.n) for job in jobs]
        await self._run_all(jobs, consumers)
        choices: list[dict[str, object]] = []
        usage = TokenUsage()
        n = call.sampling.n if call.sampling.HasField("n") else 1
        for i, consumer in enumerate(consumers):
            answer = consumer.answer
            answer.check_finished()
            if call.best_of:
                answer.keep_best(n)
            choices += answer.completion_choices(
                first_index=i * n,
                has_logprobs=call.sampling.HasField("logprobs"),
                echo=call.prompts[i] if call.echo else None,
                tells_prompt_logprobs=call.tells_prompt_logprobs,
            )
            usage += answer.usage
        reply = answer_body(
            answer_id=answer_id,
            kind="text_completion",
            created_s=exchange.created_s,
            model=call.model,
            choices=choices,
            usage=usage,
        )
        send_json(exchange.reply, 200, reply, exchange.route_headers(consumers))

    async def _run_all(self, jobs: Sequence[Job], consumers: Sequence[Consumer]) -> None:
        run = self._edge.dispatcher.run
        with Admission(sum(map(tokens_of, jobs))) as admission:
            works = [run(job, consumer, admission) for job, consumer in zip(jobs, consumers, strict=True)]
            await all_or_none(works)


def _writer_maker(call: CompletionCall, head: bytes, prompt_index: int, n: int) -> Callable[[], CompletionChunks]:
    def make_writer() -> CompletionChunks:
        return CompletionChunks(
            head=head,
            first_index=prompt_index * n,
            n=n,
            include_usage=call.include_usage,
            has_logprobs=call.sampling.HasField("logprobs"),
            echo=call.prompts[prompt_index] if call.echo else None,
        )

    return make_writer
