"""What one run of `bench.hub` does: sizes, limits, places, from the command line. Measures nothing."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import engines
from bench.hub_models import GB

_FOLDER = Path(__file__).resolve().parent
RESULTS_PATH = _FOLDER / "results" / "hub.json"
PARTIAL_RESULTS_PATH = _FOLDER / ".cache" / "hub.json"
DEFAULT_WORK_DIR = Path.home() / ".cache" / "naru" / "bench-hub"
PARTS = ("latency", "processes", "itl", "decisions", "traffic")
"""In the order they run: the long one last."""
NUM_PINNED = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    num_models: int = 300
    num_requests: int = 10_000
    num_latency: int = 33
    """One of them only warms the process."""
    num_processes: int = 6
    num_itl_models: int = 12
    num_itl_rounds: int = 6
    num_itl_tokens: int = 400
    num_known: int = 10_000
    num_decision_requests: int = 20_000


FULL = Scale()
QUICK = Scale(
    num_models=24,
    num_requests=400,
    num_latency=7,
    num_processes=2,
    num_itl_models=4,
    num_itl_rounds=1,
    num_itl_tokens=200,
    num_decision_requests=4_000,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What this run does."""

    model_path: Path
    parts: tuple[str, ...]
    scale: Scale
    num_resident: int
    num_clients: int
    max_tokens: int
    exponent: float
    seed: int
    num_host_models: int
    image_budget_bytes: int
    reserve_bytes: int
    limits: Mapping[str, float | int | None]
    """Watermarks and the like, for the worker; None: its own default."""
    work_dir: Path
    log_folder: Path
    output: Path
    is_again: bool = False
    """The parts replace those of an earlier whole run in its results."""

    @property
    def num_copies(self) -> int:
        """Copies of the model that the parts need."""
        few = max(self.scale.num_latency, self.scale.num_processes, NUM_PINNED + self.scale.num_itl_models)
        return self.scale.num_models if "traffic" in self.parts else min(self.scale.num_models, few)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hub", description="Many models in one worker, measured on this machine."
    )
    parser.add_argument("--quick", action="store_true", help="few models and requests: to see that it runs")
    parser.add_argument("--only", default="", help=f"comma-separated parts of {', '.join(PARTS)}")
    parser.add_argument("--again", default="", help="measures these parts again and puts them into the results file")
    parser.add_argument("--models", type=int, default=None, help=f"copies of the model ({FULL.num_models})")
    parser.add_argument("--requests", type=int, default=None, help=f"of the long run ({FULL.num_requests})")
    parser.add_argument("--resident", type=int, default=10, help="models the memory budget is made for (10)")
    parser.add_argument("--host-models", type=int, default=0, help="in host memory besides, in the long run (0)")
    parser.add_argument("--clients", type=int, default=8, help="requests in flight at once (8)")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens of each answer (8)")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the models' popularity (1.0)")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (1)")
    parser.add_argument("--high-watermark", type=float, default=None, help="of the worker (its default)")
    parser.add_argument("--low-watermark", type=float, default=None, help="of the worker (its default)")
    parser.add_argument("--max-loads", type=int, default=None, help="of the worker, at once (its default)")
    parser.add_argument("--image-budget-gb", type=float, default=20.0, help="disk for packed images (20)")
    parser.add_argument("--reserve-gb", type=float, default=15.0, help="disk that stays free (15)")
    parser.add_argument("--work-dir", type=Path, default=DEFAULT_WORK_DIR, help="copies and images, removed at the end")
    parser.add_argument("--model", default=None, help=f"a GGUF file ({engines.DEFAULT_MODEL_URI})")
    parser.add_argument("--output", type=Path, default=None, help="results file")
    parser.add_argument("--logs", type=Path, default=_FOLDER / ".cache" / "logs", help="folder for the servers' logs")
    return parser


def make_plan(argv: Sequence[str]) -> Plan:
    """From the command line; leaves with code 2 when a flag cannot be used."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    for name in ("models", "requests", "resident", "clients", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if arguments.again and arguments.only:
        parser.error("--again and --only both name parts; give one of them")
    named = arguments.again or arguments.only
    parts = tuple(part.strip() for part in named.split(",") if part.strip()) or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    scale = QUICK if arguments.quick else FULL
    scale = dataclasses.replace(
        scale,
        num_models=arguments.models or scale.num_models,
        num_requests=arguments.requests or scale.num_requests,
    )
    if scale.num_models < (least := NUM_PINNED + 1):
        parser.error(f"--models is {scale.num_models}; it must be at least {least}")
    sizes = ("models", "requests", "resident", "host_models", "clients", "max_tokens", "zipf")
    changed = ("quick", "only", *sizes, "high_watermark", "low_watermark", "max_loads")
    is_whole = all(getattr(arguments, name) == parser.get_default(name) for name in changed)
    return Plan(
        model_path=engines.find_model(arguments.model),
        parts=tuple(part for part in PARTS if part in parts),
        scale=scale,
        num_resident=arguments.resident,
        num_clients=arguments.clients,
        max_tokens=arguments.max_tokens,
        exponent=arguments.zipf,
        seed=arguments.seed,
        num_host_models=arguments.host_models,
        image_budget_bytes=int(arguments.image_budget_gb * GB),
        reserve_bytes=int(arguments.reserve_gb * GB),
        limits={name: getattr(arguments, name) for name in ("high_watermark", "low_watermark", "max_loads")},
        work_dir=arguments.work_dir.expanduser().resolve(),
        log_folder=arguments.logs.resolve(),
        output=arguments.output or (RESULTS_PATH if is_whole or arguments.again else PARTIAL_RESULTS_PATH),
        is_again=bool(arguments.again),
    )
