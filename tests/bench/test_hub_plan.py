from __future__ import annotations

from pathlib import Path

import pytest
from bench.hub_plan import PARTIAL_RESULTS_PATH, PARTS, QUICK, RESULTS_PATH, make_plan
from bench.hub_worker import Place, WorkerLimits, generate_request, worker_argv


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


def test_a_whole_run_writes_the_results_and_a_part_of_one_does_not(model: str) -> None:
    assert make_plan(["--model", model]).output == RESULTS_PATH
    for flags in (["--quick"], ["--only", "itl"], ["--models", "30"], ["--requests", "5"], ["--resident", "4"]):
        assert make_plan(["--model", model, *flags]).output == PARTIAL_RESULTS_PATH


def test_parts_run_in_their_order_whatever_the_flag_says(model: str) -> None:
    assert make_plan(["--model", model, "--only", "traffic, latency"]).parts == ("latency", "traffic")
    assert make_plan(["--model", model]).parts == PARTS


def test_given_sizes_replace_those_of_a_quick_run(model: str) -> None:
    scale = make_plan(["--model", model, "--quick", "--requests", "77"]).scale
    assert (scale.num_requests, scale.num_models) == (77, QUICK.num_models)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--models", "0"], "--models is 0", id="no models"),
        pytest.param(["--models", "2"], "--models is 2", id="too few models"),
        pytest.param(["--max-tokens", "-1"], "--max-tokens is -1", id="negative tokens"),
        pytest.param(["--only", "speed"], "'speed' is not one of", id="unknown part"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    flags: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        make_plan(["--model", model, *flags])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_worker_gets_the_limits_that_were_given_and_no_others() -> None:
    place = Place(Path("/w"), Path("/logs"))
    argv = worker_argv(WorkerLimits(1000, image_budget_bytes=50, max_loads=3), place, 4321)
    flags = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert flags["--memory-budget-bytes"] == "1000"
    assert flags["--host-budget-bytes"] == "0"
    assert flags["--image-budget-bytes"] == "50"
    assert flags["--image-dir"] == "/w/images"
    assert flags["--max-loads"] == "3"
    assert flags["--listen"] == "127.0.0.1:4321"
    assert "--high-watermark" not in flags


def test_requests_are_greedy_and_of_fixed_length() -> None:
    request = generate_request("r", "m", "Hello", 8, with_logprobs=True)
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.ignore_eos) == (0.0, 8, True)
    assert request.sampling.HasField("logprobs")
    assert request.return_token_ids
    assert not generate_request("r", "m", "Hello", 8).sampling.HasField("logprobs")
