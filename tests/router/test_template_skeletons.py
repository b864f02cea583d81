# ruff: noqa: E501 - chat templates are quoted as models carry them, line by line
"""Chats put together from skeletons: never another text than rendering gives, and only for templates that do not look."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_rig import CHATML, info

from naru_router.adapters.template_flow import is_opaque
from naru_router.adapters.template_sandbox import ChatEnvironment
from naru_router.adapters.template_skeletons import MAX_MESSAGES, MAX_SKELETONS, Skeletons
from naru_router.adapters.templates import TemplateLimits, TemplateRenderer
from naru_router.core.chat_request import ROLES, ChatMessage

LIMITS = TemplateLimits(timeout_s=30.0)
OPAQUE = {
    "chatml": CHATML,
    "default system": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}SYS\n{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}{% if loop.last and add_generation_prompt %}{{ 'go' }}{% endif %}{% endfor %}",
    "trimmed": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '[' + message['role'] + ']' + message['content'] | trim + '<eot>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}",
    "system apart": "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ system }}|{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ eos_token }}{% endfor %}{{ messages[-1].role }}",
    "last system": "{% for m in messages %}{% if m['role'] == 'user' %}{% if loop.last and sys is defined %}{{ sys + '\n' + m['content'] }}{% else %}{{ m['content'] }}{% endif %}{% elif m['role'] == 'system' %}{% continue %}{% endif %}{% endfor %}{{ messages|length }}",
    "empty ones": "{% for m in messages %}{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}{{ m.content or 'none' }}{{ 'x' if not m.content else 'y' }},{% endfor %}",
    "tool calls": "{% for m in messages if m.role != 'tool' %}{% if 'tool_calls' in m %}calls{% elif m.content is string %}{{ m.content }}{% endif %}{% if m.name is defined %}{{ m.name }}{% endif %}{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}{{ m.content|trim }} {% endfor %}{{ messages[0].content }}",
    "edges": "{% for m in messages %} \n\u2005\u2004{{ m.content|trim }}\u2004\u2005 {{ m.content }}\u2004{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}{{ ns.n }}{{ m.content }}{% endfor %}",
    "refuses": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}",
}
LOOKING = [
    "{% for m in messages %}{% if m.content == 'a' %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% if 'a' in m.content %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages %}{{ m.content.split('x')[0] }}{% endfor %}",
    "{% for m in messages %}{{ m.content[0] }}{% endfor %}",
    "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
    "{% for m in messages %}{% for c in m.content %}{{ c }}.{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "{% for m in messages %}{{ '%s' % m.content }}{% endfor %}",
    "{% for m in messages %}{{ '{}'.format(m.content) }}{% endfor %}",
    "{% for m in messages %}{{ ('a' + m.content) | trim }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim('x') }}{% endfor %}",
    "{% for m in messages %}{% if m.content | trim %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content + '' %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% set c = m.content + 'a' %}{% if c == 'ba' %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% set ns = namespace(c=m.content) %}{{ ns.c }}{% endfor %}",
    "{% set ns = namespace(c='') %}{% for m in messages %}{% set ns.c = m.content %}{% endfor %}{% if ns.c == 'a' %}x{% endif %}",
    "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.content == 'a' %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% set l = loop %}{% if l.previtem is defined and l.previtem.content == 'a' %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.changed(m.content) %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{{ messages }}",
    "{{ messages | tojson }}",
    "{{ messages | map(attribute='content') | join }}",
    "{% for m in messages %}{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for k in m %}{{ m[k] }}{% endfor %}{% endfor %}",
    "{% set k = 'content' %}{% for m in messages %}{% if m[k] == 'a' %}x{% endif %}{% endfor %}",
    "{% if messages[0] == messages[1] %}x{% endif %}",
    "{% if messages | length == 2 and messages[0] in messages[1:] %}x{% endif %}",
    "{% macro f(m) %}{{ m.content | upper }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
    "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x | length }}",
    "{% for m in messages %}{{ m.content is divisibleby 2 }}{% endfor %}",
    "{% for m in messages %}{{ m.content is lower }}{% endfor %}",
    "{% for m in messages %}{{ [m.content] | length }}{{ {'a': m.content}.a == 'x' }}{% endfor %}",
    "{% for m in messages %}{{ strftime_now('%S%f') }}{{ m.content }}{% endfor %}",
    "{% set m = 'a' %}{{ m }}{% for m in messages %}{{ m.content }}{% endfor %}",
]

CONTENT = st.text(st.sampled_from("ab \n\t\u2005\u2004č🧑") | st.characters(exclude_categories=["Cs"]), max_size=8)
CHATS = st.lists(st.builds(ChatMessage, st.sampled_from(ROLES), CONTENT), min_size=1, max_size=4)


def parsed(template: str) -> bool:
    return is_opaque(ChatEnvironment().parse(template))


@pytest.mark.parametrize("name", OPAQUE)
def test_templates_that_only_place_contents_are_known(name: str) -> None:
    assert parsed(OPAQUE[name])


@pytest.mark.parametrize("template", LOOKING)
def test_templates_that_look_are_rendered(template: str) -> None:
    assert not parsed(template)


@pytest.fixture(scope="module")
def renderers() -> Iterator[tuple[TemplateRenderer, TemplateRenderer]]:
    made = TemplateRenderer(LIMITS), TemplateRenderer(LIMITS)
    yield made
    for each in made:
        each.close()


async def outcome(renderer: TemplateRenderer, template: str, chat: list[ChatMessage]) -> str:
    try:
        return await renderer.render("m", info(template), chat)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


@pytest.mark.parametrize("template", [*OPAQUE.values(), *(each for each in LOOKING if "strftime" not in each)])
def test_a_skeleton_says_what_rendering_says(
    template: str, renderers: tuple[TemplateRenderer, TemplateRenderer]
) -> None:
    quick, slow = renderers
    slow._learn = lambda *args: None  # type: ignore[method-assign]

    async def compare(chats: list[list[ChatMessage]]) -> None:
        for chat in chats:
            expected = await outcome(slow, template, chat)
            assert [await outcome(quick, template, chat) for _ in range(2)] == [expected] * 2

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.lists(CHATS, min_size=1, max_size=4))
    def check(chats: list[list[ChatMessage]]) -> None:
        asyncio.run(compare(chats))

    check()


async def test_the_second_chat_of_the_same_roles_is_not_rendered(
    renderers: tuple[TemplateRenderer, TemplateRenderer],
) -> None:
    renderer = TemplateRenderer(LIMITS)
    try:
        for _ in range(2):  # the first one compiles, in a thread
            await renderer.render("m", info(CHATML), [ChatMessage("user", "one")])
        renderer._render = None  # type: ignore[method-assign, assignment]
        text = await renderer.render("m", info(CHATML), [ChatMessage("user", "two")])
        assert text == "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
        with pytest.raises(TypeError):
            await renderer.render("m", info(CHATML), [ChatMessage("user", "two", name="bob")])
    finally:
        renderer.close()


def join(messages: object) -> str:
    assert isinstance(messages, list)
    return "".join(f"{message.role}={message.content};" for message in messages)


def test_skeletons_are_bounded() -> None:
    skeletons = Skeletons()
    chats = [[ChatMessage(ROLES[i // 5**k % 5], f"text {k}") for k in range(5)] for i in range(2 * MAX_SKELETONS)]
    for chat in chats:
        skeletons.learn(chat, join(chat), join)
    assert len(skeletons._known) == MAX_SKELETONS
    assert skeletons.fill(chats[0]) is None and skeletons.fill(chats[-1]) == join(chats[-1])
    long = [ChatMessage("user", "x")] * (MAX_MESSAGES + 1)
    skeletons.learn(long, join(long), join)
    assert skeletons.fill(long) is None
    large = [ChatMessage("user", "x"), ChatMessage("system", "y")]
    skeletons.learn(large, "z" * 100_000, lambda marked: "z" * 100_000)
    assert skeletons.fill(large) is None
