"""What every custom resource model is made of: frozen pydantic models whose cross-field rules are data.

A rule stands once, as CEL for the API server and as a Python predicate for everyone else (`naru up`, tests, the
operator reading an object that an older schema let through). `naru_proto.crdgen` prints the CEL half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, Strict, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

RULE_ERROR = "rule_violated"
"""Pydantic error type of a broken rule; its context holds `violations`: (field, message) pairs."""

VALIDATIONS = "x-kubernetes-validations"
"""Where a schema holds its CEL rules."""

T = TypeVar("T")

Items = Annotated[tuple[T, ...], Strict(False)]
"""A list in the manifest, a tuple here: frozen models hold nothing that changes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule over several fields of one object."""

    field: str
    """Wire name of the field to blame, dotted below the object that carries the rule."""
    cel: str
    """True when the rule holds; `self` is the object."""
    message: str
    """What must hold and what to write instead."""
    holds: Callable[[Any], bool]
    """The same in Python, over the parsed model."""

    def to_cel(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        return {"rule": self.cel, "message": f"{self.field} {self.message}", "fieldPath": f".{self.field}"}


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """A rule over an object before and after a change; only the API server sees both, so it stands in CEL alone."""

    field: str
    """Wire name of the field to blame, dotted below the object that carries the rule."""
    cel: str
    """True when the change is allowed; `self` is the object after it, `oldSelf` before it."""
    message: str
    """What must hold and what to do instead."""

    def to_cel(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        return {"rule": self.cel, "message": f"{self.field} {self.message}", "fieldPath": f".{self.field}"}


class CrdModel(BaseModel):
    """Base of all objects of a custom resource: frozen, unknown fields refused, no silent coercion.

    Fields are read by their wire names (camelCase) alone, so that what passes here passes the API server too.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_by_alias=True,
        validate_by_name=False,
        serialize_by_alias=True,
        validate_default=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    change_rules: ClassVar[tuple[ChangeRule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        violations = [(rule.field, rule.message) for rule in self.rules if not rule.holds(self)]
        if violations:
            text = "; ".join(message for _, message in violations)
            raise PydanticCustomError(RULE_ERROR, "{text}", {"text": text, "violations": violations})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Adds rules and defaults as the API server wants them: CEL, and wire values instead of Python's."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        rules: tuple[Rule | ChangeRule, ...] = (*cls.rules, *cls.change_rules)
        if rules:
            schema[VALIDATIONS] = [rule.to_cel() for rule in rules]
        blank = cls.model_construct()
        wire = blank.model_dump(mode="json", by_alias=True)
        for name, field in cls.model_fields.items():
            wire_name = field.alias or name
            target = schema["properties"][wire_name]
            target.pop("default", None)
            if isinstance(value := getattr(blank, name, None), CrdModel):
                target["default"] = _object_default(value, wire[wire_name])
            elif wire.get(wire_name) not in (None, [], {}):
                target["default"] = wire[wire_name]
        return schema

    def to_wire(self) -> dict[str, Any]:
        """The object as JSON values under wire names, absent fields left out; validates back to an equal model."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _object_default(value: CrdModel, wire: dict[str, Any]) -> dict[str, Any]:
    """What stands for an absent object: empty where no rule looks, so that the defaults inside fill it.

    The API server tries an object's rules on its default as it is written, before the defaults inside are filled in.
    """
    if not value.rules:
        return {}
    return {name: item for name, item in wire.items() if item not in (None, [], {}) and not isinstance(item, dict)}
