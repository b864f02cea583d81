"""Tenants of this router: who sends a request, whether it may come in now, what is left. The edges' one door to it.

Without a tenants file everybody is nobody in particular, and nothing here costs anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from naru_proto.errors import Unauthenticated
from naru_proto.tenants import Tenant
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.tenancy.quota_keeper import QuotaKeeper, QuotaTicket
from naru_router.adapters.tenancy.tenants_file import TenantsFile
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.tenancy.keys import KEY_HEADERS, KeyRing, read_key
from naru_router.core.tenancy.rate_headers import Headers, rate_headers


class Tenancy:
    """Knows the tenants of a file while `run` runs; with no file, everybody is ANYONE."""

    def __init__(
        self,
        path: str,
        keeper: QuotaKeeper,
        metrics: Metrics,
        *,
        seed: Callable[[], bytes],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`seed`: the installation's secret (names.KEY_SEED), empty while it is not known yet.

        Raises:
            SettingsError: the file cannot be used.
        """
        self._keeper = keeper
        self._metrics = metrics
        self._seed = seed
        self._clock = clock
        self._file = TenantsFile(path, on_look=self._looked) if path else None
        self._tenants: tuple[Tenant, ...] = ()
        self._ring_seed = b""
        self._ring = KeyRing((), b"")
        if self._file is not None:
            self._looked(self._file)

    async def run(self) -> None:
        """Follows the file until cancelled; returns at once where there is none."""
        if self._file is not None:
            await self._file.run()

    def caller(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> Caller:
        """Who sends a request with these headers or gRPC metadata; names are in lower case.

        Raises:
            Unauthenticated: no tenant that is known.
        """
        if self._file is None:
            return ANYONE
        seed = self._seed()
        if seed != self._ring_seed:
            self._looked(self._file)
        try:
            return self._ring.holder(read_key(headers), self._clock()).caller
        except Unauthenticated:
            self._metrics.unauthenticated.inc()
            raise

    def caller_by(self, get: Callable[[str], str | None]) -> Caller:
        """The same, for an edge that gives one header at a time by its lower-case name.

        Raises:
            Unauthenticated: no tenant that is known.
        """
        return self.caller((name, get(name) or "") for name in KEY_HEADERS)

    def caller_named(self, tenant: str) -> Caller:
        """A tenant by its name, whose key was shown before: what a batch is done for. Empty: nobody in particular.

        Raises:
            Unauthenticated: there is no such tenant any more.
        """
        if self._file is None and not tenant:
            return ANYONE
        seed = self._seed()
        if self._file is not None and seed != self._ring_seed:
            self._looked(self._file)
        return self._ring.caller(tenant)

    async def admit(self, caller: Caller, num_tokens: int) -> QuotaTicket:
        """Lets a request in, if its tenant's quotas allow it. The ticket is settled when the request ends.

        Args:
            caller: of `caller`.
            num_tokens: of prompt and answer, as expected.

        Raises:
            QuotaExceeded: which quota, and when to come again.
        """
        return await self._keeper.admit(caller.tenant, self._ring.quotas(caller.tenant), num_tokens)

    def rate_headers(self, caller: Caller) -> Headers:
        """What is left of the caller's quotas, as reply headers; none where it has none."""
        quotas = self._ring.quotas(caller.tenant)
        return rate_headers(self._keeper.shares(caller.tenant, quotas), self._keeper.now_s())

    def status(self) -> dict[str, Any] | None:
        """For people who look at readiness; None without a tenants file."""
        if self._file is None:
            return None
        return {
            "tenants": len(self._file.tenants),
            "problem": self._file.problem or None,
            "quotas": {"shared": not self._keeper.problem, "problem": self._keeper.problem or None},
        }

    def _looked(self, file: TenantsFile) -> None:
        self._metrics.tenants_file_up.set(0 if file.problem else 1)
        seed = self._seed()
        if file.tenants is not self._tenants or seed != self._ring_seed:
            self._tenants, self._ring_seed = file.tenants, seed
            self._ring = KeyRing(file.tenants, seed)
