"""The fields that ask for a structure. Pure."""

from __future__ import annotations

from naru_router.core.openapi.words import Schema, array, boolean, either, free, null_or, one_of, text, thing


def response_format() -> Schema:
    """OpenAI's."""
    schema = thing(
        {
            "name": text(minLength=1, maxLength=64),
            "description": null_or(text()),
            "schema": free("JSON Schema."),
            "strict": null_or(boolean()),
        },
        ["name", "schema"],
    )
    return either(
        thing({"type": one_of("text")}, ["type"]),
        thing({"type": one_of("json_object")}, ["type"]),
        thing({"type": one_of("json_schema"), "json_schema": schema}, ["type", "json_schema"]),
        about="What the answer's text has to be.",
    )


def guided_fields() -> dict[str, Schema]:
    """vLLM's; one of them at most, and none beside a response_format."""
    choice = array(text(minLength=1), least=1)
    kinds = {
        "json": either(text(), free(), about="JSON Schema, or its text."),
        "regex": text("The whole answer matches."),
        "choice": choice,
        "grammar": text("Lark, in llguidance's dialect."),
        "json_object": boolean(),
    }
    return {
        "guided_json": kinds["json"],
        "guided_regex": kinds["regex"],
        "guided_choice": choice,
        "guided_grammar": kinds["grammar"],
        "structured_outputs": thing({name: null_or(schema) for name, schema in kinds.items()}),
    }
