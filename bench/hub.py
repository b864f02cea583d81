"""Many models in one worker, measured on this machine: ``make bench-hub`` runs ``python -m bench.hub``.

Makes copies of one small model on disk, measures how fast they come and what they cost each other, and removes them.
Prints a table of targets and figures, and writes the figures as JSON. How to read them: README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bench import hub_report, machine, report
from bench.hub_decisions import measure_decisions
from bench.hub_itl import measure_itl
from bench.hub_latency import measure_latency
from bench.hub_memory import MemoryTally
from bench.hub_models import GB, CopyError, ModelCopy, WorkFolder, image_budget, make_copies, settle
from bench.hub_plan import NUM_PINNED, Plan, make_plan
from bench.hub_probe import Probe, probe
from bench.hub_processes import measure_processes
from bench.hub_traffic import TrafficPlan, run_traffic
from bench.hub_worker import HubWorker, HubWorkerError, Place, WorkerLimits
from bench.peers import PeerError

NUM_HOST_MODELS = 4
"""Room in host memory while its latency is measured."""
PROGRESS_EVERY = 25
NEEDS_NO_WORKER = frozenset(("processes", "decisions"))


@dataclass(slots=True)
class Run:
    """What a run has and what it found so far."""

    plan: Plan
    here: machine.Machine
    place: Place
    copies: tuple[ModelCopy, ...]
    image_budget_bytes: int
    probe: Probe | None
    parts: dict[str, dict[str, Any] | None]
    failures: dict[str, str]

    def worker_limits(self, num_host_models: int = 0) -> WorkerLimits:
        """Room for as many models as the plan says, and for so many in host memory."""
        if self.probe is None:
            raise HubWorkerError(f"there is no budget to start a worker with: {self.failures['probe']}")
        return WorkerLimits(
            memory_budget_bytes=self.probe.budget_bytes(self.plan.num_resident),
            host_budget_bytes=num_host_models * self.probe.weight_bytes,
            image_budget_bytes=self.image_budget_bytes,
            **self.plan.limits,  # type: ignore[arg-type]  # its keys are field names
        )


def run_all(plan: Plan) -> dict[str, Any]:
    """The whole run, as the content of the results file.

    Raises:
        CopyError: there is no room for the copies.
    """
    here = machine.describe()
    num_copies = plan.num_copies
    source_bytes = num_copies * plan.model_path.stat().st_size
    with WorkFolder(plan.work_dir) as work:
        free_bytes = shutil.disk_usage(work.path).free
        image_bytes = image_budget(free_bytes, source_bytes, plan.image_budget_bytes, plan.reserve_bytes)
        sources = work.path / "models"
        sources.mkdir()
        say(f"{num_copies} copies of {plan.model_path.name}, {source_bytes / GB:.1f} GB in {work.path}")
        copies = make_copies(plan.model_path, sources, num_copies, _say_copies(num_copies))
        settle(copies)
        run = Run(plan, here, Place(work.path, plan.log_folder), copies, image_bytes, None, {}, {})
        if not NEEDS_NO_WORKER.issuperset(plan.parts):
            run.probe = _attempt(run, "probe", lambda: probe(run.place, copies))
        for name in plan.parts:
            say(f"{name}: begins")
            figures = _attempt(run, name, lambda measure=_MEASURES[name]: measure(run))  # type: ignore[misc]
            run.parts[name] = None if figures is None else dataclasses.asdict(figures)
        say("removing the copies and their images")
    return _results(run)


def _latency(run: Run) -> Any:
    limits = run.worker_limits(num_host_models=NUM_HOST_MODELS)
    return measure_latency(limits, run.place, run.copies[: run.plan.scale.num_latency], say)


def _processes(run: Run) -> Any:
    models = run.copies[: run.plan.scale.num_processes]
    return measure_processes(models, run.here.num_cores, run.place.log_folder, say)


def _itl(run: Run) -> Any:
    scale = run.plan.scale
    models = run.copies[: NUM_PINNED + scale.num_itl_models]
    with HubWorker(run.worker_limits(num_host_models=NUM_HOST_MODELS), run.place, "itl") as worker:
        return measure_itl(
            worker, models[:NUM_PINNED], models[NUM_PINNED:], scale.num_itl_rounds, scale.num_itl_tokens, say
        )


def _decisions(run: Run) -> Any:
    scale = run.plan.scale
    num_resident = min(200, scale.num_known // 10)
    return measure_decisions(scale.num_known, num_resident, scale.num_decision_requests, run.plan.seed, say)


def _traffic(run: Run) -> Any:
    plan = run.plan
    limits = run.worker_limits(plan.num_host_models)
    traffic = TrafficPlan(
        num_requests=plan.scale.num_requests,
        num_clients=plan.num_clients,
        max_tokens=plan.max_tokens,
        exponent=plan.exponent,
        seed=plan.seed,
        num_resident=plan.num_resident,
    )
    with HubWorker(limits, run.place, "traffic") as worker:
        tally = MemoryTally(limits.memory_budget_bytes, limits.host_budget_bytes)
        return run_traffic(worker, tally, run.copies, traffic, say)


_MEASURES: Mapping[str, Callable[[Run], Any]] = {
    "latency": _latency,
    "processes": _processes,
    "itl": _itl,
    "decisions": _decisions,
    "traffic": _traffic,
}


def _attempt(run: Run, name: str, measure: Callable[[], Any]) -> Any:
    """What `measure` gives, or None: a part that fails is told and leaves the others alone."""
    try:
        return measure()
    except HubWorkerError as exc:
        run.failures[name] = str(exc)
    except Exception as exc:
        # The top of a part: whatever it was, minutes of other parts are not thrown away for it.
        traceback.print_exc()
        run.failures[name] = f"{type(exc).__name__}: {exc}"
    say(f"{name}: {run.failures[name]}")
    return None


def _results(run: Run) -> dict[str, Any]:
    plan, figures = run.plan, hub_report.headline(run.parts)
    budget_bytes = run.probe and run.probe.budget_bytes(plan.num_resident)
    traffic = run.parts.get("traffic") or {}
    results: dict[str, Any] = {
        **figures,
        "missed": hub_report.missed(figures),
        "budget_bytes": budget_bytes,
        **{key: traffic.get(key) for key in ("rss_peak_bytes", "requests_per_s", "loads", "evictions", "hit_ratio")},
        "machine": dataclasses.asdict(run.here),
        "model": plan.model_path.name,
        "plan": {
            **dataclasses.asdict(plan.scale),
            "num_resident": plan.num_resident,
            "num_clients": plan.num_clients,
            "max_tokens": plan.max_tokens,
            "zipf_exponent": plan.exponent,
            "seed": plan.seed,
            "num_host_models": plan.num_host_models,
            "image_budget_bytes": run.image_budget_bytes,
            "limits": dict(plan.limits),
            "parts": plan.parts,
        },
        "probe": run.probe and dataclasses.asdict(run.probe),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "notes": hub_report.notes(run.parts, run.here.load_average),
        "failures": run.failures,
        **run.parts,
    }
    rounded: dict[str, Any] = report.rounded(results)
    return rounded


def print_results(results: dict[str, Any], output: Path) -> None:
    """The table, the run of many models and what to know about them, on standard output."""
    here, plan = results["machine"], results["plan"]
    print(f"\n{here['cpu_model']}, {here['isa']}, {here['num_cores']} cores; copies of {results['model']}")
    print(
        f"{plan['num_models']} models in a budget for {plan['num_resident']}, {plan['num_requests']} requests, "
        f"Zipf({plan['zipf_exponent']:g}), {plan['num_clients']} clients, {plan['max_tokens']} tokens each\n"
    )
    print(hub_report.table(results))
    if results.get("traffic"):
        print("\n" + "\n".join(hub_report.traffic_lines(results["traffic"])))
    for line in [*results["notes"], *(f"{name} was not measured: {why}" for name, why in results["failures"].items())]:
        print(f"note: {line}")
    print(f"\nwritten to {output}")


def say(text: str) -> None:
    """Progress, on standard error: standard output has the table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _say_copies(total: int) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if done % PROGRESS_EVERY == 0 or done == total:
            say(f"copies: {done}/{total}")

    return progress


def _leave(signum: int, frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that `with` blocks stop the workers and remove the copies."""
    raise SystemExit(128 + signum)


def _earlier(plan: Plan) -> dict[str, Any] | None:
    """Results of the run whose parts are measured again.

    Raises:
        PeerError: there are none.
    """
    if not plan.is_again:
        return None
    try:
        earlier: dict[str, Any] = json.loads(plan.output.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise PeerError(f"{plan.output} holds no earlier run ({exc}); run it without --again first") from exc
    return earlier


def main(argv: Sequence[str]) -> int:
    """The command. 0 when every part that was asked for was measured, 1 when one was not, 130 when interrupted."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        plan = make_plan(argv)
        plan.log_folder.mkdir(parents=True, exist_ok=True)
        earlier = _earlier(plan)
        results = run_all(plan)
        if earlier is not None:
            results = report.rounded(hub_report.renewed(earlier, results))
    except (PeerError, CopyError) as exc:
        print(f"bench-hub: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-hub: interrupted; nothing was written", file=sys.stderr)
        return 130
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    plan.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print_results(results, plan.output)
    return int(bool(results["failures"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
