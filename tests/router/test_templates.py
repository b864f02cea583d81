# ruff: noqa: E501 - chat templates are quoted as models carry them, line by line
"""Chat templates: what transformers prints, and nothing a hostile template could do with it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from router_rig import CHAT, CHATML, COMPLETION, Rig, body, info

from naru_proto.errors import InvalidRequest
from naru_proto.registry import ModelInfoRecord
from naru_router.adapters.templates import TemplateLimits, TemplateRenderer
from naru_router.core.chat_request import ChatMessage

USER = ChatMessage("user", "Hello  there\n")
TURNS = [ChatMessage("system", "Be brief."), USER, ChatMessage("assistant", "Hi!"), ChatMessage("user", "čaj 🧑‍🚀?")]
LIMITS = TemplateLimits(max_steps=50_000, max_chars=1_000_000, timeout_s=5.0)


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(LIMITS)
    yield made
    made.close()


def facts(template: str) -> ModelInfoRecord:
    return info(template)


LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% endif %}
{{ bos_token }}{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n' + message['content'] + ' [/INST]' }}
    {% else %}{{ '[INST] ' ~ message['content'] ~ ' [/INST]' }}{% endif %}
    {% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{% endfor %}"""
QWEN = """{%- macro render(content, n) %}{% if n > 0 %}{{- '  ' * n + content }}{% else %}{{ content }}{% endif %}{%- endmacro %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<t>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}<|im_start|>{{ m.role }}
{{ render(m.content.split('</think>')[-1].lstrip('\\n'), loop.index0 - ns.last) }}<|im_end|>{{ "\\n" if not loop.last }}
{% if loop.index > 90 %}{% break %}{% endif %}
{%- endfor %}{{ ns.last }} {{ messages | map(attribute='role') | unique | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{- {'a': [1, none, true], 'b': 'é<>&\\''} | tojson }} {{ [1, 2] | tojson(indent=2) }} {{ messages | tojson }}"""
VARIOUS = """{% set x %}block {{ messages[0].role | upper }}{% endset %}{{ x }} {{ undefined_thing }}|{{ none }}|{{ true }}
{% for a, b in {'k': 1, 'z': 2}.items() %}{{ a }}={{ b }};{% else %}none{% endfor %} {{ (1, 2) }} {{ [1, 'a', none] }} {{ 7 // 2 }}
{%- filter upper %} loud {{ messages|length }}{% endfilter %} {{ "%s-%03d" | format("a", 7) }} {{ "{} {:>4}".format("x", 5) }}
{{ 'a' if messages[0]['role'] != 'system' else 'b' }} {{ 'b' in ['a', 'b'] }} {{ messages[0] == messages[0] }} {{ 1.5 + 2 }}
{% generation %}kept {{ messages[1].content | trim }}{% endgeneration %}{{ range(3) | list }} {{ dict(a=1) }} {{ "x" * 3 }}
    {% if messages %}
  indented
    {% endif %}
{{ [3, 1, 2] | sort | first }} {{ 'a,b'.split(',') | join('+') }} {{ messages[0].content | replace('brief', 'long') | length }}"""


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain_render(template: str, messages: list[ChatMessage]) -> str:
    """What a sandbox without budgets prints, set up the way transformers does it."""

    def tojson(x: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    values = [{"role": m.role, "content": m.content} for m in messages]
    return environment.from_string(template).render(
        messages=values, bos_token="<s>", eos_token="</s>", add_generation_prompt=True, tools=None, documents=None
    )


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, MISTRAL, QWEN, VARIOUS], ids=["chatml", "llama", "mistral", "qwen", "various"]
)
async def test_the_budget_changes_nothing_that_is_printed(renderer: TemplateRenderer, template: str) -> None:
    assert await renderer.render("m", facts(template), TURNS) == plain_render(template, TURNS)


async def test_blocks_are_trimmed_and_special_tokens_known(renderer: TemplateRenderer) -> None:
    template = "{{ bos_token }}\n  {% if true %}\nx\n  {% endif %}\n{{ eos_token }}"
    assert await renderer.render("m", facts(template), [USER]) == "<s>\nx\n</s>"


async def test_a_template_may_refuse_the_messages(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await renderer.render("m", facts(MISTRAL), [USER, USER])


async def test_the_date_can_be_asked_for(renderer: TemplateRenderer) -> None:
    assert (await renderer.render("m", facts("{{ strftime_now('%Y') }}"), [USER])).isdigit()


async def test_developer_is_system_where_the_template_knows_no_developer(renderer: TemplateRenderer) -> None:
    messages = [ChatMessage("developer", "x")]
    assert await renderer.render("m", facts("{{ messages[0].role }}"), messages) == "system"
    knows = "{{ messages[0].role }}{# developer #}"
    assert await renderer.render("m", facts(knows), messages) == "developer"


async def test_names_and_tool_call_ids_reach_the_template(renderer: TemplateRenderer) -> None:
    messages = [ChatMessage("tool", "42", name="f", tool_call_id="c1")]
    assert await renderer.render("m", facts("{{ messages|tojson }}"), messages) == (
        '[{"role": "tool", "content": "42", "name": "f", "tool_call_id": "c1"}]'
    )


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages.__class__ }}{{ 1/0 }}",
    "{{ ''|attr('__class__')|attr('mro')() }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ self._TemplateReference__context.environment.x.y }}",
    "{{ '{0.__class__.__mro__}'.format(messages).x.y }}",
    "{{ ''.format_map({}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ open('/etc/passwd') }}",
    "{{ x.y }}",
    "{{ 1/0 }}",
    "{% for %}",
    "{{ messages|nosuchfilter }}",
    "{{",
    "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
    "{{ " + "-" * 5000 + "1 }}",
    "x" * 600_000,
]


@pytest.mark.parametrize("template", ESCAPES, ids=range(len(ESCAPES)))
async def test_escapes_and_broken_templates_are_refused(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await renderer.render("m", facts(template), TURNS)
    assert "chat template" in caught.value.message and len(caught.value.message) < 1000


LOOP = "{% for i in range(90000) %}"
BOMBS = {
    "nested loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat list": "{{ [1] * 10**10 }}",
    "power": "{{ 2 ** 1000000000 }}",
    "squares": "{% set n = namespace(x=3) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}",
    "concat": "{% set n = namespace(x='a') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "plus": "{% set n = namespace(x='a') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "list plus": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "shared lists": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "shared tuples": "{% set n = namespace(x=(1,)) %}" + LOOP + "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "namespace in itself": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "replace": "{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "replace filter": "{{ ('a' * 900000)|replace('a', 'b' * 900000) }}",
    "join": "{{ ('b' * 900000).join(['a'] * 1000) }}",
    "join filter": "{{ (['a'] * 1000)|join('b' * 900000) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10**9) }}",
    "indent": "{{ ('\n' * 1000)|indent(10**8) }}",
    "format width": "{{ '%1000000000d'|format(1) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "str.format width": "{{ '{:>1000000000}'.format(1) }}",
    "str.format nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "tojson indent": "{{ messages|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list|length }}",
    "sum of lists": "{{ ([[1]] * 1000)|sum(start=[]) }}",
    "range": "{{ range(10**9)|list }}",
    "output": LOOP + "{{ messages }}" + "y" * 1000 + "{% endfor %}",
    "hidden output": "{% set x %}" + LOOP + "y" * 5000 + "{% endfor %}{% endset %}",
    "slow search": LOOP + "{{ 'abc' in 'ab' * 400000 }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**9) }}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS.keys())
async def test_a_template_cannot_take_more_than_its_budget(renderer: TemplateRenderer, template: str) -> None:
    async with asyncio.timeout(30):  # far above the budget, as the machine may be busy; without a budget none ends
        with pytest.raises(InvalidRequest, match="chat template"):
            await renderer.render("m", facts(template), TURNS)


async def test_a_bad_template_leaves_no_thread_busy() -> None:
    renderer = TemplateRenderer(LIMITS)
    with pytest.raises(InvalidRequest):
        await renderer.render("m", facts(BOMBS["nested loops"]), TURNS)
    assert await renderer.render("m", facts(CHATML), [USER])
    renderer.close()
    threads = [t for t in threading.enumerate() if t.name.startswith("template")]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


async def test_long_chats_are_within_the_budget(renderer: TemplateRenderer) -> None:
    turns = [ChatMessage("user" if i % 2 == 0 else "assistant", "word " * 50) for i in range(1000)]
    text = await renderer.render("m", facts(MISTRAL), turns)
    assert text == plain_render(MISTRAL, turns)


async def test_a_model_without_a_template_still_completes(rig: Rig) -> None:
    await rig.publish_model()
    worker = await rig.start_worker(facts=info(""))
    await rig.start_router()
    response = await rig.post(CHAT, body(CHAT))
    assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
    assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200
    assert len(worker.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_template_says_comes_back_as_400(rig: Rig, stream: bool) -> None:
    await rig.publish_model()
    await rig.start_worker(facts=info("{{ raise_exception('roles must alternate') }}"))
    await rig.start_router()
    response = await rig.post(CHAT, body(CHAT, stream=stream))
    assert response.status_code == 400 and "roles must alternate" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages"


async def test_short_chats_need_no_thread_and_say_the_same(renderer: TemplateRenderer) -> None:
    by_thread = [await renderer.render("m", facts(LLAMA3), turns) for turns in ([USER], TURNS)]
    renderer.close()  # the next one that needs a thread would fail
    assert [await renderer.render("m", facts(LLAMA3), turns) for turns in ([USER], TURNS)] == by_thread
    with pytest.raises(RuntimeError):
        await renderer.render("m", facts(LLAMA3), [ChatMessage("tool", "x" * 20_000)])


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(6000) %}{% endfor %}done",
        "{% for i in range(9) %}{{ 'x' * 40000 }}{% endfor %}",
    ],
)
async def test_what_takes_long_goes_to_a_thread_for_a_while(renderer: TemplateRenderer, template: str) -> None:
    first = await renderer.render("m", facts(template), [USER])
    threads: list[str] = []
    inner = renderer._render

    def watch(*args: Any) -> str:
        threads.append(threading.current_thread().name)
        return inner(*args)

    renderer._render = watch  # type: ignore[method-assign, assignment]
    for _ in range(4):
        assert await renderer.render("m", facts(template), [USER]) == first
    assert threads[0] == threading.main_thread().name  # tried once, and given up
    assert len(threads) == 5 and all(name.startswith("template") for name in threads[1:])


async def test_a_template_that_refuses_a_short_chat_says_why(renderer: TemplateRenderer) -> None:
    template = "{{ raise_exception('no ' + messages[0]['role']) }}"
    for _ in range(2):  # by a thread, and without
        with pytest.raises(InvalidRequest, match="no user"):
            await renderer.render("m", facts(template), [USER])
