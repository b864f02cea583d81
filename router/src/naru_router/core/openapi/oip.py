"""The Open Inference Protocol. Pure."""

from __future__ import annotations

from naru_router.core.openapi.words import Schema, all_null, array, boolean, either, free, integer, null_or, text, thing


def oip_schemas() -> dict[str, Schema]:
    """Components of /v2."""
    tensor = {
        "name": text(minLength=1),
        "shape": array(integer(0), "Sizes of the dimensions."),
        "datatype": text("BOOL, INT8 ... FP64, BYTES."),
        "parameters": free(),
        "data": array({}, "Row-major, flat or nested."),
    }
    asked = thing({"name": text(minLength=1), "parameters": null_or(free())}, ["name"])
    call = {
        "id": text(maxLength=128),
        "parameters": free(),
        "inputs": array(
            thing(all_null(tensor, but=("name", "shape", "datatype", "data")), ["name", "shape", "datatype"]), least=1
        ),
        "outputs": array(asked),
    }
    generated = {
        "text_input": text(),
        "max_tokens": integer(0, 2**31 - 1),
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "stop_words": either(text(minLength=1), array(text(minLength=1), most=16)),
        "seed": integer(0, 2**64 - 1),
        "parameters": free(),
    }
    card = thing(
        {
            "name": text(),
            "versions": array(text()),
            "platform": text(),
            "inputs": array(free()),
            "outputs": array(free()),
        },
        ["name", "platform"],
    )
    return {
        "InferRequest": thing(all_null(call, but=("inputs",)), ["inputs"]),
        "InferReply": thing({"model_name": text(), "outputs": array(free())}, ["model_name", "outputs"]),
        "GenerateRequest": thing(all_null(generated, but=("text_input",)), ["text_input"]),
        "GenerateReply": thing({"model_name": text(), "text_output": text()}, ["model_name", "text_output"]),
        "ModelMetadata": card,
        "RepositoryIndex": array(thing({"name": text(), "state": text()}, ["name"])),
        "IndexRequest": thing({"ready": null_or(boolean())}),
    }
