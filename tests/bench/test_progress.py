from __future__ import annotations

from bench.progress import UNKNOWN_S, Progress


def test_the_rest_is_estimated_from_an_earlier_run_and_known_to_the_second() -> None:
    now, said = [0.0], list[str]()
    progress = Progress(["a", "b", "c"], {"a": 10.0, "b": 70.0}, lambda: now[0], said.append)
    assert progress.remaining_s() == 80.0 + UNKNOWN_S
    progress.begin("a")
    now[0] = 4.0
    progress.tell("half way")
    assert said == ["half way (about 1:31 min left)"]
    now[0] = 12.0
    progress.begin("b")
    assert progress.took_s == {"a": 12.0}
    now[0] = 100.0
    assert progress.remaining_s() == UNKNOWN_S  # b is late; it is not below zero


def test_a_step_done_twice_counts_both_times() -> None:
    now = [0.0]
    progress = Progress(["a"], {}, lambda: now[0], lambda text: None)
    for _ in range(2):
        progress.begin("a")
        now[0] += 3.0
        progress.end()
    assert progress.took_s == {"a": 6.0}


def test_a_step_that_never_ran_takes_as_long_as_it_did_in_other_settings_of_that_engine() -> None:
    earlier_s = {"small/peer/a/start": 40.0, "small/peer/b/start": 60.0, "larger/peer/a/start": 7.0, "limits": 9.0}
    progress = Progress((), earlier_s, lambda: 0.0, lambda text: None)
    assert progress.expected_s("small/peer/b/start") == 60.0
    assert progress.expected_s("small/peer/c/start") == 50.0
    assert progress.expected_s("small/other/c/start") == UNKNOWN_S
    assert (progress.expected_s("limits"), progress.expected_s("accuracy")) == (9.0, UNKNOWN_S)
