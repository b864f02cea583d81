"""`python -m naru_proto`: prints wire code, `crds/`, the chart's copy and `docs/reference/`, or checks all of them.

Called by `make gen` and `make verify`, in a checkout. Parts of Naru never import this.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from naru_proto import crddocs, crdgen, wiregen
from naru_proto.errors import NaruError

CRD_FOLDERS = ("crds", "charts/naru/crds")
"""Where the definitions are printed: for `kubectl apply`, and for Helm."""

# `helm show crds` puts one file after the other and nothing between them.
_NOTE = "---\n# Printed by `make gen` from the models in naru_proto.crd. Do not edit.\n"


def printed_files(root: Path) -> dict[str, str]:
    """Every printed file: path below the checkout `root` to its text.

    Raises:
        InternalError: see `wiregen.wire_files`.
    """
    files = wiregen.wire_files(root)
    for model in crdgen.ROOTS:
        plural = crdgen.crd_names(model)["plural"]
        body = yaml.safe_dump(crdgen.crd(model), sort_keys=False, allow_unicode=True, width=120)
        for folder in CRD_FOLDERS:
            files[f"{folder}/{plural}.yaml"] = _NOTE + body
        files[f"docs/reference/{model.__name__.lower()}.md"] = crddocs.reference_page(model)
    return files


def stale_files(root: Path) -> list[str]:
    """Printed files that are missing below `root` or differ from what would be printed now."""
    return [
        path
        for path, text in printed_files(root).items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints or checks; the exit status is 1 when a check finds stale files or nothing could be printed."""
    parser = argparse.ArgumentParser(
        prog="python -m naru_proto", description="Prints wire code, custom resource definitions and reference pages."
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout to work in (default: here)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    options = parser.parse_args(arguments)
    if not (options.root / wiregen.PROTO_ROOT).is_dir():
        parser.error(f"--root {str(options.root)!r} is not a checkout of Naru: it has no folder {wiregen.PROTO_ROOT}")
    try:
        if options.check:
            stale = stale_files(options.root)
            sys.stderr.writelines(f"{path} is stale: run `make gen`\n" for path in stale)
            return 1 if stale else 0
        for path, text in printed_files(options.root).items():
            target = options.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except NaruError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
