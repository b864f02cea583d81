"""What the hub asks its books: totals, what a load would take, what a departure would give."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from naru_worker.core.hub.accounts import Accounts, PageKey, page_key
from naru_worker.core.hub.model import Footprint


@dataclass(frozen=True, slots=True)
class MemoryView:
    """All bytes at one instant, as the hub booked them."""

    budget_bytes: int
    weight_bytes: int
    """Of loaded models; equal weights count once."""
    kv_bytes: int
    """Committed KV of loaded models."""
    private_bytes: int
    """Of loaded models, and what is left of those that wait in host memory."""
    workspace_bytes: int
    """One for all models; it grows and never shrinks."""
    reserved_bytes: int
    """Of loads under way, all kinds together."""
    unreturned_bytes: int
    """What unloads failed to give back."""
    host_budget_bytes: int
    host_bytes: int
    """Weights in host memory that no loaded model uses; equal weights count once."""

    @property
    def used_bytes(self) -> int:
        """At most `budget_bytes`, but for KV that grew while a load was under way, which then reports NoRoom."""
        return (
            self.weight_bytes
            + self.kv_bytes
            + self.private_bytes
            + self.workspace_bytes
            + self.reserved_bytes
            + self.unreturned_bytes
        )

    @property
    def free_bytes(self) -> int:
        """What can still be booked."""
        return self.budget_bytes - self.used_bytes


class Memory(Accounts):
    """The books with their questions; nothing here changes them."""

    def view(self) -> MemoryView:
        """All bytes by kind."""
        reserved = {"weight": 0, "kv": 0, "private": 0}
        for name in self._loading:
            holding = self._holdings[name]
            reserved["kv"] += holding.kv_bytes
            reserved["private"] += holding.footprint.private_bytes
            pages = self._pages[page_key(holding.footprint)]
            if next(iter(pages.users)) == name and pages.num_loaded == 0:
                reserved["weight"] += pages.num_bytes
        growth_bytes = self.workspace_bytes - self._admitted_workspace_bytes
        return MemoryView(
            budget_bytes=self.budget_bytes,
            weight_bytes=self._weight_bytes - reserved["weight"],
            kv_bytes=self._kv_bytes - reserved["kv"] + self.untold_bytes,
            private_bytes=self._private_bytes - reserved["private"] + self._asleep_bytes,
            workspace_bytes=self._admitted_workspace_bytes,
            reserved_bytes=sum(reserved.values()) + growth_bytes,
            unreturned_bytes=self.unreturned_bytes,
            host_budget_bytes=self.host_budget_bytes,
            host_bytes=self._host_bytes,
        )

    def kv_bytes(self, name: str) -> int:
        """Booked KV of a model; 0 where it holds none."""
        holding = self._holdings.get(name)
        return 0 if holding is None else holding.kv_bytes

    def spare_kv_bytes(self, name: str) -> int:
        """KV above the floor."""
        holding = self._holdings.get(name)
        return 0 if holding is None else holding.kv_bytes - holding.footprint.kv_floor_bytes

    def sharers(self, name: str) -> tuple[str, ...]:
        """Other models that load, have loaded or keep the same weights."""
        holding = self._holdings.get(name)
        footprint = self._kept.get(name) if holding is None else holding.footprint
        pages = None if footprint is None else self._pages.get(page_key(footprint))
        return () if pages is None else tuple(other for other in {**pages.users, **pages.keepers} if other != name)

    # --- what a change would take or give ---------------------------------------------------------------------------

    def planned_bytes(self, footprint: Footprint, before: Collection[Footprint], leaving: Collection[str]) -> int:
        """What a load would book after the loads of `before`, when all of `leaving` have left."""
        key = page_key(footprint)
        pages = self._pages.get(key)
        is_shared = any(page_key(other) == key for other in before) or (
            pages is not None and any(user not in leaving for user in pages.users)
        )
        workspace_bytes = max(self.workspace_bytes, *(other.workspace_bytes for other in before), 0)
        return (
            (0 if is_shared else footprint.weight_bytes)
            + footprint.kv_floor_bytes
            + footprint.private_bytes
            + max(0, footprint.workspace_bytes - workspace_bytes)
        )

    def freed_bytes(self, name: str, leaving: Collection[str], kept_keys: Collection[PageKey] = ()) -> int:
        """What a model's leaving gives when all of `leaving` leave as well; pages of `kept_keys` stay in any case."""
        holding = self._holdings.get(name)
        if holding is None:
            return 0
        key = page_key(holding.footprint)
        pages = self._pages[key]
        is_alone = len(pages.users) == 1 or all(user == name or user in leaving for user in pages.users)
        is_last = is_alone and key not in kept_keys
        return holding.kv_bytes + holding.footprint.private_bytes + (pages.num_bytes if is_last else 0)

    def coming_bytes(self, leaving: Collection[str]) -> int:
        """What comes free when all of `leaving` have left; common pages count once."""
        coming_bytes = 0
        seen: set[PageKey] = set()
        for name in leaving:
            holding = self._holdings.get(name)
            if holding is not None:
                key = page_key(holding.footprint)
                coming_bytes += self.freed_bytes(name, leaving, seen)
                seen.add(key)
        return coming_bytes

    def least_bytes(self, footprint: Footprint, staying: Collection[str]) -> int:
        """What is booked at least when a model is loaded beside those that stay, at their KV floors."""
        footprints = [footprint, *(self._holdings[name].footprint for name in staying)]
        pages = {page_key(each): each.weight_bytes for each in footprints}
        return (
            sum(pages.values())
            + sum(each.kv_floor_bytes + each.private_bytes for each in footprints)
            + max(self._admitted_workspace_bytes, *(each.workspace_bytes for each in footprints))
            + self.unreturned_bytes
        )

    def holds(self, name: str) -> bool:
        """Whether a model loads, is loaded or unloads."""
        return name in self._holdings

    def users(self, name: str) -> tuple[str, ...]:
        """All models that use a loaded model's weights in the engine, itself included."""
        holding = self._holdings.get(name)
        return () if holding is None else tuple(self._pages[page_key(holding.footprint)].users)

    def unload_host_bytes(self, name: str, *, keep_host: bool) -> int:
        """What the host account must have free before the model's unload begins: 0 where it has nothing to pay."""
        pages = self._pages[page_key(self._holdings[name].footprint)]
        is_kept = keep_host or bool(pages.keepers)
        return pages.num_bytes if is_kept and pages.num_loaded == 1 and not pages.is_host_paid else 0

    def host_keepers(self, name: str) -> tuple[str, ...]:
        """Models in host memory that have the weights of a loaded one."""
        return tuple(self._pages[page_key(self._holdings[name].footprint)].keepers)

    def host_freed_bytes(self, names: Collection[str]) -> int:
        """What comes free of the host account when all of `names` have left it."""
        keys = {page_key(self._kept[name]): None for name in names if name in self._kept}
        return sum(
            pages.num_bytes
            for pages in (self._pages[key] for key in keys)
            if pages.is_host_paid and all(keeper in names for keeper in pages.keepers)
        )
