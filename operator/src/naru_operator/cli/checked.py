"""Exit codes of the commands, and errors of ours as a sentence. Wraps the work of every command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import click

from naru_proto.errors import InvalidRequest, NaruError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_T = TypeVar("_T")


def checked(work: Callable[[], _T]) -> _T:
    """Runs a command's work; errors of ours become a sentence and an exit code."""
    try:
        return work()
    except InvalidRequest as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except NaruError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
