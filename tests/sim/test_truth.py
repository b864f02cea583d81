from __future__ import annotations

import pytest
from bench.sim.clock import InvariantViolation
from bench.sim.truth import Truth

from naru_worker.core.hub.model import Footprint

A = Footprint("a", weight_bytes=100, kv_floor_bytes=10, workspace_bytes=20, private_bytes=5)
B = Footprint("b", weight_bytes=50, kv_floor_bytes=10, workspace_bytes=30, private_bytes=0)
TWIN = Footprint("a", weight_bytes=100, kv_floor_bytes=10, workspace_bytes=20, private_bytes=5)


def test_a_load_counts_from_its_beginning_and_workspace_counts_once() -> None:
    truth = Truth(1000, 0)
    assert truth.need_bytes(A) == 135
    truth.begin_load("x", A)
    assert truth.used_bytes == 135
    assert truth.need_bytes(B) == 50 + 10 + 10
    truth.begin_load("y", B)
    assert truth.used_bytes == 205
    truth.recount()


def load(truth: Truth, model: str, footprint: Footprint) -> None:
    truth.begin_load(model, footprint)
    truth.end_load(model)


def unload(truth: Truth, model: str, *, keep_host: bool = False, unreturned_bytes: int = 0) -> None:
    truth.begin_unload(model, keep_host=keep_host)
    truth.end_unload(model, unreturned_bytes)


def test_shared_weights_count_once_and_leave_with_the_last_model() -> None:
    truth = Truth(1000, 0)
    load(truth, "x", A)
    assert truth.need_bytes(TWIN) == 15
    load(truth, "twin", TWIN)
    assert truth.used_bytes == 150
    assert truth.returnable_bytes("x") == 15
    unload(truth, "x")
    assert (truth.used_bytes, truth.returnable_bytes("twin")) == (135, 115)
    unload(truth, "twin")
    assert truth.used_bytes == 20, "the workspace stays"
    truth.recount()


def test_a_load_that_comes_to_nothing_gives_back_the_workspace_it_would_have_needed() -> None:
    truth = Truth(1000, 0)
    load(truth, "x", A)
    truth.begin_load("y", B)
    assert truth.workspace_bytes == 30
    truth.fail_load("y")
    assert (truth.workspace_bytes, truth.used_bytes) == (20, 135)
    truth.recount()


def test_bytes_that_did_not_come_back_stay_until_they_do() -> None:
    truth = Truth(1000, 0)
    load(truth, "x", A)
    unload(truth, "x", unreturned_bytes=60)
    assert truth.used_bytes == 80
    truth.recount()
    truth.give_back(60)
    assert truth.used_bytes == 20


def test_host_memory_counts_what_no_loaded_model_uses() -> None:
    truth = Truth(1000, 150)
    truth.enter_host("x", A)
    truth.enter_host("y", B)
    truth.begin_load("x", A)
    assert truth.host_bytes == 150, "both pay while pages move"
    truth.end_load("x")
    assert truth.host_bytes == 50
    truth.begin_unload("x", keep_host=True)
    assert (truth.host_bytes, truth.used_bytes) == (150, 135)
    truth.end_unload("x")
    assert (truth.host_bytes, truth.used_bytes) == (150, 20)
    truth.leave_host("x")
    assert truth.host_bytes == 50


def test_neither_budget_may_be_exceeded_at_any_instant() -> None:
    with pytest.raises(InvariantViolation, match="135 bytes used of a budget of 134"):
        Truth(134, 0).begin_load("x", A)
    with pytest.raises(InvariantViolation, match="100 host bytes of a budget of 99"):
        Truth(1000, 99).enter_host("x", A)
    truth = Truth(140, 0)
    truth.begin_load("x", A)
    with pytest.raises(InvariantViolation, match="KV of x"):
        truth.set_kv("x", 16)
