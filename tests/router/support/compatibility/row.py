"""One line of docs/compatibility.md, and the request that proves it.

Each API has a module beside this one with a list ROWS. `tests/router/test_compatibility.py` sends every row's request
to a router with a stub worker; `docs/print_compatibility.py` prints the page from the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from naru_proto.v1 import worker_pb2

Status = Literal["yes", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row's request."""

    response: httpx.Response
    requests: list[worker_pb2.GenerateRequest]
    """What workers were sent, in order."""

    @property
    def json(self) -> Any:
        """The reply."""
        return self.response.json()

    @property
    def sent(self) -> worker_pb2.GenerateRequest:
        """The only request to a worker."""
        (request,) = self.requests
        return request

    @property
    def events(self) -> list[Any]:
        """Data of a stream's events, parsed where it is JSON."""
        lines = [line[6:] for line in self.response.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Row:
    """A feature of an API."""

    api: str
    """Heading of its table: OpenAI chat completions, Anthropic messages, ..."""
    feature: str
    """As it is named in the table; backticks around names of fields."""
    status: Status
    """yes: it has its effect. ignored: accepted, without any. refused: an error in the API's form."""
    what: str
    """What happens, in a few words."""
    path: str
    body: Any = None
    """JSON; None: a GET. Bytes: sent as they are."""
    check: Callable[[Outcome], object] = field(default=lambda outcome: None)
    """yes: asserts the effect."""
    param: str = ""
    """refused: the `param` of the error; empty: the API's errors have none, or the feature's own name."""
    code: int = 0
    """Expected status; 0: 200, or 400 where it is refused."""
    method: str = ""
    """Empty: POST with a body, else GET."""
    headers: dict[str, str] = field(default_factory=dict)
    says: str = ""
    """refused: words that stand in the error."""
