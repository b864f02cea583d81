"""The `openai` package against Naru, unchanged: all that Naru serves. Arguments: URL. Fails by an exception."""

from __future__ import annotations

import io
import json
import math
import sys
import time

import openai
from openai import OpenAI
from pydantic import BaseModel

CHAT, EMBEDDER = "smollm2", "minilm"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    """What a structured answer is parsed into."""

    name: str
    age: int


def chats(client: OpenAI) -> None:
    """Whole and streamed chats are the same, with usage and log probabilities."""
    whole = client.chat.completions.create(
        model=CHAT, messages=QUESTION, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2
    )
    assert "Paris" in whole.choices[0].message.content, whole
    assert whole.usage.completion_tokens > 0
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model=CHAT,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    several = client.chat.completions.create(model=CHAT, messages=QUESTION, n=3, seed=7, max_tokens=8)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def tools(client: OpenAI) -> None:
    """A tool that must be called is called, with arguments that fit its schema; streamed ones join to the same."""
    asked = {"model": CHAT, "messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=120)
    (call,) = whole.choices[0].message.tool_calls[:1]
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3), arguments
    with client.chat.completions.stream(**asked, max_tokens=120) as stream:
        final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls[0]
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("get_weather", arguments)
    follow_up = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(model=CHAT, messages=follow_up, tools=[WEATHER], max_tokens=16)
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def structures(client: OpenAI) -> None:
    """Answers have the structure that was asked for."""
    parsed = client.chat.completions.parse(
        model=CHAT,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        max_tokens=80,
        seed=3,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    choice = client.completions.create(
        model=CHAT, prompt="Is the sky blue?", max_tokens=5, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert choice.choices[0].text in ("yes", "no")


def completions(client: OpenAI) -> None:
    """Text completions with echo and log probabilities."""
    scored = client.completions.create(model=CHAT, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "The sky is blue"
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    best = client.completions.create(model=CHAT, prompt="One two three", max_tokens=6, best_of=3, n=1, seed=1)
    assert len(best.choices) == 1


def embeddings(client: OpenAI) -> None:
    """Vectors of length 1, that are near where texts are."""
    reply = client.embeddings.create(model=EMBEDDER, input=["a cat", "a kitten", "the stock market"])
    one, two, three = (item.embedding for item in reply.data)
    assert len(one) == 384 and math.isclose(sum(x * x for x in one), 1, rel_tol=1e-3)
    assert dot(one, two) > dot(one, three) + 0.2
    floats = client.embeddings.create(model=EMBEDDER, input="a cat", encoding_format="float", dimensions=64)
    assert len(floats.data[0].embedding) == 64
    assert len(client.embeddings.create(model=CHAT, input="a cat").data[0].embedding) == 576


def dot(a: list[float], b: list[float]) -> float:
    """Of two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def responses(client: OpenAI) -> None:
    """The Responses API: whole, streamed, stored, with tools and structure."""
    whole = client.responses.create(
        model=CHAT, input="Name the capital of France.", temperature=0, max_output_tokens=24
    )
    assert "Paris" in whole.output_text, whole
    with client.responses.stream(
        model=CHAT, input="Name the capital of France.", temperature=0, max_output_tokens=24
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    stored = client.responses.create(model=CHAT, input="Say hello.", store=True, max_output_tokens=8)
    assert client.responses.retrieve(stored.id).id == stored.id
    client.responses.create(model=CHAT, input="Again.", previous_response_id=stored.id, max_output_tokens=8)
    client.responses.delete(stored.id)
    parsed = client.responses.parse(
        model=CHAT, input="Invent a person.", text_format=Person, max_output_tokens=80, temperature=0
    )
    assert isinstance(parsed.output_parsed, Person)


def batches(client: OpenAI) -> None:
    """A batch of chats from a file, to a file."""
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": CHAT, "messages": QUESTION, "max_tokens": 4, "seed": i},
        }
        for i in range(5)
    ]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a test"}
    )
    for _ in range(600):
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            break
        time.sleep(0.1)
    assert batch.status == "completed" and batch.request_counts.completed == 5, batch
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"line-{i}" for i in range(5)}
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
    assert file.id in {each.id for each in client.files.list()}
    client.files.delete(file.id)


def errors(client: OpenAI) -> None:
    """Errors are the package's own classes, and name the field."""
    try:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("an unknown model was served")
    try:
        client.chat.completions.create(model=CHAT, messages=QUESTION, temperature=1000)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
    else:
        raise AssertionError("a temperature of 1000 was taken")
    assert CHAT in {model.id for model in client.models.list()}
    assert client.models.retrieve(EMBEDDER).id == EMBEDDER


def main() -> None:
    """Runs all of it."""
    client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
    for part in (chats, tools, structures, completions, embeddings, responses, batches, errors):
        part(client)
        print(f"ok: {part.__name__}")


if __name__ == "__main__":
    main()
