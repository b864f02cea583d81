"""`python -m naru_mirror`: serves until SIGTERM; `python -m naru_mirror fetch PACKAGE` only fills the wheel cache."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from naru_mirror.catalog import Catalog, CatalogError
from naru_mirror.server import Mirror, open_server
from naru_mirror.wheel_cache import WheelCacheError, cached_wheel, default_cache


def main(argv: list[str] | None = None) -> None:
    """The command."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments[:1] == ["fetch"]:
            _fetch(arguments[1:])
        else:
            _serve(arguments)
    except (CatalogError, WheelCacheError, OSError) as error:
        sys.exit(f"naru_mirror: {error}")


def _fetch(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="naru_mirror fetch", description="Downloads wheels into the cache.")
    parser.add_argument("packages", nargs="+", metavar="PACKAGE[==VERSION]")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args(argv)
    for package in options.packages:
        print(cached_wheel(package, options.cache))


def _serve(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="naru_mirror", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument(
        "--package", action="append", default=[], metavar="NAME[==VERSION]", help="from the wheel cache"
    )
    parser.add_argument("--wheel", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument("--hub", action="append", default=[], metavar="ORG/NAME[@REVISION]=FOLDER")
    parser.add_argument("--gated", action="append", default=[], metavar="ORG/NAME=TOKEN")
    parser.add_argument("--rate-bytes-per-s", type=int, default=0, help="of each body; 0 is as fast as it goes")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of downloaded wheels")
    options = parser.parse_args(argv)
    mirror = Mirror(_catalog(options), options.rate_bytes_per_s)
    host, _, port = options.listen.rpartition(":")
    if not (host and port.isdigit()):
        parser.error(f"--listen is {options.listen!r}; write HOST:PORT")
    with open_server(mirror, host.strip("[]"), int(port)) as server:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print(f"naru-mirror ready: {mirror.url}", flush=True)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            sys.exit(0)


def _catalog(options: argparse.Namespace) -> Catalog:
    catalog = Catalog()
    for wheel in [*options.wheel, *(cached_wheel(package, options.cache) for package in options.package)]:
        catalog.add_wheel(wheel)
    for text in options.hub:
        name, separator, folder = text.partition("=")
        repository, _, revision = name.partition("@")
        if not (separator and "/" in repository):
            raise CatalogError(f"--hub {text!r}: write ORG/NAME=FOLDER or ORG/NAME@REVISION=FOLDER")
        catalog.add_revision(repository, Path(folder), revision or "main")
    for text in options.gated:
        repository, separator, token = text.partition("=")
        if not (separator and token and repository in catalog.revisions):
            raise CatalogError(f"--gated for {repository!r}: write ORG/NAME=TOKEN of a repository given with --hub")
        catalog.tokens[repository] = token
    return catalog


if __name__ == "__main__":
    main()
