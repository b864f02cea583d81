"""The packing process: ``python -P -m naru_worker.adapters.images.pack PARENT_PID``.

Started by `packing`, so that a hostile file can neither stall nor crash the worker, nor take its memory. Packs one
model after another, and ends by itself: when nothing was asked of it for a while, after a number of models, when its
memory or its disk gave out, and with its parent. For each model it reads the source, says on standard output what it
would write, waits to be told, and writes the destination, which the parent has made in that size meanwhile. Lines are
JSON; on standard input:

    {"source": …, "destination": …}        the next model; paths are UTF-8, odd bytes as lone surrogates
    {"write": bool}                        after the plan; false: the image is here already

and on standard output:

    {"digest": …, "num_bytes": …}          the plan
    {"done": bytes, "total": bytes}        progress
    {"finished": true, "goes_on": bool}    the destination is whole and on the disk, or was not wanted
    {"code": …, "message": …, "param": …, "goes_on": bool}
                                           an error; like the line before it the model's last, and `goes_on` tells
                                           whether another one may be asked for
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import platform
import resource
import select
import sys
from pathlib import Path

from naru_proto.errors import LoadError, NaruError
from naru_worker.adapters.images.planning import plan_image
from naru_worker.adapters.images.tokenizer_sections import TokenizerSections
from naru_worker.adapters.images.writer import ImageWriter
from naru_worker.adapters.machine import die_with_parent, release_free_memory
from naru_worker.adapters.models.opening import open_files
from naru_worker.adapters.ops.native_lib import load_best

IDLE_S = 10.0
MAX_MODELS = 64
"""Whatever grows with each model does not grow for ever."""
NICENESS = 10
MAX_PRIVATE_BYTES = 4 * 2**30
"""Memory of its own that a packing process may take; source and image are mapped and do not count."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_LOWEST_BEST_EFFORT = 2 << 13 | 7
_STDIN = 0


class Orders:
    """Lines of standard input."""

    def __init__(self) -> None:
        self._buffer = b""

    def next(self, limit_s: float | None) -> dict[str, object] | None:
        """The next order; None: none came within the limit, or none will come."""
        while b"\n" not in self._buffer:
            if not select.select([_STDIN], [], [], limit_s)[0]:
                return None
            piece = os.read(_STDIN, 2**16)
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        order: dict[str, object] = json.loads(line)
        return order


def main(parent_pid: int) -> int:
    """Packs what is asked for; returns the exit status."""
    die_with_parent(parent_pid)
    _step_back()
    # What is here now stays. A model's own objects are many and short-lived: they are collected behind it.
    gc.freeze()
    gc.disable()
    orders, sections = Orders(), TokenizerSections()
    for num_left in reversed(range(MAX_MODELS)):
        order = orders.next(IDLE_S)
        if order is None or not _serve(order, orders, sections, num_left > 0):
            break
        gc.collect()
        release_free_memory()
    return 0


def _serve(order: dict[str, object], orders: Orders, sections: TokenizerSections, may_go_on: bool) -> bool:
    """Packs one model; returns whether the process is fit for another one."""
    source, destination = _path(order["source"]), _path(order["destination"])
    try:
        _pack(source, destination, orders, sections)
    except NaruError as e:
        _say(code=e.code, message=e.message, param=e.param, goes_on=may_go_on)
        return may_go_on
    except MemoryError:
        why = f"{source}: packing needs more than {MAX_PRIVATE_BYTES} bytes of memory"
        _say(code=LoadError.code, message=why, goes_on=False)
        return False
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full" if full else e.strerror or str(e)
        _say(code=LoadError.code, message=f"{destination}: cannot be written: {what}", goes_on=False)
        return False
    _say(finished=True, goes_on=may_go_on)
    return may_go_on


def _pack(source: Path, destination: Path, orders: Orders, sections: TokenizerSections) -> None:
    files = open_files(source)
    try:
        planned = plan_image(files, sections)
        _say(digest=planned.index.digest, num_bytes=planned.file_bytes)
        answer = orders.next(None)
        if answer is None:
            sys.exit(0)
        if not answer["write"]:
            return
        descriptor = os.open(destination, os.O_RDWR | os.O_CLOEXEC)
        try:
            ImageWriter(load_best(), descriptor, planned, _progress).write(files.checkpoint)
        finally:
            os.close(descriptor)
    finally:
        files.checkpoint.close()


def _step_back() -> None:
    """The models being served come first: at the processor, at the disk, and when memory runs out."""
    os.nice(NICENESS)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass  # Not Linux, or not allowed: the worker then relies on the memory limit alone.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = MAX_PRIVATE_BYTES if hard == resource.RLIM_INFINITY else min(MAX_PRIVATE_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        # Not the idle class: requests may be waiting for this very model.
        ctypes.CDLL(None).syscall(number, 1, 0, _LOWEST_BEST_EFFORT)


def _path(text: object) -> Path:
    return Path(os.fsdecode(str(text).encode("utf-8", "surrogateescape")))


def _progress(done: int, total: int) -> None:
    _say(done=done, total=total)


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
