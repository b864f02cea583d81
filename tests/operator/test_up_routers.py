"""`naru up --routers N`: where the routers listen, what other commands and people are told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from naru_operator.adapters.log_file import LogFile
from naru_operator.adapters.run_state import private_folder, running
from naru_operator.cli.progress import LineProgress
from naru_operator.cli.up import UpOptions, _noted, _print_ready
from naru_operator.cli.up_events import UpEvents
from naru_operator.core.desired import DesiredModel, DesiredState, EngineLimits

MODEL = DesiredModel("tiny", "pypi://x", "", (), 1, ("p",), EngineLimits())


def options(http_port: int = 0, grpc_port: int = 0, num_routers: int = 1) -> UpOptions:
    return UpOptions((), "127.0.0.1", http_port, grpc_port, None, None, None, False, num_routers)


@pytest.mark.parametrize("num_routers", [1, 3, 64])
def test_every_router_has_ports_of_its_own_that_other_commands_find(home: Path, num_routers: int) -> None:
    with _noted(options(18080, 0, num_routers), private_folder()) as (endpoints, _):
        ports = [port for pair in endpoints.ports.values() for port in pair]
        assert len(set(ports)) == len(ports) == 2 * num_routers and endpoints.http_port == 18080
        (state,) = running(home)
        assert (state.http_url, *state.more_http_urls) == tuple(
            f"http://127.0.0.1:{http_port}" for http_port, _ in endpoints.ports.values()
        )
    assert running(home) == [] and not endpoints.folder.exists()


def test_people_are_told_of_all_of_them(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with LogFile(tmp_path) as log, _noted(options(num_routers=3), private_folder()) as (endpoints, _):
        _print_ready(endpoints, DesiredState((MODEL,), ()), UpEvents(LineProgress(), log, is_verbose=False), {})
        shown = capsys.readouterr().out
        assert all(url in shown for url in (endpoints.http_url, *endpoints.more_http_urls))
        assert shown.startswith("more routers: ") and "tiny at " in shown
