"""Where answers end, what they hold back and what numbers they carry, over real gRPC."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from toy_model import EOS, NUM_TOKENS, ToyRunner
from toy_worker import Exchange, RunningWorker, ask, eventually, ids, running_worker, text
from worker_probes import hold

from naru_proto.v1 import inference_pb2, worker_pb2

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
SEPARATOR = 257
"""The toy model's special token ``<sep>``, which is no EOS."""


@pytest.mark.parametrize("start", [0, 1, 7, 20])
@pytest.mark.parametrize("length", [1, 3, 5])
async def test_no_part_of_a_stop_string_is_ever_told(start: int, length: int) -> None:
    async with running_worker(None, None, "toy") as worker:
        whole = text(await worker.generate(ask("whole", max_tokens=40)))
        stop = whole[start : start + length]
        never = "a very long stop string that never comes"
        deltas = await worker.generate(ask("r", max_tokens=40, stop=[never, stop]))
        many = await worker.generate(ask("n", max_tokens=40, stop=[stop], n=2))
    cut = whole[: whole.index(stop)]
    told = ""
    for delta in deltas:
        told += delta.text
        assert cut.startswith(told), "text that was to be withheld"
    assert told == cut == text(many, 0) == text(many, 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (STOP, stop)
    # Withheld tokens count as they come, and those of the stop string do, too.
    assert deltas[-1].usage.completion_tokens == whole.index(stop) + len(stop) == len(ids(deltas))


async def test_a_prompt_alone_is_scored_whole_and_nothing_is_generated() -> None:
    prompt = "The sky is blue"
    async with running_worker(None, None, "toy") as worker:
        # Twice: what is cached by now must not cost a score.
        runs = [await worker.generate(ask(f"r{i}", prompt, max_tokens=0, prompt_logprobs=1)) for i in range(2)]
        [plain] = await worker.generate(ask("plain", prompt, max_tokens=0))
        one = await worker.generate(ask("one", prompt, max_tokens=1, prompt_logprobs=1))
    for [delta] in runs:
        assert b"".join(position.chosen.bytes for position in delta.prompt_logprobs) == prompt.encode()
        assert [position.chosen.rank > 0 for position in delta.prompt_logprobs] == [False, *[True] * 14]
        assert [len(position.top) for position in delta.prompt_logprobs] == [0, *[1] * 14]
        assert (delta.text, delta.num_tokens, delta.finish_reason) == ("", 0, LENGTH)
        assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (len(prompt), 0)
    assert runs[0][0].prompt_logprobs == runs[1][0].prompt_logprobs == one[0].prompt_logprobs
    assert (plain.text, plain.finish_reason, plain.usage.completion_tokens) == ("", LENGTH, 0)


@pytest.mark.parametrize(
    ("stops", "reason"),
    [({"stop": ["<sep>"]}, "<sep>"), ({"stop_token_ids": [SEPARATOR]}, f"token:{SEPARATOR}")],
)
@pytest.mark.parametrize("shows", [False, True])
async def test_a_special_token_that_is_no_eos_stops_where_it_is_asked_for(
    stops: dict[str, Any], reason: str, shows: bool
) -> None:
    async with running_worker(None, None, "toy") as worker:
        free = ask("free", max_tokens=40, temperature=1.0, seed=3, logit_bias={SEPARATOR: 5.0}, ignore_eos=False)
        free.show_special_tokens = shows
        whole = await worker.generate(free)
        request = worker_pb2.GenerateRequest()
        request.CopyFrom(free)
        request.request_id = "stopped"
        request.sampling.stop.extend(stops.get("stop", []))
        request.sampling.stop_token_ids.extend(stops.get("stop_token_ids", []))
        stopped = await worker.generate(request)
    place = ids(whole).index(SEPARATOR)
    assert 0 < place < 39, "the token comes in the middle of the free answer"
    assert ("<sep>" in text(whole)) == shows
    assert ids(stopped) == ids(whole)[: place + 1]
    assert text(stopped) == bytes(ids(whole)[:place]).decode(errors="replace")
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == (STOP, reason)


async def test_no_logit_however_odd_gives_a_number_that_json_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ToyRunner._row

    def odd(self: ToyRunner, context: list[int]) -> Any:
        row = plain(self, context)
        row[: 32 + len(context) % 3 * 32] = -np.inf
        row[200] = np.inf if len(context) % 5 == 0 else np.nan
        return row

    async with running_worker(None, None, "toy") as worker:
        tiny = ask("tiny", "a b c", temperature=1.0, top_k=1, logprobs=20, prompt_logprobs=20, max_tokens=8)
        banned = ask("banned", "a b c", logprobs=20, max_tokens=8, logit_bias={token: -100.0 for token in range(250)})
        beams = ask("beams", "a b c", logprobs=20, max_tokens=8, beam_width=4)
        expected = await worker.generate(ask("before"))
        with monkeypatch.context() as patch:
            patch.setattr(ToyRunner, "_row", odd)
            patch.setattr("toy_model.draw", _careful_draw)
            for request in (tiny, banned, beams):
                deltas = await worker.generate(request)
                assert not deltas[-1].error.code, (request.request_id, deltas[-1].error)
                positions = [p for d in deltas for p in (*d.logprobs, *d.prompt_logprobs)]
                tokens = [token for p in positions for token in (p.chosen, *p.top)]
                assert len(tokens) > 8 * 20
                assert all(math.isfinite(t.logprob) and -9999.0 <= t.logprob <= 0.0 for t in tokens)
        again = ask("after")
        again.skip_prefix_cache = True
        assert ids(await worker.generate(again)) == ids(expected)


def _careful_draw(logits: Any, sampling: Any) -> Any:
    """The reference sampler: the toy's own has no answer for odd numbers."""
    from naru_worker.adapters.ops.sampling_ref import sample

    return sample(logits, sampling)


async def _is_idle(worker: RunningWorker) -> bool:
    [model] = (await worker.stub.Stats(worker_pb2.StatsRequest())).models
    return (model.num_running, model.num_waiting, model.num_free_blocks) == (0, 0, model.num_blocks)


async def test_choices_come_each_by_its_index_and_leave_together() -> None:
    async with running_worker(None, None, "toy") as worker:
        drawn: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7}
        first = await worker.generate(ask("first", **drawn))
        assert {d.index for d in first} == {0, 1, 2}
        assert [sum(d.index == i and d.finish_reason == LENGTH for d in first) for i in range(3)] == [1, 1, 1]
        assert len({tuple(ids(first, i)) for i in range(3)}) == 3
        assert first[-1].usage == inference_pb2.Usage(prompt_tokens=9, completion_tokens=36)
        again = await worker.generate(ask("again", **drawn))
        assert [ids(again, i) for i in range(3)] == [ids(first, i) for i in range(3)]
        hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(ask("left", max_tokens=240, **drawn))
        await router.read_until(lambda: len({d.index for d in router.deltas.get("left", [])}) == 3)
        await router.send(cancel=("left",))
        await router.finish("left")
        ends = [d for d in router.deltas["left"] if d.finish_reason]
        assert [(d.index, d.finish_reason) for d in ends] == [
            (i, inference_pb2.FINISH_REASON_CANCELLED) for i in range(3)
        ]
        await eventually(lambda: _is_idle(worker), "blocks did not come back")
        await router.close()


async def test_a_request_too_long_says_both_numbers_and_what_fits_is_filled_up() -> None:
    async with running_worker(None, None, "toy") as worker:
        [over] = await worker.generate(ask("over", "x" * 257, max_tokens=None))
        assert over.error.code == "context_length_exceeded"
        assert "257 tokens" in over.error.message
        assert "256" in over.error.message
        [sum_over] = await worker.generate(ask("sum", "x" * 200, max_tokens=57))
        assert all(number in sum_over.error.message for number in ("200", "57", "257", "256"))
        last = await worker.generate(ask("last", "x" * 255, max_tokens=None))
        assert (len(ids(last)), last[-1].finish_reason) == (1, LENGTH)


async def test_an_answer_that_ends_at_once_is_empty_and_whole() -> None:
    async with running_worker(None, None, "toy") as worker:
        deltas = await worker.generate(ask("r", logit_bias={EOS: 100.0}, ignore_eos=False, n=2))
    assert text(deltas, 0) == text(deltas, 1) == ""
    assert [(d.index, d.finish_reason, d.stop_reason) for d in deltas] == [(0, STOP, ""), (1, STOP, "")]
    assert deltas[-1].usage.completion_tokens == 2
    assert EOS < NUM_TOKENS
