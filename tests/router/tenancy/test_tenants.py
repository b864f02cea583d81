"""Who a request is from: keys, headers, a file that changes or breaks, and what is told of tenants."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from naru_proto.errors import Unauthenticated
from naru_proto.settings import SettingsError
from naru_proto.tenants import Quotas, key_digest
from naru_router.adapters.leases import connect
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.tenancy.quota_keeper import QuotaKeeper
from naru_router.adapters.tenancy.tenancy import Tenancy
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.errors import error_body, error_shape
from naru_router.core.tenancy.quota import Answer, Ask, Share
from naru_router.core.tenancy.rate_headers import duration, rate_headers

KEY, OTHER = "nk-one", "nk-two"
A = {"name": "a", "keys": [key_digest(KEY)], "weight": 2, "topPriority": -5, "models": ["m*"]}
B = {"name": "b", "keys": [{"sha256": key_digest(OTHER), "expires": "2030-01-01T00:00:00Z"}]}
NEW_YEAR_S = 1893456000.0


class Made:
    """A tenancy over a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.json"
        self.now_s = 0.0
        self.seed = b"seed"
        self.metrics = Metrics()

    def write(self, *tenants: dict[str, Any]) -> None:
        self.put(json.dumps({"tenants": tenants}))

    def put(self, text: str) -> None:
        staged = self.path.with_suffix(".part")
        staged.write_text(text)
        staged.replace(self.path)

    def start(self, path: str | None = None) -> Tenancy:
        keeper = QuotaKeeper(connect("redis://127.0.0.1:1"), "r", lambda: 1, self.metrics)
        where = str(self.path) if path is None else path
        return Tenancy(where, keeper, self.metrics, seed=lambda: self.seed, clock=lambda: self.now_s)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


async def look(tenancy: Tenancy) -> None:
    assert tenancy._file is not None
    await tenancy._file.look()


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


async def test_without_a_file_everybody_is_nobody_in_particular(made: Made) -> None:
    tenancy = made.start("")
    assert tenancy.caller(bearer("whatever")) is ANYONE
    assert tenancy.status() is None and tenancy.rate_headers(ANYONE) == []
    (await tenancy.admit(ANYONE, 10**9)).settle(10**9)
    await tenancy.run()


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        [(b"authorization", b"bearer   " + KEY.encode() + b" ")],
        [(b"x-api-key", KEY.encode())],
        [(b"api-key", KEY.encode())],
        [("authorization", f"Bearer {KEY}"), ("user-agent", "grpc")],
        [(b"authorization", b"Basic Zm9vOmJhcg=="), (b"x-api-key", KEY.encode())],
        [(b"x-api-key", OTHER.encode()), (b"authorization", b"Bearer " + KEY.encode())],
    ],
    ids=["bearer", "spaces", "x-api-key", "api-key", "grpc metadata", "a proxy's own authorization", "bearer first"],
)  # fmt: skip
async def test_a_key_says_who_asks_wherever_clients_put_it(made: Made, headers: Any) -> None:
    made.write(A, B)
    caller = made.start().caller(headers)
    assert (caller.tenant, caller.weight, caller.top_priority, caller.models) == ("a", 2.0, -5, ("m*",))


async def test_an_edge_may_give_one_header_at_a_time(made: Made) -> None:
    made.write(A, B)
    tenancy = made.start()
    assert tenancy.caller_by({"x-api-key": OTHER}.get).tenant == "b"
    with pytest.raises(Unauthenticated):
        tenancy.caller_by({"x-tenant": "a"}.get)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("nk-none"),
        bearer(KEY + "x"),
        bearer(key_digest(KEY)),
        [(b"x-tenant", b"a"), (b"x-naru-tenant", b"a"), (b"x-tenant-id", b"a"), (b"openai-organization", b"a")],
        [(b"authorization", KEY.encode())],
        bearer("é" * 5000),
        [("authorization", "Bearer \udcff")],
    ],
    ids=["none", "empty", "unknown", "longer", "a hash", "tenant headers", "no scheme", "huge", "broken text"],
)  # fmt: skip
async def test_without_a_known_key_all_are_refused_in_the_same_words(made: Made, headers: Any) -> None:
    made.write(A, B)
    tenancy = made.start()
    with pytest.raises(Unauthenticated) as caught:
        tenancy.caller(headers)
    with pytest.raises(Unauthenticated) as absent:
        tenancy.caller([])
    assert caught.value.message == absent.value.message
    assert error_shape(caught.value).status == 401
    error = json.loads(error_body(caught.value))["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert b"naru_router_unauthenticated_requests_total 2.0" in made.metrics.exposition()


async def test_a_key_ends_at_its_time(made: Made) -> None:
    made.write(A, B)
    tenancy = made.start()
    made.now_s = NEW_YEAR_S - 1
    assert tenancy.caller(bearer(OTHER)).tenant == "b"
    made.now_s = NEW_YEAR_S
    with pytest.raises(Unauthenticated):
        tenancy.caller(bearer(OTHER))
    assert tenancy.caller(bearer(KEY)).tenant == "a"


async def test_salts_differ_by_tenant_and_installation_and_follow_the_seed(made: Made) -> None:
    made.write(A, B)
    tenancy = made.start()
    first, second = tenancy.caller(bearer(KEY)).salt, tenancy.caller(bearer(OTHER)).salt
    assert len(first) == 16 and first != second
    assert made.start().caller(bearer(KEY)).salt == first
    made.seed = b"another"
    assert tenancy.caller(bearer(KEY)).salt not in (first, second)


async def test_a_changed_file_is_taken_and_a_broken_one_leaves_the_last_good_one(made: Made) -> None:
    made.write(A)
    tenancy = made.start()
    made.write(A, B)
    await look(tenancy)
    assert tenancy.caller(bearer(OTHER)).tenant == "b"
    for broken in ("tenants: [", json.dumps({"tenants": [{"name": "a", "keys": [KEY]}]}), ""):
        made.put(broken)
        await look(tenancy)
        assert tenancy.caller(bearer(OTHER)).tenant == "b"
        status = tenancy.status()
        assert status is not None and status["problem"] and KEY not in status["problem"]
        assert b"naru_router_tenants_file_up 0.0" in made.metrics.exposition()
    made.path.unlink()
    await look(tenancy)
    assert tenancy.caller(bearer(KEY)).tenant == "a"
    made.write(B)
    await look(tenancy)
    assert tenancy.status() == {"tenants": 1, "problem": None, "quotas": {"shared": True, "problem": None}}
    assert b"naru_router_tenants_file_up 1.0" in made.metrics.exposition()
    with pytest.raises(Unauthenticated):
        tenancy.caller(bearer(KEY))


async def test_a_secret_that_is_swapped_by_its_link_is_seen(made: Made, tmp_path: Path) -> None:
    for name, tenants in (("one", [A]), ("two", [B])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
        os.utime(tmp_path / name / "tenants.yaml", (1, 1))
    link = tmp_path / "..data"
    link.symlink_to("one")
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    tenancy = made.start(str(tmp_path / "tenants.yaml"))
    assert tenancy.caller(bearer(KEY)).tenant == "a"
    swapped = tmp_path / "..tmp"
    swapped.symlink_to("two")
    swapped.replace(link)
    await look(tenancy)
    assert tenancy.caller(bearer(OTHER)).tenant == "b"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda made: None, "No such file"),
        (lambda made: made.put("tenants: [{name: a, keys: [nk-secret]}]"), "tenants[0].keys[0]: it must be 64 hex"),
        (lambda made: made.put("\x00"), "is no valid YAML"),
        (lambda made: made.path.mkdir(), "Is a directory"),
    ],
)
async def test_a_router_does_not_start_without_a_first_good_file(
    made: Made, write: Callable[[Made], None], words: str
) -> None:
    write(made)
    with pytest.raises(SettingsError) as caught:
        made.start()
    assert words in str(caught.value) and "nk-secret" not in str(caught.value)


async def test_reply_headers_tell_limits_in_openais_form(made: Made) -> None:
    made.write({**A, "quotas": {"requestsPerMinute": 60, "maxInFlight": 3}})
    tenancy = made.start()
    assert tenancy.rate_headers(tenancy.caller(bearer(KEY))) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"60"),
        (b"x-ratelimit-reset-requests", b"0s"),
    ]
    share = Share(60)
    share.answered(Ask(1, 0, 0, 0, 0), Answer(0, 20, 10, 0.0, 61.25), 0.0, 0.0)
    assert [value for _, value in rate_headers([("tokens", 60, share)], 0.0)] == [b"60", b"30", b"1m1.3s"]
    assert [duration(seconds) for seconds in (0, 0.0123, 1, 59.96, 360)] == ["0s", "13ms", "1s", "1m0s", "6m0s"]


async def test_a_tenant_that_is_gone_has_no_quotas_left_to_keep(made: Made) -> None:
    made.write(B)
    tenancy = made.start()
    assert tenancy.rate_headers(Caller("gone")) == []
    assert tenancy._ring.quotas("gone") == Quotas()
