"""An image holds what the checkpoint held: every number in its place, config, template and tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import Lane, batch_of
from gguf_builder import model_file
from image_bytes import unmeasured
from quantized_models import SCHEMES, SPEC, write_quantized
from tiny_models import CHAT_TEMPLATE, TinySpec, write_model

from naru_proto.errors import LoadError
from naru_worker.adapters.images import mapped_image
from naru_worker.adapters.images.errors import ImageDamaged
from naru_worker.adapters.images.header import PAGE_BYTES
from naru_worker.adapters.images.mapped_image import _mapped, is_verified
from naru_worker.adapters.images.model_image import ModelImage
from naru_worker.adapters.models.decoder import load_weights
from naru_worker.adapters.models.opening import OpenedModel, open_model
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu_pack import float_vector
from naru_worker.adapters.ops.native_lib import load_best
from naru_worker.adapters.ops.protocol import RawTensor, RunnerOptions
from naru_worker.adapters.ops.weights_image import SegmentPlace, WeightsImage
from naru_worker.core.weight_layout import expected_shapes

Array = np.ndarray[Any, np.dtype[Any]]

FAMILIES = {
    "llama": TinySpec(),
    "llama tied": TinySpec(tied=True),
    "llama with biases": TinySpec(bias=True),
    "llama, ragged rows": TinySpec(vocab_size=301, intermediate_size=100, hidden_size=60, num_heads=3, num_kv_heads=1),
    "qwen2": TinySpec(model_type="qwen2", extra={"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "qwen3": TinySpec(model_type="qwen3", head_dim=24),
    "mistral": TinySpec(model_type="mistral", extra={"sliding_window": 32}),
    "gpt2": TinySpec(model_type="gpt2"),
    "gpt2 tied": TinySpec(model_type="gpt2", tied=True),
}

OPTIONS = RunnerOptions(16, 16, 64, 4, 128, num_threads=1, kv_format="f32")


def bytes_at(image: ModelImage, offset: int, num_bytes: int) -> Array:
    return np.array(image._mapped.bytes[offset : offset + num_bytes])


def unpacked(image: ModelImage, place: SegmentPlace, columns: int) -> Array:
    """Rows of a float32 segment, read as the layout is described: panels of 16 rows, column by column."""
    panels = bytes_at(image, place.offset, place.num_bytes).view(np.float32).reshape(-1, columns, 16)
    return panels.transpose(0, 2, 1).reshape(-1, columns)[: place.num_rows]


def assert_holds(image: ModelImage, model: OpenedModel) -> None:
    """Every tensor of the checkpoint is in the image, and nothing else."""
    checkpoint = model.checkpoint
    found: set[str] = set()
    for matrix in image.index.matrices:
        place = image.matrix(matrix.names)
        biases: list[Array] = []
        for name, segment in zip(matrix.names, place.segments, strict=True):
            tensor = checkpoint.get(name)
            np.testing.assert_array_equal(repacked(tensor), bytes_at(image, segment.offset, segment.num_bytes))
            if tensor.format == "f32":
                values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
                np.testing.assert_array_equal(unpacked(image, segment, place.num_columns), values)
            bias = f"{name}_bias"
            has_bias = checkpoint.has(bias)
            biases.append(float_vector(checkpoint.get(bias)) if has_bias else np.zeros(tensor.shape[0], np.float32))
            found |= {name, bias} if has_bias else {name}
        if matrix.biases:
            stacked = np.concatenate([*biases, np.zeros(16, np.float32)])
            np.testing.assert_array_equal(bytes_at(image, place.bias_offset, stacked.nbytes).view(np.float32), stacked)
        else:
            assert place.bias_offset == -1
    for name in image.index.vectors:
        np.testing.assert_array_equal(image.vector(name), float_vector(checkpoint.get(name)))
        found.add(name)
    assert found == set(expected_shapes(checkpoint.config))
    assert all(image.has(name) for name in found) and not image.has("layers.0.nothing")


def repacked(tensor: RawTensor) -> Array:
    """The whole tensor packed in one go."""
    number = {"f32": 0, "f16": 1, "bf16": 2, "q4_0": 3, "q4_1": 4, "q8_0": 5, "q4_k": 6, "q6_k": 7}[tensor.format]
    library = load_best()
    out = np.zeros(library.naru_segment_bytes(number, *tensor.shape), np.uint8)
    data = np.frombuffer(tensor.data, np.uint8)
    library.naru_pack_segment(number, *tensor.shape, data.ctypes.data, out.ctypes.data)
    return out


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES.keys())
def test_an_image_holds_the_whole_model(
    tmp_path: Path, tiny_model: Callable[[TinySpec], Path], pack_here: Any, go_on: threading.Event, spec: TinySpec
) -> None:
    folder = tiny_model(spec)
    image = ModelImage(pack_here(folder, tmp_path))
    model = open_model(folder)
    weights: WeightsImage = image
    assert weights.config == model.checkpoint.config
    assert (image.chat_template, image.revision) == (CHAT_TEMPLATE, model.checkpoint.revision)
    assert image.vocab_limit == model.vocab_limit
    ready: list[int] = []
    image.make_present(ready.append, True, go_on)
    assert_holds(image, model)
    assert image.build_tokenizer().backend.to_str() == model.tokenizer.backend.to_str()
    image.close()
    model.close()


def test_an_image_stays_one_mapping_so_that_huge_pages_fit(
    source: Path, tmp_path: Path, pack_here: Any, go_on: threading.Event
) -> None:
    """What the kernel is told of a part of a mapping cuts it there, and no huge page lies across a cut."""
    path = pack_here(source, tmp_path)
    image = ModelImage(path)
    image.make_present(lambda ready: None, True, go_on)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path.name)]
    image.close()
    assert len(maps) == 1


@pytest.mark.parametrize("name", ["llama with biases", "llama, ragged rows", "qwen2", "qwen3", "gpt2 tied"])
def test_a_model_run_from_its_image_gives_the_same_logits(
    tmp_path: Path, tiny_model: Callable[[TinySpec], Path], pack_here: Any, go_on: threading.Event, name: str
) -> None:
    assert_runs_from_its_image(tiny_model(FAMILIES[name]), FAMILIES[name], tmp_path, pack_here, go_on)


@pytest.mark.parametrize("name", ["gptq, groups of 128", "awq, groups of 64", "floats, scales of blocks"])
def test_a_model_in_another_quantizers_layout_is_packed_in_native_formats(
    tmp_path: Path, pack_here: Any, go_on: threading.Event, name: str
) -> None:
    folder = tmp_path / "model"
    write_quantized(folder, SCHEMES[name])
    assert_runs_from_its_image(folder, SPEC, tmp_path, pack_here, go_on)


def assert_runs_from_its_image(
    folder: Path, spec: TinySpec, tmp_path: Path, pack_here: Any, go_on: threading.Event
) -> None:
    image = ModelImage(pack_here(folder, tmp_path))
    image.make_present(lambda ready: None, True, go_on)
    model = open_model(folder)
    batch = batch_of([(Lane(list(range(5, 45)), [1, 2, 3]), 40)], 16, every_logit=True)
    runners = [cpu.load_runner(model.checkpoint, OPTIONS), cpu.load_image_runner(image, OPTIONS)]
    copied, mapped = (runner.logits(batch) for runner in runners)
    assert copied.shape == (40, spec.vocab_size) and np.isfinite(copied).all()
    np.testing.assert_array_equal(copied, mapped)
    for runner in runners:
        runner.close()
    image.close()
    model.close()


def test_a_gguf_file_and_its_folder_are_one_image(tmp_path: Path, pack_here: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.gguf"
    path.write_bytes(model_file(TinySpec()))
    image = ModelImage(pack_here(path, tmp_path))
    model = open_model(path)
    assert_holds(image, model)
    assert pack_here(folder, tmp_path) == image.path
    image.close()
    model.close()


class Requests:
    """Notes in which order the decoder asks for matrices."""

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []

    def matrix(self, parts: list[RawTensor], biases: list[RawTensor | None]) -> None:
        names = tuple(part.name for part in parts)
        if names not in self.names:
            self.names.append(names)

    def vector(self, tensor: RawTensor) -> None: ...

    def table(self, tensor: RawTensor) -> None:
        self.matrix([tensor], [None])


@pytest.mark.parametrize("spec", [FAMILIES["llama"], FAMILIES["gpt2 tied"]])
def test_weights_lie_in_the_order_in_which_a_step_reads_them(
    tmp_path: Path, tiny_model: Callable[[TinySpec], Path], pack_here: Any, spec: TinySpec
) -> None:
    folder = tiny_model(spec)
    image = ModelImage(pack_here(folder, tmp_path))
    model = open_model(folder)
    requests = Requests()
    load_weights(requests, model.checkpoint)  # type: ignore[arg-type]
    assert [matrix.names for matrix in image.index.matrices] == requests.names
    ends = image.layer_ends()
    assert len(ends) == model.checkpoint.config.num_layers + 2
    for i in range(model.checkpoint.config.num_layers):
        first = next(m for m in image.index.matrices if m.names[0].startswith(f"layers.{i}."))
        assert first.place.segments[0].offset % PAGE_BYTES == 0
        assert first.place.segments[0].offset >= ends[i]
    for matrix in image.index.matrices:
        stage = int(matrix.names[0].split(".")[1]) + 1 if "." in matrix.names[0] else 0
        stage = len(ends) - 1 if matrix.names[0] == "lm_head" else stage
        assert all(s.offset % 64 == 0 and s.offset + s.num_bytes <= ends[stage] for s in matrix.place.segments)
    assert all(place.offset + 4 * place.length <= ends[0] for place in image.index.vectors.values())
    assert ends[-1] % PAGE_BYTES == 0 and image.weight_bytes == ends[-1] - PAGE_BYTES
    image.close()
    model.close()


def test_stages_are_reported_as_they_become_ready(source: Path, tmp_path: Path, pack_here: Any) -> None:
    image = ModelImage(pack_here(source, tmp_path))
    ready: list[int] = []
    image.make_present(ready.append, True, threading.Event())
    assert len(ready) == len(image.layer_ends()) and ready == sorted(ready)
    assert all(present >= needed for present, needed in zip(ready, image.layer_ends(), strict=True))
    assert ready[-1] == image.weight_bytes + PAGE_BYTES
    image.close()


def test_a_file_is_verified_once_in_a_life_of_the_machine(
    source: Path, tmp_path: Path, pack_here: Any, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack_here(source, tmp_path)
    image = ModelImage(path)
    image.make_present(lambda ready: None, False, go_on)
    assert not is_verified(image._mapped)
    image.make_present(lambda ready: None, True, go_on)
    assert is_verified(image._mapped)
    # Another process has its own memory, and finds what this one has left beside the file.
    monkeypatch.setattr(mapped_image, "_verified", {})
    assert is_verified(image._mapped)
    monkeypatch.setattr(mapped_image, "_boot_id", lambda: "another start of the machine")
    assert not is_verified(image._mapped)
    monkeypatch.undo()
    image.close()
    monkeypatch.setattr("naru_worker.adapters.images.presence._compare", None)
    again = ModelImage(path)
    again.make_present(lambda ready: None, True, go_on)
    again.close()


def test_a_file_that_was_changed_since_is_verified_again(
    source: Path, tmp_path: Path, pack_here: Any, go_on: threading.Event
) -> None:
    path = pack_here(source, tmp_path)
    image = ModelImage(path)
    image.make_present(lambda ready: None, True, go_on)
    image.close()
    with path.open("r+b") as file:
        file.seek(2 * PAGE_BYTES)
        (byte,) = file.read(1)
        file.seek(2 * PAGE_BYTES)
        file.write(bytes([byte ^ 1]))
    damaged = ModelImage(path)
    with pytest.raises(ImageDamaged, match="chunk 0"):
        damaged.make_present(lambda ready: None, True, go_on)
    damaged.close()


def test_equal_images_share_one_mapping_until_the_last_is_closed(source: Path, tmp_path: Path, pack_here: Any) -> None:
    path = pack_here(source, tmp_path)
    first, second = ModelImage(path), ModelImage(path)
    assert first.address == second.address and first._mapped.num_users == 2
    identity = first._mapped.identity
    first.close()
    first.close()
    assert second.vector("final_norm").shape == (64,) and _mapped[identity].num_users == 1
    second.close()
    assert identity not in _mapped


def test_a_vector_outlives_its_image(source: Path, tmp_path: Path, pack_here: Any) -> None:
    image = ModelImage(pack_here(source, tmp_path))
    values = image.vector("final_norm")
    before = values.tolist()
    image.close()
    assert values.tolist() == before


def test_closing_an_image_while_it_is_made_present_is_safe(
    source: Path, tmp_path: Path, pack_here: Any, go_on: threading.Event
) -> None:
    image = ModelImage(pack_here(source, tmp_path))
    mapped = image._mapped
    alive: list[int] = []

    def close(ready: int) -> None:
        image.close()
        alive.append(mapped.num_users)

    image.make_present(close, True, go_on)
    assert set(alive) == {1} and mapped.num_users == 0 and mapped.identity not in _mapped
    with pytest.raises(LoadError, match="the image is closed"):
        image.make_present(close, True, go_on)
    with pytest.raises(LoadError, match="the image is closed"):
        image.build_tokenizer()


def test_what_an_image_does_not_have_is_an_error(source: Path, tmp_path: Path, pack_here: Any) -> None:
    image = ModelImage(pack_here(source, tmp_path))
    with pytest.raises(LoadError, match="no matrix of"):
        image.matrix(("layers.0.q",))
    with pytest.raises(LoadError, match="no vector 'embed'"):
        image.vector("embed")
    image.close()


def test_the_digest_is_that_of_the_content(tmp_path: Path, pack_here: Any) -> None:
    """Template, tokenizer and each weight decide it; name and place of the files do not."""
    folders = [tmp_path / name for name in ("a", "b", "weights", "template", "tokenizer")]
    for folder in folders:
        folder.mkdir()
        write_model(folder, TinySpec(seed=1 if folder.name == "weights" else 0))
    (folders[3] / "chat_template.jinja").write_text("other")
    tokenizer = folders[4] / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|im_done|>"))
    names = [pack_here(folder, tmp_path).name for folder in folders]
    assert names[0] == names[1] and len(set(names)) == 4


def test_packing_again_gives_the_same_bytes(source: Path, tmp_path: Path, pack_here: Any) -> None:
    first = unmeasured(pack_here(source, tmp_path))
    assert unmeasured(pack_here(source, tmp_path)) == first


@pytest.mark.smollm2
def test_the_real_model_goes_through_an_image(
    smollm2_path: Path, tmp_path: Path, pack_here: Any, go_on: threading.Event
) -> None:
    image = ModelImage(pack_here(smollm2_path, tmp_path))
    model = open_model(smollm2_path)
    image.make_present(lambda ready: None, True, go_on)
    assert_holds(image, model)
    assert len(image.layer_ends()) == 32 and image.vocab_limit == 49152
    assert 2**20 <= image.tokenizer_bytes < 64 * 2**20
    text = "Tělo žádá čaj — naïve 12345 '   \t\n日本語 🤖<|im_start|>user\n<|im_end|> it's don't"
    tokenizer = image.build_tokenizer()
    assert tokenizer.encode(text, add_special_tokens=True) == model.tokenizer.encode(text, add_special_tokens=True)
    image.close()
    model.close()
