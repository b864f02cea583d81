# ruff: noqa: E501 - a row is a line of a table
"""Embeddings, rerank, score and tokenize: what their clients may send."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

from compatibility.known_worker import CHAT, DIMENSION, EMBEDDER, RANKER
from compatibility.row import Outcome, Row

from naru_proto.v1 import worker_pb2 as wire

EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
EMBEDDINGS_API = "OpenAI embeddings"
RERANK_API = "Rerank and score"
TOKENS_API = "Tokenize"


def embedding(**fields: Any) -> dict[str, Any]:
    return {"model": EMBEDDER, "input": "hi", **fields}


def ranking(**fields: Any) -> dict[str, Any]:
    return {"model": RANKER, "query": "q", "documents": ["a", "b"], **fields}


def scoring(**fields: Any) -> dict[str, Any]:
    return {"model": RANKER, "text_1": "a", "text_2": ["b", "c"], **fields}


def vectors(outcome: Outcome) -> list[Any]:
    assert outcome.json["object"] == "list"
    return [item["embedding"] for item in outcome.json["data"]]


def gives(count: int, size: int = DIMENSION) -> Callable[[Outcome], None]:
    """So many vectors of so many numbers, in order."""

    def check(outcome: Outcome) -> None:
        assert vectors(outcome) == [[0.5 + i] * size for i in range(count)]

    return check


def sends(name: str, value: object) -> Callable[[Outcome], None]:
    """A field of the worker's task."""

    def check(outcome: Outcome) -> None:
        assert getattr(outcome.sent.pooling, name) == value

    return check


def base64_floats(outcome: Outcome) -> None:
    (text,) = vectors(outcome)
    assert struct.unpack(f"<{DIMENSION}f", base64.b64decode(text)) == (0.5,) * DIMENSION


def token_ids(outcome: Outcome) -> None:
    assert list(outcome.sent.pooling.inputs[0].token_ids.ids) == [1, 2]


def best_first(outcome: Outcome) -> None:
    assert outcome.sent.pooling.kind == wire.POOLING_KIND_SCORE
    assert [(it["index"], it["relevance_score"]) for it in outcome.json["results"]] == [(1, 1.5), (0, 0.5)]


def one_result(outcome: Outcome) -> None:
    assert [it["index"] for it in outcome.json["results"]] == [1]


def documents_are(*texts: str | None) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        assert [it.get("document", {}).get("text") for it in outcome.json["results"]] == list(texts)

    return check


def by_cosine(outcome: Outcome) -> None:
    assert outcome.sent.pooling.kind == wire.POOLING_KIND_EMBED
    assert [round(it["relevance_score"], 6) for it in outcome.json["results"]] == [1.0, 1.0]


def scores(*values: float) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        assert [it["score"] for it in outcome.json["data"]] == list(values)

    return check


def rendered(outcome: Outcome) -> None:
    assert outcome.sent.tokenize.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not outcome.sent.tokenize.add_special_tokens


def tokens(outcome: Outcome) -> None:
    assert (outcome.json["count"], outcome.json["tokens"], outcome.json["max_model_len"]) == (2, [0, 1], 2048)


def token_texts(outcome: Outcome) -> None:
    assert outcome.json["token_strs"] == ["to", "be"]


def no_specials(outcome: Outcome) -> None:
    assert not outcome.sent.tokenize.add_special_tokens


def text_again(outcome: Outcome) -> None:
    assert outcome.json == {"prompt": "t3 t4"}


MESSAGES = [{"role": "user", "content": "hi"}]
ROWS = [
    Row(EMBEDDINGS_API, "`input` a string", "yes", "one vector", EMBED, embedding(), gives(1)),
    Row(EMBEDDINGS_API, "`input` strings", "yes", "a vector each, at most 2048", EMBED, embedding(input=["a", "b"]), gives(2)),
    Row(EMBEDDINGS_API, "`input` token ids", "yes", "taken as they are", EMBED, embedding(input=[1, 2]), token_ids),
    Row(EMBEDDINGS_API, "`input` arrays of token ids", "yes", "a vector each", EMBED, embedding(input=[[1], [2]]), gives(2)),
    Row(EMBEDDINGS_API, "empty `input`", "refused", "as at OpenAI", EMBED, embedding(input=""), param="input"),
    Row(EMBEDDINGS_API, "more than 2048 inputs", "refused", "send several calls", EMBED, embedding(input=["a"] * 2049), param="input"),
    Row(EMBEDDINGS_API, "`model` that generates", "yes", "its last token's hidden state", EMBED, embedding(model=CHAT), gives(1)),
    Row(EMBEDDINGS_API, "`model` that only scores", "refused", "says what the model can", EMBED, embedding(model=RANKER), param="model"),
    Row(EMBEDDINGS_API, "`encoding_format: base64`", "yes", "float32, little-endian", EMBED, embedding(encoding_format="base64"), base64_floats),
    Row(EMBEDDINGS_API, "`encoding_format` of another kind", "refused", "float or base64", EMBED, embedding(encoding_format="int8"), param="encoding_format"),
    Row(EMBEDDINGS_API, "`dimensions`", "yes", "cut, and of length 1 again", EMBED, embedding(dimensions=2), gives(1, 2)),
    Row(EMBEDDINGS_API, "`dimensions` above the model's", "refused", "says how many there are", EMBED, embedding(dimensions=5), param="dimensions"),
    Row(EMBEDDINGS_API, "`user`", "ignored", "changes nothing", EMBED, embedding(user="me"), gives(1)),
    Row(EMBEDDINGS_API, "unknown fields", "ignored", "changes nothing", EMBED, embedding(input_type="query"), gives(1)),
    Row(EMBEDDINGS_API, "`truncate_prompt_tokens`", "yes", "longer inputs are cut; -1: to the model's limit; absent: refused", EMBED, embedding(truncate_prompt_tokens=-1), sends("truncate_tokens", -1)),
    Row(EMBEDDINGS_API, "`normalize`", "yes", "absent: as the model's files say", EMBED, embedding(normalize=False), sends("normalize", False)),
    Row(EMBEDDINGS_API, "`add_special_tokens`", "yes", "true where absent", EMBED, embedding(add_special_tokens=False), sends("add_special_tokens", False)),
    Row(RERANK_API, "`query`, `documents`", "yes", "best first", RERANK, ranking(), best_first),
    Row(RERANK_API, "`documents` with `text`", "yes", "ranked by the text", RERANK, ranking(documents=[{"text": "a"}, "b"]), best_first),
    Row(RERANK_API, "`top_n`", "yes", "the best alone", RERANK, ranking(top_n=1), one_result),
    Row(RERANK_API, "`return_documents`", "yes", "true where absent, false at `/v2/rerank`", RERANK, ranking(return_documents=False), documents_are(None, None)),
    Row(RERANK_API, "documents in the reply", "yes", "as `document.text`", RERANK, ranking(), documents_are("b", "a")),
    Row(RERANK_API, "`/rerank`", "yes", "the same", "/rerank", ranking(), best_first),
    Row(RERANK_API, "`/v2/rerank`", "yes", "the same, without documents", "/v2/rerank", ranking(), documents_are(None, None)),
    Row(RERANK_API, "embedding models", "yes", "cosine of the vectors", RERANK, ranking(model=EMBEDDER), by_cosine),
    Row(RERANK_API, "`truncate_prompt_tokens`", "yes", "to the model's limit where absent", RERANK, ranking(), sends("truncate_tokens", -1)),
    Row(RERANK_API, "`max_tokens_per_doc`", "refused", "set truncate_prompt_tokens", RERANK, ranking(max_tokens_per_doc=9), param="max_tokens_per_doc"),
    Row(RERANK_API, "`rank_fields`", "refused", "documents are ranked by their text", RERANK, ranking(rank_fields=["title"]), param="rank_fields"),
    Row(RERANK_API, "empty documents", "refused", "names which", RERANK, ranking(documents=["a", ""]), param="documents[1]"),
    Row(RERANK_API, "`/v1/score`: `text_1`, `text_2`", "yes", "one with many, or pairs", SCORE, scoring(), scores(0.5, 1.5)),
    Row(RERANK_API, "`/v1/score` of pairs", "yes", "in their order", SCORE, scoring(text_1=["a", "b"]), scores(0.5, 1.5)),
    Row(RERANK_API, "`/v1/score` of unequal lists", "refused", "as many, or one text_1", SCORE, scoring(text_1=["a", "b", "c"]), param="text_1"),
    Row(RERANK_API, "`/v1/score`: `truncate_prompt_tokens`", "yes", "too long pairs are refused where absent", SCORE, scoring(), sends("truncate_tokens", 0)),
    Row(TOKENS_API, "`prompt`", "yes", "its tokens", TOKENIZE, {"model": CHAT, "prompt": "to be"}, tokens),
    Row(TOKENS_API, "`messages`", "yes", "rendered by the chat template", TOKENIZE, {"model": CHAT, "messages": MESSAGES}, rendered),
    Row(TOKENS_API, "`prompt` and `messages`", "refused", "send one of them", TOKENIZE, {"model": CHAT, "prompt": "a", "messages": MESSAGES}, param="prompt"),
    Row(TOKENS_API, "`add_special_tokens`", "yes", "true for prompts, false for chats", TOKENIZE, {"model": CHAT, "prompt": "to", "add_special_tokens": False}, no_specials),
    Row(TOKENS_API, "`return_token_strs`", "yes", "each token's text", TOKENIZE, {"model": CHAT, "prompt": "to be", "return_token_strs": True}, token_texts),
    Row(TOKENS_API, "`/detokenize`: `tokens`", "yes", "their text", DETOKENIZE, {"model": CHAT, "tokens": [3, 4]}, text_again),
    Row(TOKENS_API, "`/detokenize` of other things", "refused", "names which", DETOKENIZE, {"model": CHAT, "tokens": [3, "a"]}, param="tokens[1]"),
]  # fmt: skip
