"""What `naru up` says to try first fits what the models can do."""

from __future__ import annotations

import pytest

from naru_operator.cli.up import _first_request


@pytest.mark.parametrize(
    ("served", "tasks", "path", "model"),
    [
        (["m"], {}, "/v1/chat/completions", "m"),
        (["e", "m"], {"e": ["embed"], "m": ["generate", "embed"]}, "/v1/chat/completions", "m"),
        (["e"], {"e": ["embed"]}, "/v1/embeddings", "e"),
        (["s"], {"s": ["score"]}, "/v1/score", "s"),
        (["t"], {"t": ["tensors"]}, "/v2/repository/index", None),
    ],
)
def test_the_first_request_is_one_that_a_model_can_answer(
    served: list[str], tasks: dict[str, list[str]], path: str, model: str | None
) -> None:
    found, body = _first_request(served, tasks)
    assert (found, body.get("model")) == (path, model)
