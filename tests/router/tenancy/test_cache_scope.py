"""What tenants share of prefix caches, and how much of a chat is its system prompt, whatever the template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_rig import CHATML, info

from naru_proto.registry import ModelInfoRecord, ModelRecord
from naru_router.adapters.system_parts import SystemParts
from naru_router.adapters.templates import TemplateLimits, TemplateRenderer
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.chat_request import ChatMessage
from naru_router.core.tenancy.cache_scope import cache_scope, common_prefix

TENANT = Caller("a", salt=b"salt")
SYSTEM = ChatMessage("system", "Be brief, čau 🧑.")
PLAIN = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}Answer:"
USER_FIRST = "{{ messages[-1]['content'] }}|{% for m in messages %}{{ m['content'] }}{% endfor %}"
MERGED = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% else %}{% set s = '' %}{% endif %}"
    "{% for m in messages %}[{% if loop.last %}{{ s }}\n{% endif %}{{ m['content'] }}]{% endfor %}"
)
STRICT = "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}{{ messages[0]['content'] }}"


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(TemplateLimits(timeout_s=30.0))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("isolation", "caller", "expected"),
    [
        ("isolated", TENANT, (b"salt", False)),
        ("after_system", TENANT, (b"salt", True)),
        ("shared", TENANT, (b"", False)),
        ("a word of a newer version", TENANT, (b"salt", False)),
        ("isolated", ANYONE, (b"", False)),
    ],
)
def test_the_salt_is_the_tenants_but_where_all_share(
    isolation: str, caller: Caller, expected: tuple[bytes, bool]
) -> None:
    assert cache_scope(caller, ModelRecord("m", "file:///", 1, cache_isolation=isolation)) == expected


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, [SYSTEM, ChatMessage("user", "secret")],
         "<|im_start|>system\nBe brief, čau 🧑.<|im_end|>\n<|im_start|>user\n"),
        (CHATML, [SYSTEM, ChatMessage("user", "x"), ChatMessage("assistant", "y"), ChatMessage("user", "z")],
         "<|im_start|>system\nBe brief, čau 🧑.<|im_end|>\n<|im_start|>user\n"),
        (CHATML, [ChatMessage("user", "secret")], ""),
        (CHATML, [ChatMessage("user", "x"), SYSTEM], ""),
        (PLAIN, [SYSTEM, ChatMessage("user", "Answer: what?")], "Be brief, čau 🧑.\n"),
        (PLAIN, [SYSTEM, ChatMessage("user", "aa")], "Be brief, čau 🧑.\n"),
        (USER_FIRST, [SYSTEM, ChatMessage("user", "secret")], ""),
        (MERGED, [SYSTEM, ChatMessage("user", "secret")], "[Be brief, čau 🧑.\n"),
        (MERGED, [SYSTEM, ChatMessage("user", "Be"), ChatMessage("assistant", "y"), ChatMessage("user", "z")], ""),
        (STRICT, [SYSTEM, ChatMessage("user", "x"), ChatMessage("assistant", "y")], ""),
    ],
    ids=["chat", "a longer chat", "no system prompt", "a late system prompt", "begins like the template goes on",
         "begins like a probe", "the user first", "merged", "merged elsewhere", "a template that refuses short chats"],
)  # fmt: skip
async def test_what_is_shared_ends_before_anything_a_user_said(
    renderer: TemplateRenderer, template: str, messages: list[ChatMessage], expected: str
) -> None:
    facts = info(template)
    text = await renderer.render("m", facts, messages)
    parts = SystemParts(renderer)
    for _ in range(2):
        assert await parts.of("m", facts, messages, text) == expected


async def test_equal_system_prompts_are_rendered_once_and_others_apart(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    real = renderer.render

    async def render(model: str, facts: ModelInfoRecord, messages: Sequence[ChatMessage]) -> str:
        rendered.append(messages[0].content)
        return await real(model, facts, messages)

    monkeypatch.setattr(renderer, "render", render)
    parts = SystemParts(renderer)
    for system in ("one", "one", "two", "one"):
        chat = [ChatMessage("system", system), ChatMessage("user", "u")]
        assert await parts.of("m", info(PLAIN), chat, f"{system}\nu\nAnswer:") == f"{system}\n"
    assert rendered == ["one", "one", "two", "two"]
    await parts.of("m", info(CHATML), [ChatMessage("system", "one")], "one")
    assert len(rendered) == 6


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_common_prefix_is_the_longest_one(head: str, one: str, other: str) -> None:
    first, second = head + one, head + other
    found = common_prefix(first, second)
    assert first.startswith(found) and second.startswith(found) and len(found) >= len(head)
    n = len(found)
    assert n == len(first) or n == len(second) or first[n] != second[n]
