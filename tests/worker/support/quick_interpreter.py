"""Triton's interpreter, several times as fast: it looks for what it has to replace in its language once, not per call.

Each call of a jitted function by another one goes through all of `triton.language` and replaces what it finds there,
although it has been replaced already; this takes a millisecond, and most calls are no longer than that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def hasten() -> None:
    """Does nothing where Triton is missing, or made in another way than is known here."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    known = ("_patch_lang", "_LangPatchScope")
    if not all(hasattr(interpreter, name) for name in known) or not hasattr(tl.core, "is_builtin"):
        return
    replace: Callable[[Any], Any] = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        languages = [module for module in modules if module in (tl, tl.core)]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return replace(function)

    interpreter._patch_lang = replace_once
