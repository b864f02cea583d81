"""The `naru plan` command: its flags and help."""

from __future__ import annotations

import sys

import click
from click.shell_completion import CompletionItem

from naru_operator.cli.checked import checked


def _complete_models(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.core.roofline.models import MODELS

    names = [CompletionItem(name) for name in MODELS if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def _complete_gpus(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.core.roofline.gpus import GPUS

    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in GPUS if name.startswith(last)]


def _complete_weights(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.core.roofline.formats import WEIGHTS

    return [CompletionItem(name) for name in WEIGHTS if name.startswith(incomplete)]


def _complete_kv(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.core.roofline.formats import KV_FORMATS

    return [CompletionItem(name) for name in KV_FORMATS if name.startswith(incomplete)]


@click.command()
@click.argument("model", shell_complete=_complete_models)
@click.option("--roofline", is_flag=True, help="Print how long each kernel takes at best, MBU and MFU.")
@click.option("--gpu", "gpus", default="h100,h200", show_default=True, shell_complete=_complete_gpus,
              help="GPUs, with commas: a100-40, a100-80, l40s, h100, h100-pcie, h200.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Requests that generate at once.")
@click.option("--context", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of each of them.")
@click.option("--prompt", type=click.IntRange(1), default=1024, show_default=True,
              help="Tokens of a prompt that is computed in one step.")  # fmt: skip
@click.option("--weights", default=None, shell_complete=_complete_weights,
              help="bf16, f16, fp8, int4 (GPTQ, AWQ), q8_0, q4_0, q4_1, q4_k, q6_k; else as in the files.")  # fmt: skip
@click.option("--kv", default="float16", show_default=True, shell_complete=_complete_kv,
              help="Of the KV cache: float16, fp8 or int8.")  # fmt: skip
@click.option("--launch-us", type=click.FloatRange(0.0), default=1.0, show_default=True,
              help="Microseconds between two kernels of a CUDA graph; assumed, not measured.")  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def plan(
    model: str,
    roofline: bool,
    gpus: str,
    batch: int,
    context: int,
    prompt: int,
    weights: str | None,
    kv: str,
    launch_us: float,
    output: str,
) -> None:
    """Say whether MODEL fits GPUs, and with --roofline how fast it could be on them.

    MODEL is a GGUF file, a folder with config.json, a manifest, or a known name such as llama-3.1-8b. No GPU is needed:
    the numbers come from data sheets. They are a roof, not a forecast.
    """

    def work() -> int:
        from naru_operator.cli.plan_report import PlanOptions, run_plan

        options = PlanOptions(
            model, gpus, roofline, batch, context, prompt, weights, kv, launch_us, is_json=output == "json"
        )
        return run_plan(options)

    sys.exit(checked(work))
