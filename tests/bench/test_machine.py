from __future__ import annotations

import os

import pytest
from bench.machine import describe, isa_of, process_tree, program_name, usable_cores, usage_by_process, usage_of

AVX2 = ("avx2", "fma")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(("sse4_2",), "baseline", id="old"),
        pytest.param(AVX2, "avx2", id="avx2"),
        pytest.param((*AVX2, "avx_vnni"), "avx2-vnni", id="client with vnni"),
        pytest.param(AVX512, "avx512", id="first avx512 servers"),
        pytest.param((*AVX512, "avx512_vnni"), "avx512-vnni", id="vnni"),
        pytest.param((*AVX512, "avx512_vnni", "amx_tile", "amx_int8"), "amx", id="amx"),
    ],
)
def test_the_widest_complete_instruction_set_names_the_machine(flags: tuple[str, ...], expected: str) -> None:
    assert isa_of(flags) == expected


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "expected"),
    [
        pytest.param(8, "", 8, id="no cgroup"),
        pytest.param(8, "max 100000", 8, id="no quota"),
        pytest.param(8, "250000 100000", 2, id="quota of two and a half"),
        pytest.param(8, "50000 100000", 1, id="less than one is one"),
        pytest.param(2, "800000 100000", 2, id="mask below quota"),
    ],
)
def test_cores_are_what_mask_and_quota_leave(affinity: int, cpu_max: str, expected: int) -> None:
    assert usable_cores(affinity, cpu_max) == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["/opt/bin/redis-server", "*:0"], "redis-server", id="program"),
        pytest.param(["redis-server unixsocket:/run/x"], "redis-server", id="title set by the program"),
        pytest.param(["/usr/bin/python3.11", "-m", "naru_worker", "--listen", "x"], "naru_worker", id="module"),
        pytest.param(["python", "/opt/bin/naru", "up"], "naru", id="script"),
        pytest.param(["python"], "python", id="bare"),
        pytest.param([], "", id="zombie"),
    ],
)
def test_a_process_is_named_by_what_it_runs(argv: list[str], expected: str) -> None:
    assert program_name(argv) == expected


def test_this_machine_and_process_can_be_described() -> None:
    assert 1 <= describe().num_cores <= len(os.sched_getaffinity(0))
    usage = usage_of(os.getpid())
    assert usage.rss_bytes > 1_000_000
    assert usage.cpu_s > 0
    assert sum(each.cpu_s for each in usage_by_process(os.getpid())) >= usage.cpu_s


def test_a_process_that_is_gone_has_no_tree() -> None:
    assert process_tree(2**22 + 1) == []  # above the largest process id Linux gives
