"""An encoder as the hub handles it: what is booked is what it takes, and all of it comes back."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from tiny_encoders import TinyEncoder, inputs_of, write_encoder

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.encoder_model import EncoderHosted, prepare_encoder
from naru_worker.adapters.engine.loader import Interrupted
from naru_worker.adapters.engine.wiring import EngineRoom
from naru_worker.adapters.fetch import FetchedModel
from naru_worker.adapters.machine import release_free_memory
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.core.residency import LoadOptions, ModelSpec
from naru_worker.settings import EngineSettings, MemorySettings

pytestmark = pytest.mark.timeout(300)  # the kernels may have to be compiled

LARGE = TinyEncoder(hidden_size=256, num_heads=4, num_layers=1, max_positions=100_000)
"""Tens of megabytes, most of them positions."""
FOREVER = threading.Event()


def room(budget_bytes: int = 10**9) -> EngineRoom:
    return EngineRoom(EngineSettings(), MemorySettings(), 2, MemoryLedger(budget_bytes))


def spec_of(folder: Path, max_model_len: int | None = None) -> ModelSpec:
    return ModelSpec(f"file://{folder}", options=LoadOptions(max_model_len=max_model_len))


def private_bytes() -> int:
    """Anonymous memory of this process."""
    release_free_memory()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


def test_what_is_booked_is_what_it_takes_and_all_of_it_comes_back(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, LARGE)
    prepared = prepare_encoder("m", spec_of(folder, max_model_len=64), FetchedModel(folder, "d", "r"), room())
    booked = prepared.footprint.weight_bytes
    assert booked > 40_000_000 and prepared.footprint.kv_floor_bytes == 0
    for _ in range(2):  # the second time, what stays after the first (threads, tokenizers) is there already
        before = private_bytes()
        hosted = prepared.open()
        hosted.make_present(FOREVER)
        assert private_bytes() - before == pytest.approx(booked, abs=8 << 20)
        model = hosted.load(lambda _: None, FOREVER)
        assert model.facts.weight_bytes == booked
        model.release()
        assert hosted.close() == 0 and hosted.close() == 0
        left = private_bytes() - before
    assert left < 4 << 20


def test_a_model_that_was_unloaded_but_stays_hosted_is_loaded_again_at_once(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder())
    hosted = prepare_encoder("m", spec_of(folder), FetchedModel(folder, "d", "r"), room()).open()
    first = hosted.load(lambda _: None, FOREVER)
    first.release()
    shutil.rmtree(folder)  # nothing is read again
    second = hosted.load(lambda _: None, FOREVER)
    assert second.engine is not first.engine
    assert second.pooling == first.pooling and second.facts == first.facts
    hosted.close()


@pytest.mark.torch
def test_on_a_gpu_the_weights_are_there_only_while_it_is_loaded(tmp_path: Path) -> None:
    """The interpreter's GPU is the host: what matters is what the hub is told, and when weights are read."""
    pytest.importorskip("triton")
    on_gpu = EngineRoom(EngineSettings(backend="cuda"), MemorySettings(), 2, MemoryLedger(10**9))
    folder = write_encoder(tmp_path, TinyEncoder())
    hosted = prepare_encoder("m", spec_of(folder), FetchedModel(folder, "d", "r"), on_gpu).open()
    hosted.make_present(FOREVER)
    assert hosted._runner is None
    hosted.load(lambda _: None, FOREVER).release()
    assert "do not leave the GPU" in hosted.keep()
    hosted.close()


def test_a_load_that_is_told_to_stop_leaves_nothing(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder())
    hosted = prepare_encoder("m", spec_of(folder), FetchedModel(folder, "d", "r"), room()).open()
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        hosted.load(lambda _: None, stop)
    assert hosted.load(lambda _: None, FOREVER).pooling is not None
    hosted.close()


def test_options_and_files_set_the_longest_input(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder(max_positions=80, normalize=True))
    longest = {}
    for wish in (None, 16):
        hosted = prepare_encoder("m", spec_of(folder, wish), FetchedModel(folder, "d", "r"), room()).open()
        model = hosted.load(lambda _: None, FOREVER)
        assert model.pooling is not None
        longest[wish] = (model.pooling.max_tokens, model.facts.info.max_model_len)
        assert model.pooling.normalize and model.facts.info.embedding_dim == 64
        hosted.close()
    assert longest == {None: (80, 80), 16: (16, 16)}
    with pytest.raises(LoadError, match="max_model_len is 81; this model takes 80"):
        prepare_encoder("m", spec_of(folder, max_model_len=81), FetchedModel(folder, "d", "r"), room())


def test_a_model_that_can_never_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder())
    with pytest.raises(LoadError, match="whole budget") as refused:
        prepare_encoder("m", spec_of(folder), FetchedModel(folder, "d", "r"), room(100_000))
    assert refused.value.param == "memory"


def test_files_that_changed_since_are_prepared_anew(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder())
    prepared = prepare_encoder("m", spec_of(folder), FetchedModel(folder, "d", "r"), room())
    assert prepared.is_current()
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace("true", "true "))
    assert not prepared.is_current()
    with pytest.raises(LoadError, match="has changed"):
        prepared.open()


def test_results_of_a_loaded_model_are_those_of_its_runner(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder())
    hosted = prepare_encoder("m", spec_of(folder), FetchedModel(folder, "d", "r"), room()).open()
    assert isinstance(hosted, EncoderHosted)
    hosted.make_present(FOREVER)
    assert hosted._runner is not None
    assert hosted._runner.encode(inputs_of(1, 9)).shape == (2, 64)
    hosted.close()
    assert hosted._runner is None
