"""A request for text on its way from the board to the engine: tokenized, checked against its model, and posted.

Called by the board once the model takes requests. Requests with a task go by `tasks`.
"""

from __future__ import annotations

import asyncio
import functools
import secrets

from naru_proto.errors import InvalidRequest, Unavailable
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.server import wire
from naru_worker.adapters.server.keeper import INLINE_CHARS, Aside, Asked, Keeper
from naru_worker.adapters.server.prompt import Prompt, read_prompt
from naru_worker.adapters.server.stream import LiveRequest
from naru_worker.core.request import Request
from naru_worker.core.request_check import check_num_prior
from naru_worker.core.request_limits import check_prior, check_prompt_text, resolve_params
from naru_worker.core.structured import StructuredOutput
from naru_worker.core.token_matcher import TokenMatcher

GENERATE = "generate"
_WORDS = {"generate": "generate text", "embed": "give vectors", "score": "score pairs", "tensors": "take tensors"}


class Admission:
    """Asyncio thread only."""

    def __init__(self, loop: EngineLoop, keeper: Keeper, max_message_bytes: int) -> None:
        self._loop = loop
        self._keeper = keeper
        self._aside = Aside(keeper)
        self._max_message_bytes = max_message_bytes

    def admit(self, live: LiveRequest, model: LoadedModel, asked: Asked) -> None:
        """Sends a request to its model's engine; long prompts are tokenized in another thread first.

        Raises:
            NaruError: the model cannot serve it.
        """
        check_can(model, GENERATE)
        text = asked.message.text
        inline = len(text) <= INLINE_CHARS
        if not inline:
            check_prompt_text(len(text.encode()), model.limits)
        if asked.params.structured is not None:
            work = _prepare(model, asked, asked.params.structured, inline=inline)
            self._aside.start(
                live, work, lambda made: self._submit(live, model, asked, *made), "the request could not be prepared"
            )
            return
        self._aside.run(
            live,
            functools.partial(read_prompt, model, asked.message),
            functools.partial(self._submit, live, model, asked),
            "the prompt could not be tokenized",
            inline=inline,
        )

    def _submit(
        self,
        live: LiveRequest,
        model: LoadedModel,
        asked: Asked,
        prompt: Prompt,
        matchers: tuple[TokenMatcher, ...] = (),
    ) -> None:
        message, prompt_token_ids = asked.message, prompt.token_ids
        if message.prior_revision and message.prior_revision != model.facts.revision:
            raise Unavailable(
                f"the answer was begun by revision {message.prior_revision[:80]!r} of the model, and this worker holds "
                f"{model.facts.revision[:80]!r}; send the request again",
                param="model",
            )
        if message.return_token_ids:
            live.untold_revision = model.facts.revision
        live.first_prompt_token_id = prompt_token_ids[0] if prompt_token_ids else None
        params = resolve_params(prompt_token_ids, asked.params, model.limits)
        prior = wire.prior_from_wire(message)
        check_prior(prior, model.limits)
        wire.check_answer_size(len(prompt_token_ids), params, self._max_message_bytes)
        request = Request(
            request_id=live.engine_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            arrival=asked.turn.number,
            priority=message.priority,
            cache_salt=message.cache_salt,
            skip_prefix_cache=message.skip_prefix_cache,
            prior=prior,
            marks=prompt.marks,
            show_special_tokens=message.show_special_tokens,
            matchers=matchers,
        )
        self._keeper.is_submitted(live)
        model.note_posted(len(prompt_token_ids))
        self._loop.submit(model.engine, request, live.arrived_s)


async def _prepare(
    model: LoadedModel, asked: Asked, wish: StructuredOutput, *, inline: bool
) -> tuple[Prompt, tuple[TokenMatcher, ...]]:
    """The prompt in tokens, and what holds each choice to the wish: compiled, or found in the model's cache."""
    if model.grammars is None:
        raise InvalidRequest(f"model {model.name!r} has no structured output; leave it out", param=wish.param)
    prior = wire.prior_from_wire(asked.message)
    check_prior(prior, model.limits)
    check_num_prior(len(prior), asked.params.n)  # before there is a matcher for each
    prompt = read_prompt(model, asked.message) if inline else await asyncio.to_thread(read_prompt, model, asked.message)
    return prompt, await model.grammars.matchers(wish, asked.params.n, prior)


def check_can(model: LoadedModel, task: str) -> None:
    """Passes or raises.

    Raises:
        InvalidRequest: the model does something else; says what.
    """
    tasks = model.facts.info.tasks
    if task not in tasks:
        able = " or ".join(_WORDS.get(each, each) for each in tasks)
        raise InvalidRequest(
            f"model {model.name!r} is asked to {_WORDS[task]}, and can {able} only; ask another model", param="model"
        )
