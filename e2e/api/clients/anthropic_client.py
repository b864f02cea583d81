"""The `anthropic` package against Naru, unchanged. Arguments: URL. Fails by an exception."""

from __future__ import annotations

import sys

import anthropic

CHAT = "smollm2"
GREEDY = {"temperature": 0}
"""The package has no argument for it any more; the API has."""
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def messages(client: anthropic.Anthropic) -> None:
    """Whole and streamed messages are the same."""
    whole = client.messages.create(
        model=CHAT, max_tokens=24, extra_body=GREEDY, system="Answer in one word.", messages=QUESTION
    )
    assert whole.content[0].type == "text" and "Paris" in whole.content[0].text, whole
    assert whole.usage.output_tokens > 0 and whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(
        model=CHAT, max_tokens=24, extra_body=GREEDY, system="Answer in one word.", messages=QUESTION
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    stopped = client.messages.create(
        model=CHAT, max_tokens=24, extra_body=GREEDY, stop_sequences=["Paris"], messages=QUESTION
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "Paris", stopped


def tools(client: anthropic.Anthropic) -> None:
    """A tool that must be used is used, and its result is taken."""
    asked = {"model": CHAT, "max_tokens": 120, "extra_body": GREEDY, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**asked, messages=QUESTION)
    use = next(block for block in whole.content if block.type == "tool_use")
    assert use.name == "get_weather" and set(use.input) == {"city"}, whole
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**asked, messages=QUESTION) as stream:
        final = stream.get_final_message()
    streamed = next(block for block in final.content if block.type == "tool_use")
    assert (streamed.name, streamed.input) == (use.name, use.input)
    client.messages.create(
        model=CHAT,
        max_tokens=16,
        tools=[WEATHER],
        messages=[
            *QUESTION,
            {"role": "assistant", "content": [use.model_dump()]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
        ],
    )


def tokens(client: anthropic.Anthropic) -> None:
    """Tokens are counted as they will be."""
    counted = client.messages.count_tokens(model=CHAT, messages=QUESTION)
    sent = client.messages.create(model=CHAT, max_tokens=1, messages=QUESTION)
    assert counted.input_tokens == sent.usage.input_tokens + (sent.usage.cache_read_input_tokens or 0)


def errors(client: anthropic.Anthropic) -> None:
    """Errors are the package's own classes."""
    for expected, changes in (
        (anthropic.NotFoundError, {"model": "nobody"}),
        (anthropic.BadRequestError, {"extra_body": {"temperature": 1000}}),
    ):
        try:
            client.messages.create(**{"model": CHAT, "max_tokens": 4, "messages": QUESTION, **changes})
        except expected as error:
            assert error.body["type"] == "error", error.body
        else:
            raise AssertionError(f"{changes} was taken")


def main() -> None:
    """Runs all of it."""
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
    for part in (messages, tools, tokens, errors):
        part(client)
        print(f"ok: {part.__name__}")


if __name__ == "__main__":
    main()
