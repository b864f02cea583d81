"""Embeddings, rerank and score over HTTP: forms, order, cutting, bad input, errors."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from router_rig import MODEL, Rig
from stub_worker import STOP, fail
from task_worker import DIMENSION, EMBEDDER, SCORER, pool, text_of, vector_of

from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import worker_pb2 as wire
from naru_router.core.embedding_request import MAX_JOB_BYTES, MAX_JOB_INPUTS, cut
from naru_router.core.vectors import embedding_items

EMBED = "/v1/embeddings"
RERANK = "/v1/rerank"
SCORE = "/v1/score"


async def serve(rig: Rig, facts: ModelInfoRecord = EMBEDDER, **settings: Any) -> None:
    await rig.publish_model()
    await rig.start_worker(script=pool, facts=facts)
    await rig.start_router(**settings)


async def embed(rig: Rig, **fields: Any) -> Any:
    response = await rig.post(EMBED, {"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(rig: Rig, path: str, **fields: Any) -> dict[str, Any]:
    response = await rig.post(path, {"model": MODEL, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


# --- embeddings -----------------------------------------------------------------------------------------------------


async def test_one_text_gives_its_vector_and_the_usage(rig: Rig) -> None:
    await serve(rig)
    reply = await embed(rig, input="hello")
    assert reply == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector_of("hello")}],
        "model": MODEL,
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    (request,) = rig.workers["w0"].requests
    assert request.pooling.kind == wire.POOLING_KIND_EMBED
    assert request.pooling.add_special_tokens
    assert not request.pooling.HasField("normalize")
    assert (request.pooling.truncate_tokens, request.pooling.dimensions) == (0, 0)


async def test_all_forms_of_input_are_taken_and_keep_their_order(rig: Rig) -> None:
    await serve(rig)
    for given, texts in (
        (["b", "a", "b"], ["b", "a", "b"]),
        ([5, 6, 7], ["[5, 6, 7]"]),
        ([[1, 2], [3]], ["[1, 2]", "[3]"]),
    ):
        reply = await embed(rig, input=given)
        assert [item["index"] for item in reply["data"]] == list(range(len(texts)))
        assert [item["embedding"] for item in reply["data"]] == [vector_of(text) for text in texts]


async def test_base64_holds_the_same_numbers(rig: Rig) -> None:
    await serve(rig)
    reply = await embed(rig, input=["x", "y"], encoding_format="base64")
    found = [struct.unpack(f"<{DIMENSION}f", base64.b64decode(item["embedding"])) for item in reply["data"]]
    assert found == [tuple(vector_of("x")), tuple(vector_of("y"))]


async def test_options_reach_the_worker(rig: Rig) -> None:
    await serve(rig)
    reply = await embed(
        rig, input="x", dimensions=3, truncate_prompt_tokens=-1, normalize=False, add_special_tokens=False, user="me"
    )
    assert reply["data"][0]["embedding"] == vector_of("x", 3)
    task = rig.workers["w0"].requests[0].pooling
    assert (task.dimensions, task.truncate_tokens, task.normalize, task.add_special_tokens) == (3, -1, False, False)


async def test_a_large_call_is_shared_by_the_copies_and_keeps_its_order(rig: Rig) -> None:
    await rig.publish_model()
    for name in ("w0", "w1"):
        await rig.start_worker(name, pool, facts=EMBEDDER)
    await rig.start_router()
    texts = [f"text {i}" for i in range(2048)]
    reply = await embed(rig, input=texts)
    assert [item["embedding"] for item in reply["data"]] == [vector_of(text) for text in texts]
    assert [item["index"] for item in reply["data"]] == list(range(2048))
    assert reply["usage"]["prompt_tokens"] == 3 * 2048
    jobs = [len(worker.requests) for worker in rig.workers.values()]
    assert sum(jobs) == 2048 // MAX_JOB_INPUTS
    assert min(jobs) > 0, "both copies have worked on it"


def test_a_call_is_cut_by_inputs_and_by_bytes() -> None:
    assert cut([]) == []
    assert cut([1] * MAX_JOB_INPUTS) == [(0, MAX_JOB_INPUTS)]
    assert cut([1] * (MAX_JOB_INPUTS + 1)) == [(0, MAX_JOB_INPUTS), (MAX_JOB_INPUTS, MAX_JOB_INPUTS + 1)]
    assert cut([MAX_JOB_BYTES, 1, 1]) == [(0, 1), (1, 3)]
    assert cut([1, 5 * MAX_JOB_BYTES, 1]) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("inputs[{}] has 900 tokens; the model takes 512", "input[200] has 900 tokens; the model takes 512"),
        ("input {}: it is too long; set truncate_tokens", "input[200]: it is too long; set truncate_prompt_tokens"),
        ("too long", "too long"),
    ],
)
async def test_one_part_that_fails_fails_the_call_and_names_the_input(rig: Rig, words: str, told: str) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        for index, item in enumerate(request.pooling.inputs):
            if text_of(item) == "bad":
                message, param = words.format(index), f"inputs[{index}]"
                error = wire.Error(code="context_length_exceeded", message=message, param=param)
                yield wire.Delta(error=error, request_done=True)
                return
        async for delta in pool(request):
            yield delta

    await rig.publish_model()
    await rig.start_worker(script=script, facts=EMBEDDER)
    await rig.start_router()
    texts = [f"text {i}" for i in range(300)]
    texts[200] = "bad"
    error = await refusal(rig, EMBED, input=texts)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input[200]"
    assert error["message"] == told


async def test_a_vector_that_is_left_out_is_an_error_of_ours(rig: Rig) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        async for delta in pool(request):
            if delta.vectors[0].index != 1:
                yield delta

    await rig.publish_model()
    await rig.start_worker(script=script, facts=EMBEDDER)
    await rig.start_router()
    response = await rig.post(EMBED, {"model": MODEL, "input": ["a", "b"]})
    assert response.status_code == 500
    assert "no vector for input 1 of 2" in response.json()["error"]["message"]


async def test_a_lost_worker_is_replaced_unseen(rig: Rig) -> None:
    await rig.publish_model()

    async def half(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        async for delta in pool(request):
            yield delta
            await rig.workers["w0"].kill()
            return

    await rig.start_worker("w0", half, facts=EMBEDDER)
    await rig.start_router()
    await rig.start_worker("w1", pool, facts=EMBEDDER)
    reply = await embed(rig, input=["a", "b"])
    assert [item["embedding"] for item in reply["data"]] == [vector_of("a"), vector_of("b")]


BAD_EMBEDDINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [""]}, "input[0]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[]]}, "input[0]"),
    ({"input": ["a", [1]]}, "input[1]"),
    ({"input": [1, "a"]}, "input[1]"),
    ({"input": [-1]}, "input[0]"),
    ({"input": [1.5]}, "input[0]"),
    ({"input": [True]}, "input[0]"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": DIMENSION + 1}, "dimensions"),
    ({"input": "a", "dimensions": "3"}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "user": 5}, "user"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "normalize": "yes"}, "normalize"),
    ({"input": "a", "model": 5}, "model"),
    ({"input": "a", "priority": "high"}, "priority"),
]


async def test_bad_fields_are_named(rig: Rig) -> None:
    await serve(rig)
    found = [(fields, (await refusal(rig, EMBED, **fields))["param"]) for fields, _ in BAD_EMBEDDINGS]
    assert found == BAD_EMBEDDINGS
    assert rig.workers["w0"].requests == []


async def test_a_model_that_makes_no_vectors_says_what_it_can(rig: Rig) -> None:
    await serve(rig, SCORER)
    error = await refusal(rig, EMBED, input="a")
    assert (error["param"], "scores pairs of texts" in error["message"]) == ("model", True)


async def test_the_openai_client_reads_vectors_and_errors(rig: Rig) -> None:
    await serve(rig)
    url = f"http://127.0.0.1:{rig.app.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        found = await client.embeddings.create(model=MODEL, input=["a", "b"])  # asks for base64
        assert [item.embedding for item in found.data] == [vector_of("a"), vector_of("b")]
        plain = await client.embeddings.create(model=MODEL, input="a", encoding_format="float", dimensions=2)
        assert plain.data[0].embedding == vector_of("a", 2)
        assert plain.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError, match="input is an empty string"):
            await client.embeddings.create(model=MODEL, input="")
        (card,) = (await client.models.list()).data
        assert (card.id, card.model_dump()["state"], card.model_dump()["embedding_dim"]) == (MODEL, "ready", DIMENSION)


async def test_a_large_reply_comes_in_pieces_and_whole(rig: Rig) -> None:
    wide = ModelInfoRecord("bert", 512, 30522, "", "", "", tasks=("embed",), embedding_dim=4096)

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        count = len(request.pooling.inputs)
        delta = wire.Delta(finish_reason=STOP, request_done=True)
        for index in range(count):
            delta.vectors.add(index=index, values=struct.pack("<4096f", *[0.1 * index] * 4096), prompt_tokens=1)
        delta.usage.prompt_tokens = count
        yield delta

    await rig.publish_model()
    await rig.start_worker(script=script, facts=wide)
    await rig.start_router(max_unsent_bytes=1024 * 1024)
    response = await rig.post(EMBED, {"model": MODEL, "input": ["x"] * 128})
    assert response.headers["transfer-encoding"] == "chunked"
    assert len(response.content) > 7 * 1024 * 1024, "many times what may wait for a client"
    data = response.json()["data"]
    assert len(data) == 128
    for item in (data[0], data[127]):
        assert item["embedding"] == [struct.unpack("<f", struct.pack("<f", 0.1 * item["index"]))[0]] * 4096


@pytest.mark.parametrize("is_base64", [True, False])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128])
def test_pieces_of_a_reply_are_never_empty_and_make_one_array(count: int, is_base64: bool) -> None:
    vectors = [struct.pack("<4096f", *[i / 7] * 4096) for i in range(count)]  # some counts end with a full piece
    pieces = list(embedding_items(vectors, is_base64=is_base64))
    assert all(pieces), "an empty piece would end a reply in chunks"
    items = json.loads(b"[%b]" % b"".join(pieces))
    assert [item["index"] for item in items] == list(range(count))
    found = [
        base64.b64decode(it["embedding"]) if is_base64 else struct.pack("<4096f", *it["embedding"]) for it in items
    ]
    assert found == vectors


# --- rerank and score -----------------------------------------------------------------------------------------------

DOCUMENTS = ["red sky", "blue sky at night", {"text": "sky"}, "grass"]


async def test_rerank_gives_the_best_first(rig: Rig) -> None:
    await serve(rig, SCORER)
    response = await rig.post(RERANK, {"model": MODEL, "query": "blue sky", "documents": DOCUMENTS, "top_n": 3})
    assert response.status_code == 200, response.text
    reply = response.json()
    assert [(it["index"], it["relevance_score"]) for it in reply["results"]] == [(1, 2 / 16), (0, 1 / 16), (2, 1 / 16)]
    assert [it["document"]["text"] for it in reply["results"]] == ["blue sky at night", "red sky", "sky"]
    assert reply["id"].startswith("rerank-")
    assert reply["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    (request,) = rig.workers["w0"].requests
    assert request.pooling.kind == wire.POOLING_KIND_SCORE
    assert [(it.text, it.pair) for it in request.pooling.inputs][2] == ("blue sky", "sky")
    assert request.pooling.truncate_tokens == -1


@pytest.mark.parametrize(
    ("path", "fields", "has_documents"),
    [(RERANK, {}, True), ("/rerank", {"return_documents": False}, False), ("/v2/rerank", {}, False)],
)
async def test_documents_come_back_where_that_is_usual_or_asked(
    rig: Rig, path: str, fields: dict[str, Any], has_documents: bool
) -> None:
    await serve(rig, SCORER)
    reply = (await rig.post(path, {"model": MODEL, "query": "q", "documents": ["a", "b"], **fields})).json()
    assert ["document" in it for it in reply["results"]] == [has_documents] * 2


def cosine(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True)) / math.hypot(*first) / math.hypot(*second)


async def test_an_embedding_model_ranks_by_cosine(rig: Rig) -> None:
    await serve(rig)
    texts = [f"document {i}" for i in range(300)]
    reply = (await rig.post(RERANK, {"model": MODEL, "query": "q", "documents": texts})).json()
    expected = {i: cosine(vector_of("q"), vector_of(text)) for i, text in enumerate(texts)}
    for it in reply["results"]:
        assert it["relevance_score"] == pytest.approx(expected[it["index"]], abs=1e-9)
    assert [it["index"] for it in reply["results"]] == sorted(expected, key=lambda i: -expected[i])


async def test_score_takes_one_with_many_and_pairs(rig: Rig) -> None:
    await serve(rig, SCORER)
    reply = (await rig.post(SCORE, {"model": MODEL, "text_1": "a b", "text_2": ["a", "b a", "c"]})).json()
    assert [(it["index"], it["object"], it["score"]) for it in reply["data"]] == [
        (0, "score", 1 / 16),
        (1, "score", 2 / 16),
        (2, "score", 0.0),
    ]
    pairs = (await rig.post("/score", {"model": MODEL, "text_1": ["a", "b"], "text_2": ["b", "b"]})).json()
    assert [it["score"] for it in pairs["data"]] == [0.0, 1 / 16]
    assert rig.workers["w0"].requests[0].pooling.truncate_tokens == 0


async def test_score_of_an_embedding_model_computes_each_text_once(rig: Rig) -> None:
    await serve(rig)
    reply = (await rig.post(SCORE, {"model": MODEL, "text_1": "a", "text_2": ["a", "b", "b"]})).json()
    assert [it["score"] for it in reply["data"]] == pytest.approx(
        [1.0, cosine(vector_of("a"), vector_of("b")), cosine(vector_of("a"), vector_of("b"))]
    )
    assert [text_of(it) for it in rig.workers["w0"].requests[0].pooling.inputs] == ["a", "b"]


BAD_PAIRS: list[tuple[str, dict[str, Any], str]] = [
    (RERANK, {"documents": ["a"]}, "query"),
    (RERANK, {"query": "", "documents": ["a"]}, "query"),
    (RERANK, {"query": "q"}, "documents"),
    (RERANK, {"query": "q", "documents": []}, "documents"),
    (RERANK, {"query": "q", "documents": "a"}, "documents"),
    (RERANK, {"query": "q", "documents": ["a", ""]}, "documents[1]"),
    (RERANK, {"query": "q", "documents": ["a", {"title": "x"}]}, "documents[1].text"),
    (RERANK, {"query": "q", "documents": ["a", 5]}, "documents[1]"),
    (RERANK, {"query": "q", "documents": ["a"] * 2049}, "documents"),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    (RERANK, {"query": "q", "documents": ["a"], "return_documents": 1}, "return_documents"),
    (RERANK, {"query": "q", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
    (RERANK, {"query": "q", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    (SCORE, {"text_2": "a"}, "text_1"),
    (SCORE, {"text_1": "a"}, "text_2"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    (SCORE, {"text_1": "a", "text_2": [["b"]]}, "text_2[0]"),
]


async def test_bad_fields_of_rerank_and_score_are_named(rig: Rig) -> None:
    await serve(rig, SCORER)
    found = [(path, fields, (await refusal(rig, path, **fields))["param"]) for path, fields, _ in BAD_PAIRS]
    assert found == BAD_PAIRS


async def test_a_worker_that_names_an_input_has_the_document_named(rig: Rig) -> None:
    await rig.publish_model()
    script = fail("context_length_exceeded", "inputs[1] has 900 tokens", param="inputs[1]")
    await rig.start_worker(script=script, facts=SCORER)
    await rig.start_router()
    error = await refusal(rig, RERANK, query="q", documents=["a", "b"])
    assert (error["param"], error["message"]) == ("documents[1]", "documents[1] has 900 tokens")


async def test_a_generating_model_alone_scores_nothing(rig: Rig) -> None:
    await serve(rig, ModelInfoRecord("llama", 512, 100, "", "", ""))
    error = await refusal(rig, RERANK, query="q", documents=["a"])
    assert (
        error["param"],
        "generates text, and this request needs one that scores pairs of texts" in error["message"],
    ) == ("model", True)
