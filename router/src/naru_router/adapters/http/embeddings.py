"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

import asyncio

import orjson

from naru_router.adapters.http.generation import Exchange, GenerationEndpoint
from naru_router.adapters.http.pooling_jobs import Pooled, embed
from naru_router.core.embedding_request import EmbeddingCall, parse_embedding
from naru_router.core.vectors import PIECE_BYTES, embedding_items, json_bytes

_JSON = (b"content-type", b"application/json")


class EmbeddingEndpoint(GenerationEndpoint):
    """Serves embeddings."""

    name = "embedding"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer."""
        call = parse_embedding(body)
        pooled = Pooled()
        vectors = await embed(call, exchange, pooled)
        headers = (_JSON, *exchange.route_headers(pooled.consumers[:1]))
        await _send(call, vectors, pooled, exchange, headers)


async def _send(
    call: EmbeddingCall,
    vectors: list[bytes],
    pooled: Pooled,
    exchange: Exchange,
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    """Sends the reply: a small one whole, a large one in pieces, no faster than the client takes them."""
    reply = exchange.reply
    head, items = b'{"object":"list","data":[', embedding_items(vectors, is_base64=call.is_base64)
    usage = {"prompt_tokens": pooled.usage.prompt_tokens, "total_tokens": pooled.usage.prompt_tokens}
    tail = b'],"model":%b,"usage":%b}' % (orjson.dumps(call.model), orjson.dumps(usage))
    if json_bytes(vectors, is_base64=call.is_base64) <= 2 * PIECE_BYTES:
        reply.send(200, headers, b"".join((head, *items, tail)))
        return
    reply.begin(200, headers)
    reply.write(head)
    for piece in items:
        reply.write(piece)
        await reply.drained()
        await asyncio.sleep(0)
    reply.write(tail)
    reply.end()
