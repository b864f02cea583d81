"""Reads the small files of a model folder: JSON and templates, with limits.

Used by the checkpoint and tokenizer openers. A missing optional file is None; a broken one is an error, for dropping it
would silently change how the model behaves.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import NoReturn

from naru_proto.errors import LoadError
from naru_worker.core.fields import shown

MAX_CONFIG_BYTES = 16 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_TEMPLATE_BYTES = 2**20

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def read_small_file(path: Path, limit_bytes: int) -> bytes | None:
    """The file's bytes, or None when there is no such file.

    Raises:
        LoadError: not a regular file, unreadable, or longer than the limit.
    """
    try:
        # Without O_NONBLOCK a pipe under this name would block the worker for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise LoadError(f"{path}: cannot be opened ({e.strerror}); check the path and its rights") from e
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise LoadError(f"{path}: is not a regular file")
        if info.st_size > limit_bytes:
            raise LoadError(f"{path}: has {info.st_size} bytes; at most {limit_bytes} are allowed")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    except OSError as e:
        raise LoadError(f"{path}: cannot be read ({e.strerror})") from e
    finally:
        os.close(descriptor)


def parse_json_object(raw: bytes, where: str) -> dict[str, object]:
    """A JSON object without duplicate keys, NaN or infinities.

    Raises:
        LoadError: it is anything else.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise LoadError(f"{where}: nests too deep to be a model file") from None
    except ValueError as e:
        raise LoadError(f"{where}: is not valid JSON ({e}); fetch the file again") from e
    if not isinstance(value, dict):
        raise LoadError(f"{where}: holds {shown(value)}; an object is needed")
    return value


def read_json_object(path: Path, limit_bytes: int = MAX_CONFIG_BYTES) -> dict[str, object] | None:
    """The JSON object in a file, or None when there is no such file.

    Raises:
        LoadError: the file cannot be read or is no JSON object.
    """
    raw = read_small_file(path, limit_bytes)
    return None if raw is None else parse_json_object(raw, str(path))


def refuse_pickle(path: Path) -> NoReturn:
    """Raises LoadError: pickle files run code when they are read."""
    raise LoadError(
        f"{path}: is a pickle file, which can run any code when it is read; convert it to safetensors or GGUF",
        param="format",
    )


def read_chat_template(folder: Path, tokenizer_config: dict[str, object]) -> str:
    """The folder's chat template: chat_template.jinja, or tokenizer_config.json's; empty when there is none.

    A list of named templates means the one called "default".

    Raises:
        LoadError: a template is of the wrong type, too long or not UTF-8.
    """
    path = folder / "chat_template.jinja"
    raw = read_small_file(path, MAX_TEMPLATE_BYTES)
    if raw is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise LoadError(f"{path}: is not UTF-8 ({e.reason} at byte {e.start})") from e
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise LoadError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {shown(value)}; it must be a string or a list of "
            "named templates",
            param="chat_template",
        )
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is there twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
