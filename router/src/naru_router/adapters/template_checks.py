"""What a chat template may not ask of filters and string methods: results far larger than what goes in.

Called by the sandbox before the operation runs, since afterwards the memory is already gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError

from naru_router.adapters.template_budget import NODE_CHARS, Budget, budget_of_thread

REFUSED_METHODS = frozenset({"encode", "decode", "translate", "format_map", "striptags", "unescape"})
_LONG_NUMBER = re.compile(r"[0-9]{5}|\*")
"""A field width in a format string that makes text out of nothing."""


def check_filter(budget: Budget, name: str, values: list[Any], named: dict[str, Any]) -> None:
    """Checks a filter before it runs; `values` are what it is given by place, its subject first.

    Raises:
        BudgetExceeded: its result may be too large.
        SecurityError: a use that cannot be bounded.
    """
    if not values:
        return
    subject, options = values[0], [*values[1:], *named.values()]
    widths = [o for o in options if isinstance(o, int)] + [len(o) for o in options if isinstance(o, str)]
    width = max(widths, default=0)
    if name in ("center", "truncate"):
        budget.check_size(width)
    elif name in ("batch", "slice"):
        budget.check_size(width * NODE_CHARS)
    elif name == "tojson":
        budget.check_size(budget.weigh(subject) * max(width, 1))
    elif name == "indent":
        budget.check_size((str(subject).count("\n") + 1) * width + budget.weigh(subject))
    elif name == "join":
        budget.check_size(_length(subject) * width + budget.weigh(subject))
    elif name == "replace":
        given = dict(zip(("old", "new"), values[1:], strict=False)) | named
        _check_replace(budget, str(subject), str(given.get("old", "")), str(given.get("new", "")))
    elif name == "format":
        check_format(str(subject))
    elif name == "sum" and any(isinstance(o, (list, tuple)) for o in options):
        raise SecurityError("sum of lists is not supported; use + or a loop")


def check_method(budget: Budget, owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
    """Checks a method of a string before it runs.

    Raises:
        BudgetExceeded: its result may be too large.
        SecurityError: a method that cannot be bounded.
    """
    if name in REFUSED_METHODS:
        raise SecurityError(f"the method {name!r} of strings is not allowed in chat templates")
    width = max((a for a in args if isinstance(a, int)), default=0)
    if name in ("center", "ljust", "rjust", "zfill"):
        budget.check_size(width)
    elif name == "expandtabs":
        budget.check_size(len(owner) * max(width, 8))
    elif name == "join" and args:
        budget.check_size(_length(args[0]) * len(owner) + budget.weigh(args[0]))
    elif name == "replace" and len(args) >= 2 and isinstance(owner, str):
        _check_replace(budget, owner, str(args[0]), str(args[1]))


def _check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def check_format(text: str | bytes) -> None:
    """Checks a format string.

    Raises:
        SecurityError: a field could be thousands of characters wide.
    """
    shown = text.decode("latin-1") if isinstance(text, bytes) else text
    if _LONG_NUMBER.search(shown):
        raise SecurityError("a format string with a width of 5 digits or more, or with *, is not allowed")


def checked_format(text: str, wrapped: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """Calls the safe stand-in of `text.format` once its result is known to be bounded.

    Raises:
        BudgetExceeded: its result may be too large.
        SecurityError: a field could be thousands of characters wide.
    """
    check_format(text)
    budget = budget_of_thread.get()
    # A nested field takes its width from an argument.
    widths = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
    budget.check_size(max(widths, default=0) * (text.count("{") if "{:{" in text.replace(" ", "") else 1))
    for value in args:
        budget.check_size(budget.weigh(value) * max(text.count("{"), 1))
    return wrapped(*args, **kwargs)


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1
