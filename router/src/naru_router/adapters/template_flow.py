"""Whether a chat template looks at what messages say, or only puts it where it belongs. Used by `template_skeletons`.

A template that does not look prints the same text around the contents for all chats of the same roles. This follows
values through the syntax tree: contents may be printed, joined with other text, kept in names and trimmed; whether one
is empty may be asked. Whatever else is done with them, or with a message as a whole, means: it looks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from jinja2 import nodes


class Kind(enum.IntEnum):
    """What of a chat a value depends on, beside its roles; a larger one is less bound."""

    SAFE = 0
    """On nothing else."""
    CONTENT = 1
    """It is the content of a message."""
    TEXT = 2
    """It holds contents."""
    MESSAGES = 3
    """It is a message, or several."""


class Looks(Exception):
    """The template may look at contents."""


_ALWAYS_THE_SAME = frozenset({"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number"})
"""Tests whose answer is the same for every text."""
_MAX_PASSES = 8


def is_opaque(template: nodes.Template) -> bool:
    """Whether contents are only put into the output, by what can be read from the syntax."""
    flow = _Flow()
    try:
        for _ in range(_MAX_PASSES):
            before = dict(flow.names)
            flow.run(template.body)
            if flow.names == before:
                return True
    except Looks:
        return False
    return False


class _Flow:
    """One walk over a template; `names` only ever become less bound."""

    def __init__(self) -> None:
        self.names: dict[str, Kind] = {"messages": Kind.MESSAGES}

    def run(self, body: list[nodes.Node]) -> None:
        for node in body:
            do = _STATEMENTS.get(type(node))
            if do is None:
                raise Looks
            do(self, node)

    def kind(self, node: nodes.Node | None) -> Kind:
        """Of an expression."""
        if node is None:
            return Kind.SAFE
        of = _EXPRESSIONS.get(type(node))
        if of is not None:
            return of(self, node)
        if isinstance(node, (nodes.BinExpr, nodes.UnaryExpr, nodes.Operand, nodes.Slice, nodes.List)):
            return self._safe_children(node)
        raise Looks

    def output(self, node: nodes.Output) -> None:
        for child in node.nodes:
            if not isinstance(child, nodes.TemplateData) and self.kind(child) is Kind.MESSAGES:
                raise Looks

    def branch(self, node: nodes.If) -> None:
        self._ask(node.test)
        self.run(node.body)
        for other in node.elif_:
            self.branch(other)
        self.run(node.else_)

    def loop(self, node: nodes.For) -> None:
        kind = self.kind(node.iter)
        if node.recursive or kind not in (Kind.SAFE, Kind.MESSAGES) or not isinstance(node.target, nodes.Name):
            raise Looks
        self._set(node.target.name, kind)
        if node.test is not None:
            self._ask(node.test)
        self.run(node.body)
        self.run(node.else_)

    def assign(self, node: nodes.Assign) -> None:
        kind = self.kind(node.node)
        if isinstance(node.target, nodes.Name):
            self._set(node.target.name, kind)
        elif not isinstance(node.target, nodes.NSRef) or kind is not Kind.SAFE:
            raise Looks

    def joined(self, node: nodes.Add | nodes.Concat) -> Kind:
        parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
        kinds = [self.kind(part) for part in parts]
        if Kind.MESSAGES in kinds:
            raise Looks
        return Kind.TEXT if any(kinds) else Kind.SAFE

    def either(self, node: nodes.And | nodes.Or) -> Kind:
        # Its value is one of the two, chosen by whether the first is empty.
        self._ask(node.left)
        self._ask(node.right)
        return Kind.TEXT if self.kind(node.left) or self.kind(node.right) else Kind.SAFE

    def compared(self, node: nodes.Compare) -> Kind:
        first = node.ops[0]
        if (
            len(node.ops) == 1
            and first.op in ("in", "notin")
            and isinstance(node.expr, nodes.Const)
            and isinstance(node.expr.value, str)
            and self.kind(first.expr) is Kind.MESSAGES
        ):
            return Kind.SAFE  # which fields a message has is the same for all of its role
        return self._safe_children(node)

    def negation(self, node: nodes.Not) -> Kind:
        self._ask(node.node)
        return Kind.SAFE

    def condition(self, node: nodes.CondExpr) -> Kind:
        self._ask(node.test)
        kinds = (self.kind(node.expr1), self.kind(node.expr2))
        if Kind.MESSAGES in kinds:
            raise Looks
        return Kind.TEXT if any(kinds) else Kind.SAFE

    def part(self, node: nodes.Getitem | nodes.Getattr) -> Kind:
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            # Of a loop over messages, these are messages; all else of a loop is numbers, and methods are not called.
            is_item = isinstance(node, nodes.Getattr) and node.attr in ("previtem", "nextitem")
            return Kind.SAFE if isinstance(node, nodes.Getattr) and not is_item else _looks()
        kind = self.kind(node.node)
        key: object
        if isinstance(node, nodes.Getattr):
            key = node.attr
        elif isinstance(node.arg, nodes.Const):
            key = node.arg.value
        elif isinstance(node.arg, nodes.Neg) and isinstance(node.arg.node, nodes.Const):
            key = -1 if isinstance(node.arg.node.value, int) else _looks()
        elif self._safe_children(node.arg) is Kind.SAFE and isinstance(node.arg, nodes.Slice):
            return kind if kind in (Kind.SAFE, Kind.MESSAGES) else _looks()
        else:
            key = None
            if kind is not Kind.SAFE:
                raise Looks
        if kind is Kind.SAFE:
            return Kind.SAFE
        if kind is not Kind.MESSAGES:
            raise Looks
        if isinstance(key, int):
            return Kind.MESSAGES
        # What a message may have beside its role and content is absent where this is used.
        return Kind.CONTENT if key == "content" else Kind.SAFE

    def filtered(self, node: nodes.Filter) -> Kind:
        kind = self.kind(node.node)
        is_bare = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        if node.name == "trim" and is_bare and kind in (Kind.SAFE, Kind.CONTENT):
            return Kind.SAFE if kind is Kind.SAFE else Kind.TEXT
        if kind is Kind.MESSAGES and node.name in ("length", "count"):
            return Kind.SAFE
        if kind is not Kind.SAFE:
            raise Looks
        return self._safe_children(node)

    def tested(self, node: nodes.Test) -> Kind:
        if self.kind(node.node) is not Kind.SAFE and node.name not in _ALWAYS_THE_SAME:
            raise Looks
        for child in (*node.args, *node.kwargs):
            self._safe_children(child)
        return Kind.SAFE

    def called(self, node: nodes.Call) -> Kind:
        # The others depend on more than the chat, such as the time, or are methods.
        if not (isinstance(node.node, nodes.Name) and node.node.name in ("namespace", "raise_exception", "range")):
            raise Looks
        for child in (*node.args, *node.kwargs):
            self._safe_children(child)
        return Kind.SAFE

    def _ask(self, node: nodes.Node) -> None:
        """Whether it is empty; that of a content is known, that of a text with contents is not."""
        if self.kind(node) not in (Kind.SAFE, Kind.CONTENT, Kind.MESSAGES):
            raise Looks

    def _safe_children(self, node: nodes.Node) -> Kind:
        for child in node.iter_child_nodes():
            if isinstance(child, nodes.Expr) or isinstance(child, (nodes.Operand, nodes.Keyword)):
                kind = self._safe_children(child) if isinstance(child, nodes.Keyword) else self.kind(child)
                if kind is not Kind.SAFE:
                    raise Looks
        return Kind.SAFE

    def _set(self, name: str, kind: Kind) -> None:
        before = self.names.get(name, Kind.SAFE)
        if Kind.MESSAGES in (before, kind) and before != kind and name in self.names:
            raise Looks  # one name for a message here and for something else there
        self.names[name] = max(before, kind)


def _looks() -> Kind:
    raise Looks


def _none(flow: _Flow, node: nodes.Node) -> Kind:
    return Kind.SAFE


def _name(flow: _Flow, node: nodes.Name) -> Kind:
    return _looks() if node.name in ("loop", "self") else flow.names.get(node.name, Kind.SAFE)


def _nothing(flow: _Flow, node: nodes.Node) -> None:
    pass


_STATEMENTS: Mapping[type[nodes.Node], Callable[[_Flow, nodes.Node], None]] = {
    nodes.Output: _Flow.output,  # type: ignore[dict-item]
    nodes.If: _Flow.branch,  # type: ignore[dict-item]
    nodes.For: _Flow.loop,  # type: ignore[dict-item]
    nodes.Assign: _Flow.assign,  # type: ignore[dict-item]
    nodes.Break: _nothing,
    nodes.Continue: _nothing,
}
_EXPRESSIONS: Mapping[type[nodes.Node], Callable[[_Flow, nodes.Node], Kind]] = {
    nodes.Const: _none,
    nodes.TemplateData: _none,
    nodes.Name: _name,  # type: ignore[dict-item]
    nodes.Add: _Flow.joined,  # type: ignore[dict-item]
    nodes.Concat: _Flow.joined,  # type: ignore[dict-item]
    nodes.And: _Flow.either,  # type: ignore[dict-item]
    nodes.Or: _Flow.either,  # type: ignore[dict-item]
    nodes.Compare: _Flow.compared,  # type: ignore[dict-item]
    nodes.Not: _Flow.negation,  # type: ignore[dict-item]
    nodes.CondExpr: _Flow.condition,  # type: ignore[dict-item]
    nodes.Getitem: _Flow.part,  # type: ignore[dict-item]
    nodes.Getattr: _Flow.part,  # type: ignore[dict-item]
    nodes.Filter: _Flow.filtered,  # type: ignore[dict-item]
    nodes.Test: _Flow.tested,  # type: ignore[dict-item]
    nodes.Call: _Flow.called,  # type: ignore[dict-item]
}
