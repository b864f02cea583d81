from __future__ import annotations

import pytest
from bench.measure import Measurement
from bench.report import TIMES, best_of, figures, ratios, rounded, table, warnings
from bench.stream import Timing

PEERS = ("llamacpp", "vllm")
RATES = {"single": 100.0, "conc16": 200.0, "prefill": 1000.0, "shared": 50.0, "prefill8k": 800.0, "decode8k": 40.0}


def engine(factor: float, ttft_p99_ms: float = 50.0) -> dict[str, dict[str, float]]:
    cases = {case: {"output_tok_s": rate * factor} for case, rate in RATES.items()}
    for case in ("prefill", "prefill8k"):
        cases[case] = {"prefill_tok_s": RATES[case] * factor}
    cases["decode8k"] = {"decode_tok_s": RATES["decode8k"] * factor}
    cases["mixed"] = {"itl_p99_ms": ttft_p99_ms / 4, "long_ttft_ms": 10 * ttft_p99_ms}
    cases["conc16"] |= {"ttft_p99_ms": ttft_p99_ms, "itl_p99_ms": ttft_p99_ms / 2}
    return cases


def timing(ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (), out: int = 1, cached: int = 0) -> Timing:
    return Timing(ttft_s, ttft_s + sum(gaps_s), gaps_s, 10, out, cached, len(gaps_s) + 1)


def measurement(wall_s: float, *timings: Timing, measured: bool = True) -> Measurement:
    return Measurement("conc16", 0, measured, wall_s, 0.01, 2 * wall_s, timings)


def test_above_one_is_in_our_favour_for_rates_and_for_times() -> None:
    found = ratios({"naru": engine(2.0, 10.0), "llamacpp": engine(1.0, 40.0), "vllm": engine(4.0, 30.0)}, PEERS)
    assert found["single_vs_llamacpp"] == 2.0
    assert found["conc16_vs_vllm"] == 0.5
    assert found["prefill_vs_best"] == 0.5
    assert found["shared_vs_best"] == 0.5
    assert found["ttft_p99_vs_llamacpp"] == 4.0
    assert found["ttft_p99_vs_best"] == 3.0
    assert found["itl_p99_vs_best"] == 3.0
    assert found["mixed_itl_p99_vs_best"] == 3.0
    assert found["decode8k_vs_llamacpp"] == 2.0


def test_a_missing_peer_leaves_its_ratios_and_the_best_ones_empty() -> None:
    found = ratios({"naru": engine(2.0), "llamacpp": engine(1.0)}, PEERS)
    assert found["single_vs_llamacpp"] == 2.0
    assert {name for name, value in found.items() if value is not None} == {
        f"{what}_vs_llamacpp" for what in (*RATES, *TIMES)
    }


def test_without_our_own_figures_every_ratio_is_empty() -> None:
    found = ratios({"llamacpp": engine(1.0), "vllm": engine(1.0)}, PEERS)
    assert set(found.values()) == {None}


def test_figures_are_medians_over_repeats_and_percentiles_over_requests() -> None:
    found = figures(
        [
            measurement(9.0, timing(), measured=False),
            measurement(1.0, timing(0.1, (0.2, 0.4), out=3), timing(0.3, (0.2, 0.2), out=3, cached=5)),
            measurement(2.0, timing(0.1, (0.2, 0.2), out=3), timing(0.1, (0.2, 0.2), out=3)),
            measurement(4.0, timing(0.1, (0.2, 0.2), out=3), timing(0.1, (0.2, 0.2), out=3)),
        ]
    )
    assert found["wall_s"] == 2.0
    assert (found["wall_min_s"], found["wall_max_s"]) == (1.0, 4.0)
    assert found["output_tok_s"] == 3.0
    assert found["prime_wall_s"] == 9.0
    assert found["ttft_p50_ms"] == pytest.approx(100)
    assert found["ttft_p99_ms"] == pytest.approx(290)
    assert found["itl_p50_ms"] == pytest.approx(200)
    assert found["tokens_per_chunk"] == 1.0
    assert found["cached_prompt_share"] == pytest.approx(5 / 60)
    assert found["client_cpu_share"] == pytest.approx(0.01)
    assert found["server_cpu_cores"] == pytest.approx(2.0)


def test_each_case_counts_in_the_setting_that_did_best_in_it() -> None:
    one = {"single": {"output_tok_s": 10.0}, "prefill": {"prefill_tok_s": 5.0, "output_tok_s": 9.0}}
    two = {
        "single": {"output_tok_s": 12.0},
        "prefill": {"prefill_tok_s": 4.0, "output_tok_s": 99.0},
        "shared": {"output_tok_s": 1.0},
    }
    found, chosen = best_of([one, two])
    assert found == {"single": two["single"], "prefill": one["prefill"], "shared": two["shared"]}
    assert chosen == {"single": 1, "prefill": 0, "shared": 1}


def test_prefill_speed_is_prompt_tokens_until_the_first_token() -> None:
    assert figures([measurement(0.6, timing(0.5))])["prefill_tok_s"] == pytest.approx(20.0)


def test_the_table_has_a_column_for_each_engine_and_a_dash_for_what_is_missing() -> None:
    engines = {"naru": engine(2.0), "llamacpp": engine(1.0)}
    lines = table(engines, PEERS, ratios(engines, PEERS)).splitlines()
    assert lines[0].split() == ["naru", "llamacpp", "vllm", "÷", "llamacpp", "÷", "vllm", "÷", "best"]
    single = next(line for line in lines if line.startswith("single stream"))
    assert single.split()[-6:] == ["200", "100", "-", "2.00×", "-", "-"]


def test_noise_a_heavy_client_and_merged_tokens_are_said() -> None:
    quiet = {"naru": {"single": {"client_cpu_share": 0.01, "tokens_per_chunk": 1.0}}}
    assert warnings(quiet, 0.1) == []
    loud = {"naru": {"single": {"client_cpu_share": 0.2, "tokens_per_chunk": 2.0}}}
    busy, client, merged = warnings(loud, 3.0)
    assert "3.00" in busy
    assert "20%" in client
    assert "2.0 tokens" in merged


def test_results_keep_six_digits() -> None:
    assert rounded({"a": [1.23456789, None, "x", 3]}) == {"a": [1.23457, None, "x", 3]}


def test_of_streams_beside_a_long_prompt_only_gaps_that_meet_it_count() -> None:
    stream = Timing(0.1, 1.2, (0.1, 0.5, 0.1, 0.4), 10, 5, 0, 5)  # chunks at 0.1, 0.2, 0.7, 0.8 and 1.2
    long = Timing(0.3, 0.3, (), 100, 1, 0, 1, sent_s=0.25)  # computed from 0.25 to 0.55
    found = figures([Measurement("mixed", 0, True, 1.2, 0.01, 1.0, (stream, long))])
    assert found["itl_p99_ms"] == found["itl_max_ms"] == pytest.approx(500)
    assert found["long_ttft_ms"] == pytest.approx(300)


def test_beside_a_long_prompt_the_setting_with_the_shortest_stalls_is_the_best() -> None:
    _, chosen = best_of([{"mixed": {"itl_p99_ms": 90.0}}, {"mixed": {"itl_p99_ms": 40.0}}])
    assert chosen == {"mixed": 1}
