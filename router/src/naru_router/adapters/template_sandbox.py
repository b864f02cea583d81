"""The jinja environment chat templates run in: what transformers offers them, in a sandbox with a budget.

Same syntax and values as transformers (trimmed blocks, loop controls, ``generation`` blocks, ``tojson``,
``raise_exception``, ``strftime_now``). The compiled template is rewritten so that every loop, output, concatenation,
comparison and literal passes through the budget; calls, filters, tests and operators are intercepted.

Not covered: recursive loops and the filters in `_REMOVED_FILTERS` are refused; no chat template is known to use them.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from naru_router.adapters.template_budget import Budget, budget_of_thread
from naru_router.adapters.template_checks import (
    REFUSED_METHODS,
    check_filter,
    check_format,
    check_method,
    checked_format,
)

MAX_EXPONENT = 64
_REMOVED_FILTERS = ("forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""Slow on long texts in ways no step sees, or not repeatable."""


class GenerationExtension(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. Rendering needs `budget_of_thread`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        # Without the optimizer nothing of the template runs while it is compiled, where no budget watches.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=[GenerationExtension, LoopControlExtension],
        )
        self.filters["tojson"] = _tojson
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.tests = {name: _metered(name, function) for name, function in self.tests.items()}
        self.filters |= {"naru_each": _each, "naru_emit": _emit, "naru_concat": _concat, "naru_guard": _guard}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        metered = _Meter().visit(source)
        return super()._generate(metered, name, filename, defer_init=defer_init)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function, macro or method for the template."""
        budget = budget_of_thread.get()
        budget.step()
        args = tuple(_materialized(budget, arg) for arg in args)
        for value in kwargs.values():
            budget.weigh(value)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes)):
            check_method(budget, owner, obj.__name__, (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        budget.spend(budget.weigh(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator for the template."""
        budget = budget_of_thread.get()
        if operator == "+" and type(left) is str and type(right) is str:
            return budget.join(left, right)
        budget.step()
        weight = budget.weigh(left), budget.weigh(right)
        if operator == "*":
            for value, size, factor in ((left, weight[0], right), (right, weight[1], left)):
                if isinstance(factor, int) and not isinstance(value, (int, float)):
                    budget.check_size(size * factor)
        elif operator == "**" and (isinstance(right, int) and abs(right) > MAX_EXPONENT):
            raise SecurityError(f"the exponent {right} is above {MAX_EXPONENT}")
        elif operator == "%" and isinstance(left, (str, bytes)):
            check_format(left)
        result = super().call_binop(context, operator, left, right)
        budget.spend(budget.weigh(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The safe stand-in for a string's `format`, with a limit on widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ in REFUSED_METHODS:
            raise SecurityError(f"the method {value.__name__!r} of strings is not allowed in chat templates")
        return functools.partial(checked_format, value.__self__, wrapped)


class _Meter(NodeTransformer):
    """Sends what the environment cannot intercept through the budget's filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateSyntaxError("recursive loops are not supported", node.lineno)
        self.generic_visit(node)
        node.iter = _through("naru_each", cast(nodes.Expr, node.iter))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_printed(child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("naru_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _guarded(node.expr)
        for operand in node.ops:
            operand.expr = _guarded(operand.expr)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _guarded(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _guarded(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _guarded(node)


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _printed(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        node = nodes.Const(node.data, lineno=node.lineno)
    return _through("naru_emit", node)


def _guarded(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through("naru_guard", node)


# Taking the context keeps the compiler from running these on constants, where no budget watches.


@pass_context
def _each(context: Context, value: Any) -> Iterator[object]:
    return budget_of_thread.get().each(value)


@pass_context
def _emit(context: Context, value: object) -> str:
    budget = budget_of_thread.get()
    budget.step()
    budget.weigh(value)
    text = value if type(value) is str else str(value)
    budget.spend(len(text))
    return text


@pass_context
def _concat(context: Context, values: list[object]) -> str:
    budget = budget_of_thread.get()
    budget.step()
    budget.weigh(values)
    text = "".join([str(value) for value in values])
    budget.spend(len(text))
    return text


@pass_context
def _guard(context: Context, value: object) -> object:
    budget = budget_of_thread.get()
    budget.step()
    budget.weigh(value)
    return value


def _materialized(budget: Budget, value: Any) -> Any:
    """The value, weighed; what a lazy filter would yield becomes a list, one step an item."""
    if isinstance(value, Iterator):
        value = list(budget.each(value))
    budget.weigh(value)
    return value


def _metered(name: str, function: Any) -> Callable[..., Any]:
    """A filter or test that counts."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context comes first

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = budget_of_thread.get()
        budget.step()
        values = [_materialized(budget, arg) for arg in args[num_passed:]]
        for value in kwargs.values():
            budget.weigh(value)
        check_filter(budget, name, values, kwargs)
        result = function(*args[:num_passed], *values, **kwargs)
        budget.spend(budget.weigh(result))
        return result

    return run


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
