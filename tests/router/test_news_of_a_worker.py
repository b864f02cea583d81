"""Two routers' indices against the cache of a real worker that evicts, over real streams, one of which breaks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

from hearer import Hearer
from toy_worker import Exchange, ToyLoader, ask, running_worker

from naru_proto.route_keys import key_root, keys_of_text, pack_keys
from naru_router.adapters.news import News

TOKENS = 4
"""Of a block of the toy model; a token is a byte."""


async def listen(news: News, exchange: Exchange, worker_id: str, model_keys: set[bytes]) -> None:
    """Reads until the router's index is the worker's cache."""
    while {key for key in model_keys if news.matches("toy", [key])} != model_keys or (
        news.index.num_worker_keys(worker_id) != len(model_keys)
    ):
        news.take(worker_id, await exchange.read())


async def test_indices_are_what_the_cache_holds_after_any_traffic() -> None:
    rng = random.Random(3)
    subjects = ["".join(rng.choice("abcdefgh") for _ in range(64 * 4)) for _ in range(5)]
    one, two = News(), News()
    async with running_worker(ToyLoader(num_blocks=100, max_model_len=384), None, "toy") as worker:
        streams = {"one": Exchange(worker.stub), "two": Exchange(worker.stub)}
        sizes = []
        for number in range(40):
            prompt = rng.choice(subjects)[: rng.randrange(60, 257)] + "x" * rng.randrange(70)
            request = ask(f"r{number}", prompt, max_tokens=2)
            request.route_keys = pack_keys(keys_of_text(prompt.encode(), key_root(b"", "toy")))
            news, stream = rng.choice([(one, "one"), (two, "two")])
            news.sent("w", request.request_id, "toy", len(prompt))
            await streams[stream].send(request)
            while not streams[stream].is_done(request.request_id):
                news.take("w", await streams[stream].read())
            if number == 20:
                streams["two"].break_off()
                two.lost("w")
                streams["two"] = Exchange(worker.stub)
            if number % 5 == 4:
                marks = worker.engine()._scheduler.kv.cache.marks
                held = set(marks._blocks)
                sizes.append(len(held))
                await listen(one, streams["one"], "w", held)
                await listen(two, streams["two"], "w", held)
                one.index.check()
        assert max(sizes) > min(sizes[1:]) > 0
        assert one.num_damaged == two.num_damaged == 0
        while one.load("w", "toy").waiting_tokens or one.load("w", "toy").num_running:
            one.take("w", await streams["one"].read())
        assert one.load("w", "toy").prefill_tokens_per_s > 0
        for exchange in streams.values():
            await exchange.close()


async def test_what_a_router_sent_and_what_the_worker_tells_never_leaves_a_request_out() -> None:
    news = News()
    async with running_worker(ToyLoader(max_num_seqs=2, max_model_len=384), None, "toy") as worker:
        hearer = Hearer(worker.stub)
        news.take("w", await hearer.read())
        prompts = {f"r{number}": "y" * 100 + str(number) * 80 for number in range(12)}
        for request_id, prompt in prompts.items():
            news.sent("w", request_id, "toy", len(prompt))
        assert news.load("w", "toy").waiting_tokens == sum(map(len, prompts.values()))
        # The first step lasts until all are counted by the worker: until then each waits here or there.
        is_open = threading.Event()
        worker.loader.runners["toy"].before_step = lambda batch: assert_set(is_open)
        await hearer.exchange.send(*(ask(r, prompt, max_tokens=3) for r, prompt in prompts.items()))
        total = sum(map(len, prompts.values()))
        while hearer.counted[-1:] != ["r11"]:
            news.take("w", await hearer.read())
            assert news.load("w", "toy").waiting_tokens >= total
        assert news.load("w", "toy").waiting_tokens == total
        is_open.set()
        await hear_all(hearer, news, prompts)
        while news.load("w", "toy").waiting_tokens:
            news.take("w", await hearer.read())
        assert news.num_others("w") == 0
        await hearer.exchange.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20.0), "nobody lets the step go on"


async def hear_all(hearer: Hearer, news: News, request_ids: Iterable[str]) -> None:
    while not all(hearer.exchange.is_done(request_id) for request_id in request_ids):
        news.take("w", await hearer.read())
