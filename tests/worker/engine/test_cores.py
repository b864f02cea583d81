"""How many threads compute where less than asked for may be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from naru_worker.adapters.cores import compute_threads, cpu_quota
from naru_worker.adapters.machine import huge_pages_warning


def machine(folder: Path, files: dict[str, str], siblings: dict[int, str]) -> dict[str, Path]:
    """Where a machine with these cgroup files and hyperthreads describes itself."""
    for name, content in files.items():
        path = folder / "cgroup" / name if name != "own" else folder / "own"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    for cpu, group in siblings.items():
        path = folder / "cpus" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(group + "\n")
    return {"cgroup_root": folder / "cgroup", "own_cgroups": folder / "own", "topology": folder / "cpus"}


PAIRS = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


@pytest.mark.parametrize(
    ("asked", "cpus", "siblings", "files", "count", "warning"),
    [
        (0, 8, {}, {}, 8, ""),
        (0, 8, PAIRS, {}, 4, ""),  # hyperthreads
        (0, 4, PAIRS, {}, 4, ""),  # one of each pair
        (3, 8, PAIRS, {}, 3, ""),
        (0, 8, {}, {"cpu.max": "max 100000"}, 8, ""),
        (0, 8, {}, {"cpu.max": "350000 100000"}, 3, ""),
        (0, 8, {}, {"cpu.max": "395000 100000"}, 4, ""),
        (0, 2, {}, {"cpu.max": "400000 100000"}, 2, ""),
        (0, 2, {}, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1, ""),
        (0, 2, {}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 2, ""),
        (0, 2, {}, {"cpu.max": "nonsense"}, 2, ""),
        (
            4,
            2,
            {},
            {},
            2,
            "not 4: this process may run on 2 CPUs, which are 2 cores; widen its CPU set",
        ),
        (
            4,
            8,
            {},
            {"cpu.max": "200000 100000"},
            2,
            "2 threads compute, not 4: the CPU quota grants 2 cores",
        ),
        (8, 8, PAIRS, {}, 4, "may run on 8 CPUs, which are 4 cores"),
        (0, 2, {}, {"cpu.max": "50000 100000"}, 1, "the CPU quota grants 0.5 cores, so that steps stand still"),
        (1, 2, {}, {"cpu.max": "50000 100000"}, 1, "raise the container's CPU limit"),
    ],
)
def test_threads_are_cut_by_what_limits_the_process_and_a_warning_names_it(
    tmp_path: Path, asked: int, cpus: int, siblings: dict[int, str], files: dict[str, str], count: int, warning: str
) -> None:
    found = compute_threads(asked, cpus=frozenset(range(cpus)), **machine(tmp_path, files, siblings))
    assert found.count == count
    assert warning in found.warning and (warning != "") == (found.warning != "")


@pytest.mark.parametrize(
    "files",
    [
        {"own": "0::/naru/pod", "naru/cpu.max": "150000 100000", "naru/pod/cpu.max": "max 100000"},
        {"own": "3:cpu,cpuacct:/a\n2:memory:/b", "cpu/a/cpu.cfs_quota_us": "15000", "cpu/a/cpu.cfs_period_us": "10000"},
        {"own": "0::/../..", "cpu.max": "150000 100000"},
    ],
)  # fmt: skip
def test_the_quota_of_any_group_around_the_process_counts(tmp_path: Path, files: dict[str, str]) -> None:
    places = machine(tmp_path, files, {})
    assert cpu_quota(places["cgroup_root"], places["own_cgroups"]) == 1.5


def test_this_machine_gives_at_least_one_thread() -> None:
    assert compute_threads(0).count >= 1
    assert compute_threads(1).count == 1


@pytest.mark.parametrize(
    ("setting", "warns"),
    [("always [madvise] never\n", False), ("[always] madvise never\n", False), ("always madvise [never]\n", True)],
)
def test_where_there_are_no_huge_pages_the_log_says_so_and_what_to_do(
    setting: str, warns: bool, tmp_path: Path
) -> None:
    file = tmp_path / "enabled"
    file.write_text(setting)
    warning = huge_pages_warning(file)
    assert ("set it to madvise" in warning) is warns
    assert (repr(setting.strip()) in warning) is warns


def test_a_system_that_knows_no_huge_pages_is_told_of_too(tmp_path: Path) -> None:
    assert "is 'missing'" in huge_pages_warning(tmp_path / "enabled")
