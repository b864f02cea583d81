from __future__ import annotations

from pathlib import Path

from bench.report import EngineFigures
from bench.winners import FILE_NAME, Known, fewest, key_of, load, near_best, save


def rates(**values: float) -> EngineFigures:
    """Cases with the figure that stands for each."""
    names = {"single": "output_tok_s", "conc16": "output_tok_s", "prefill": "prefill_tok_s", "mixed": "itl_p99_ms"}
    return {case: {names[case]: value} for case, value in values.items()}


def test_settings_do_as_well_as_the_best_within_what_two_runs_differ_by() -> None:
    settings = [rates(single=100.0, mixed=50.0), rates(single=98.0, mixed=54.0), rates(single=96.0, mixed=56.0)]
    assert near_best("single", settings) == {0, 1}
    assert near_best("mixed", settings) == {0, 1}  # less is better
    assert near_best("prefill", settings) == frozenset()


def test_few_servers_are_started_yet_none_where_another_setting_does_better() -> None:
    one = rates(single=100.0, conc16=50.0, prefill=10.0)
    other = rates(single=98.0, conc16=60.0, prefill=10.0)
    assert fewest([one, other]) == {"single": 1, "conc16": 1, "prefill": 1}
    third = rates(prefill=20.0)
    assert fewest([one, other, third]) == {"single": 1, "conc16": 1, "prefill": 2}
    # both must run: then each case takes the better of the two
    assert fewest([rates(single=100.0, conc16=50.0), rates(single=98.0, conc16=40.0, prefill=10.0)]) == {
        "single": 0,
        "conc16": 0,
        "prefill": 1,
    }
    assert fewest([]) == {}


def test_what_was_learnt_is_kept_by_machine_and_forgotten_with_another_version(tmp_path: Path) -> None:
    key, other = (key_of("cpu", 2, isa, "m.gguf") for isa in ("", "avx2"))
    assert load(tmp_path, key) == Known()
    known = Known(took_s={"small/peer/a/start": 4.0})
    known.learn("peer", "1", {"single": "a", "conc16": "b"})
    known.learn("peer", "1", {"conc16": "c"})
    save(tmp_path / "peers", key, known)
    save(tmp_path / "peers", other, Known())
    found = load(tmp_path / "peers", key)
    assert found == known
    assert found.settings("peer", "1") == {"single": "a", "conc16": "c"}
    assert found.settings("peer", "2") == found.settings("third", "1") == {}
    (tmp_path / "peers" / FILE_NAME).write_text("{")
    assert load(tmp_path / "peers", key) == Known()
