"""Each re-implemented policy against examples computed by hand: its constants and its habits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from bench.fleet_sim.cache import PrefixCache
from bench.fleet_sim.engine import Engine
from bench.fleet_sim.machines import GPU
from bench.fleet_sim.policies import aibrix, dynamo, kubeai, llmd, sglang
from bench.fleet_sim.policies.policy import Board, Policy, Surroundings
from bench.fleet_sim.policies.production_stack import ProductionStack, Trie
from bench.fleet_sim.policies.simple import LeastLoad, RoundRobin
from bench.fleet_sim.prompts import Message, PromptPress
from bench.fleet_sim.reports import Report
from bench.fleet_sim.requests import Request, Turn
from bench.sim.clock import Simulation

WORKERS = (0, 1, 2)


def around(in_flight: Sequence[int] = (0, 0, 0), router: int = 0) -> Surroundings:
    sim = Simulation(0)
    engines = [
        Engine(sim, f"worker-{index}", GPU, {}, lambda _: None, lambda _: None) for index in range(len(in_flight))
    ]
    others = [0] * len(in_flight)
    counts = [list(in_flight), others] if router == 0 else [others, list(in_flight)]
    return Surroundings(router, engines, Board(counts), random.Random(0), 0.001, {})


def request(press: PromptPress, *messages: tuple[str, str], number: int = 0) -> Request:
    prompt = press.make("chat", [Message(role, text) for role, text in messages])
    return Request(number, Turn(prompt, 1, prompt.blocks), 0, 0.0)


def chosen(policy: Policy, ask: Request, now_s: float = 0.0) -> int:
    ask.worker = policy.choose(ask, WORKERS, now_s)
    return ask.worker


# --- counts and turns


def test_round_robin_goes_on_from_its_routers_own_number() -> None:
    press = PromptPress()
    first, second = RoundRobin(around()), RoundRobin(around(router=1))
    assert [chosen(first, request(press, ("user", "x"))) for _ in range(4)] == [0, 1, 2, 0]
    assert [chosen(second, request(press, ("user", "x"))) for _ in range(3)] == [1, 2, 0]


def test_least_load_takes_the_lowest_count_and_chance_among_equals() -> None:
    press = PromptPress()
    assert chosen(LeastLoad(around((2, 1, 3))), request(press, ("user", "x"))) == 1
    policy = LeastLoad(around((1, 2, 1)))
    assert {chosen(policy, request(press, ("user", "x"))) for _ in range(50)} == {0, 2}


# --- KubeAI


def test_kubeai_hashes_a_hundred_characters_of_the_first_user_message_and_no_system_prompt() -> None:
    press = PromptPress()
    long = "a" * 100
    asked = request(press, ("system", "S"), ("user", long + "tail"), ("assistant", "b"), ("user", "c"))
    assert kubeai.prefix_of(asked) == long
    assert kubeai.prefix_of(request(press, ("system", "other"), ("user", long + "else"))) == long
    assert kubeai.prefix_of(request(press, ("system", "alone"))) == ""


def test_kubeais_bound_admits_one_request_more_than_it_says() -> None:
    # (3 + 1) / 4 x 1.25 = 1.25: a load of 1 passes and becomes 2; the classic form stops at ceil(1.25) = 2 as well,
    # but with (7 + 1) / 4 x 1.25 = 2.5 a load of 2 becomes 3, and one of 3 is refused.
    assert kubeai.load_is_ok(1, 3, 4)
    assert not kubeai.load_is_ok(2, 3, 4)
    assert kubeai.load_is_ok(2, 7, 4)
    assert not kubeai.load_is_ok(3, 7, 4)
    assert kubeai.load_is_ok(99, 0, 4), "an idle fleet takes anything"


def test_kubeai_keeps_a_key_in_place_until_its_endpoint_is_full() -> None:
    home = kubeai.pick({0: 0, 1: 0, 2: 0}, "prefix")
    others = [worker for worker in WORKERS if worker != home]
    assert kubeai.pick({home: 1, others[0]: 1, others[1]: 1}, "prefix") == home
    assert kubeai.pick({home: 9, others[0]: 0, others[1]: 0}, "prefix") in others


def test_kubeai_spreads_keys_over_all_endpoints() -> None:
    counts = Counter(kubeai.pick({0: 0, 1: 0, 2: 0, 3: 0}, f"key {index}") for index in range(2000))
    assert min(counts.values()) > 350 and max(counts.values()) < 650


# --- vLLM production-stack


def test_production_stacks_trie_matches_whole_chunks_of_128_characters_and_never_forgets() -> None:
    trie, first = Trie(), "a" * 128
    live = {0, 1, 2}
    assert trie.match(first, live) == live
    trie.insert(first + "b" * 128, 1)
    trie.insert(first + "c" * 128, 2)
    assert trie.match(first + "zzz", live) == {1, 2}
    assert trie.match(first + "b" * 128 + "more", live) == {1}
    assert trie.match("a" * 127, live) == live, "a shorter chunk is another chunk"
    assert trie.match(first + "b" * 128, {0, 2}) == {2}, "the deepest node with a live owner"


def test_production_stack_sends_equal_prompts_to_one_worker_whatever_its_load() -> None:
    press = PromptPress()
    policy = ProductionStack(around((99, 99, 99)))
    text = "q" * 300
    assert len({chosen(policy, request(press, ("user", text))) for _ in range(20)}) == 1


def test_production_stack_joins_the_messages_texts_alone() -> None:
    assert request(PromptPress(), ("system", "S"), ("user", "U")).prompt.joined == "S\nU"


# --- AIBrix


def test_aibrix_hashes_blocks_of_four_bytes_in_a_chain_and_drops_the_rest() -> None:
    one, other = aibrix.block_hashes(b"aaaabbbbcc"), aibrix.block_hashes(b"xxxxbbbb")
    assert len(one) == len(other) == 2
    assert one[1] != other[1], "the same block after another one is another block"
    assert list(aibrix.block_hashes(b"aaaabbbbdddd"))[:2] == list(one)


def test_aibrix_matches_in_whole_percent_of_leading_blocks() -> None:
    table = aibrix.BlockTable()
    table.add([1, 2, 3], 0, 0.0)
    table.add([1, 2], 1, 0.0)
    assert table.match_percent([1, 2, 3, 4, 5, 6], WORKERS, 1.0) == {0: 50, 1: 33}
    assert table.match_percent([9, 1], WORKERS, 1.0) == {}


def test_aibrix_forgets_after_twenty_minutes_and_beyond_its_size() -> None:
    table = aibrix.BlockTable(max_blocks=3)
    table.add([1, 2], 0, 0.0)
    assert table.match_percent([1, 2], [0], 1200.0) == {0: 100}
    assert table.match_percent([1, 2], [0], 1201.0) == {}
    table.add([7, 8], 0, 1300.0)
    assert table.match_percent([1], [0], 1300.0) == {}, "the oldest block made room"
    assert aibrix.MAX_BLOCKS == 200_000


def test_aibrix_looks_at_the_least_loaded_alone_when_loads_are_more_than_eight_apart() -> None:
    assert aibrix.allowed({0: 0, 1: 8, 2: 3}) == [0, 1, 2]
    assert aibrix.allowed({0: 0, 1: 9, 2: 0}) == [0, 2]


def test_aibrix_takes_the_best_match_within_mean_and_one_deviation() -> None:
    # loads 0, 0, 6: mean 2, deviation sqrt((4 + 4 + 16) / 3) = 2.83, limit 4.83: worker 2 is above it.
    assert aibrix.pick({0: 0, 1: 0, 2: 6}, {2: 100, 1: 40, 0: 40}) == 0
    # loads 2, 3, 4: mean 3, deviation 0.82, limit 3.82.
    assert aibrix.pick({0: 2, 1: 3, 2: 4}, {1: 50, 0: 40, 2: 90}) == 1
    assert aibrix.pick({0: 0, 1: 0, 2: 6}, {2: 100}) is None
    assert aibrix.pick({0: 1, 1: 9}, {1: 100}) == 1, "of two pods none is ever above: 5 + 4"


def test_aibrix_sees_other_gateways_counts_as_they_stood_at_the_last_tick() -> None:
    board = Board([[1, 0], [5, 0]])
    board.advance(0.0)
    board.in_flight[1][0] = 9
    assert board.shared(0, 0) == 1 + 5
    board.advance(0.05)
    assert board.shared(0, 0) == 1 + 5
    board.advance(0.1)
    assert board.shared(0, 0) == 1 + 9


# --- llm-d


def test_llmd_scores_queues_from_least_to_most() -> None:
    assert llmd.queue_scores({0: 2, 1: 4, 2: 6}) == {0: 1.0, 1: 0.5, 2: 0.0}
    assert llmd.queue_scores({0: 3, 1: 3}) == {0: 1.0, 1: 1.0}
    assert (llmd.QUEUE_WEIGHT, llmd.KV_WEIGHT, llmd.PREFIX_WEIGHT) == (2.0, 2.0, 3.0)


def test_llmd_takes_the_last_partial_block_too_and_no_more_than_256() -> None:
    press = PromptPress()
    # <|user|>\n 9, text, \n 1, <|assistant|>\n 14: 24 bytes around the text.
    assert len(llmd.prefix_blocks(request(press, ("user", "x" * 104)))) == 2
    assert len(llmd.prefix_blocks(request(press, ("user", "x" * 105)))) == 3
    assert len(llmd.prefix_blocks(request(press, ("user", "x" * 64 * 300)))) == 256


def test_llmds_index_forgets_the_longest_unused_blocks_of_a_pod() -> None:
    index = llmd.PrefixIndex(blocks_per_pod=3)
    index.add([1, 2, 3], 0)
    index.add([1, 4], 0)
    assert index.matched([1, 3, 4], 0) == 3
    assert index.matched([1, 2], 0) == 1
    assert index.matched([1], 1) == 0


def test_llmd_follows_a_prefix_on_an_idle_fleet_and_leaves_it_for_a_queue_and_a_full_cache() -> None:
    press = PromptPress()
    policy = llmd.LlmD(around())
    ask = request(press, ("user", "x" * 1000))
    home = chosen(policy, ask)
    assert all(chosen(policy, ask, 1.0) == home for _ in range(10))
    # Queue and usage as scraped: 2 x 0 + 2 x 0.1 + 3 x 1 = 3.2 at home, 2 x 1 + 2 x 1 + 0 = 4 elsewhere.
    policy.around.engines[home].reports.add(Report(2.0, 9, 5, 0, 0.0, 0.9, 0.0, 0.0, ()))
    assert chosen(policy, ask, 2.04) == home, "the last scrape was before that"
    assert chosen(policy, ask, 2.06) != home


# --- Dynamo


def test_dynamos_cost_is_prefill_blocks_plus_distinct_active_blocks() -> None:
    active = dynamo.Active()
    active.add([1, 2, 3], 32)
    # prefill: (32 waiting + 64 - 2 x 16 of its own) / 16 = 4; decode: 3 there + 1 tail + 1 tail of its own + 1 new.
    assert dynamo.cost(active, [1, 2, 4], 64, 2) == 4 + 6
    active.add([1, 9], 0)
    assert active.decode_blocks_with([1]) == 4 + 2 + 1
    active.remove([1, 2, 3])
    assert active.decode_blocks_with([1]) == 2 + 1 + 1
    assert active.blocks == {1: 1, 9: 1}


def test_dynamo_knows_a_cache_from_its_events_when_they_have_come() -> None:
    cache = PrefixCache(4, {})
    cache.acquire((), 0, 2, 1.0)
    held = cache.store((11, 12), 1.0, is_prompt=True)
    told = dynamo.ToldBlocks(cache.blocks)
    told.read(0.9)
    assert told.matched((11, 12)) == 0
    told.read(1.0)
    assert told.matched((11, 12, 13)) == 2
    cache.release(held, 0)
    cache.acquire((), 0, 3, 2.0)
    told.read(2.0)
    assert told.matched((11, 12)) == 1, "the last block of an ended request left first"


def test_dynamo_gives_prompt_load_back_at_the_first_token_and_blocks_at_the_end() -> None:
    press = PromptPress()
    policy = dynamo.Dynamo(around())
    first = request(press, ("user", "x" * 1000))
    home = chosen(policy, first)
    other = chosen(policy, request(press, ("user", "y" * 1000), number=1))
    assert other != home
    policy.on_first_token(first, 1.0)
    policy.on_end(first, 2.0)
    third = chosen(policy, request(press, ("user", "z" * 1000), number=2))
    assert third != other


# --- SGLang


def test_sglang_is_imbalanced_only_when_both_limits_are_passed() -> None:
    assert not sglang.is_imbalanced([0, 64])
    assert sglang.is_imbalanced([0, 65])
    assert not sglang.is_imbalanced([200, 280]), "not one and a half times as many"
    assert sglang.is_imbalanced([100, 165])


def test_sglangs_tree_matches_by_characters_and_splits_edges() -> None:
    tree = sglang.Tree(WORKERS)
    tree.insert("hello world", 1)
    assert tree.match("hello there") == (6, 1)
    tree.insert("hello there", 2)
    assert tree.num_chars == {0: 0, 1: 11, 2: 11}
    assert tree.match("hello there!") == (11, 2)
    assert tree.match("hello") == (5, 1), "where several own a node, the first of them"
    assert tree.match("nothing")[0] == 0
    assert tree.smallest(WORKERS) == 0


def test_sglangs_tree_gives_up_the_longest_unused_leaves() -> None:
    tree = sglang.Tree(WORKERS)
    tree.insert("aaaa", 0)
    tree.insert("bbbb", 0)
    tree.match("aaaa")
    tree.evict(max_chars=4)
    assert tree.num_chars[0] == 4
    assert tree.match("aaaa")[0] == 4
    assert tree.match("bbbb")[0] == 0


def test_sglang_needs_more_than_three_tenths_to_follow_a_prefix() -> None:
    press = PromptPress()
    policy = sglang.SGLang(around())
    home = chosen(policy, request(press, ("user", "a" * 1000)))
    assert chosen(policy, request(press, ("user", "a" * 500 + "b" * 500))) == home
    assert chosen(policy, request(press, ("user", "a" * 200 + "c" * 800))) != home


def test_sglang_takes_the_shortest_queue_when_imbalanced() -> None:
    press = PromptPress()
    policy = sglang.SGLang(around((100, 0, 5)))
    assert chosen(policy, request(press, ("user", "a" * 1000))) == 1


@pytest.mark.parametrize("rest", [1, 5, 63])
def test_sglang_counts_shared_characters_exactly(rest: int) -> None:
    tree = sglang.Tree(WORKERS)
    tree.insert("x" * 64, 0)
    assert tree.match("x" * rest + "y" * 64)[0] == rest
