"""`naru tenants`: keys are shown once and never written, and a file that is at fault stays as it was."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from naru_operator.adapters import local_processes
from naru_operator.adapters.tenants_file import read_tenants_file
from naru_operator.cli.main import cli
from naru_proto.tenants import KEY_PREFIX, Quotas, key_digest


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["tenants", *arguments], input=stdin)


def made(path: Path, *arguments: str) -> str:
    """The key that a command made."""
    found = run(*arguments, "-f", str(path))
    assert found.exit_code == 0, found.output
    (key,) = found.stdout.split()
    assert key.startswith(KEY_PREFIX) and len(key) >= len(KEY_PREFIX) + 43
    return key


@pytest.mark.parametrize("name", ["tenants.yaml", "tenants.json"])
def test_a_tenant_is_added_with_a_key_that_only_its_hash_is_kept_of(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    key = made(path, "add", "team-a", "--weight", "2", "--requests-per-minute", "60", "--model", "llama-*",
               "--key-name", "ci", "--expires", "2030-01-31T12:00:00Z")  # fmt: skip
    (tenant,) = read_tenants_file(path)
    assert (tenant.name, tenant.weight, tenant.quotas, tenant.models) == ("team-a", 2.0, Quotas(60), ("llama-*",))
    assert [(each.sha256, each.name, each.expires) for each in tenant.keys] == [
        (key_digest(key), "ci", "2030-01-31T12:00:00Z")
    ]
    assert key not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    second = made(path, "key", "team-a", "--key-name", "laptop")
    assert second != key and len(read_tenants_file(path)[0].keys) == 2
    listed = run("list", "-f", str(path)).output
    assert "team-a" in listed and "ci (until 2030-01-31T12:00:00Z), laptop" in listed and "nk-" not in listed
    assert run("check", str(path)).output == f"{path} is good: 1 tenants, 2 keys\n"
    if name.endswith("json"):
        json.loads(path.read_text())


def test_tenants_and_single_keys_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    made(path, "add", "a", "--key-name", "one")
    second = made(path, "key", "a")
    made(path, "add", "b")
    assert run("remove", "a", "--key", "one", "-f", str(path)).exit_code == 0
    assert [key.sha256 for key in read_tenants_file(path)[0].keys] == [key_digest(second)]
    assert "0 keys of the tenant 'a' are called so" in run("remove", "a", "--key", "one", "-f", str(path)).output
    assert run("remove", "a", "--key", key_digest(second)[:8], "-f", str(path)).exit_code == 0
    assert run("remove", "a", "-f", str(path)).exit_code == 0
    assert [tenant.name for tenant in read_tenants_file(path)] == ["b"]
    gone = run("remove", "a", "-f", str(path))
    assert (gone.exit_code, gone.output) == (2, "error: there is no tenant 'a'; there are: b\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "a"), "there is a tenant 'a' already; `naru tenants key a` gives it another key"),
        (("add", "no name"), "name: it must be 1 to 63 letters"),
        (("add", "b", "--model", "a b"), "models[0]: it must be a model's name"),
        (("key", "a", "--expires", "tomorrow"), "a time with its zone"),
        (("key", "c"), "there is no tenant 'c'; there are: a"),
    ],
)
def test_what_cannot_be_is_refused_and_shows_no_key(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = tmp_path / "t.yaml"
    made(path, "add", "a")
    before = path.read_bytes()
    found = run(*arguments, "-f", str(path))
    assert found.exit_code == 2 and message in found.output and "nk-" not in found.output
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["t.yaml"]


def test_a_broken_file_is_not_touched_and_its_faults_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("tenants: [{name: a, keys: [nk-secret]}]")
    for arguments in (("add", "b", "-f", str(path)), ("check", str(path)), ("list", "-f", str(path))):
        found = run(*arguments)
        assert found.exit_code == 2
        assert "tenants[0].keys[0]: it must be 64 hex digits" in found.output and "nk-secret" not in found.output
    assert "nk-secret" in path.read_text()
    assert "cannot be read" in run("check", str(tmp_path / "none")).output


def test_a_link_stays_one_and_modes_stay_as_they_are(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("# ours\n# by hand\ntenants: []\n")
    real.chmod(0o640)
    link.symlink_to(real)
    found = run("add", "a", "-f", str(link))
    assert found.exit_code == 0 and f"comments in {link} are not kept" in found.stderr
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [tenant.name for tenant in read_tenants_file(real)] == ["a"]


def test_a_key_from_elsewhere_is_hashed_without_standing_on_the_command_line() -> None:
    assert run("hash", stdin="my own key\n").output == key_digest("my own key") + "\n"
    assert run("hash", stdin="\n").exit_code == 2


def test_routers_on_this_machine_are_told_of_the_file(tmp_path: Path) -> None:
    without = local_processes.router_process("router", "redis://x", "127.0.0.1", 1, 2)
    told = local_processes.router_process("router", "redis://x", "127.0.0.1", 1, 2, tmp_path / "t.yaml")
    assert "--tenants-file" not in without.argv
    assert told.argv[-2:] == ("--tenants-file", str(tmp_path / "t.yaml"))


def test_routers_on_this_machine_share_a_folder_of_files(tmp_path: Path) -> None:
    told = local_processes.router_process("router", "redis://x", "127.0.0.1", 1, 2, files_dir=tmp_path / "files")
    assert told.argv[-2:] == ("--files-dir", str(tmp_path / "files"))


def test_a_broken_tenants_file_starts_nothing(tmp_path: Path) -> None:
    manifest, path = tmp_path / "m.yaml", tmp_path / "t.yaml"
    manifest.write_text(
        "apiVersion: serving.naru.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: m}\n"
        "spec: {model: {uri: 'pypi://x'}}\n"
    )
    path.write_text("tenants: 1")
    found = CliRunner().invoke(cli, ["up", str(manifest), "--tenants", str(path)])
    assert (found.exit_code, found.output) == (
        2,
        f"error: {str(path)!r} is no tenants file: tenants: it must be a list\n",
    )
