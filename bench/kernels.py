"""Times the CPU kernels on SmolLM2's shapes: each linear layer alone, then whole steps, for one instruction set.

Run by hand: `python bench/kernels.py [--isa NAME] [--threads N]`. Weights are random; nothing is downloaded. Prints a
table and writes bench/results/kernels.json. The smallest of several runs counts, since other processes only ever add.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "worker" / "native"), str(ROOT / "tests" / "worker" / "support")]

from batches import Lane, batch_of  # noqa: E402
from memory_models import checkpoint_of, config_of, random_tensor  # noqa: E402
from sampling_batches import greedy_batch  # noqa: E402

from naru_worker.adapters.ops import cpu  # noqa: E402
from naru_worker.adapters.ops.cpu_batch import address  # noqa: E402
from naru_worker.adapters.ops.cpu_device import open_device  # noqa: E402
from naru_worker.adapters.ops.cpu_pack import matrix_bytes, pack_matrix  # noqa: E402
from naru_worker.adapters.ops.native_lib import ModelSpec, load_variant  # noqa: E402
from naru_worker.adapters.ops.protocol import RunnerOptions, TensorFormat  # noqa: E402
from naru_worker.core.model_config import RopeConfig  # noqa: E402
from naru_worker.native.isa import VARIANTS, detect_isa  # noqa: E402

VOCAB = 49152
LAYERS: tuple[tuple[str, TensorFormat, int, int], ...] = (
    ("qkv", "q4_1", 960, 576),
    ("o", "q4_1", 576, 576),
    ("gate+up", "q4_1", 3072, 576),
    ("down", "q4_1", 576, 1536),
    ("head", "q8_0", VOCAB, 576),
    ("head f16", "f16", VOCAB, 576),
)
ROWS = (1, 4, 8, 16, 32, 128, 512)
DECODES = ((1, 100), (4, 100), (8, 100), (16, 100), (32, 100), (1, 2000), (16, 1000))
PROMPTS = (128, 512, 2048)


def smallest(run: Callable[[], object], budget_s: float = 0.5) -> float:
    """Seconds of the fastest run within a time budget, at least three runs."""
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def linear_layers(isa: str, threads: int) -> list[dict[str, Any]]:
    """One row per layer and number of activation rows."""
    library = load_variant(isa)
    results = []
    for name, tensor_format, outputs, columns in LAYERS:
        tensor, _ = random_tensor(name, tensor_format, (outputs, columns), np.random.default_rng(0))
        num_bytes = matrix_bytes(library, [tensor], [None])
        spec = ModelSpec(num_bytes, 1, 1, 1, 16, 16, 16, 2, 2, 16, 1, 16, threads, 0, 1.0)
        model = library.naru_model_new(open_device(threads, isa).handle, ctypes.byref(spec), None)
        matrix = pack_matrix(library, model, [tensor], [None])
        for rows in ROWS if outputs < VOCAB else ROWS[:5]:
            x = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
            out = np.empty((rows, outputs), np.float32)

            def run(repeats: int) -> float:
                start = time.perf_counter()
                library.naru_linear(model, matrix.id, address(x), rows, address(out), repeats)  # noqa: B023
                return time.perf_counter() - start

            # The difference leaves out what precedes the loop: quantizing the activations.
            seconds = max(1e-9, (min(run(9) for _ in range(7)) - min(run(1) for _ in range(7))) / 8)
            results.append(
                {
                    "layer": name,
                    "format": tensor_format,
                    "rows": rows,
                    "us": seconds * 1e6,
                    "gb_per_s": num_bytes / seconds / 1e9,
                    "gflop_per_s": 2.0 * rows * outputs * columns / seconds / 1e9,
                }
            )
        library.naru_model_free(model)
    return results


def open_runner(isa: str, threads: int) -> cpu.CpuRunner:
    """SmolLM2's shapes with random weights."""
    config = config_of(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=RopeConfig(theta=100000.0, rotary_dim=64),
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    options = RunnerOptions(16, 1200, 2048, 64, 4096, threads)
    return cpu.load_runner(checkpoint_of(config, {"embed": "q8_0"}, "q4_1"), options, isa)


def decode_step(runner: cpu.CpuRunner, count: int, position: int) -> Callable[[], object]:
    """Runs one step of `count` sequences that generate their token at `position`."""
    ids = np.random.default_rng(2).integers(0, VOCAB, position + 1).tolist()
    width = position // 16 + 1
    blocks = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(count)]
    lanes = [Lane(ids, own, position, num_prompt_tokens=position) for own in blocks]
    batch, sampling = batch_of([(lane, 1) for lane in lanes], 16), greedy_batch(count, VOCAB)
    return lambda: runner.run(batch, sampling)


def steps(isa: str, threads: int) -> list[dict[str, Any]]:
    """Whole steps, sampling included: decodes at a position, and prompts."""
    runner = open_runner(isa, threads)
    ids = np.random.default_rng(2).integers(0, VOCAB, 2100).tolist()
    results = []
    for count, position in DECODES:
        seconds = smallest(decode_step(runner, count, position))
        results.append({"step": f"decode {count} at {position}", "ms": seconds * 1e3, "tokens_per_s": count / seconds})
    for length in PROMPTS:
        batch, sampling = batch_of([(Lane(ids, list(range(1, 140))), length)], 16), greedy_batch(1, VOCAB)
        seconds = smallest(lambda: runner.run(batch, sampling))  # noqa: B023
        results.append({"step": f"prompt {length}", "ms": seconds * 1e3, "tokens_per_s": length / seconds})
    runner.close()
    return results


def main() -> None:
    """Runs both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=list(VARIANTS), default=detect_isa())
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    table = linear_layers(arguments.isa, arguments.threads)
    print(f"{arguments.isa}, {arguments.threads} threads\n{'layer':10}{'rows':>6}{'us':>10}{'GB/s':>8}{'GFLOP/s':>10}")
    for r in table:
        print(f"{r['layer']:10}{r['rows']:6}{r['us']:10.1f}{r['gb_per_s']:8.1f}{r['gflop_per_s']:10.0f}")
    whole = steps(arguments.isa, arguments.threads)
    print(f"\n{'step':20}{'ms':>10}{'tokens/s':>10}")
    for r in whole:
        print(f"{r['step']:20}{r['ms']:10.2f}{r['tokens_per_s']:10.0f}")
    target = ROOT / "bench" / "results" / "kernels.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {"isa": arguments.isa, "threads": arguments.threads, "linear": table, "steps": whole}
    target.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
