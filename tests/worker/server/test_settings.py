"""Settings from flags and environment: derived, checked, and told by name and value."""

from __future__ import annotations

import subprocess
import sys

import pytest

from naru_worker.settings import SettingsError, WorkerSettings
from naru_worker.settings_source import field_docs, knobs, read_settings


def test_nothing_given_is_the_defaults() -> None:
    assert read_settings([], {}) == WorkerSettings()


def test_flags_beat_the_environment() -> None:
    environ = {"NARU_WORKER_NUM_THREADS": "3", "NARU_WORKER_ID": "from-env", "NARU_WORKER_POOL": "gold"}
    settings = read_settings(["--num-threads", "5"], environ)
    assert settings.engine.num_threads == 5
    assert settings.server.worker_id == "from-env"
    assert settings.registry.pool == "gold"


def test_lists_and_truth_values() -> None:
    argv = ["--load", "a=file:///a", "--load", "b=file:///b", "--exit-with-parent", "--enable-prefix-caching", "off"]
    settings = read_settings(argv, {})
    assert settings.server.load == ("a=file:///a", "b=file:///b")
    assert settings.server.exit_with_parent
    assert not settings.engine.enable_prefix_caching
    assert read_settings([], {"NARU_WORKER_LOAD": "a=x,b=y"}).server.load == ("a=x", "b=y")


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--num-threads", "many"], {}, ("--num-threads", "'many'", "whole number")),
        ([], {"NARU_WORKER_NUM_THREADS": "2.5"}, ("NARU_WORKER_NUM_THREADS", "'2.5'")),
        (["--num-threads", "-1"], {}, ("num_threads", "-1")),
        (["--backend", "gpu"], {}, ("--backend", "'gpu'", "cpu, cuda, ref")),
        (["--num-accelerators", "0"], {}, ("num_accelerators", "0", "at least 1")),
        (["--num-accelerators", "2"], {}, ("num_accelerators is 2", "backend cpu", "cuda or ref")),
        (
            ["--backend", "ref", "--num-accelerators", "6", "--tensor-parallel-size", "3"],
            {},
            ("tensor_parallel_size is 3", "num_accelerators 6", "one of 1, 2, 4, 6"),
        ),
        (["--speculation", "maybe"], {}, ("--speculation", "'maybe'", "auto, off")),
        (["--max-draft-tokens", "0"], {}, ("max_draft_tokens", "0")),
        (["--kv-cache-dtype", "fp8"], {}, ("--kv-cache-dtype", "'fp8'", "auto, float16, int8")),
        (["--listen", "9090"], {}, ("listen", "'9090'", "host:port")),
        (["--listen", "h:70000"], {}, ("listen", "70000")),
        (["--block-size", "12"], {}, ("block_size", "12")),
        (["--drain-timeout-s", "nan"], {}, ("drain_timeout_s", "nan")),
        (["--move-timeout-s", "-1"], {}, ("move_timeout_s", "-1")),
        (["--redis-url", "http://user:secret@h"], {}, ("redis_url", "'http'")),
        (["--load", "nothing"], {}, ("load", "'nothing'", "NAME=URI")),
        (["--listen", "0.0.0.0:9090", "--redis-url", "redis://h"], {}, ("listen", "0.0.0.0", "advertise")),
        (["--exit-with-parent", "maybe"], {}, ("--exit-with-parent", "'maybe'")),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(
    argv: list[str], environ: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(argv, environ)
    for word in words:
        assert word in str(caught.value)
    assert "secret" not in str(caught.value)


def test_unknown_flags_stop_the_start() -> None:
    with pytest.raises(SystemExit, match="2"):
        read_settings(["--no-such-flag"], {})


def test_every_setting_has_a_docstring_and_names_are_unique() -> None:
    all_knobs = list(knobs())
    docs = field_docs()
    assert {k.field for k in all_knobs} <= docs.keys()
    assert all(len(docs[k.field]) > 20 for k in all_knobs)
    for names in ([k.flag for k in all_knobs], [k.variable for k in all_knobs]):
        assert len(set(names)) == len(names)


def test_help_shows_every_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "naru_worker", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    for knob in knobs():
        assert knob.flag in done.stdout
        assert knob.variable in done.stdout.replace("\n", " ")


def test_the_start_imports_nothing_heavy() -> None:
    code = (
        "import sys, naru_worker.__main__, naru_worker.app, naru_worker.adapters.engine.loading\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'starlette', 'redis', 'prometheus_client', 'httpx', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
