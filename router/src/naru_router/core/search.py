"""How many answers are made of which some are given: `best_of` and beam search. Read by both request parsers.

The worker searches beams; of sampled answers the router picks those with the highest mean log probability of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import PositionLogprobs, SamplingParams
from naru_router.core.fields import Fields
from naru_router.core.logprobs import FLOOR, finite
from naru_router.core.sampling import LENGTH_PENALTIES, MAX_BEAM_WIDTH, MAX_CHOICES

FIELDS = frozenset({"best_of", "use_beam_search", "beam_width", "length_penalty"})


def read_search(fields: Fields, sampling: SamplingParams, *, is_stream: bool) -> int:
    """How many answers are made, of which the best `n` are given; 0: n. Sets the beams in `sampling`.

    Raises:
        InvalidRequest: naming the field.
    """
    n = sampling.n if sampling.HasField("n") else 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of is {best_of}, below n {n}; raise it or leave it out", param="best_of")
    if _searches_beams(fields):
        _set_beams(fields, sampling, n, best_of)
        return 0
    if fields.get("length_penalty") is not None and fields.number("length_penalty", *LENGTH_PENALTIES) != 1.0:
        message = "length_penalty is set but use_beam_search is not true; set it or leave length_penalty out"
        raise InvalidRequest(message, param="length_penalty")
    if best_of is None or best_of == n:
        return 0
    if is_stream:
        raise InvalidRequest(
            f"best_of is {best_of} and stream is true; the best are known at the end: leave one of them out",
            param="best_of",
        )
    return best_of


def _searches_beams(fields: Fields) -> bool:
    uses, width = fields.boolean("use_beam_search"), fields.integer("beam_width", 1, MAX_BEAM_WIDTH)
    if uses is False and width is not None:
        message = f"beam_width is {width} and use_beam_search is false; leave one of them out"
        raise InvalidRequest(message, param="beam_width")
    return bool(uses) or width is not None


def _set_beams(fields: Fields, sampling: SamplingParams, n: int, best_of: int | None) -> None:
    width = fields.integer("beam_width", 1, MAX_BEAM_WIDTH)
    if width is None:
        width = best_of if best_of is not None else n
    elif best_of is not None and best_of != width:
        message = f"beam_width is {width} and best_of is {best_of}; both are the number of beams: send one of them"
        raise InvalidRequest(message, param="best_of")
    if width < n:
        raise InvalidRequest(f"beam_width is {width}, below n {n}; raise it", param="beam_width")
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(f"{width} beams are asked for; at most {MAX_BEAM_WIDTH} are allowed", param="beam_width")
    sampling.beam_width = width
    penalty = fields.number("length_penalty", *LENGTH_PENALTIES)
    if penalty is not None:
        sampling.length_penalty = penalty


def sampling_of_best(sampling: SamplingParams, best_of: int) -> SamplingParams:
    """What the worker is asked so that the best can be told: all of the choices, with log probabilities."""
    if best_of == 0:
        return sampling
    made = SamplingParams()
    made.CopyFrom(sampling)
    made.n = best_of
    if not made.HasField("logprobs"):
        made.logprobs = 0
    return made


def best_first(choices: Sequence[Sequence[PositionLogprobs]]) -> list[int]:
    """Places of choices by the mean log probability of their tokens, highest first; equals stay in order."""

    def mean(index: int) -> float:
        positions = choices[index]
        if not positions:
            return FLOOR
        return sum(finite(position.chosen.logprob) for position in positions) / len(positions)

    return sorted(range(len(choices)), key=mean, reverse=True)
