"""What `make gen` prints is what stands in the checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("grpc_tools")

from naru_proto import __main__ as printing  # noqa: E402
from naru_proto import crdgen  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout that holds the sources of printing and nothing printed."""
    target = tmp_path / "proto" / "src" / "naru_proto" / "v1"
    target.mkdir(parents=True)
    for path in (ROOT / "proto" / "src" / "naru_proto" / "v1").glob("*.proto"):
        shutil.copy(path, target)
    return tmp_path


def test_printed_files_are_fresh() -> None:
    assert printing.stale_files(ROOT) == []


def test_nothing_printed_is_left_from_former_sources() -> None:
    printed = {ROOT / path for path in printing.printed_files(ROOT)}
    folders = [(folder, "*.yaml") for folder in printing.CRD_FOLDERS]
    for folder, pattern in (*folders, ("docs/reference", "*.md"), ("proto/src/naru_proto/v1", "*_pb2*.py*")):
        assert set((ROOT / folder).glob(pattern)) <= printed


def test_printing_makes_a_checkout_fresh_and_a_changed_file_is_told(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printing.main(["--root", str(checkout), "--check"]) == 1
    assert printing.main(["--root", str(checkout)]) == 0
    assert printing.main(["--root", str(checkout), "--check"]) == 0
    capsys.readouterr()
    (checkout / "crds" / "workerpools.yaml").write_text("edited: true\n", encoding="utf-8")
    assert printing.main(["--root", str(checkout), "--check"]) == 1
    assert capsys.readouterr().err == "crds/workerpools.yaml is stale: run `make gen`\n"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        printing.main(["--root", str(tmp_path)])
    assert "is not a checkout of Naru" in capsys.readouterr().err


def test_a_broken_proto_is_told_and_nothing_is_written(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (checkout / "proto/src/naru_proto/v1/worker.proto").write_text('syntax = "proto3"; message {', encoding="utf-8")
    assert printing.main(["--root", str(checkout)]) == 1
    assert "worker.proto:1:" in capfd.readouterr().err
    assert not (checkout / "crds").exists()


@pytest.mark.parametrize("root", crdgen.ROOTS, ids=lambda root: root.__name__)
def test_a_printed_definition_is_yaml_of_the_same_data(root: type) -> None:
    plural = crdgen.crd_names(root)["plural"]
    text = (ROOT / "crds" / f"{plural}.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == crdgen.crd(root)
