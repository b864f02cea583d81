"""Embeddings, rerank, score, tokenize, detokenize. Pure."""

from __future__ import annotations

from naru_router.core.embedding_request import MAX_DIMENSIONS, MAX_INPUTS
from naru_router.core.openapi.words import (
    Schema,
    all_null,
    array,
    boolean,
    either,
    free,
    integer,
    null_or,
    number,
    one_of,
    ref,
    text,
    thing,
)

_MODEL = text("One of GET /v1/models.", minLength=1)


def pooling_schemas() -> dict[str, Schema]:
    """Components of what models are asked for beside text."""
    word = text(minLength=1)
    options: dict[str, Schema] = {
        "truncate_prompt_tokens": either(
            integer(-1, -1), integer(1, 2**31 - 1), about="Longer inputs are cut; -1: to the model's limit."
        ),
        "normalize": boolean("Vectors have length 1; scores have their activation."),
        "add_special_tokens": boolean(),
    }
    ids = array(integer(0, 2**31 - 1), least=1)
    inputs = either(word, ids, array(word, least=1, most=MAX_INPUTS), array(ids, least=1, most=MAX_INPUTS))
    texts = either(word, array(word, least=1, most=MAX_INPUTS))
    usage = thing({"prompt_tokens": integer(0), "total_tokens": integer(0)}, ["prompt_tokens", "total_tokens"])
    embedding = {
        "model": _MODEL,
        "input": inputs,
        "encoding_format": one_of("float", "base64"),
        "dimensions": integer(1, MAX_DIMENSIONS),
        "user": text(),
        **options,
    }
    rerank = {
        "model": _MODEL,
        "query": word,
        "documents": array(either(word, thing({"text": word}, ["text"])), least=1, most=MAX_INPUTS),
        "top_n": integer(1, 2**31 - 1),
        "return_documents": boolean(),
        **options,
    }
    score = {"model": _MODEL, "text_1": texts, "text_2": texts, **options}
    chat_or_text = {
        "model": _MODEL,
        "prompt": text(),
        "messages": array(ref("Message"), least=1),
        "add_special_tokens": boolean(),
        "return_token_strs": boolean(),
    }
    ranked = thing(
        {"index": integer(0), "relevance_score": number(), "document": null_or(free())}, ["index", "relevance_score"]
    )
    vector = thing(
        {
            "object": one_of("embedding"),
            "index": integer(0),
            "embedding": either(array(number()), text("Base64 of little-endian float32.")),
        },
        ["object", "index", "embedding"],
    )
    return {
        "EmbeddingRequest": thing(all_null(embedding, but=("model", "input")), ["model", "input"]),
        "Embeddings": thing(
            {"object": one_of("list"), "data": array(vector), "model": text(), "usage": usage},
            ["object", "data", "model", "usage"],
        ),
        "RerankRequest": thing(all_null(rerank, but=("model", "query", "documents")), ["model", "query", "documents"]),
        "Ranking": thing({"results": array(ranked)}, ["results"]),
        "ScoreRequest": thing(all_null(score, but=("model", "text_1", "text_2")), ["model", "text_1", "text_2"]),
        "Scores": thing({"data": array(thing({"index": integer(0), "score": number()}, ["index", "score"]))}, ["data"]),
        "TokenizeRequest": {
            **thing(all_null(chat_or_text, but=("model", "prompt", "messages")), ["model"]),
            "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        },
        "Tokens": thing(
            {"count": integer(0), "max_model_len": integer(0), "tokens": array(integer(0))}, ["count", "tokens"]
        ),
        "DetokenizeRequest": thing({"model": _MODEL, "tokens": array(integer(0, 2**31 - 1))}, ["model", "tokens"]),
        "Detokenized": thing({"prompt": text()}, ["prompt"]),
    }
