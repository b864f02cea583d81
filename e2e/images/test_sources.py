"""Locks and digests: what tells that an image is stale. Needs no tool and builds nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from naru_images.sources import Part

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "operator": ("operator", "cli"),
    "router": ("router",),
    "worker": ("worker",),
    "worker-cuda": ("worker", "cuda"),
}


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "images" / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_meets_what_the_project_asks_for(lock: str) -> None:
    """When it fails: run `make image-locks`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(t for e in EXTRAS[lock] for t in project["optional-dependencies"][e])]
    wanted = [Requirement(text) for text in texts]
    found = pins(lock)
    unmet = [str(r) for r in wanted if not r.specifier.contains(found.get(r.name.lower(), "0"), prereleases=True)]
    assert unmet == []


@pytest.mark.parametrize("lock", [*EXTRAS, "build"])
def test_every_pin_has_hashes(lock: str) -> None:
    text = (ROOT / "images" / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(entries) == len(pins(lock)) > 5
    assert [entry.partition(" ")[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_torch_is_in_the_cuda_variant_alone() -> None:
    assert [lock for lock in EXTRAS if "torch" in pins(lock)] == ["worker-cuda"]


@pytest.fixture
def part(tmp_path: Path) -> Part:
    from naru_images.sources import Part

    (tmp_path / "code" / "__pycache__").mkdir(parents=True)
    (tmp_path / "Dockerfile").write_text("FROM base")
    (tmp_path / "code" / "a.py").write_text("a = 1")
    return Part("thing", "Dockerfile", ("code",))


def test_a_digest_changes_with_content_name_mode_and_base(part: Part, tmp_path: Path) -> None:
    from naru_images.sources import source_digest

    seen = [source_digest(part, "base", tmp_path), source_digest(part, "other base", tmp_path)]
    file = tmp_path / "code" / "a.py"
    file.write_text("a = 2")
    seen.append(source_digest(part, "base", tmp_path))
    file.chmod(0o755)
    seen.append(source_digest(part, "base", tmp_path))
    file.rename(file.with_name("b.py"))
    seen.append(source_digest(part, "base", tmp_path))
    assert len(set(seen)) == len(seen)


def test_what_a_build_does_not_read_changes_no_digest(part: Part, tmp_path: Path) -> None:
    from naru_images.sources import source_digest

    before = source_digest(part, "base", tmp_path)
    (tmp_path / "code" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (tmp_path / "code" / "libnaru_cpu_avx2_x.so").write_bytes(b"x")
    (tmp_path / "other.py").write_text("")
    assert source_digest(part, "base", tmp_path) == before


def test_every_file_that_a_dockerfile_copies_counts() -> None:
    from naru_images.sources import OWN_PARTS, source_files

    for part in OWN_PARTS:
        read = {str(path.relative_to(ROOT)) for path in source_files(part)}
        text = (ROOT / part.dockerfile).read_text(encoding="utf-8")
        copied = [
            name for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for name in line.split()[:-1]
        ]
        assert copied
        missing = [name for name in copied if not any(f == name or f.startswith(f"{name.rstrip('/')}/") for f in read)]
        assert missing == [], part.name


def test_a_package_with_files_for_newer_pythons_does_not_end_a_build(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "newer.py").write_text("def f[[T]](): this is not Python yet\n")
    step = (ROOT / "images" / "steps" / "dependencies.sh").read_text(encoding="utf-8")
    command = step[step.index("/opt/naru/bin/python -m compileall") :]
    command = command.replace("/opt/naru/bin/python", sys.executable).replace("/opt/naru/lib", str(tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(["sh", "-euc", command], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "newer.py" in done.stdout + done.stderr and "without bytecode" in done.stderr
    assert [path.name.partition(".")[0] for path in tmp_path.glob("__pycache__/*.pyc")] == ["good"]
