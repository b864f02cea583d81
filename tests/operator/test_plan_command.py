"""`naru plan`: what it prints, for known names and for files, and what it says to those it cannot plan for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from naru_operator.cli.main import cli
from naru_operator.core.roofline.formats import WEIGHTS
from naru_operator.core.roofline.gpus import GPUS
from naru_operator.core.roofline.models import MODELS
from naru_operator.core.roofline.prediction import decode_time, prefill_time

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

MANIFEST = """\
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: mine}}
spec: {{model: {{uri: "{uri}"}}}}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "-o", "json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_a_mixture_says_what_of_its_weights_a_token_meets() -> None:
    done = run("qwen3-30b-a3b", "--roofline", "--gpu", "h200")
    lines = done.output.splitlines()
    assert lines[0] == (
        "qwen3-30b-a3b: weights 57 GiB (bf16), 6.2 GiB of them for a token, KV cache 96 KiB a token (float16)"
    )
    assert sum(line.startswith("experts: ") for line in lines) == 2 * 4
    found = json.loads(run("qwen3-30b-a3b", "--gpu", "h200", "-o", "json").output)
    assert (found["weight_bytes"], found["active_weight_bytes"]) == (2 * 30_532_122_624, 2 * 3_353_032_704)


def test_a_known_model_is_planned_for_both_gpus_with_the_kernels_times() -> None:
    done = run("llama-3.1-8b", "--roofline")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "llama-3.1-8b: weights 15 GiB (bf16), KV cache 128 KiB a token (float16)"
    assert lines[1].split("  ")[0] == "GPU" and "REQUESTS OF 1024" in lines[1]
    heads = [line for line in lines if " tokens/s, MBU " in line]
    assert heads == [
        "H100 SXM, decode, batch 1, context 1024: 4.848 ms, 206 tokens/s, MBU 93.3%, MFU 0.3%",
        "H100 SXM, prefill, 1024 tokens: 16.308 ms, 62792 tokens/s, MBU 46.2%, MFU 87.9%",
        "H200 SXM, decode, batch 1, context 1024: 3.481 ms, 287 tokens/s, MBU 90.7%, MFU 0.5%",
        "H200 SXM, prefill, 1024 tokens: 15.797 ms, 64821 tokens/s, MBU 33.3%, MFU 90.7%",
    ]
    start = lines.index(heads[0]) + 1
    rows = [line.split()[0] for line in lines[start : start + 13]]
    assert rows[0] == "KERNEL" and rows[1:] == [
        "embed", "norm", "qkv", "rope,", "attention", "o", "gate,", "activation", "down", "head", "sample",
        "launches",
    ]  # fmt: skip
    shares = [float(cell[:-1]) for line in lines[start : start + 13] for cell in line.split() if cell.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.7)


def test_the_page_about_gpus_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    command, _, rest = page.partition("$ naru plan ")[2].partition("\n")
    assert run(*command.split()).output == rest[: rest.index("```")]


def test_without_roofline_only_what_fits_is_said() -> None:
    done = run("llama-3.1-8b", "--gpu", "a100-40", "--context", "2048")
    assert done.output.splitlines()[1:] == [
        "GPU      USABLE  KV TOKENS  REQUESTS OF 2048  NOTES",
        "a100-40  34 GiB  152126     74                -",
    ]


def test_json_has_the_numbers_of_the_model_of_the_roofline() -> None:
    found = planned(
        "llama-3.1-8b", "--roofline", "--gpu", "h200,l40s", "--batch", "16", "--context", "4096", "--prompt", "2048",
        "--weights", "fp8", "--kv", "int8", "--launch-us", "2.5",
    )  # fmt: skip
    assert [gpu["gpu"] for gpu in found["gpus"]] == ["h200", "l40s"]
    for gpu in found["gpus"]:
        model, weights, limits = MODELS["llama-3.1-8b"], WEIGHTS["fp8"], GPUS[gpu["gpu"]]
        decode = decode_time(model, weights, "int8", limits, batch=16, context=4096, launch_s=2.5e-6)
        prefill = prefill_time(model, weights, "int8", limits, prompt=2048, launch_s=2.5e-6)
        for given, step in ((gpu["decode"], decode), (gpu["prefill"], prefill)):
            assert given["seconds"] == pytest.approx(step.seconds)
            assert given["tokens_per_s"] == pytest.approx(step.tokens_per_s)
            assert (given["mbu"], given["mfu"]) == (pytest.approx(step.mbu), pytest.approx(step.mfu))
            assert sum(kernel["seconds"] for kernel in given["kernels"]) == pytest.approx(given["kernel_s"])


def test_what_does_not_fit_has_no_times_and_a_remedy() -> None:
    done = run("llama-3.1-70b", "--roofline", "--gpu", "h100,h200", "--weights", "fp8", "--context", "8192")
    assert done.exit_code == 0
    (row,) = [line for line in done.output.splitlines() if line.startswith("h100 ")]
    assert "does not fit: 1 x 8192 tokens lack " in row and row.endswith("--context, --weights or --kv")
    assert "H100 SXM, decode" not in done.output and "H200 SXM, decode" in done.output
    found = planned("llama-3.1-70b", "--roofline", "--gpu", "h100", "--weights", "fp8")
    assert found["gpus"][0]["missing_bytes"] > 0 and "decode" not in found["gpus"][0]


def test_fp8_weights_on_a_gpu_without_the_units_are_told_of() -> None:
    found = planned("llama-3.1-8b", "--gpu", "a100-80,h100", "--weights", "fp8")
    assert [gpu["notes"] for gpu in found["gpus"]] == [
        ["A100 80 GB SXM has no FP8 units: weights of 8 bits, activations of 16"],
        [],
    ]


def test_a_folder_with_nothing_but_its_config_and_a_manifest_of_it_give_the_same_plan(
    folder: Path, tmp_path: Path
) -> None:
    known = planned("llama-3.1-8b", "--roofline")
    of_folder = planned(str(folder), "--roofline")
    assert of_folder == {**known, "model": "my-model"}
    manifest = tmp_path / "m.yaml"
    manifest.write_text(MANIFEST.format(uri=f"file://{folder}"))
    assert planned(str(manifest), "--roofline") == of_folder
    assert planned(f"file://{folder}", "--roofline") == of_folder


def test_quantized_files_are_planned_in_their_format_or_in_one_that_is_given(folder: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    assert planned(str(folder))["weights"] == "int4"
    config["quantization_config"] = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps(config))
    done = run(str(folder))
    assert done.exit_code == 2
    assert "the weights of my-model have a format that GPUs are not planned for: give --weights, one of" in done.output
    assert planned(str(folder), "--weights", "q4_k")["weights"] == "q4_k"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-9"], "'llama-9' is no file or folder and no known model: give a GGUF file, a folder"),
        (["llama-3.1-8b", "--gpu", "v100"], "GPU 'v100' is not known: use one or more of a100-40,"),
        (["llama-3.1-8b", "--weights", "q3"], "weight format 'q3' is not known"),
        (["llama-3.1-8b", "--kv", "q4"], "KV format 'q4' is not known"),
        (["llama-3.1-8b", "--batch", "0"], "'--batch'"),
        (["llama-3.1-8b", "--context", "200000"], "context 200000 is above what llama-3.1-8b was made for"),
        (["llama-3.1-8b", "--prompt", "200000"], "prompt 200000 is above what llama-3.1-8b was made for"),
        (["pypi://some-model"], "fetch them with `naru pull pypi://some-model` and give the path that it prints"),
        (["file://relative"], "is not a valid file URI"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_what_cannot_be_planned_for_is_said_with_a_remedy(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output and "Traceback" not in done.output


def test_files_that_are_no_model_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    assert "config.json: model_type is 'mamba'; supported are " in run(str(folder)).output
    (tmp_path / "x.gguf").write_bytes(b"PK..")
    done = run(str(tmp_path / "x.gguf"))
    assert done.exit_code == 2 and "a GGUF file starts with" in done.output
    (tmp_path / "m.yaml").write_text("")
    assert "has 0 ModelDeployments: give a file with one" in run(str(tmp_path / "m.yaml")).output


def test_a_reader_that_breaks_is_told_of(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named naru_worker >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    done = run(str(folder))
    assert done.exit_code == 1
    assert "could not be read: the worker's reader ended with 'no module named naru_worker'" in done.output


def test_names_are_completed() -> None:
    options = {parameter.name: parameter for parameter in cli.commands["plan"].params}

    def completed(name: str, text: str) -> list[str]:
        return [item.value for item in options[name].shell_complete(None, text)]  # type: ignore[arg-type]

    assert completed("model", "llama-3.2") == ["llama-3.2-1b", "llama-3.2-3b"]
    assert [item.type for item in options["model"].shell_complete(None, "./")] == ["file"]  # type: ignore[arg-type]
    assert completed("gpus", "h100,h2") == ["h100,h200"]
    assert completed("weights", "q4_") == ["q4_0", "q4_1", "q4_k"]
    assert completed("kv", "f") == ["float16", "fp8"]
