"""POST /v1/rerank, /rerank, /v2/rerank, and /v1/score, /score: how well texts fit one another."""

from __future__ import annotations

import orjson

from naru_router.adapters.http.generation import Edge, Exchange, GenerationEndpoint
from naru_router.adapters.http.pooling_jobs import Pooled, score
from naru_router.adapters.http.responses import send_json
from naru_router.core.rerank_request import parse_rerank, parse_score


class RerankEndpoint(GenerationEndpoint):
    """Serves rerank calls."""

    name = "rerank"

    def __init__(self, edge: Edge, *, returns_documents: bool = True) -> None:
        """`returns_documents`: where a call does not say."""
        super().__init__(edge)
        self._returns_documents = returns_documents

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer: the best first, ties in the documents' order."""
        call = parse_rerank(body, returns_documents=self._returns_documents)
        pooled = Pooled()
        pairs = [(call.query, document) for document in call.documents]
        scores = await score(call.model, pairs, call.options, exchange, pooled, lambda i: f"documents[{i}]")
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: call.top_n]
        results: list[dict[str, object]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if call.returns_documents:
            for result, i in zip(results, best, strict=True):
                result["document"] = {"text": call.documents[i]}
        num_tokens = pooled.usage.prompt_tokens
        reply = {
            "id": f"rerank-{exchange.answer_id}",
            "object": "list",
            "model": call.model,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": num_tokens}},
        }
        send_json(exchange.reply, 200, orjson.dumps(reply), exchange.route_headers(pooled.consumers[:1]))


class ScoreEndpoint(GenerationEndpoint):
    """Serves score calls."""

    name = "score"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer, in the order of the pairs."""
        call = parse_score(body)
        pooled = Pooled()
        scores = await score(call.model, call.pairs, call.options, exchange, pooled, lambda i: f"text_2[{i}]")
        num_tokens = pooled.usage.prompt_tokens
        reply = {
            "id": f"score-{exchange.answer_id}",
            "object": "list",
            "created": exchange.created_s,
            "model": call.model,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        send_json(exchange.reply, 200, orjson.dumps(reply), exchange.route_headers(pooled.consumers[:1]))
