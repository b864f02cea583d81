"""The `naru` command."""

from naru_operator.cli.main import main

__all__ = ["main"]
