"""Hooks of Schemathesis: most generated requests name a model that can do what is asked, the others any."""

from __future__ import annotations

from typing import Any

import schemathesis

CHAT, EMBEDDER, RANKER, DOUBLER = "smollm2", "minilm", "ranker", "doubler"
_RANKED = ("/score", "/rerank")


def model_for(path: str) -> str:
    """One that can do what a path is for."""
    if "embeddings" in path:
        return EMBEDDER
    if path.endswith(_RANKED):
        return RANKER
    return DOUBLER if path.endswith("/infer") else CHAT


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Names a model of ours, nine times in ten."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and hash(body["model"]) % 10:
        return {**body, "model": model_for(context.operation.path)}
    return body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """The same for models in paths."""
    if isinstance(path_parameters, dict) and hash(str(path_parameters.get("model"))) % 10:
        known = {"model": model_for(context.operation.path), "version": "1"}
        return {name: known.get(name, value) for name, value in path_parameters.items()}
    return path_parameters
