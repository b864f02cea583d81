"""A model of tensors from its .onnx file to its engine: what the hub prepares, opens, loads and closes.

The library reads the file itself, so that there is no packed image, and nothing waits in host memory but the page
cache. What the model takes is measured in a process of its own when it is prepared: the memory that it holds is booked
as weights, and what one call took beyond as the workspace that all models share.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_proto.registry import ModelInfoRecord
from naru_worker.adapters.engine.batch_engine import tensor_engine
from naru_worker.adapters.engine.loaded import LoadedModel, ModelFacts
from naru_worker.adapters.engine.loader import Interrupted
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.engine.wiring import EngineRoom
from naru_worker.adapters.fetch import FetchedModel
from naru_worker.adapters.onnx.graph_files import external_files
from naru_worker.adapters.onnx.probing import OnnxFacts, ProbeStopped, probe
from naru_worker.adapters.onnx.repository import CONFIG_NAME, model_file, versions_of
from naru_worker.adapters.onnx.session import OnnxRunner, import_runtime
from naru_worker.adapters.onnx.tensor_plan import TensorPlan, plan_tensors
from naru_worker.adapters.onnx.triton_config import TritonConfig, parse_config
from naru_worker.adapters.weights.model_folder import read_small_file
from naru_worker.adapters.weights.watched_checkpoint import OnShare, unheard
from naru_worker.core.batching import BatchLimits
from naru_worker.core.hub.model import Footprint
from naru_worker.core.request_limits import RequestLimits
from naru_worker.core.residency import ModelSpec

_log = logging.getLogger(__name__)

PRIVATE_BYTES = 1 << 20
"""Engine, queue and facts of one model."""
MAX_CONFIG_BYTES = 1 << 20
_Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Files:
    """What is served of a folder."""

    path: Path
    """The .onnx file."""
    all: tuple[Path, ...]
    """With its external data."""
    config: TritonConfig | None
    version: int | None

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.all)

    def stamp(self) -> _Stamp:
        """Tells whether a file has changed; empty where one is gone."""
        try:
            stats = [(str(file), file.stat()) for file in self.all]
        except OSError:
            return ()
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def prepare_onnx(
    name: str, spec: ModelSpec, fetched: FetchedModel, room: EngineRoom, should_stop: threading.Event
) -> OnnxModel:
    """Checks a model's files and measures what it will take.

    Raises:
        LoadError: the files are no model that can be served, or it can never fit.
        Interrupted: `should_stop` was set.
    """
    import_runtime()
    try:
        files = _find(fetched.path)
        stamp, num_bytes = files.stamp(), files.num_bytes
    except OSError as exc:
        raise LoadError(f"{fetched.path}: cannot be read ({exc.strerror})", param="path") from exc
    _refuse_hopeless(name, num_bytes, room)
    wished = spec.options.max_batch_size
    rows = max(1, min(wished or room.engine.max_batch_size, (files.config and files.config.max_batch_size) or 2**16))
    try:
        facts = probe(files.path, room.num_threads, rows, should_stop)
    except ProbeStopped as exc:
        raise Interrupted from exc
    plan = plan_tensors(files.path, facts, files.config, wished, room.engine.max_batch_size)
    delay_s = spec.options.max_batch_delay_s
    if delay_s is None:
        delay_s = room.engine.max_batch_delay_s if files.config is None else files.config.max_delay_s
    footprint = Footprint(
        weights_key=f"own:{name}",
        weight_bytes=max(num_bytes, facts.weight_bytes),
        kv_floor_bytes=0,
        workspace_bytes=facts.workspace_bytes,
        private_bytes=PRIVATE_BYTES,
    )
    _refuse_hopeless(name, footprint.weight_bytes + footprint.workspace_bytes + footprint.private_bytes, room)
    limits = BatchLimits(max(1, plan.max_batch_size), delay_s, preferred_rows=plan.preferred_rows)
    return OnnxModel(name, fetched, room, _Prepared(files, stamp, facts, plan, limits, footprint))


@dataclass(frozen=True, slots=True)
class _Prepared:
    files: _Files
    stamp: _Stamp
    facts: OnnxFacts
    plan: TensorPlan
    limits: BatchLimits
    footprint: Footprint


class OnnxModel:
    """Prepared: see `PreparedModel`."""

    def __init__(self, name: str, fetched: FetchedModel, room: EngineRoom, prepared: _Prepared) -> None:
        self.footprint = prepared.footprint
        self.detail = ""
        self._name = name
        self._fetched = fetched
        self._room = room
        self._prepared = prepared

    def is_current(self) -> bool:
        """Whether the files are as they were; a newer version beside them counts as a change."""
        try:
            files = _find(self._fetched.path)
        except (OSError, LoadError):
            return False
        return files == self._prepared.files and files.stamp() == self._prepared.stamp

    def open(self) -> OnnxHosted:
        """Looks whether the files are still what was measured.

        Raises:
            LoadError: they are not.
        """
        if not self.is_current():
            raise LoadError(f"{self._fetched.path}: has changed since it was prepared; load it again", param="path")
        self._fetched.touch()
        return OnnxHosted(self._name, self._fetched, self._room, self._prepared)


class OnnxHosted:
    """Its files; the library reads them when it is loaded."""

    def __init__(self, name: str, fetched: FetchedModel, room: EngineRoom, prepared: _Prepared) -> None:
        self._name = name
        self._fetched = fetched
        self._room = room
        self._prepared = prepared

    def make_present(self, should_stop: threading.Event) -> None:
        """Nothing: memory of the library's cannot be had without its engine."""

    def load(
        self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event, on_share: OnShare = unheard
    ) -> LoadedModel:
        """An engine over a session of the library's.

        Raises:
            LoadError: the library refuses the file, which it did not do when it was prepared.
        """
        self._room.stand_aside(should_stop)
        prepared = self._prepared
        runner = OnnxRunner(prepared.files.path, self._room.num_threads, prepared.footprint.weight_bytes)
        try:
            if (runner.inputs, runner.outputs) != (prepared.facts.inputs, prepared.facts.outputs):
                raise LoadError(f"{prepared.files.path}: has changed since it was prepared; load it again")
            return LoadedModel(
                name=self._name,
                engine=tensor_engine(runner, prepared.limits, prepared.plan.output_names),
                tokenizer=None,
                tokens=TokenTable(_NoVocabulary()),
                limits=RequestLimits(0, 0),
                facts=_facts(self._fetched, prepared),
                release=runner.close,
            )
        except BaseException:
            runner.close()
            raise

    def keep(self) -> str:
        """Only the files stay: memory of the library's goes with its engine."""
        return ""

    def close(self) -> int:
        """The files may leave the cache; what was loaded from them has been released."""
        self._fetched.release()
        return 0


class _NoVocabulary:
    """Of a model without text."""

    def piece(self, token_id: int) -> bytes | None:
        return None

    def special_text(self, token_id: int) -> str | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def _find(path: Path) -> _Files:
    config, version = None, None
    if path.is_dir():
        config = _read_config(path / CONFIG_NAME)
        version = _version(path, config)
    file = model_file(path, config.file_name if config else "", version)
    return _Files(file, (file, *external_files(file)), config, version)


def _read_config(path: Path) -> TritonConfig | None:
    raw = read_small_file(path, MAX_CONFIG_BYTES)
    if raw is None:
        return None
    try:
        config = parse_config(raw.decode(), str(path))
    except UnicodeDecodeError as exc:
        raise LoadError(f"{path}: is not UTF-8 ({exc.reason} at byte {exc.start})") from exc
    if config.ignored:
        _log.info("%s: not looked at: %s", path, ", ".join(config.ignored))
    return config


def _version(path: Path, config: TritonConfig | None) -> int | None:
    """The highest that may be served; None: the folder has no versions."""
    found = versions_of(path)
    only = config.versions.only if config else ()
    allowed = [number for number in found if not only or number in only]
    if found and not allowed:
        raise LoadError(f"{path}: has no version of {list(only)}, which {CONFIG_NAME} allows", param="version_policy")
    return max(allowed, default=None)


def _refuse_hopeless(name: str, num_bytes: int, room: EngineRoom) -> None:
    budget_bytes = room.ledger.budget_bytes
    if num_bytes > budget_bytes:
        raise LoadError(
            f"model {name!r} needs {num_bytes / 1e6:,.1f} MB; this worker's whole budget is "
            f"{budget_bytes / 1e6:,.1f} MB; raise memory_budget_bytes or serve it on a larger worker",
            param="memory",
        )


def _facts(fetched: FetchedModel, prepared: _Prepared) -> ModelFacts:
    plan, version = prepared.plan, prepared.files.version
    revision = fetched.revision or fetched.digest
    return ModelFacts(
        info=ModelInfoRecord(
            architecture="onnx",
            max_model_len=0,
            vocab_size=0,
            chat_template="",
            bos_token="",
            eos_token="",
            tasks=("tensors",),
            platform="onnxruntime",
            inputs=plan.inputs,
            outputs=plan.outputs,
            max_batch_size=plan.max_batch_size,
        ),
        revision=revision if version is None else f"{revision}@{version}",
        weight_bytes=prepared.footprint.weight_bytes,
        kv_bytes=0,
        kv_bytes_per_token=0,
        block_size=1,
        num_blocks=0,
    )
