"""A family's tokenizer is built once in a packing process, and every change of what it is built from is seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import byte_level_tokenizer, model_file
from tiny_models import TinySpec, byte_alphabet, tokenizer_json, write_json

from naru_proto.errors import LoadError
from naru_worker.adapters.images import tokenizer_sections
from naru_worker.adapters.images.planning import plan_image
from naru_worker.adapters.images.tokenizer_sections import TokenizerSections, resident_bytes, tokenizer_section
from naru_worker.adapters.images.writer import PlannedImage
from naru_worker.adapters.models.opening import open_files
from naru_worker.adapters.tokenizer.gguf_tokenizer import gguf_tokenizer, tokenizer_metadata
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.origin import gguf_origin
from naru_worker.core.fields import Fields

MIB = 2**20


def planned(path: Path, sections: TokenizerSections) -> PlannedImage:
    files = open_files(path)
    try:
        return plan_image(files, sections)
    finally:
        files.checkpoint.close()


def origin(path: Path) -> bytes:
    files = open_files(path)
    files.checkpoint.close()
    return files.tokenizer_origin()


@pytest.fixture
def num_built(monkeypatch: pytest.MonkeyPatch) -> list[ModelTokenizer]:
    """Grows with each tokenizer that is serialized."""
    built: list[ModelTokenizer] = []

    def counted(tokenizer: ModelTokenizer) -> tokenizer_sections.TokenizerSection:
        built.append(tokenizer)
        return tokenizer_section(tokenizer)

    monkeypatch.setattr(tokenizer_sections, "tokenizer_section", counted)
    return built


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_second_model_of_a_family_is_planned_as_if_it_were_the_first(
    tmp_path: Path, tiny_model: Callable[[TinySpec], Path], num_built: list[ModelTokenizer], kind: str
) -> None:
    paths = [tiny_model(TinySpec(seed=seed)) for seed in (0, 1)]
    if kind == "gguf":
        paths = [tmp_path / f"{seed}.gguf" for seed in (0, 1)]
        for seed, path in enumerate(paths):
            path.write_bytes(model_file(TinySpec(seed=seed)))
    sections = TokenizerSections()
    first, second = (planned(path, sections) for path in paths)
    assert len(num_built) == 1
    assert first.tokenizer == second.tokenizer and first.index.digest != second.index.digest
    assert planned(paths[1], TokenizerSections()) == second
    assert len(num_built) == 2


FOLDER_CHANGES: dict[str, Callable[[Path], object]] = {
    "tokenizer": lambda folder: write_json(folder / "tokenizer.json", tokenizer_json(added_tokens=[])),
    "settings": lambda folder: write_json(folder / "tokenizer_config.json", {"add_bos_token": False}),
    "no settings": lambda folder: (folder / "tokenizer_config.json").unlink(),
}


@pytest.mark.parametrize("change", FOLDER_CHANGES.values(), ids=FOLDER_CHANGES.keys())
def test_a_change_of_a_folder_s_tokenizer_files_is_another_origin(
    source: Path, change: Callable[[Path], object]
) -> None:
    before = origin(source)
    (source / "README.md").write_text("not of the tokenizer")
    assert origin(source) == before
    change(source)
    assert origin(source) != before


def test_another_number_of_embeddings_is_another_origin(tiny_model: Callable[[TinySpec], Path]) -> None:
    assert origin(tiny_model(TinySpec())) != origin(tiny_model(TinySpec(vocab_size=301)))


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.pre": "qwen2"},
        {"tokenizer.ggml.tokens": [*byte_alphabet(), "a", "b", "c"]},
        {"tokenizer.ggml.merges": ["t h"]},
        {"tokenizer.ggml.token_type": [1] * 259},
        {"tokenizer.ggml.eos_token_id": 3},
        {"tokenizer.ggml.eos_token_id": 256.0},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.add_bos_token": 1},
    ],
    ids=repr,
)
def test_a_change_of_gguf_metadata_is_another_origin(change: dict[str, Any]) -> None:
    metadata = byte_level_tokenizer()
    before = gguf_origin(tokenizer_metadata(metadata), 300)
    assert gguf_origin(tokenizer_metadata(metadata | change), 300) != before
    other = dict(reversed(metadata.items())) | {"general.name": "fine-tune", "tokenizer.chat_template": "x"}
    assert gguf_origin(tokenizer_metadata(other), 300) == before
    assert gguf_origin(tokenizer_metadata(metadata), 301) != before


def test_the_bytes_that_were_hashed_are_those_that_are_built_from(source: Path) -> None:
    """Should the file change in between, its section would be kept under the wrong name."""
    files = open_files(source)
    before = files.tokenizer_origin()
    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|im_done|>"))
    built = files.build_tokenizer()
    assert built.token_id("<|im_end|>") is not None and built.token_id("<|im_done|>") is None
    assert files.tokenizer_origin() != before
    files.checkpoint.close()


def test_a_tokenizer_that_cannot_be_built_is_not_kept(source: Path, tmp_path: Path) -> None:
    sections = TokenizerSections()
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(LoadError, match="is no tokenizer"):
            planned(broken, sections)
    assert planned(source, sections).tokenizer


def small() -> ModelTokenizer:
    return gguf_tokenizer(Fields("m.gguf", byte_level_tokenizer()), 300)


def test_the_last_few_are_kept(num_built: list[ModelTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    sections = TokenizerSections()
    names = [bytes([number]) for number in range(tokenizer_sections.MAX_SECTIONS)]
    for name in [*names, names[0], b"new", names[0]]:
        section = sections.get(name, small)
    assert len(num_built) == len(names) + 1
    sections.get(names[1], small)
    assert len(num_built) == len(names) + 2, "the one used longest ago went"
    monkeypatch.setattr(tokenizer_sections, "MAX_SECTIONS_BYTES", 2 * len(section.raw))
    for name in (b"a", b"b", b"a", b"b"):
        sections.get(name, small)
    assert len(num_built) == len(names) + 4


@pytest.mark.smollm2
def test_a_tokenizer_measures_the_same_in_a_process_that_has_run_before(smollm2_path: Path) -> None:
    """Memory that was freed before hides nothing."""
    sizes: list[int] = []
    for _ in range(3):
        files = open_files(smollm2_path)
        section = tokenizer_section(files.build_tokenizer())
        files.checkpoint.close()
        sizes.append(section.resident_bytes)
    assert len(set(sizes)) == 1 and 7 * MIB <= sizes[0] <= 14 * MIB
    assert resident_bytes(section.raw, 0) >= 16 * MIB, "an estimate covers all that a new process grows by"


def test_without_a_measure_the_size_is_estimated() -> None:
    assert resident_bytes(bytes(1000), 0) == 4 * MIB
    assert resident_bytes(bytes(MIB), 0) == 21 * MIB
    assert resident_bytes(bytes(MIB), 9 * MIB + 1) == 10 * MIB
