"""The hub's books: every byte of the engine account and of the host account, and how they are booked.

Weights are pages with a content identity: models that have them in common pay once. The engine account pays for pages
as long as a model that is loading, loaded or unloading uses them; the host account pays for those that models in host
memory keep and no loaded model uses. While a load or an unload moves pages between the two, both pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from naru_worker.core.hub.model import Footprint

PageKey = tuple[str, int]
"""(weights_key, weight_bytes): equal identities of unequal size are taken for different weights."""


@dataclass(slots=True)
class Pages:
    """Weights of one identity, and who uses or keeps them. Mutable; owned by the accounts."""

    num_bytes: int
    users: dict[str, None] = field(default_factory=dict)
    """Models that load, are loaded or unload."""
    num_loaded: int = 0
    """Users that are loaded and whose unload has not begun."""
    keepers: dict[str, None] = field(default_factory=dict)
    """Models that have them, or are about to have them, in host memory."""
    is_host_paid: bool = False


@dataclass(slots=True)
class Holding:
    """What one model has of the engine account beside pages and workspace."""

    footprint: Footprint
    kv_bytes: int


class Accounts:
    """Mutable; owned by the hub, which uses it as `Memory`. Every method is O(1)."""

    def __init__(self, budget_bytes: int, host_budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self.unreturned_bytes = 0
        self.untold_bytes = 0
        """KV growth that a refused booking told of before the engines did."""
        self._pages: dict[PageKey, Pages] = {}
        self._holdings: dict[str, Holding] = {}
        self._kept: dict[str, Footprint] = {}
        self._asleep: dict[str, int] = {}
        """What models in host memory have left in the engine account; it becomes part of their next load."""
        self._asleep_bytes = 0
        self._weight_bytes = 0
        self._private_bytes = 0
        self._kv_bytes = 0
        self._host_bytes = 0
        self._admitted_workspace_bytes = 0
        self._loading: dict[str, None] = {}

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def workspace_bytes(self) -> int:
        """The largest any model needs that was ever loaded, or is loading now."""
        return max(
            self._admitted_workspace_bytes,
            *(self._holdings[name].footprint.workspace_bytes for name in self._loading),
            0,
        )

    @property
    def used_bytes(self) -> int:
        """All of the engine account."""
        return (
            self._weight_bytes
            + self._private_bytes
            + self._asleep_bytes
            + self._kv_bytes
            + self.workspace_bytes
            + self.unreturned_bytes
            + self.untold_bytes
        )

    @property
    def free_bytes(self) -> int:
        """Of the engine account; negative while KV grows past a load under way."""
        return self.budget_bytes - self.used_bytes

    @property
    def host_free_bytes(self) -> int:
        """Of the host account."""
        return self.host_budget_bytes - self._host_bytes

    # --- engine account ---------------------------------------------------------------------------------------------

    def need_bytes(self, footprint: Footprint) -> int:
        """What a load of a model that has left nothing would book now."""
        pages = self._pages.get(page_key(footprint))
        is_shared = pages is not None and bool(pages.users)
        return (
            (0 if is_shared else footprint.weight_bytes)
            + footprint.kv_floor_bytes
            + footprint.private_bytes
            + max(0, footprint.workspace_bytes - self.workspace_bytes)
        )

    def asleep_bytes(self, names: Iterable[str]) -> int:
        """What these models have left in the engine account, and give back when they leave host memory or load."""
        return sum(self._asleep.get(name, 0) for name in names if name not in self._holdings)

    def load_bytes(self, name: str, footprint: Footprint) -> int:
        """What a load of this model would book now, beyond what it has left there."""
        return self.need_bytes(footprint) - self.asleep_bytes([name])

    def begin_load(self, name: str, footprint: Footprint) -> int:
        """Books a load; returns how many bytes it took."""
        need_bytes = self.load_bytes(name, footprint)
        self._asleep_bytes -= self._asleep.get(name, 0)
        pages = self._pages.setdefault(page_key(footprint), Pages(footprint.weight_bytes))
        if not pages.users:
            self._weight_bytes += pages.num_bytes
        pages.users[name] = None
        self._holdings[name] = Holding(footprint, footprint.kv_floor_bytes)
        self._loading[name] = None
        self._kv_bytes += footprint.kv_floor_bytes
        self._private_bytes += footprint.private_bytes
        return need_bytes

    def end_load(self, name: str) -> None:
        """It is loaded: host memory no longer pays for its weights."""
        holding = self._holdings[name]
        del self._loading[name]
        self._admitted_workspace_bytes = max(self._admitted_workspace_bytes, holding.footprint.workspace_bytes)
        pages = self._pages[page_key(holding.footprint)]
        pages.num_loaded += 1
        self.leave_host(name)
        self._pay_host(pages, False)

    def cancel_load(self, name: str) -> None:
        """It is not loaded: what was booked is free; what it keeps in host memory stays kept, as it was."""
        del self._loading[name]
        self._leave(name)
        self._asleep_bytes += self._asleep.get(name, 0)

    def begin_unload(self, name: str, *, keep_host: bool) -> None:
        """Its pages leave the engine account with `end_unload`; where host memory keeps them, it pays from now on."""
        holding = self._holdings[name]
        pages = self._pages[page_key(holding.footprint)]
        pages.num_loaded -= 1
        if keep_host:
            self._kept[name] = holding.footprint
            pages.keepers[name] = None
        if pages.keepers and pages.num_loaded == 0:
            self._pay_host(pages, True)

    def end_unload(self, name: str, unreturned_bytes: int) -> None:
        """It is out; `unreturned_bytes` stay booked, and what it leaves behind where it is kept in host memory."""
        if name in self._kept:
            self._asleep[name] = self._holdings[name].footprint.asleep_bytes
            self._asleep_bytes += self._asleep[name]
        self._leave(name)
        self.unreturned_bytes += unreturned_bytes

    def set_kv(self, name: str, kv_bytes: int) -> None:
        """Books a model's committed KV, at least its floor; ignored where it holds none."""
        holding = self._holdings.get(name)
        if holding is not None:
            kv_bytes = max(kv_bytes, holding.footprint.kv_floor_bytes)
            self._kv_bytes += kv_bytes - holding.kv_bytes
            holding.kv_bytes = kv_bytes

    # --- host account -----------------------------------------------------------------------------------------------

    def host_need_bytes(self, footprint: Footprint) -> int:
        """What keeping these weights in host memory would take from the host account."""
        pages = self._pages.get(page_key(footprint))
        is_free = pages is not None and (pages.is_host_paid or pages.num_loaded > 0)
        return 0 if is_free else footprint.weight_bytes

    def join_host(self, name: str, footprint: Footprint) -> None:
        """Its weights come into host memory."""
        need_bytes = self.host_need_bytes(footprint)
        pages = self._pages.setdefault(page_key(footprint), Pages(footprint.weight_bytes))
        self._kept[name] = footprint
        pages.keepers[name] = None
        if need_bytes:
            self._pay_host(pages, True)

    def leave_host(self, name: str) -> None:
        """Its weights left host memory; it need not have been there."""
        footprint = self._kept.pop(name, None)
        if footprint is None:
            return
        left_bytes = self._asleep.pop(name, 0)
        if name not in self._holdings:
            self._asleep_bytes -= left_bytes
        pages = self._pages[page_key(footprint)]
        del pages.keepers[name]
        if not pages.keepers:
            self._pay_host(pages, False)
        self._drop_unused(page_key(footprint), pages)

    def _pay_host(self, pages: Pages, is_paid: bool) -> None:
        if pages.is_host_paid != is_paid:
            pages.is_host_paid = is_paid
            self._host_bytes += pages.num_bytes if is_paid else -pages.num_bytes

    def _leave(self, name: str) -> None:
        holding = self._holdings.pop(name)
        self._kv_bytes -= holding.kv_bytes
        self._private_bytes -= holding.footprint.private_bytes
        key = page_key(holding.footprint)
        pages = self._pages[key]
        del pages.users[name]
        if not pages.users:
            self._weight_bytes -= pages.num_bytes
        self._drop_unused(key, pages)

    def _drop_unused(self, key: PageKey, pages: Pages) -> None:
        if not pages.users and not pages.keepers:
            del self._pages[key]


def page_key(footprint: Footprint) -> PageKey:
    """What models must have in common to share their weights."""
    return footprint.weights_key, footprint.weight_bytes


def total_bytes(footprint: Footprint) -> int:
    """What a model takes that is alone in a fresh worker."""
    return footprint.weight_bytes + footprint.kv_floor_bytes + footprint.workspace_bytes + footprint.private_bytes
