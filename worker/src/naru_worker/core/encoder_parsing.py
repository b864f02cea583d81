"""An encoder's files to `EncoderConfig`: config.json, and sentence-transformers' modules, pooling and limits.

Called when a model folder is opened. Pure: the caller reads the files. Where a file is absent, it is as
sentence-transformers would have it; what would be computed wrongly is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naru_worker.core.encoder_config import (
    ENCODER_MODEL_TYPES,
    EncoderActivation,
    EncoderConfig,
    EncoderFamily,
    Pooling,
)
from naru_worker.core.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    Fields,
    shown,
)

MAX_LABELS = 4096
MAX_TOKEN_TYPES = 1024
_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
_NAMED_POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}
_BASE_ENDINGS = ("Model", "ForMaskedLM")
_SCORE_ENDING = "ForSequenceClassification"
_MODULES = ("Transformer", "Pooling", "Normalize")
_SIGMOIDS = {"Sigmoid": True, "Identity": False}


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """The small files of an encoder's folder; None: there is no such file."""

    config: Fields
    modules: Sequence[object] | None = None
    """modules.json of sentence-transformers."""
    modules_name: str = "modules.json"
    pooling: Fields | None = None
    """config.json of the pooling module."""
    transformer: Fields | None = None
    """sentence_bert_config.json."""
    sentence_transformers: Fields | None = None
    """config_sentence_transformers.json."""


def parse_encoder(files: EncoderFiles) -> EncoderConfig:
    """The encoder's shape and how its results are made.

    Raises:
        LoadError: unknown architecture or feature, or a field missing, of the wrong type or out of range.
    """
    fields = files.config
    model_type = fields.text("model_type", "")
    family = ENCODER_MODEL_TYPES.get(model_type)
    if family is None:
        fields.fail("model_type", f"is {model_type!r}; encoders that are supported: {', '.join(ENCODER_MODEL_TYPES)}")
    _refuse_features(fields)
    num_labels = _num_labels(fields)
    kinds = _modules(files)
    if files.sentence_transformers is not None and files.sentence_transformers.has("default_prompt_name"):
        files.sentence_transformers.fail("default_prompt_name", "is set; put the prompt before each text instead")
    hidden_size = fields.integer(_name(family, "hidden_size"), 1, MAX_HIDDEN_SIZE)
    num_heads = fields.integer(_name(family, "num_attention_heads"), 1, MAX_HEADS)
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
        fields.fail(
            _name(family, "hidden_size"), f"is {hidden_size}; it must be {num_heads} heads times at most {MAX_HEAD_DIM}"
        )
    num_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    first_position = 0
    if family == "roberta":
        first_position = fields.integer("pad_token_id", 0, MAX_POSITIONS, 1) + 1
        if first_position >= num_positions:
            fields.fail("max_position_embeddings", f"is {num_positions}, and the first position is {first_position}")
    return EncoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(_name(family, "intermediate_size"), 1, MAX_INTERMEDIATE_SIZE),
        num_layers=fields.integer(_name(family, "num_hidden_layers"), 1, MAX_LAYERS),
        num_heads=num_heads,
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=0 if family == "distilbert" else fields.integer("type_vocab_size", 1, MAX_TOKEN_TYPES, 2),
        norm_eps=1e-12 if family == "distilbert" else fields.number("layer_norm_eps", 1e-15, 1.0, 1e-12),
        activation=_activation(fields, family),
        max_tokens=_max_tokens(files.transformer, num_positions - first_position),
        pooling="cls" if num_labels else _pooling(files.pooling, hidden_size),
        normalize=not num_labels and "Normalize" in kinds,
        num_labels=num_labels,
        is_sigmoid=num_labels > 0 and _is_sigmoid(files, num_labels),
    )


_DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "hidden_act": "activation",
}


def _name(family: EncoderFamily, name: str) -> str:
    return _DISTILBERT_NAMES[name] if family == "distilbert" else name


def _refuse_features(fields: Fields) -> None:
    if fields.has("quantization_config"):
        fields.fail("quantization_config", "is set; use unquantized safetensors")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        fields.fail("position_embedding_type", f"is {kind!r}; only 'absolute' is supported")
    for flag in ("is_decoder", "add_cross_attention"):
        if fields.boolean(flag, False):
            fields.fail(flag, "is true; an encoder that looks both ways is needed")


def _activation(fields: Fields, family: EncoderFamily) -> EncoderActivation:
    key = _name(family, "hidden_act")
    name = fields.text(key, "gelu")
    if name not in _ACTIVATIONS:
        fields.fail(key, f"is {name!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _num_labels(fields: Fields) -> int:
    """0: the model gives vectors."""
    named = fields.values.get("architectures")
    if named is None:
        return 0
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        fields.fail("architectures", f"is {shown(named)}; a list of one name is needed")
    name = named[0]
    if name.endswith(_SCORE_ENDING):
        labels = fields.table("id2label")
        # The reference has two where nothing is said.
        return fields.integer("num_labels", 1, MAX_LABELS, min(len(labels) or 2, MAX_LABELS))
    if not name.endswith(_BASE_ENDINGS):
        fields.fail(
            "architectures",
            f"is {name!r}; encoders that give vectors (…Model) or scores (…{_SCORE_ENDING}) are supported",
        )
    return 0


def _modules(files: EncoderFiles) -> tuple[str, ...]:
    """The last parts of the modules' class names, in order; none where there is no list."""
    if files.modules is None:
        return ()
    where = Fields(files.modules_name, {})
    kinds = []
    for module in files.modules:
        path = module.get("type") if isinstance(module, Mapping) else None
        if not isinstance(path, str):
            where.fail("type", f"of a module is missing in {shown(module)}")
        kinds.append(path.rpartition(".")[2])
    unknown = [kind for kind in kinds if kind not in _MODULES]
    if unknown:
        where.fail("type", f"of a module is {unknown[0]!r}; supported are {', '.join(_MODULES)}")
    if kinds != [kind for kind in _MODULES if kind in kinds] or "Transformer" not in kinds:
        where.fail("type", f"of the modules are {', '.join(kinds) or 'none'}; the order must be {', '.join(_MODULES)}")
    if "Pooling" not in kinds:
        where.fail("type", "of no module is Pooling: it would give a vector for each token, which is not supported")
    return tuple(kinds)


def _pooling(fields: Fields | None, hidden_size: int) -> Pooling:
    if fields is None:
        return "mean"
    width = fields.integer("word_embedding_dimension", 1, MAX_HIDDEN_SIZE, hidden_size)
    if width != hidden_size:
        fields.fail("word_embedding_dimension", f"is {width}, and the encoder's hidden size {hidden_size}")
    modes = [key for key in fields.values if key.startswith("pooling_mode") and fields.values[key] not in (None, False)]
    if modes == ["pooling_mode"]:
        # Newer files name the mode.
        name = fields.text("pooling_mode", "mean")
        if name not in _NAMED_POOLINGS:
            fields.fail("pooling_mode", f"is {shown(name)}; supported are {', '.join(_NAMED_POOLINGS)}")
        return _NAMED_POOLINGS[name]
    for mode in modes:
        fields.boolean(mode, False)
        if mode not in _POOLINGS:
            fields.fail(mode, f"is set; supported are {', '.join(_POOLINGS)}")
    if len(modes) > 1:
        fields.fail(modes[1], f"is set beside {modes[0]}; one way of pooling at a time is supported")
    if fields.has("include_prompt") and not fields.boolean("include_prompt", True):
        fields.fail("include_prompt", "is false; prompts are part of the text here")
    return _POOLINGS[modes[0]] if modes else "mean"


def _max_tokens(fields: Fields | None, longest: int) -> int:
    if fields is None:
        return longest
    if fields.boolean("do_lower_case", False):
        fields.fail("do_lower_case", "is true; let the tokenizer's normalizer do it, and set it to false")
    return min(longest, fields.integer("max_seq_length", 1, MAX_POSITIONS, longest))


def _is_sigmoid(files: EncoderFiles, num_labels: int) -> bool:
    """What sentence-transformers' CrossEncoder would do with the scores."""
    fields = files.config
    nested = fields.table("sentence_transformers").get("activation_fn")
    name = nested if nested is not None else fields.values.get("sbert_ce_default_activation_function")
    if name is None:
        return num_labels == 1
    kind = name.rpartition(".")[2] if isinstance(name, str) else ""
    if kind not in _SIGMOIDS:
        fields.fail("activation_fn", f"is {shown(name)}; supported are {', '.join(_SIGMOIDS)}")
    return _SIGMOIDS[kind]
