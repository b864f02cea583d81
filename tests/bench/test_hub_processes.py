from __future__ import annotations

import pytest
from bench.hub_processes import has_text, summary


def test_the_setting_with_the_fastest_first_token_counts() -> None:
    found = summary({"slow": [(1.0, 1.2), (1.0, 1.4), (1.0, 9.0)], "fast": [(0.5, 1.0), (0.7, 1.1), (0.9, 1.3)]})
    assert found.setting == "fast"
    assert found.first_token_p50_s == 1.1
    assert found.ready_p50_s == 0.7
    assert found.first_token_s["slow"] == (1.2, 1.4, 9.0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(b'data: {"choices": [{"text": " Paris"}]}\n', True, id="text"),
        pytest.param(b'data: {"choices": [{"text": ""}]}\n', False, id="no text yet"),
        pytest.param(b'data: {"choices": []}\n', False, id="usage alone"),
        pytest.param(b'data: {"error": "x"}\n', False, id="error"),
        pytest.param(b"data: [DONE]\n", False, id="end"),
        pytest.param(b": keep-alive\n", False, id="comment"),
        pytest.param(b"\n", False, id="between events"),
    ],
)
def test_only_an_event_with_text_is_a_token(line: bytes, expected: bool) -> None:
    assert has_text(line) is expected
