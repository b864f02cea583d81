"""Prints the Python half of the `.proto` files with the protocol compiler of grpcio-tools.

Called by `python -m naru_proto` and tests, in a checkout with the `dev` extra. Parts of Naru never import this.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from naru_proto.errors import InternalError

PROTO_ROOT = "proto/src"
_FOLDER = "naru_proto/v1"


def wire_files(root: Path) -> dict[str, str]:
    """Messages, their stubs, services and theirs: path below the checkout `root` to text.

    Raises:
        InternalError: the compiler is not installed, or it refuses a `.proto` file (it says why on stderr).
    """
    try:
        from grpc_tools import protoc
    except ImportError as exc:
        raise InternalError("the protocol compiler is missing: run `make gen`, or install the extra `dev`") from exc
    source = root / PROTO_ROOT
    protos = sorted(str(path.relative_to(source)) for path in (source / _FOLDER).glob("*.proto"))
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "protoc",
            f"-I{source}",
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            f"--grpc_python_out={folder}",
            f"--mypy_grpc_out=quiet,generate_concrete_servicer_stubs:{folder}",
            *protos,
        ]
        if not protos or protoc.main(arguments) != 0:
            raise InternalError(f"the protocol compiler refused {protos!r}: correct what it names above")
        printed = sorted(Path(folder, _FOLDER).iterdir())
        return {f"{PROTO_ROOT}/{_FOLDER}/{path.name}": path.read_text(encoding="utf-8") for path in printed}
