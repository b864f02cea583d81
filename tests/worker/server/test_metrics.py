"""The Prometheus endpoint over real HTTP."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest
from toy_worker import Exchange, ask, eventually, running_worker, toy_settings
from worker_probes import hold, scrape

from naru_worker.adapters.engine.stats import Histogram

TOY = (("model", "toy"),)


async def test_numbers_are_those_of_the_scrape() -> None:
    async with running_worker(None, toy_settings(metrics_listen="127.0.0.1:0"), "toy") as worker:
        for name in "ab":
            await worker.generate(ask(name, "sixteen tokens!!", max_tokens=5))
        values = await scrape(worker)
        assert values["naru_generation_tokens_total", TOY] == 10
        assert values["naru_drafted_tokens_total", TOY] >= values["naru_accepted_draft_tokens_total", TOY] == 0
        assert values["naru_prompt_tokens_total", TOY] == 32
        assert values["naru_prefix_cache_queries_total", TOY] == 32
        assert values["naru_prefix_cache_hits_total", TOY] == 15
        assert values["naru_time_to_first_token_seconds_count", TOY] == 2
        assert values["naru_inter_token_latency_seconds_count", TOY] == 8
        assert values["naru_e2e_request_latency_seconds_count", TOY] == 2
        assert values["naru_step_seconds_count", TOY] == 10
        assert values["naru_request_success_total", (("model", "toy"), ("reason", "length"))] == 2
        assert values["naru_num_requests_running", TOY] == 0
        assert values["naru_kv_cache_usage_ratio", TOY] == 0
        assert values["naru_kv_cached_blocks", TOY] > 0
        assert values["naru_worker_serving", ()] == 1
        assert values["naru_worker_rss_bytes", ()] > 10**6


async def test_gauges_rise_with_load_and_fall_after_a_mass_abort() -> None:
    async with running_worker(None, toy_settings(metrics_listen="127.0.0.1:0"), "toy") as worker:
        hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(*(ask(f"r{i}", "some words", max_tokens=240) for i in range(16)))
        await router.read_until(lambda: len(router.deltas) == 16)
        busy = await scrape(worker)
        assert busy["naru_num_requests_running", TOY] > 0
        assert busy["naru_kv_cache_usage_ratio", TOY] > 0
        assert 0.0 <= busy["naru_kv_waste_ratio", TOY] < 1.0
        router.break_off()
        await eventually(lambda: len(worker.app.board) == 0, "requests go on")
        idle = await scrape(worker)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "kv_waste_ratio"):
            assert idle[f"naru_{name}", TOY] == 0


async def test_no_request_can_make_a_series() -> None:
    async with running_worker(None, toy_settings(metrics_listen="127.0.0.1:0"), "toy") as worker:
        await worker.generate(ask("warm"))
        before = await scrape(worker)
        for i in range(50):
            await worker.generate(ask(f"r{i}", model=f'junk-{i}"\n'))
        assert (await scrape(worker)).keys() == before.keys()


async def test_other_paths_are_not_found() -> None:
    async with running_worker(None, toy_settings(metrics_listen="127.0.0.1:0")) as worker:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(urllib.request.urlopen, f"http://{worker.app.metrics_address}/secret", None, 10)


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == pytest.approx(8.65)
