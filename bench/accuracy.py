"""What the engine's arithmetic costs in accuracy, beside llama.cpp's on the same files: ``python -m bench.accuracy``.

For each weight format and KV format, for rows of prompts and of generated tokens, per instruction set: perplexity of a
fixed text, and KL divergence from float32. Float32 is Naru's `ref` backend with the file's own weights, dequantized:
what is left is the loss by activations and arithmetic. `from source` compares with the float32 weights that the files
were made from, so it holds the loss by the weight format too. README.md beside this file says how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench import llama_logits, report
from bench.accuracy_table import HEADER, KINDS, Kind, Row, line
from bench.divergence import FloatArray, IntArray, divergence, log_probabilities
from bench.engines import find_model
from bench.gguf_models import write_requantized
from bench.machine import describe
from bench.peers import LLAMA_ISAS, PeerError, peers_folder

from naru_worker.adapters.ops import cpu, ref
from naru_worker.adapters.ops.protocol import BatchInputs, Runner, RunnerOptions
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.native.isa import VARIANTS, detect_isa, runnable

_FOLDER = Path(__file__).resolve().parent
RESULTS_PATH = _FOLDER / "results" / "accuracy.json"
TEXT_PATH = _FOLDER / "texts" / "accuracy.txt"
WINDOW = 256
"""Tokens of a window; the second half of each is scored."""
BLOCK = 16
SOURCE = "q4_1"
"""The format of the package's own file: its dequantized weights are the float32 model all files are made from."""
WEIGHTS = ("q4_1", "q4_0", "q4_k", "q6_k", "q8_0", "bf16", "f16", "f32")
LLAMA_KV = {"f32": "f32", "f16": "f16", "int8": "q8_0", "q8": "q8_0", "i8": "q8_0"}
DEFAULT_KV = "f16"


@dataclass(frozen=True, slots=True)
class Reference:
    """What float32 says about the text."""

    token_ids: IntArray
    """(windows, WINDOW)"""
    targets: IntArray
    """The tokens that came next, for each scored row."""
    source: FloatArray
    """Log probabilities of the source model."""


def kv_formats() -> tuple[str, ...]:
    """Those the engine knows."""
    return typing.get_args(typing.get_type_hints(RunnerOptions)["kv_format"])


def window_batch(token_ids: IntArray, kind: Kind) -> BatchInputs:
    """All tokens of one window in one step, as prompt or as generated tokens, with logits of the scored rows."""
    count = len(token_ids)
    positions = np.arange(count, dtype=np.int32)
    return BatchInputs(
        token_ids=token_ids,
        positions=positions,
        slots=positions + BLOCK,  # block 0 is nobody's
        query_start=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.arange(1, -(-count // BLOCK) + 1, dtype=np.int32).reshape(1, -1),
        logits_rows=np.array(llama_logits.rows_of(count), np.int32),
        copies=np.zeros((0, 2), np.int32),
        num_generated_tokens=count if kind == "generated" else 0,
    )


def naru_log_probs(load: Callable[[RunnerOptions], Runner], token_ids: IntArray, kv: str, kind: Kind) -> FloatArray:
    """Of all scored rows, in text order."""
    options = RunnerOptions(
        block_size=BLOCK,
        num_blocks=2 + WINDOW // BLOCK,
        max_num_tokens=WINDOW,
        max_num_seqs=1,
        max_model_len=WINDOW,
        num_threads=describe().num_cores,
        kv_format=kv,  # type: ignore[arg-type]
    )
    runner = load(options)
    try:
        return np.concatenate([log_probabilities(runner.logits(window_batch(row, kind))) for row in token_ids])
    finally:
        runner.close()


def write_formats(source: Path, formats: Sequence[str], folder: Path, peers: Path | None) -> dict[str, Path]:
    """A file for each format that can be made here: k-quants need llama.cpp's own program.

    Columns of SmolLM2's matrices are no multiple of 256 but in ``ffn_down``: only that one is a k-quant, beside the
    format that llama.cpp would take for the rest. The head is Q8_0 in all files of up to 8 bits, as in the source.
    """
    files: dict[str, Path] = {}
    for name in formats:
        target = folder / f"{source.stem}-{name}.gguf"
        if name == SOURCE:
            files[name] = source
        elif name in ("q4_k", "q6_k"):
            if peers is None:
                continue
            floats = write_requantized(source, folder / f"{source.stem}-f32.gguf", "f32")
            rest = "q4_1" if name == "q4_k" else "q8_0"
            files[name] = llama_logits.quantize(peers, floats, target, name, "ffn_down", rest)
        else:
            files[name] = write_requantized(source, target, name, "q8_0" if name == "q4_0" else None)
    return files


def measure_file(model: Path, weights: str, reference: Reference, kvs: Sequence[str], plan: Plan) -> list[Row]:
    """All rows of one file: Naru per instruction set, llama.cpp as it is installed."""
    with_file = reference.source
    if weights != SOURCE:
        with_file = naru_log_probs(lambda options: _ref(model, options), reference.token_ids, "f32", "prompt")
    rows: list[Row] = []

    def add(engine: str, isa: str, kv: str, kind: Kind, log_probs: FloatArray) -> None:
        own = divergence(with_file, log_probs, reference.targets)
        source = divergence(reference.source, log_probs, reference.targets)
        rows.append(Row(engine, isa, weights, kv, kind, own, source.mean_kl, source.p99_kl))
        print(line(rows[-1]), flush=True)

    add("float32", "", "f32", "prompt", with_file)
    for kv in kvs:
        for kind in KINDS:
            for isa in plan.isas:
                load = _loader(model, isa)
                add("naru", isa, kv, kind, naru_log_probs(load, reference.token_ids, kv, kind))
            if plan.peers is not None and kv in LLAMA_KV:
                add(
                    "llamacpp", plan.llama_isa, kv, kind, _llama(plan.peers, plan.llama_isa, model, reference, kv, kind)
                )
    return rows


def _llama(peers: Path, isa: str, model: Path, reference: Reference, kv: str, kind: Kind) -> FloatArray:
    """By llama-perplexity; generated tokens are batches of one. One thread: several only wait on a busy machine."""
    cache = ["-ctk", LLAMA_KV[kv], "-ctv", LLAMA_KV[kv], *(["-fa", "on"] if LLAMA_KV[kv] == "q8_0" else [])]
    arguments = [*cache, "-ub", "1" if kind == "generated" else str(WINDOW)]
    arguments += ["--chunks", str(len(reference.token_ids))]
    found = llama_logits.windows(peers, model, TEXT_PATH, WINDOW, 1, arguments, isa)
    if not np.array_equal(found.token_ids, reference.token_ids):
        raise PeerError("llama.cpp cuts the text into other tokens: its figures would not compare")
    return found.log_probs


def _ref(model: Path, options: RunnerOptions) -> Runner:
    return ref.load_runner(open_checkpoint(model), options)


def _loader(model: Path, isa: str) -> Callable[[RunnerOptions], Runner]:
    def load(options: RunnerOptions) -> Runner:
        checkpoint = open_checkpoint(model)
        try:
            return cpu.load_runner(checkpoint, options, isa)
        finally:
            checkpoint.close()

    return load


def token_windows(model: Path, num_windows: int) -> IntArray:
    """The text's tokens by the file's own tokenizer, in whole windows: (windows, WINDOW)."""
    from bench.export_hf import byte_level_tokenizer

    ids = byte_level_tokenizer(model).encode(TEXT_PATH.read_text(encoding="utf-8")).ids
    count = min(len(ids) // WINDOW, num_windows or len(ids))
    return np.array(ids[: count * WINDOW], np.int32).reshape(count, WINDOW)


def make_reference(source: Path, num_windows: int) -> Reference:
    """Float32 on the source's weights."""
    token_ids = token_windows(source, num_windows)
    targets = np.concatenate([row[1:][np.array(llama_logits.rows_of(WINDOW))] for row in token_ids])
    source_rows = naru_log_probs(lambda options: _ref(source, options), token_ids, "f32", "prompt")
    return Reference(token_ids, targets, source_rows)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared."""

    source: Path
    weights: tuple[str, ...]
    kvs: tuple[str, ...]
    isas: tuple[str, ...]
    num_windows: int
    """0: the whole text."""
    peers: Path | None
    """llama.cpp's installation; None: without."""
    llama_isa: str = ""
    """Its build; empty: the one for this CPU."""


def measure(plan: Plan) -> dict[str, Any]:
    """The whole comparison, as the content of the results file. KV formats other than the default: source file only.

    Raises:
        PeerError: llama.cpp is not there, or failed.
    """
    folder = peers_folder() / "models"
    reference = make_reference(plan.source, plan.num_windows)
    rows: list[Row] = []
    for weights, path in write_formats(plan.source, plan.weights, folder, plan.peers).items():
        kvs = plan.kvs if weights == SOURCE else tuple(kv for kv in plan.kvs if kv == DEFAULT_KV)
        rows += measure_file(path, weights, reference, kvs, plan)
    data: dict[str, Any] = report.rounded(
        {
            "model": plan.source.name,
            "text": TEXT_PATH.name,
            "scored_rows": len(reference.targets),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
    )
    return data


def _plan(argv: Sequence[str]) -> tuple[Plan, Path]:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="comma-separated weight formats (all)")
    parser.add_argument(
        "--kv", default=",".join(kv_formats()), help="comma-separated KV formats (all); served: all but float32"
    )
    parser.add_argument("--isa", default="", help="comma-separated instruction sets, or all (the best here)")
    parser.add_argument("--windows", type=int, default=0, help="of 256 tokens, 0: the whole text (0)")
    parser.add_argument("--no-llama", action="store_true", help="Naru alone")
    parser.add_argument("--llama-isa", default="", choices=["", *LLAMA_ISAS], help="llama.cpp's build (for this CPU)")
    parser.add_argument("--output", type=Path, default=None, help="results file")
    arguments = parser.parse_args(argv)
    if arguments.kv == "served":
        arguments.kv = ",".join(name for name in kv_formats() if name != "f32")
    isas = tuple(name for name in VARIANTS if runnable(name)) if arguments.isa == "all" else _list(arguments.isa)
    for flag, given, known in (
        ("--weights", _list(arguments.weights), WEIGHTS),
        ("--kv", _list(arguments.kv), kv_formats()),
        ("--isa", isas, tuple(VARIANTS)),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{flag}: {unknown[0]!r} is not one of {', '.join(known)}")
    plan = Plan(
        source=find_model(None),
        weights=_list(arguments.weights),
        kvs=_list(arguments.kv),
        isas=isas or (detect_isa(),),
        num_windows=arguments.windows,
        peers=None if arguments.no_llama else peers_folder(),
        llama_isa=arguments.llama_isa,
    )
    whole = plan.weights == WEIGHTS and plan.kvs == kv_formats() and not plan.num_windows and plan.peers is not None
    return plan, arguments.output or (RESULTS_PATH if whole else _FOLDER / ".cache" / "accuracy.json")


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main(argv: Sequence[str]) -> int:
    """The command."""
    try:
        plan, output = _plan(argv)
        print(HEADER, flush=True)
        data = measure(plan)
    except PeerError as exc:
        print(f"accuracy: {exc}", file=sys.stderr)
        return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{data['scored_rows']} rows; written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
