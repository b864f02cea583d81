"""The `naru tenants` commands: who may ask the routers, with which keys. They work on a file; routers follow it.

A key is printed once, where it is made, and stands nowhere: the file has its hash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from naru_operator.cli.checked import checked

if TYPE_CHECKING:
    from naru_proto.tenants import Quotas, Tenant

_KEY_BYTES = 32
_SHOWN_DIGITS = 12

_F = TypeVar("_F", bound=Callable[..., Any])


def _file_option(command: _F) -> _F:
    return click.option(
        "-f", "--file", "path", type=click.Path(path_type=Path, dir_okay=False), required=True,
        envvar="NARU_TENANTS_FILE", show_envvar=True, help="The tenants file, YAML or JSON.",
    )(command)  # fmt: skip


@click.group("tenants")
def tenants() -> None:
    """Make API keys and say who may use what.

    The commands change a tenants file; `naru up --tenants FILE` and routers with --tenants-file follow it.
    """


@tenants.command("add")
@click.argument("name")
@_file_option
@click.option("--weight", type=click.FloatRange(0.001, 1000), default=1.0, show_default=True,
              help="Share beside other tenants where they compete.")  # fmt: skip
@click.option("--requests-per-minute", type=click.IntRange(1), default=None, help="Quota over all routers.")
@click.option("--tokens-per-minute", type=click.IntRange(1), default=None, help="Of prompts and answers.")
@click.option("--max-in-flight", type=click.IntRange(1), default=None, help="Requests at once.")
@click.option("--model", "models", multiple=True, help="Model it may use, '*' for any characters; may be repeated.")
@click.option("--key-name", default="", help="A name for its first key.")
@click.option("--expires", default="", help="When that key ends, such as 2030-01-31T12:00:00Z.")
def add(
    name: str,
    path: Path,
    weight: float,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_in_flight: int | None,
    models: tuple[str, ...],
    key_name: str,
    expires: str,
) -> None:
    """Add the tenant NAME with a new API key, which is printed once. The file is made if it is not there."""

    def work() -> int:
        from naru_proto.tenants import Quotas

        quotas = Quotas(requests_per_minute or 0, tokens_per_minute or 0, max_in_flight or 0)
        return _add(path, name, weight, quotas, models, (key_name, expires))

    sys.exit(checked(work))


@tenants.command("key")
@click.argument("name")
@_file_option
@click.option("--key-name", default="", help="A name for the key.")
@click.option("--expires", default="", help="When it ends, such as 2030-01-31T12:00:00Z.")
def key(name: str, path: Path, key_name: str, expires: str) -> None:
    """Give the tenant NAME one more API key, which is printed once."""
    sys.exit(checked(lambda: _add_key(path, name, (key_name, expires))))


@tenants.command("list")
@_file_option
def list_tenants(path: Path) -> None:
    """Show the tenants, their keys' names and their quotas."""
    sys.exit(checked(lambda: _list(path)))


@tenants.command("remove")
@click.argument("name")
@_file_option
@click.option("--key", "which", default=None, help="Only this key: its name, or the first digits of its hash.")
def remove(name: str, path: Path, which: str | None) -> None:
    """Remove the tenant NAME, or one of its keys."""
    sys.exit(checked(lambda: _remove(path, name, which)))


@tenants.command("check")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
def check(path: Path) -> None:
    """Check FILE as a router would read it."""
    sys.exit(checked(lambda: _check(path)))


@tenants.command("hash")
def hash_key() -> None:
    """Read an API key from the terminal or a pipe and print what stands in the file for it."""
    from naru_proto.tenants import key_digest

    given = click.prompt("key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    text = given.strip()
    if not text:
        raise click.UsageError("no key was given; write it on a line of its own")
    click.echo(key_digest(text))


def _add(
    path: Path, name: str, weight: float, quotas: Quotas, models: tuple[str, ...], key_words: tuple[str, str]
) -> int:
    from naru_operator.adapters.tenants_file import change_tenants_file
    from naru_proto.errors import InvalidRequest
    from naru_proto.tenants import Tenant, TenantKey, key_digest

    secret = _new_key()

    def change(before: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        if any(tenant.name == name for tenant in before):
            raise InvalidRequest(f"there is a tenant {name!r} already; `naru tenants key {name}` gives it another key")
        made = TenantKey(key_digest(secret), *key_words)
        return (*before, Tenant(name, (made,), weight, quotas=quotas, models=models))

    return _told(path, secret, lambda: change_tenants_file(path, change))


def _add_key(path: Path, name: str, key_words: tuple[str, str]) -> int:
    import dataclasses

    from naru_operator.adapters.tenants_file import change_tenants_file
    from naru_proto.tenants import TenantKey, key_digest

    secret = _new_key()

    def change(before: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        found = _find(before, name)
        more = dataclasses.replace(found, keys=(*found.keys, TenantKey(key_digest(secret), *key_words)))
        return tuple(more if tenant is found else tenant for tenant in before)

    return _told(path, secret, lambda: change_tenants_file(path, change))


def _remove(path: Path, name: str, which: str | None) -> int:
    import dataclasses

    from naru_operator.adapters.tenants_file import change_tenants_file
    from naru_proto.errors import InvalidRequest

    def change(before: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        found = _find(before, name)
        if which is None:
            return tuple(tenant for tenant in before if tenant is not found)
        meant = [key for key in found.keys if which and (key.name == which or key.sha256.startswith(which.lower()))]
        if len(meant) != 1:
            raise InvalidRequest(
                f"{len(meant)} keys of the tenant {name!r} are called so; `naru tenants list` has them"
            )
        fewer = dataclasses.replace(found, keys=tuple(key for key in found.keys if key is not meant[0]))
        return tuple(fewer if tenant is found else tenant for tenant in before)

    _note_comments(path)
    change_tenants_file(path, change)
    what = f"the tenant {name!r}" if which is None else f"one key of the tenant {name!r}"
    click.echo(f"removed {what}; routers follow within two seconds", err=True)
    return 0


def _list(path: Path) -> int:
    from naru_operator.adapters.tenants_file import read_tenants_file
    from naru_operator.cli.text import listed, table

    found = read_tenants_file(path)
    rows = [
        (
            tenant.name,
            f"{tenant.weight:g}",
            _limit(tenant.quotas.requests_per_minute),
            _limit(tenant.quotas.tokens_per_minute),
            _limit(tenant.quotas.max_in_flight),
            listed(tenant.models, 3) if tenant.models else "all",
            listed((_key_text(key.name, key.sha256, key.expires) for key in tenant.keys), 8),
        )
        for tenant in found
    ]
    click.echo(table(("TENANT", "WEIGHT", "REQUESTS/MIN", "TOKENS/MIN", "AT ONCE", "MODELS", "KEYS"), rows))
    return 0


def _check(path: Path) -> int:
    from naru_operator.adapters.tenants_file import read_tenants_file

    found = read_tenants_file(path)
    click.echo(f"{path} is good: {len(found)} tenants, {sum(len(tenant.keys) for tenant in found)} keys")
    return 0


def _told(path: Path, secret: str, write: Callable[[], None]) -> int:
    """Writes, and only then shows the key: one that is shown works."""
    _note_comments(path)
    write()
    click.echo(f"written to {path}; this is the only time that the key is shown:", err=True)
    click.echo(secret)
    return 0


def _note_comments(path: Path) -> None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return
    if any(line.lstrip().startswith("#") for line in lines):
        click.echo(f"note: comments in {path} are not kept", err=True)


def _find(found: tuple[Tenant, ...], name: str) -> Tenant:
    from naru_operator.cli.text import listed
    from naru_proto.errors import InvalidRequest

    tenant = next((tenant for tenant in found if tenant.name == name), None)
    if tenant is None:
        raise InvalidRequest(f"there is no tenant {name!r}; there are: {listed((each.name for each in found), 20)}")
    return tenant


def _new_key() -> str:
    import secrets

    from naru_proto.tenants import KEY_PREFIX

    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _limit(value: int) -> str:
    return str(value) if value else "-"


def _key_text(name: str, digest: str, expires: str) -> str:
    return f"{name or digest[:_SHOWN_DIGITS]}" + (f" (until {expires})" if expires else "")
