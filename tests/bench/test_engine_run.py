from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.engine_run import Suite, cases_for, steps_of, still_known
from bench.limits import INSTRUCTIONS, usable
from bench.measure import Repeats
from bench.servers import ServerSpec
from bench.workload import CASE_NAMES, FULL, LONG_CASES

from naru_worker.native.isa import VARIANTS


def spec(settings: str, cases: tuple[str, ...] = ()) -> ServerSpec:
    return ServerSpec("peer", ("peer",), 1, "/", "m", 1.0, settings=settings, cases=cases)


def test_a_setting_runs_the_cases_it_is_for_unless_another_one_won_them_before() -> None:
    assert cases_for(spec("a"), CASE_NAMES, {}) == CASE_NAMES
    assert cases_for(spec("a", LONG_CASES), CASE_NAMES, {}) == LONG_CASES
    won = {"single": "a", "conc16": "b", "mixed": "a"}
    assert cases_for(spec("a"), ("single", "conc16", "mixed"), won) == ("single", "mixed")
    assert cases_for(spec("b"), ("single", "conc16", "mixed"), won) == ("conc16",)
    assert cases_for(spec("c"), ("single", "conc16"), won) == ()
    assert cases_for(spec("c"), ("single", "shared"), won) == ("shared",)  # nobody won it yet


def test_a_setting_that_is_gone_leaves_its_cases_to_all_others() -> None:
    specs = (spec("a"), spec("b"))
    assert still_known({"single": "a", "conc16": "as it was", "mixed": "b"}, specs) == {"single": "a", "mixed": "b"}


def test_the_steps_of_an_engine_are_those_of_the_settings_it_will_be_started_with() -> None:
    suite = Suite("small", Path("m.gguf"), FULL, Repeats(1, 1.0), ("single", "mixed"), ())
    assert steps_of((spec("a"), spec("b")), suite, {"single": "b"}) == [
        *("small/peer/a/start", "small/peer/a/mixed"),
        *("small/peer/b/start", "small/peer/b/single", "small/peer/b/mixed"),
    ]
    assert steps_of((spec("a"), spec("b")), suite, {"single": "b", "mixed": "b"})[0] == "small/peer/b/start"


@pytest.mark.parametrize(
    ("walls_s", "elapsed_s", "enough"),
    [
        ([], 99.0, False),
        ([40.0], 40.0, True),
        ([1.0, 1.0], 2.0, False),
        ([1.0, 1.01, 1.02], 3.0, True),
        ([1.0, 1.2, 1.0], 3.0, False),
        ([1.0, 1.2, 1.0, 1.3, 1.0], 5.0, True),
    ],
)
def test_rounds_end_when_they_agree_or_time_is_up_but_never_before_the_first(
    walls_s: list[float], elapsed_s: float, enough: bool
) -> None:
    assert Repeats(5, 10.0).are_enough(walls_s, elapsed_s) is enough


def test_a_narrower_instruction_set_has_no_limit_that_only_a_wider_one_reaches() -> None:
    assert {isa for one in INSTRUCTIONS for isa in one.isas} == set(VARIANTS) - {"plain"} | {"avx512_bf16"}
    names = [{one.name for one in usable(isa)} for isa in ("avx512", "avx512_bf16", "amx")]
    assert names[0] <= names[1] <= names[2]
    assert not any("AVX512" in one.name or "AMX" in one.name for one in usable("avx2"))


def test_a_window_is_one_sequence_of_one_kind_with_logits_of_its_second_half() -> None:
    accuracy = pytest.importorskip("bench.accuracy", exc_type=ImportError)
    ids = np.arange(256, dtype=np.int32)
    batch = accuracy.window_batch(ids, "generated")
    assert batch.num_generated_tokens == 256
    assert batch.logits_rows.tolist() == list(range(128, 255))
    assert batch.slots.tolist() == [batch.block_table[0][i // 16] * 16 + i % 16 for i in range(256)]
    assert accuracy.window_batch(ids, "prompt").num_generated_tokens == 0
