"""All that the router answers over HTTP. Pure."""

from __future__ import annotations

from naru_router.core.openapi.operations import (
    ANY_REQUEST,
    EVENTS,
    JSON,
    PAGE,
    Operation,
    path_parameter,
    query_parameter,
)
from naru_router.core.openapi.words import integer, one_of, ref, text

_MODEL = path_parameter("model", "Name of a model.", "smollm2", pattern="^[^/?#]+$")
_VERSION = path_parameter("version", "Version of a model.", "1", pattern="^[^/?#]+$")
_ID = path_parameter("id", "Of the object.", pattern="^[^/?#]+$")
_PAGING = (
    query_parameter("limit", "Most objects.", integer(1, 100)),
    query_parameter("after", "Id of the last object seen.", text()),
)
_ORDER = query_parameter("order", "By time.", one_of("asc", "desc"))
_BOTH = (JSON, EVENTS)


def operations() -> list[Operation]:
    """Every method of every path."""
    return [*_openai(), *_stored(), *_anthropic(), *_oip(), *_pages()]


def _ask(path: str, tag: str, summary: str, body: str, reply: str, *, streams: bool = False) -> Operation:
    return Operation(
        "POST",
        path,
        tag,
        summary,
        ref(reply),
        ref(body),
        _BOTH if streams else (JSON,),
        ANY_REQUEST,
    )


def _openai() -> list[Operation]:
    rank = ("Ranks documents by what they have to do with a query.", "RerankRequest", "Ranking")
    score = ("Scores pairs of texts.", "ScoreRequest", "Scores")
    return [
        _ask("/v1/chat/completions", "OpenAI", "Answers a chat.", "ChatRequest", "ChatCompletion", streams=True),
        _ask("/v1/completions", "OpenAI", "Continues prompts.", "CompletionRequest", "Completion", streams=True),
        _ask("/v1/responses", "OpenAI", "Makes a response.", "ResponseRequest", "Response", streams=True),
        _ask("/v1/responses/input_tokens", "OpenAI", "Counts the tokens of an input.", "ResponseRequest", "Count"),
        _ask("/v1/embeddings", "OpenAI", "Vectors of texts.", "EmbeddingRequest", "Embeddings"),
        *[_ask(path, "Rank and score", *rank) for path in ("/v1/rerank", "/rerank", "/v2/rerank")],
        *[_ask(path, "Rank and score", *score) for path in ("/v1/score", "/score")],
        _ask("/tokenize", "Tokens", "A text, or a chat, in tokens.", "TokenizeRequest", "Tokens"),
        _ask("/detokenize", "Tokens", "Tokens in text.", "DetokenizeRequest", "Detokenized"),
        Operation("GET", "/v1/models", "OpenAI", "Every name that can be asked for.", ref("Models")),
        Operation("GET", "/v1/models/{model}", "OpenAI", "One of them.", ref("Model"), parameters=(_MODEL,)),
    ]


def _stored() -> list[Operation]:
    batches = "OpenAI files and batches"
    upload = Operation(
        "POST",
        "/v1/files",
        batches,
        "Uploads a file.",
        ref("File"),
        ref("Upload"),
        statuses=(400, 401, 413, 429, 500, 503),
        body_type="multipart/form-data",
    )
    content = Operation(
        "GET",
        "/v1/files/{id}/content",
        batches,
        "What is in a file.",
        reply_types=("application/octet-stream", JSON),
        parameters=(_ID,),
    )
    purpose = query_parameter("purpose", "Only such files.", text())
    paging = (query_parameter("limit", "Most objects.", integer(1, 10_000)), _PAGING[1], _ORDER, purpose)
    batch = Operation(
        "POST", "/v1/batches", batches, "Makes a batch.", ref("Batch"), ref("BatchRequest"), statuses=ANY_REQUEST
    )
    return [
        upload,
        Operation("GET", "/v1/files", batches, "Files.", ref("Files"), parameters=paging),
        Operation("GET", "/v1/files/{id}", batches, "A file.", ref("File"), parameters=(_ID,)),
        Operation(
            "DELETE",
            "/v1/files/{id}",
            batches,
            "Deletes a file.",
            ref("Deleted"),
            parameters=(_ID,),
            statuses=(*PAGE, 409),
        ),
        content,
        batch,
        Operation("GET", "/v1/batches", batches, "Batches.", ref("Batches"), parameters=_PAGING),
        Operation("GET", "/v1/batches/{id}", batches, "A batch.", ref("Batch"), parameters=(_ID,)),
        Operation("POST", "/v1/batches/{id}/cancel", batches, "Cancels a batch.", ref("Batch"), parameters=(_ID,)),
        Operation("GET", "/v1/responses/{id}", "OpenAI", "A stored response.", ref("Response"), parameters=(_ID,)),
        Operation("DELETE", "/v1/responses/{id}", "OpenAI", "Deletes it.", ref("Deleted"), parameters=(_ID,)),
        Operation(
            "GET",
            "/v1/responses/{id}/input_items",
            "OpenAI",
            "What it was made from.",
            ref("Items"),
            parameters=(_ID, *_PAGING, _ORDER),
        ),
    ]


def _anthropic() -> list[Operation]:
    error = ref("AnthropicError")
    return [
        Operation(
            "POST",
            "/v1/messages",
            "Anthropic",
            "Answers a conversation.",
            ref("AssistantMessage"),
            ref("MessagesRequest"),
            _BOTH,
            ANY_REQUEST,
            error,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            "Anthropic",
            "Counts the tokens of a conversation.",
            ref("Count"),
            ref("CountRequest"),
            (JSON,),
            ANY_REQUEST,
            error,
        ),
    ]


def _oip() -> list[Operation]:
    error = ref("OipError")

    def page(path: str, summary: str, reply: str = "Anything", *states: int) -> Operation:
        names = [parameter for parameter in (_MODEL, _VERSION) if f"{{{parameter['name']}}}" in path]
        further = {state: ref("Anything") for state in states}
        left = tuple(status for status in PAGE if status not in states)
        return Operation(
            "GET", path, "Open Inference Protocol", summary, ref(reply), error=error, parameters=tuple(names),
            further=further, statuses=left,
        )  # fmt: skip

    def ask(path: str, summary: str, body: str, reply: str, kind: str = JSON) -> Operation:
        names = [parameter for parameter in (_MODEL, _VERSION) if f"{{{parameter['name']}}}" in path]
        return Operation(
            "POST", path, "Open Inference Protocol", summary, ref(reply) if reply else None, ref(body), (kind,),
            ANY_REQUEST, error, tuple(names), needs_body="/repository/" not in path,
        )  # fmt: skip

    found = [
        page("/v2", "What this server is."),
        page("/v2/health/live", "The process answers."),
        page("/v2/health/ready", "Requests are taken.", "Anything", 503),
        page("/v2/models/stats", "Counts of all models."),
        ask("/v2/repository/index", "Lists the models.", "IndexRequest", "RepositoryIndex"),
        ask("/v2/repository/models/{model}/load", "Brings a model up.", "Anything", "Anything"),
        ask("/v2/repository/models/{model}/unload", "Takes its idle copies down.", "Anything", "Anything"),
    ]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            page(base, "What is told of a model.", "ModelMetadata"),
            page(f"{base}/ready", "Whether it is ready.", "Anything", 503),
            page(f"{base}/config", "In Triton's words."),
            page(f"{base}/stats", "Its counts."),
            ask(f"{base}/infer", "Runs it once.", "InferRequest", "InferReply"),
            ask(f"{base}/generate", "Continues a text.", "GenerateRequest", "GenerateReply"),
            ask(f"{base}/generate_stream", "The same, streamed.", "GenerateRequest", "", EVENTS),
        ]
    return found


def _pages() -> list[Operation]:
    def page(path: str, summary: str, *states: int) -> Operation:
        return Operation(
            "GET", path, "Server", summary, ref("Anything"), statuses=(500,),
            further={state: ref("Anything") for state in states},
        )  # fmt: skip

    named = query_parameter("model", "Only of this model.", text())
    request_id = path_parameter("request_id", "Its `x-request-id`.", pattern="^[A-Za-z0-9._-]{1,128}$")
    return [
        page("/health", "The process answers."),
        page("/healthz", "The same."),
        page("/ready", "Requests are taken.", 503),
        page("/readyz", "The same, for people.", 503),
        page("/openapi.json", "This description."),
        Operation("GET", "/metrics", "Server", "Prometheus.", reply_types=("text/plain",), statuses=(500,)),
        Operation(
            "GET",
            "/v1/naru/requests/{request_id}",
            "Naru",
            "The course of a request.",
            ref("Anything"),
            parameters=(request_id,),
        ),
        Operation(
            "POST",
            "/v1/naru/route",
            "Naru",
            "Where a request would go.",
            ref("Anything"),
            ref("Anything"),
            statuses=ANY_REQUEST,
        ),
        Operation("GET", "/v1/naru/placement", "Naru", "Copies of all models.", ref("Anything"), parameters=(named,)),
        Operation("POST", "/v1/naru/placement", "Naru", "Where a copy would go.", ref("Anything"), ref("Anything")),
    ]
