"""The bodies of rerank and score calls, checked. Built by the HTTP edge."""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import read_model
from naru_router.core.embedding_request import MAX_INPUTS, PoolingOptions, read_options
from naru_router.core.fields import Fields, check_text, refuse

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RerankCall:
    """Which of the documents answer the query best."""

    model: str
    query: str
    documents: tuple[str, ...]
    top_n: int
    returns_documents: bool
    options: PoolingOptions


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """How much the texts of each pair have to do with one another."""

    model: str
    pairs: tuple[Pair, ...]
    options: PoolingOptions


def parse_rerank(body: dict[str, object], *, returns_documents: bool = True) -> RerankCall:
    """Reads a rerank body; `returns_documents` where it does not say. Too long texts are cut unless it says so.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    query = _text("query", fields.get("query"))
    documents = _documents(fields.get("documents"))
    top_n = fields.integer("top_n", 1, 2**31 - 1) or len(documents)
    wants = fields.boolean("return_documents")
    if fields.get("rank_fields") not in (None, ["text"]):
        refuse("rank_fields", fields.get("rank_fields"), "absent: documents are ranked by their text")
    if fields.get("max_tokens_per_doc") is not None:
        refuse("max_tokens_per_doc", fields.get("max_tokens_per_doc"), "absent: set truncate_prompt_tokens")
    return RerankCall(
        model,
        query,
        documents,
        min(top_n, len(documents)),
        returns_documents if wants is None else wants,
        read_options(fields, truncate_tokens=-1),
    )


def parse_score(body: dict[str, object]) -> ScoreCall:
    """Reads a score body: one text beside each of several, or pairs.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    firsts, seconds = (_texts(name, fields.get(name)) for name in ("text_1", "text_2"))
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; send as many, or one text_1", param="text_1"
        )
    return ScoreCall(model, tuple(zip(firsts, seconds, strict=True)), read_options(fields))


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_text(name, value),)
    _check_many(name, value, "a string, or an array of strings")
    assert isinstance(value, list)  # checked
    return tuple(_text(f"{name}[{i}]", item) for i, item in enumerate(value))


def _documents(value: object) -> tuple[str, ...]:
    _check_many("documents", value, "an array of strings, or of objects with text")
    assert isinstance(value, list)  # checked
    texts = []
    for i, item in enumerate(value):
        if isinstance(item, dict):
            texts.append(_text(f"documents[{i}].text", item.get("text")))
        else:
            texts.append(_text(f"documents[{i}]", item))
    return tuple(texts)


def _check_many(name: str, value: object, wanted: str) -> None:
    if not isinstance(value, list) or not value:
        refuse(name, value, f"{wanted}; none may be empty")
    if len(value) > MAX_INPUTS:
        raise InvalidRequest(f"{name} has {len(value)} texts; at most {MAX_INPUTS} are allowed", param=name)


def _text(path: str, value: object) -> str:
    text = check_text(path, value)
    if not text:
        raise InvalidRequest(f"{path} is an empty string; send text", param=path)
    return text
