"""Lets torch see less of the CPU, in a peer that is restricted to an instruction set (``$NARU_BENCH_TORCH_ISA``).

Python imports this at its start because the folder is on the peer's ``PYTHONPATH``; so do the processes it starts. vLLM
picks its compiled kernels by what torch reports, which no setting of its own can narrow.
"""

import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

_HIDDEN = {
    "avx2": ("avx512", "amx"),
    "avx512": ("avx512_bf16", "avx512_fp16", "amx"),
    "avx512_bf16": ("avx512_fp16", "amx"),
}


def _narrow(module: Any) -> None:
    """Wraps `get_capabilities` of ``torch.cpu``: what begins with a hidden name is not there."""
    whole = module.get_capabilities
    hidden = _HIDDEN[os.environ["NARU_BENCH_TORCH_ISA"]]

    def get_capabilities() -> Mapping[str, Any]:
        return types.MappingProxyType(
            {name: False if name.startswith(hidden) else value for name, value in whole().items()}
        )

    module.get_capabilities = get_capabilities


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``torch.cpu`` as everyone else does, and narrows it once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _narrow(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("NARU_BENCH_TORCH_ISA") in _HIDDEN:
    sys.meta_path.insert(0, _Finder())
