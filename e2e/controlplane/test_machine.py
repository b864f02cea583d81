"""What a machine without the cluster's parts is told. Needs no cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from naru_cluster import machine, parts
from naru_cluster.errors import Unavailable


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("runc", "nft") else f"/usr/bin/{name}")
    monkeypatch.setattr(
        machine, "PACKAGES", {name: machine.PACKAGES[name] for name in ("ip", "runc", "nft", "unshare")}
    )
    monkeypatch.setattr(machine, "CONTROL_PLANE_PROGRAMS", ("ip", "unshare"))
    with pytest.raises(Unavailable, match="run `apt-get install -y nftables runc`"):
        machine.check(full_node=True)
    assert machine.missing_packages(full_node=False) == []


def test_without_root_a_cluster_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match=r"needs root .*KUBECONFIG"):
        machine.check(full_node=False)


@pytest.mark.parametrize(
    ("ci", "root", "go", "must"),
    [("true", True, True, True), ("", True, True, False), ("true", False, True, False), ("true", True, False, False)],
)
def test_only_a_machine_that_can_carry_a_cluster_must_not_skip(
    monkeypatch: pytest.MonkeyPatch, ci: str, root: bool, go: bool, must: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/go" if go else None)
    assert machine.must_not_skip() is must


def test_parts_that_were_not_built_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NARU_CLUSTER_CACHE", str(tmp_path))
    with pytest.raises(Unavailable, match="etcd and perhaps more are not built: run `make cluster-parts`"):
        parts.find_parts()


def test_parts_are_built_anew_when_their_sources_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(parts.GO_SOURCES, tmp_path / "go")
    monkeypatch.setattr(parts, "GO_SOURCES", tmp_path / "go")
    monkeypatch.setenv("NARU_CLUSTER_CACHE", str(tmp_path))
    folder = parts.parts_folder()
    assert folder.parent == tmp_path
    with open(tmp_path / "go" / "etcd" / "main.go", "a") as source:
        source.write("\n// changed\n")
    assert parts.parts_folder() != folder
