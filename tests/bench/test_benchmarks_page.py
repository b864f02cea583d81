from __future__ import annotations

from typing import Any

import pytest
from bench.benchmarks_page import PAGE, page, replaced


def part(naru: float, llama: float, vllm: float) -> dict[str, Any]:
    engines = {
        name: {
            "figures": {"single": {"output_tok_s": rate}},
            "best_settings": {"single": f"{name} as it is"},
            "runs": [{"version": "1"}],
        }
        for name, rate in (("naru", naru), ("llamacpp", llama), ("vllm", vllm))
    }
    fraction = {
        "case": "single",
        "measured_tok_s": naru,
        "read_limit_tok_s": 400.0,
        "float_limit_tok_s": 5e3,
        "int8_limit_tok_s": 9e3,
        "of_limit": naru / 400,
    }
    return {
        "model": "m.gguf",
        "weight_mb": 97.0,
        "engines": engines,
        "single_vs_llamacpp": naru / llama,
        "single_vs_best": naru / max(llama, vllm),
        "fractions": [fraction],
    }


def run(day: int, naru: float, isa: str = "amx") -> dict[str, Any]:
    limits = {
        "num_cores": 2,
        "read_gb_s": {"small": 50.0 + day},
        "read_one_core_gb_s": {"small": 28.0},
        "gop_s": {"AMX, int8": 14000.0},
        "gop_one_core_s": {"AMX, int8": 7000.0},
    }
    return {
        "measured_at": f"2026-11-{day:02}T00:00:00Z",
        "cpu_model": "A CPU",
        "used_isa": isa,
        "is_restricted": isa == "avx2",
        "machine": {"num_cores": 2, "memory_gb": 25.3, "kernel": "6", "load_average": 0.1},
        "limits": limits,
        "larger": part(naru / 4, 25.0, 20.0),
        **part(naru, 100.0, 60.0),
    }


def test_the_newest_three_runs_of_each_instruction_set_are_shown_with_medians_and_each_ratio() -> None:
    text = page(
        [run(day, rate) for day, rate in ((4, 120.0), (1, 900.0), (2, 200.0), (3, 300.0))] + [run(5, 1.0, "avx2")], None
    )
    assert text.count("## ") == 2 + 2 * 2
    assert (
        "| single stream, 128 in, 128 out (tok/s) | 200 | 100 | 60.0 | 1.5 × llamacpp | **2.00×** | **3.00×** | 1.20× |"
        in text
    )
    assert "| single stream, 128 in, 128 out (tok/s) | 50.0 | 25.0 | 20.0 |" in text
    assert "| single | 200 | 400 | 5000 | 9000 | 50% |" in text
    assert "| reading, GB/s: small | 28.0 | 54.0 |" in text
    assert "avx2, all engines kept to it" in text
    assert "2026-11-01" not in text


def test_the_page_has_one_place_for_the_runs() -> None:
    printed = replaced(PAGE.read_text(encoding="utf-8"), "the runs")
    assert "\nthe runs\n" in printed
    assert replaced(printed, "the runs") == printed
    with pytest.raises(ValueError, match="0 places"):
        replaced("# Benchmarks", "the runs")
