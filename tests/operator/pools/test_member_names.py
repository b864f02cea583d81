"""Names of a pool's pods and volumes: valid, stable, and no two the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_world import SETTINGS, make_pool, raw_pool

from naru_operator.core.pools.member_names import budget_name, claim_name, member_name, pool_label, pool_selector
from naru_operator.core.pools.observe import observe_pod
from naru_operator.core.pools.pod_manifest import worker_pod
from naru_proto import names

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
PREFIX = "a" * 60
POOLS = (
    "p", "gpu-h100", "a" * 48, "a" * 49, "a" * 62, "a" * 63, "a" * 64, "a" * 100, "a" * 253, "llama-3.1-8b",
    "llama-3-1-8b", PREFIX + "-x", PREFIX + "-y", "a." * 30 + "b", ("b" * 40 + ".") * 6 + "b", "x-0", "0",
)  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("slot", [0, 7, 1000, 99_999_999])
def test_names_and_labels_are_valid_for_any_pool(pool: str, slot: int) -> None:
    assert DNS_LABEL.fullmatch(member_name(pool, slot))
    claim = claim_name(pool, slot, "class")
    assert re.fullmatch(r"[a-z0-9][-a-z0-9]*[a-z0-9]", claim)
    assert len(claim) <= 253
    assert LABEL_VALUE.fullmatch(pool_label(pool))
    assert pool_selector(pool) == f"serving.naru.dev/pool={pool_label(pool)}"


def test_short_names_stay_readable() -> None:
    assert member_name("gpu-h100", 3) == "gpu-h100-3"
    assert pool_label("llama-3.1-8b") == "llama-3.1-8b"
    assert pool_label("a" * 63) == "a" * 63
    assert budget_name("gpu") == "gpu-workers"


def test_no_two_pools_share_a_name_or_a_label() -> None:
    pods = [member_name(pool, slot) for pool in POOLS for slot in range(12)]
    assert len(set(pods)) == len(pods)
    claims = [claim_name(pool, slot, kind) for pool in POOLS for slot in range(3) for kind in ("a", "b")]
    assert len(set(claims)) == len(claims)
    assert len({pool_label(pool) for pool in POOLS}) == len(POOLS)
    assert len({budget_name(pool) for pool in POOLS}) == len(POOLS)


def test_cut_names_never_change() -> None:
    assert member_name("a" * 100, 2) == "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-cdd655dc3d-2"
    assert member_name("llama-3.1-8b", 0) == "llama-3-1-8b-15a4b29667-0"


@given(
    pool=st.from_regex(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?){0,3}", fullmatch=True)
)
def test_a_pods_own_labels_lead_back_to_its_pool(pool: str) -> None:
    item = worker_pod(make_pool(pool), raw_pool(pool), 4, SETTINGS)
    assert DNS_LABEL.fullmatch(item["metadata"]["name"])
    assert all(LABEL_VALUE.fullmatch(value) for value in item["metadata"]["labels"].values())
    assert item["metadata"]["annotations"][names.ANNOTATION_POOL_NAME] == pool
    seen = observe_pod(item)
    assert (seen.pool, seen.slot, seen.key.name) == (pool, 4, member_name(pool, 4))
