"""Tells when the installed definitions of our kinds are older than this operator: the API server drops what it does not
know of statuses and specs without a word. Run by the app beside everything else; changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import NotFound
from naru_operator.adapters.kube.kinds import MODEL_DEPLOYMENT
from naru_proto import crdgen, names
from naru_proto.errors import NaruError

logger = logging.getLogger(__name__)

_RETRY_S = 30.0
_MAX_SHOWN = 8
_GVK = "x-kubernetes-group-version-kind"
_KEEPS_ALL = "x-kubernetes-preserve-unknown-fields"

Schema = Mapping[str, Any]


class SchemaCheck:
    """Compares at the start and at each resync. asyncio thread only."""

    def __init__(self, client: KubeClient, *, resync_s: float) -> None:
        self._client = client
        self._resync_s = resync_s
        self._said = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
                pause_s = self._resync_s
            except NotFound:
                pause_s = _RETRY_S  # the informer tells that the kinds are missing
            except NaruError as exc:
                logger.debug("the installed definitions cannot be read: %s", exc.message)
                pause_s = _RETRY_S
            except Exception:
                # The top of a loop: a document of an unexpected shape must not end the operator.
                logger.exception("the installed definitions cannot be compared")
                pause_s = self._resync_s
            await asyncio.sleep(pause_s)

    async def look(self) -> str:
        """Compares once and logs what is new; returns what is wrong, empty: nothing.

        Raises:
            NotFound: none of the kinds is installed.
            NaruError: the API server does not tell.
        """
        document = await self._client.schemas(MODEL_DEPLOYMENT)
        problem = await asyncio.to_thread(_problem, document)  # printing our own takes some tens of milliseconds
        if problem and problem != self._said:
            logger.error("%s", problem)
        elif self._said and not problem:
            logger.info("the installed definitions are up to date")
        self._said = problem
        return problem


def missing_fields(ours: Schema, theirs: Schema, resolve: Callable[[Schema], Schema], path: str = "") -> list[str]:
    """Dotted paths of fields that `ours` has and `theirs` lacks, in order; of a missing field nothing below it.

    ``resolve`` follows a reference within their document.
    """
    theirs = resolve(theirs)
    if theirs.get(_KEEPS_ALL) is True:
        return []
    missing: list[str] = []
    known = theirs.get("properties") or {}
    for name, child in (ours.get("properties") or {}).items():
        below = f"{path}.{name}" if path else name
        if name in known:
            missing += missing_fields(child, known[name], resolve, below)
        else:
            missing.append(below)
    for word, mark in (("items", "[]"), ("additionalProperties", ".*")):
        mine, other = ours.get(word), theirs.get(word)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            missing += missing_fields(mine, other, resolve, path + mark)
    return missing


def _problem(document: Schema) -> str:
    """Sentences about all our kinds that the API server's document lacks fields of; empty: none."""
    components = (document.get("components") or {}).get("schemas") or {}

    def resolve(schema: Schema) -> Schema:
        parts: list[Schema] = schema.get("allOf") or []
        reference = schema.get("$ref") or (parts[0].get("$ref") if len(parts) == 1 else None)
        return components.get(str(reference).rpartition("/")[2], {}) if reference else schema

    told = []
    for root in crdgen.ROOTS:
        kind = root.__name__
        theirs = next((it for it in components.values() if _is_kind(it, kind)), None)
        missing = missing_fields(crdgen.root_schema(root), theirs, resolve) if theirs is not None else []
        if missing:
            more = f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
            told.append(f"{kind} lacks {', '.join(missing[:_MAX_SHOWN])}{more}")
    if not told:
        return ""
    return (
        f"the installed definitions are older than this operator ({'; '.join(told)}): the API server drops these "
        "fields; apply the crds/ folder of the chart this operator came with"
    )


def _is_kind(schema: Schema, kind: str) -> bool:
    wanted = {"group": names.API_GROUP, "version": names.API_VERSION, "kind": kind}
    return any(entry == wanted for entry in schema.get(_GVK) or ())
