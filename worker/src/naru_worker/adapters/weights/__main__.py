"""``python -m naru_worker.adapters.weights PATH``: what a model's files say of its shape, as JSON. For `naru plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from naru_proto.errors import NaruError
from naru_worker.adapters.weights.describing import describe


def main(arguments: list[str]) -> int:
    """Prints a description, or ``error`` and ``message``; 1 when there is none."""
    try:
        print(json.dumps(describe(Path(arguments[0]))))
    except NaruError as error:
        print(json.dumps({"error": error.code, "message": error.message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
