"""Values a chat body has for the model's template: `chat_template_kwargs` and what has a field of its own.

| field | value in the template |
|---|---|
| chat_template_kwargs | each by its own name |
| add_generation_prompt | add_generation_prompt |
| continue_final_message | add_generation_prompt false; the prompt ends with the last message's text |
| documents | documents |
| reasoning_effort | reasoning_effort; with none also enable_thinking false |

What a template does not read has no effect.
"""

from __future__ import annotations

import re

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import Fields, refuse
from naru_router.core.json_values import check_json

ADD_GENERATION_PROMPT = "add_generation_prompt"
CONTINUE_FINAL_MESSAGE = "continue_final_message"
MAX_OPTIONS = 64
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_OWN = frozenset({"messages", "tools", "bos_token", "eos_token", "chat_template", "tokenize", "self", "documents"})
"""Not to be set by name: they come from the model or from fields of their own."""


def read_template_options(fields: Fields, last_role: str) -> dict[str, object]:
    """The values, by their names in the template.

    Raises:
        InvalidRequest: naming the field.
    """
    options: dict[str, object] = {}
    effort = fields.get("reasoning_effort")
    if effort is not None:
        options |= effort_options(effort, fields.path("reasoning_effort"))
    documents = fields.array("documents")
    if documents is not None:
        for index, document in enumerate(documents):
            if not isinstance(document, dict):
                refuse(fields.path(f"documents[{index}]"), document, "an object")
        options["documents"] = check_json(fields.path("documents"), documents)
    _read_ends(fields, options, last_role)
    options |= _read_kwargs(fields)
    return options


def effort_options(effort: object, path: str) -> dict[str, object]:
    """Of how long the model is to think before it answers.

    Raises:
        InvalidRequest: not one of the words for it.
    """
    if effort not in EFFORTS:
        refuse(path, effort, f"one of {', '.join(EFFORTS)}")
    options: dict[str, object] = {"reasoning_effort": effort}
    if effort == "none":
        options["enable_thinking"] = False
    return options


def _read_ends(fields: Fields, options: dict[str, object], last_role: str) -> None:
    adds, continues = fields.boolean(ADD_GENERATION_PROMPT), fields.boolean(CONTINUE_FINAL_MESSAGE)
    if continues:
        path = fields.path(CONTINUE_FINAL_MESSAGE)
        if adds:
            message = f"{path} and add_generation_prompt are both true; leave one of them out"
            raise InvalidRequest(message, param=path)
        if last_role != "assistant":
            refuse(path, True, f"false where the last message is of the role {last_role}: only an assistant's goes on")
        options[CONTINUE_FINAL_MESSAGE] = True
        options[ADD_GENERATION_PROMPT] = False
    elif adds is False:
        options[ADD_GENERATION_PROMPT] = False


def _read_kwargs(fields: Fields) -> dict[str, object]:
    kwargs = fields.object("chat_template_kwargs")
    if kwargs is None:
        return {}
    options: dict[str, object] = {}
    for name, value in kwargs.items():
        path = fields.path("chat_template_kwargs")
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{path} has a name that no template can have; use letters and digits", param=path)
        path = f"{path}.{name}"
        if name in _OWN:
            refuse(path, value, "absent: it cannot be set here")
        if name in (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE):
            refuse(path, value, f"absent: send it as {name} beside chat_template_kwargs")
        options[name] = check_json(path, value)
    if len(options) > MAX_OPTIONS:
        path = fields.path("chat_template_kwargs")
        raise InvalidRequest(f"{path} has {len(options)} names; at most {MAX_OPTIONS} are allowed", param=path)
    return options
