"""`litellm`, the library of a gateway, in front of Naru. Arguments: URL. Fails by an exception."""

from __future__ import annotations

import sys

import litellm

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


def main() -> None:
    """Chats over two APIs, streams, and embeds."""
    url = sys.argv[1]
    openai = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 24, "num_retries": 0}
    whole = litellm.completion(model="openai/smollm2", messages=QUESTION, **openai)
    text = whole.choices[0].message.content
    assert "Paris" in text
    parts = litellm.completion(model="openai/smollm2", messages=QUESTION, stream=True, **openai)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    anthropic = {**openai, "api_base": url}
    other = litellm.completion(model="anthropic/smollm2", messages=QUESTION, **anthropic)
    assert other.choices[0].message.content == text, other
    vectors = litellm.embedding(
        model="openai/minilm", input=["a", "b"], api_base=f"{url}/v1", api_key="none", encoding_format="float"
    )
    assert [len(item["embedding"]) for item in vectors.data] == [384, 384]
    print("ok: litellm")


if __name__ == "__main__":
    main()
