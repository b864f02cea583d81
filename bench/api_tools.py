"""What a token of a chat with tools costs beside the model: from its id to text in the worker, from the worker's delta
through the reader to SSE bytes in the router.

Run by `make bench-api`, or alone: `python -m bench.api_tools`. The stream is recorded: the tokens of an answer that
thinks, says something and calls two tools, as a tokenizer of 50 000 tokens cuts it.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Any

from bench.structured_engine import smollm2

from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.core.chat_parts import OutputReader
from naru_router.core.chunks_parts import PartChunks
from naru_router.core.tools.declared import Tool
from naru_router.core.tools.reader import StyledReader
from naru_router.core.tools.styles import style_of
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.models.opening import open_files
from naru_worker.core.output_text import OutputStream
from naru_worker.core.request import FinishReason
from naru_worker.core.step import SequenceOutput
from naru_worker.core.stop_strings import StopStrings

TEMPLATE = "{% if tools %}<tool_call>{% endif %}<think></think>"
ANSWER = (
    "<think>\nThe user wants the weather in two cities, and asks for it in degrees Celsius. I have a tool for it, and "
    "it takes one city at a time, so that I call it twice.\n</think>\n\nI look up both cities for you.\n"
    + "\n".join(
        '<tool_call>\n{"name": "get_weather", "arguments": '
        + json.dumps({"city": city, "unit": "celsius", "days": [1, 2, 3], "notes": f'the "old town" of {city}\n'})
        + "}\n</tool_call>"
        for city in ("Brno", "Ústí nad Labem")
    )
)
_TOKEN = re.compile(r" ?[A-Za-zÀ-ž]{1,5}|\d|\s+|[^\sA-Za-zÀ-ž\d]{1,2}")
REPEATS, ROUNDS = 200, 7


def recorded_deltas() -> list[worker_pb2.Delta]:
    """The answer, a token a delta, as it comes off the wire."""
    texts = _TOKEN.findall(ANSWER)
    assert "".join(texts) == ANSWER
    deltas = [worker_pb2.Delta(text=text, num_tokens=1, token_ids=[7]) for text in texts]
    end = worker_pb2.Delta(finish_reason=inference_pb2.FINISH_REASON_STOP, request_done=True)
    end.usage.completion_tokens = len(texts)
    return [worker_pb2.Delta.FromString(delta.SerializeToString()) for delta in (*deltas, end)]


def run_once(deltas: list[worker_pb2.Delta]) -> bytes:
    """One stream's bytes."""
    ids = itertools.count()
    tools = {"get_weather": Tool("get_weather")}

    def make_reader() -> OutputReader:
        return StyledReader(style_of(TEMPLATE), lambda: f"call_{next(ids)}", tools=tools)

    chunks = PartChunks(
        answer_id="chatcmpl-1", created_s=1, model="m", n=1, include_usage=True, make_reader=make_reader
    )
    pieces = [chunks.feed((delta,)) for delta in deltas]
    return b"".join([*pieces, chunks.end()])


def run() -> dict[str, Any]:
    """Microseconds for each token of the recorded stream; the best of several rounds, as others use the machine."""
    deltas = recorded_deltas()
    data = run_once(deltas)
    assert data.count(b'"name":"get_weather"') == 2 and data.count(b'"finish_reason":"tool_calls"') == 1
    router_us = _best_us(lambda: run_once(deltas), len(deltas) - 1)
    tokenizer = open_files(smollm2()).build_tokenizer()
    token_ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    tokens = TokenTable(tokenizer)
    assert detokenize(tokens, token_ids) == ANSWER
    worker_us = _best_us(lambda: detokenize(tokens, token_ids), len(token_ids))
    print(f"detokenizing {worker_us:.2f} µs a token, reading and writing {router_us:.2f} µs a token")
    details = {"detokenize_us": round(worker_us, 2), "read_and_write_us": round(router_us, 2)}
    return {"us_per_token_tools": round(worker_us + router_us, 2), "tools": details}


def detokenize(tokens: TokenTable, token_ids: list[int]) -> str:
    """As the worker does it for each token, with a stop string to look for."""
    stream, last = OutputStream(tokens, StopStrings(("</never>",))), len(token_ids) - 1
    nobody: Any = None  # whose output it is matters to the scheduler alone
    outputs = (
        SequenceOutput(nobody, (token_id,), FinishReason.LENGTH if number == last else None)
        for number, token_id in enumerate(token_ids)
    )
    return "".join([stream.push(output).text for output in outputs])


def _best_us(once: Callable[[], object], num_tokens: int) -> float:
    def round_s() -> float:
        start_s = time.perf_counter()
        for _ in range(REPEATS):
            once()
        return time.perf_counter() - start_s

    return min(round_s() for _ in range(ROUNDS)) / (REPEATS * num_tokens) * 1e6


if __name__ == "__main__":
    print(json.dumps(run()))
