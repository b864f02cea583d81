"""Generated requests: none is answered with a fault, none otherwise than it is described."""

from __future__ import annotations

from pathlib import Path

from fuzzing import fuzz, num_cases, served


def test_requests_at_the_edges_of_the_description_are_answered_as_it_says(tmp_path: Path) -> None:
    """The short run: every boundary of every field. `make fuzz-api` goes on with random ones."""
    with served(tmp_path) as url:
        done = fuzz(url, tmp_path, "coverage", max_examples=1)
    generated, passed = num_cases(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert generated == passed > 1000
