"""The images as a cluster runs them: who they run as, what is in them, how they start and end."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from image_run import Image
    from naru_images.builder import Builder, BuiltImage

# The first test that asks for the images waits for their builds.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
OWN = ("operator", "router", "worker")
PROGRAM_FOLDERS = ("usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "opt/naru/bin")
COMPILERS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|cpp|clang|tcc|ld|as|rustc|go|nvcc)(-\d+)?")


@pytest.fixture(params=OWN)
def image(request: pytest.FixtureRequest, images: dict[str, Image]) -> Image:
    return images[request.param]


def part_of(image: Image) -> str:
    return image.name.removeprefix("naru.local/").partition(":")[0]


def installed(image: Image) -> dict[str, str]:
    """Canonical names and versions of the distributions in the image."""
    found = importlib.metadata.distributions(path=[str(image.site_packages)])
    return {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in found}


def locked(part: str) -> dict[str, str]:
    text = (ROOT / "images" / "requirements" / f"{part}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", text, flags=re.MULTILINE))


def test_it_runs_as_a_numeric_user_that_is_not_root(image: Image) -> None:
    assert image.config["User"] == "65532:65532"
    assert image.config["Entrypoint"] == ["/usr/bin/tini", "--", f"naru-{part_of(image)}"]
    assert not image.config.get("Volumes")


def test_it_starts_with_a_read_only_root(image: Image, tmp_path: Path) -> None:
    from image_run import run

    done = run(image, tmp_path, ["--help"])
    assert (done.returncode, f"naru-{part_of(image)}" in done.stdout) == (0, True), done.stdout


def test_the_operator_image_has_the_naru_command(images: dict[str, Image], tmp_path: Path) -> None:
    from image_run import run

    done = run(images["operator"], tmp_path, ["naru", "--version"], ["/usr/bin/tini", "--"])
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+\.\d+\.\d+", done.stdout)


def test_redis_starts_as_the_chart_runs_it(images: dict[str, Image], tmp_path: Path) -> None:
    from image_run import run

    done = run(images["redis"], tmp_path, ["-ec", "redis-cli --version; exec redis-server --version"], ["sh"])
    assert done.returncode == 0, done.stdout
    assert images["redis"].config["User"] == "999"
    assert "Redis server v=" in done.stdout


def test_it_holds_the_locked_packages_and_no_others(image: Image) -> None:
    assert installed(image) == {**locked(part_of(image)), "naru": importlib.metadata.version("naru")}


def test_each_image_holds_its_own_part_only(image: Image) -> None:
    parts = {path.name for path in image.site_packages.glob("naru_*") if path.is_dir() and "." not in path.name}
    assert parts == {"naru_proto", f"naru_{part_of(image)}"}


def test_no_image_has_torch_and_only_workers_have_arrays(images: dict[str, Image]) -> None:
    packages = {name: set(installed(image)) for name, image in images.items() if name in OWN}
    assert not any("torch" in names for names in packages.values())
    assert [name for name, names in packages.items() if names & {"numpy", "tokenizers"}] == ["worker"]
    assert [name for name, names in packages.items() if "kopf" in names] == ["operator"]


def test_there_is_no_compiler(image: Image) -> None:
    programs = {path.name for folder in PROGRAM_FOLDERS for path in (image.root / folder).glob("*")}
    assert "tini" in programs
    assert sorted(name for name in programs if COMPILERS.fullmatch(name)) == []


def test_the_list_of_parts_names_every_package(image: Image) -> None:
    bill: dict[str, Any] = json.loads((image.root / "usr/share/naru/sbom.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in bill["components"]}
    assert listed == installed(image)


def test_all_code_is_compiled_and_never_compared_with_its_source(image: Image) -> None:
    sources = [path for path in image.site_packages.rglob("*.py") if path.read_bytes()]
    flags = {}
    for source in sources:
        compiled = next((source.parent / "__pycache__").glob(f"{source.stem}.cpython-3??.pyc"))
        with compiled.open("rb") as stream:
            flags[source] = int.from_bytes(stream.read(8)[4:], "little")
    assert len(flags) > 100
    assert {source: flag for source, flag in flags.items() if flag != 1} == {}


def test_nothing_of_the_building_machine_is_in_it(image: Image) -> None:
    names = {variable.partition("=")[0] for variable in image.config["Env"]}
    known = {"PATH", "HOME", "LANG", "NARU_HOME", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
    assert names <= known
    assert not list((image.root / "run").glob("secrets/*"))
    assert not (image.root / "build").exists()
    assert list((image.root / "mnt").iterdir()) == []


def test_labels_say_what_it_is(image: Image) -> None:
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"naru-{part_of(image)}"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == importlib.metadata.version("naru")
    assert image.name.endswith(labels["org.opencontainers.image.revision"])


LOAD_ALL = """
import ctypes
from naru_worker.native import build, isa
paths = [build.find_library(variant) for variant in isa.VARIANTS]
assert all(path and path.parent == build.PACKAGE_DIR for path in paths), paths
for path in paths:
    ctypes.CDLL(str(path))
print("loaded", *isa.VARIANTS)
"""


def test_the_kernels_of_every_instruction_set_are_there_and_load(images: dict[str, Image], tmp_path: Path) -> None:
    from image_run import run

    done = run(images["worker"], tmp_path, ["-c", LOAD_ALL], ["python3"])
    assert (done.returncode, done.stdout) == (0, "loaded plain avx2 avx512 avx512_bf16 amx\n")


LISTEN = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]


def test_a_worker_starts_and_ends_on_a_signal(images: dict[str, Image], tmp_path: Path) -> None:
    from image_run import DEADLINE_S, started

    with started(images["worker"], tmp_path, LISTEN) as container:
        container.wait_line("ready: grpc")
        container.signal("TERM")
        assert container.process.wait(DEADLINE_S) == 0, container.read_rest()


def test_a_signal_before_the_program_listens_ends_it_too(image: Image, tmp_path: Path) -> None:
    """Process 1 is deaf to signals it has no handler for; a pod deleted while it starts would wait for its KILL."""
    from image_run import DEADLINE_S, started

    with started(image, tmp_path, ["-c", "import time; time.sleep(600)"], [*_init(image), "python3"]) as container:
        container.wait_running()
        container.signal("TERM")
        assert container.process.wait(DEADLINE_S) == 128 + 15


ORPHAN = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
os.wait()
def states():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        except OSError:
            pass
deadline = time.monotonic() + 30
while "Z" in (found := list(states())) and time.monotonic() < deadline:
    time.sleep(0.01)
print(sorted(found))
"""


def test_orphans_are_reaped(images: dict[str, Image], tmp_path: Path) -> None:
    from image_run import run

    done = run(images["worker"], tmp_path, ["-c", ORPHAN], [*_init(images["worker"]), "python3"])
    assert (done.returncode, "Z" in done.stdout) == (0, False), done.stdout


def _init(image: Image) -> list[str]:
    """The entry point less its program."""
    init: list[str] = image.config["Entrypoint"][:-1]
    return init


def test_the_archive_holds_both_names_over_the_same_layers(built: dict[str, BuiltImage]) -> None:
    image = built["worker"]
    with tarfile.open(image.archive) as archive:

        def read(digest: str) -> Any:
            stream = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert stream is not None
            return json.load(stream)

        index = archive.extractfile("index.json")
        assert index is not None
        manifests = json.load(index)["manifests"]
        assert [m["annotations"]["io.containerd.image.name"] for m in manifests] == list(image.names)
        first, second = (read(manifest["digest"]) for manifest in manifests)
        labels = [read(manifest["config"]["digest"])["config"]["Labels"] for manifest in (first, second)]
    assert first["layers"] == second["layers"] != []
    assert labels[1] == {**labels[0], "serving.naru.dev/build": "2"}


def test_unchanged_sources_build_nothing(builder: Builder, built: dict[str, BuiltImage], tmp_path: Path) -> None:
    (again,) = builder.build([built["redis"].part], tmp_path)
    assert (again.seconds, again.digest, again.archive) == (0.0, built["redis"].digest, tmp_path / "redis.tar")
    assert again.archive.stat().st_size == built["redis"].archive.stat().st_size
