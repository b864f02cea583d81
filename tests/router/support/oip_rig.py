"""A router with models of every kind behind the Open Inference Protocol, and the protocol's two edges."""

from __future__ import annotations

import json
from typing import Any

import httpx
from compatibility.known_worker import DOUBLER, FACTS, answer
from router_rig import Rig

OCTETS = {"content-type": "application/octet-stream"}
HEADER = "inference-header-content-length"


async def start(rig: Rig, **settings: Any) -> None:
    """A worker for each model, and a router."""
    for name in FACTS:
        await rig.publish_model(name, min_replicas=0)
    for name, facts in FACTS.items():
        await rig.start_worker(f"w-{name}", answer, models=(name,), facts=facts)
    await rig.start_router(**settings)


def x(shape: Any = (1, 4), data: Any = (1, 2, 3, 4), datatype: Any = "FP32", **more: Any) -> dict[str, Any]:
    """The doubler's input."""
    return {"name": "x", "shape": shape, "datatype": datatype, "data": data, **more}


def texts(name: str, *values: str) -> dict[str, Any]:
    """An input of texts."""
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def raw(num_bytes: int, shape: Any = (1, 4), datatype: str = "FP32") -> dict[str, Any]:
    """The doubler's input whose data is binary."""
    return {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": num_bytes}}


async def infer(rig: Rig, body: Any, model: str = DOUBLER) -> httpx.Response:
    return await rig.client.post(f"/v2/models/{model}/infer", json=body)


async def infer_binary(
    rig: Rig, body: Any, binary: bytes, *, length: Any = None, model: str = DOUBLER
) -> httpx.Response:
    """A JSON object and bytes after it."""
    head = json.dumps(body).encode()
    headers = {HEADER: str(len(head) if length is None else length), **OCTETS}
    return await rig.client.post(f"/v2/models/{model}/infer", content=head + binary, headers=headers)
