"""Shell completion: the script to load, and candidates that are cheap to find. Called by the shell."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import click
from click.shell_completion import get_completion_class

from naru_operator.adapters.run_state import naru_home, running

_TIMEOUT_S = 0.5
"""A key press must not hang."""

_SCHEMES = ("file://", "hf://", "pypi://")


def completion_script(cli: click.Command, shell: str) -> str:
    """What the shell must read to complete `naru`."""
    kind = get_completion_class(shell)
    assert kind is not None, shell
    complete = kind(cli, {}, "naru", "_NARU_COMPLETE")
    # Not `source()`: for bash it runs a bash to ask its version, which fails where another shell is the only one.
    return complete.source_template % complete.source_vars()


def running_model_names() -> list[str]:
    """Models of the instances that run here; none where nothing answers at once."""
    found: set[str] = set()
    for state in running(naru_home()):
        try:
            with urllib.request.urlopen(f"{state.http_url}/v1/models", timeout=_TIMEOUT_S) as reply:
                found |= {str(card["id"]) for card in json.load(reply)["data"]}
        except (OSError, ValueError, KeyError, TypeError, urllib.error.URLError):
            continue
    return sorted(found)


def model_uris(incomplete: str) -> list[str]:
    """Schemes, then packages and repositories fetched before."""
    if "://" not in incomplete:
        return [scheme for scheme in _SCHEMES if scheme.startswith(incomplete)]
    models = naru_home() / "models"
    known = [f"pypi://{path.name}" for path in models.glob("pypi/*") if path.is_dir()]
    known += [f"hf://{path.parent.name}/{path.name}" for path in models.glob("hf/*/*") if path.is_dir()]
    return sorted(uri for uri in known if uri.startswith(incomplete))
