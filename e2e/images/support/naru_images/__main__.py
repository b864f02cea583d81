"""`python -m naru_images base|build|export`: makes the base, builds what has changed, copies the archives."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from naru_images.buildah import BuildError, install_tools
from naru_images.builder import Builder
from naru_images.sources import PARTS


def main(argv: list[str] | None = None) -> None:
    """The command. Prints one line for each image; what builds say goes to standard error."""
    parser = argparse.ArgumentParser(prog="naru_images", description=__doc__)
    parser.add_argument("--cache", type=Path, help="folder for the storage and the archives (default: below ~/.cache)")
    commands = parser.add_subparsers(dest="command", required=True)
    base_command = commands.add_parser("base", help="makes the two base images")
    base_command.add_argument("--install-packages", action="store_true", help="first what is missing, by apt-get")
    for name, help_text in (("build", "builds the images"), ("export", "builds them and copies the archives")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="not all")
        if name == "export":
            command.add_argument("folder", type=Path, help="where the OCI archives go")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "base" and arguments.install_packages:
            install_tools()
        builder = Builder(arguments.cache)
        if arguments.command == "base":
            base = builder.base()
            print(base.runtime, base.build, sep="\n")
            return
        chosen = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
        folder = arguments.folder if arguments.command == "export" else None
        for image in builder.build(chosen, folder):
            how = f"built in {image.seconds:.0f} s" if image.seconds else "unchanged"
            print(f"{' '.join(image.names)}  {image.archive}  ({how})")
    except BuildError as error:
        sys.exit(f"naru_images: {error}")


if __name__ == "__main__":
    main()
