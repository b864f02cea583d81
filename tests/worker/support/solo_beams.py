"""What a beam search over the pretend model must come to, written as plainly as can be: all continuations, sorted."""

from __future__ import annotations

from naru_worker.core.request import FinishReason, Request
from naru_worker.core.testing import PretendModel

Text = tuple[tuple[int, ...], FinishReason]


def solo_beams(
    model: PretendModel, request: Request, *, max_tokens: int, eos_token_ids: tuple[int, ...] = ()
) -> list[Text]:
    """The n best texts of a request, whatever else runs. `max_tokens`: most output tokens."""
    params = request.params
    width = params.beam_width
    assert width is not None
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    complete: list[tuple[float, Text]] = []
    while live:
        length = len(live[0][1]) + 1
        ranked = []
        for place, (score, output) in enumerate(live):
            found = model.candidates(chain_after(model, request, output))
            for rank, (token, logprob) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
                if token not in stops or length > params.min_tokens:
                    ranked.append((-(score + logprob), place, rank, (*output, token)))
        ranked.sort()
        live = []
        for rank, (negative, _, _, output) in enumerate(ranked):
            is_stopped = output[-1] in stops
            if not is_stopped and length < max_tokens:
                live.append((-negative, output))
            elif rank < width:
                reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
                complete.append((-negative / length**params.length_penalty, (output, reason)))
        live = live[:width]
        complete = sorted(complete, key=lambda each: -each[0])[:width]
        if live and len(complete) == width and live[0][0] / length**params.length_penalty <= complete[-1][0]:
            break
    return [text for _, text in complete[: params.n]]


def chain_after(model: PretendModel, request: Request, output: tuple[int, ...]) -> int:
    """Chain value after prompt and output."""
    chain = model.root(request)
    for position, token_id in enumerate((*request.prompt_token_ids, *output)):
        chain = model.follow(request, chain, position, token_id)
    return chain
