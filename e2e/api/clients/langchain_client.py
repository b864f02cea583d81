"""`langchain-openai` against Naru, unchanged. Arguments: URL. Fails by an exception."""

from __future__ import annotations

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def main() -> None:
    """Chats, streams, calls a tool, parses an answer, embeds."""
    url = f"{sys.argv[1]}/v1"
    chat = ChatOpenAI(model="smollm2", base_url=url, api_key="none", temperature=0, max_tokens=64, max_retries=0)
    whole = chat.invoke("Name the capital of France.")
    assert "Paris" in whole.content
    assert "".join(chunk.content for chunk in chat.stream("Name the capital of France.")) == whole.content
    called = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("How is the weather in Rome?")
    assert called.tool_calls[0]["name"] == "get_weather" and "city" in called.tool_calls[0]["args"], called
    for method in ("json_schema", "function_calling"):
        person = chat.with_structured_output(Person, method=method).invoke("Invent a person.")
        assert isinstance(person, Person), (method, person)
    responses = ChatOpenAI(
        model="smollm2", base_url=url, api_key="none", temperature=0, max_tokens=64, use_responses_api=True
    )
    assert "Paris" in responses.invoke("Name the capital of France.").text
    embeddings = OpenAIEmbeddings(model="minilm", base_url=url, api_key="none", check_embedding_ctx_length=False)
    assert [len(vector) for vector in embeddings.embed_documents(["a", "b"])] == [384, 384]
    print("ok: langchain")


if __name__ == "__main__":
    main()
