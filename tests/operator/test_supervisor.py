"""Real child processes: output, restarts, orderly and forced ends, death with the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from naru_operator.adapters import parent_death, supervisor
from naru_operator.adapters.child_process import ProcessSpec, start_child
from naru_operator.adapters.supervisor import ProcessExit, Supervisor
from naru_operator.core import backoff


def python(name: str, code: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code), *arguments))


FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(15, lambda *_: print('no', flush=True)); print('up'); [signal.pause() for _ in 'xxx']"
)


class Rig:
    """A supervisor and what it told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.exits: list[ProcessExit] = []
        self.news = asyncio.Event()
        self.supervisor = Supervisor(self._line, self._exit)

    def _line(self, name: str, text: str) -> None:
        self.lines.append((name, text))
        self.news.set()

    def _exit(self, ended: ProcessExit) -> None:
        self.exits.append(ended)
        self.news.set()

    async def until_lines(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.lines) < count:
                self.news.clear()
                await self.news.wait()

    async def until_exits(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.exits) < count:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Restart pauses are a hundred times shorter."""
    monkeypatch.setattr(supervisor, "restart_delay_s", lambda n: backoff.restart_delay_s(n) / 100)
    made = Rig()
    yield made
    for name in made.supervisor.names:
        await made.supervisor.stop(name, 5)


async def test_output_comes_line_by_line_under_the_name(rig: Rig) -> None:
    code = r"""
        import os, signal
        os.write(1, b"one\ntwo\r\n" + bytes([255]) + b"\nhalf")
        os.write(2, b" and half\n")
        signal.pause()
    """
    await rig.supervisor.start(python("a", code))
    await rig.until_lines(4)
    assert rig.lines == [("a", "one"), ("a", "two"), ("a", "\ufffd"), ("a", "half and half")]


async def test_a_line_without_end_is_cut_and_the_tail_is_bounded(rig: Rig) -> None:
    code = "import os, sys; [os.write(1, b'x' * 1000) for _ in range(500)]; os.write(1, b'\\n' * 100)"
    child = await start_child(python("a", code), rig._line)
    assert await child.wait() == 0
    assert len(child.tail) == 40
    assert max(len(text) for _, text in rig.lines) < 200_000
    assert sum(len(text) for _, text in rig.lines) == 500_000


async def test_a_child_that_ends_is_started_again_and_reported(rig: Rig) -> None:
    await rig.supervisor.start(python("a", "print('last words'); raise SystemExit(3)"))
    await rig.until_exits(3)
    assert [(e.name, e.exit_code, e.num_failures) for e in rig.exits[:3]] == [("a", 3, 1), ("a", 3, 2), ("a", 3, 3)]
    assert rig.exits[0].tail == ("last words",)
    assert rig.exits[0].restart_in_s < rig.exits[2].restart_in_s
    assert str(rig.exits[0]) == "a ended with exit code 3"


async def test_a_killed_child_is_started_again_as_another_process(rig: Rig) -> None:
    await rig.supervisor.start(python("a", FOREVER))
    await rig.until_lines(1)
    first = rig.supervisor.pid("a")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await rig.until_exits(1)
    assert str(rig.exits[0]) == "a was ended by SIGKILL"
    await rig.until_lines(2)
    assert rig.supervisor.pid("a") not in (None, first)
    assert rig.supervisor.names == ("a",)


async def test_stop_is_an_orderly_end_and_no_exit(rig: Rig) -> None:
    code = """
        import signal, sys
        signal.signal(15, lambda *_: (print("drained", flush=True), sys.exit(0)))
        print("up", flush=True)
        signal.pause()
    """
    await rig.supervisor.start(python("a", code))
    await rig.until_lines(1)
    pid = rig.supervisor.pid("a")
    assert pid is not None
    await rig.supervisor.stop("a", 30)
    assert rig.lines == [("a", "up"), ("a", "drained")]
    assert rig.exits == []
    assert not psutil.pid_exists(pid)
    assert rig.supervisor.names == ()
    await rig.supervisor.stop("a", 30)


async def test_who_does_not_go_is_killed(rig: Rig) -> None:
    await rig.supervisor.start(python("a", STUBBORN))
    await rig.until_lines(1)
    pid = rig.supervisor.pid("a")
    assert pid is not None
    await rig.supervisor.stop("a", 0.2)
    assert ("a", "no") in rig.lines
    assert not psutil.pid_exists(pid)


async def test_kill_all_ends_even_a_stop_that_waits(rig: Rig) -> None:
    await rig.supervisor.start(python("a", STUBBORN))
    await rig.until_lines(1)
    stop = asyncio.create_task(rig.supervisor.stop("a", 600))
    await rig.until_lines(2)
    rig.supervisor.kill_all()
    async with asyncio.timeout(10):
        await stop
    assert rig.supervisor.names == ()


async def test_a_child_waiting_for_its_restart_can_be_stopped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "restart_delay_s", lambda _: 600.0)
    await rig.supervisor.start(python("a", "raise SystemExit(1)"))
    await rig.until_exits(1)
    async with asyncio.timeout(5):
        await rig.supervisor.stop("a", 600)
    assert rig.supervisor.names == ()


async def test_a_program_that_is_not_there_says_so(rig: Rig) -> None:
    child = await start_child(ProcessSpec("a", ("/no/such/program",)), rig._line)
    assert await child.wait() == 1
    assert child.tail == ("cannot run '/no/such/program': No such file or directory",)


async def test_children_are_out_of_the_terminals_reach_and_get_our_environment(rig: Rig) -> None:
    spec = python("a", "import os; print(os.getsid(0) == os.getpid(), os.environ['A'], bool(os.environ['PATH']))")
    child = await start_child(ProcessSpec(spec.name, spec.argv, {"A": "b"}), rig._line)
    await child.wait()
    assert child.tail == ("True b True",)


def test_children_die_with_a_killed_parent() -> None:
    code = """
        import asyncio, sys
        from naru_operator.adapters.child_process import ProcessSpec, start_child
        async def run():
            program = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
            ready = asyncio.Event()
            child = await start_child(ProcessSpec("a", (sys.executable, "-c", program)), lambda *_: ready.set())
            await ready.wait()
            print(child.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(run())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(timeout=10)
    assert not child.is_running()


def test_a_parent_that_is_already_gone_is_noticed() -> None:
    script = Path(parent_death.__file__)
    done = subprocess.run(
        [sys.executable, "-I", "-S", script, "1", "/bin/echo", "ran"], capture_output=True, check=True
    )
    assert done.stdout == b""
