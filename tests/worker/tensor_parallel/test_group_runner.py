"""What a step over ranks gives when one of them is lost in the middle of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from batches import batch_of, lanes_for  # noqa: E402

from naru_worker.adapters.ops.tensor_parallel.errors import RankLost  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.group_runner import GroupRunner  # noqa: E402


class Group:
    """Ranks of which one can be lost."""

    size = 2
    is_lost = False

    def order(self, header: dict[str, Any], tail: bytes = b"", **options: Any) -> int:
        return 1

    def loss(self, own_failure: str = "") -> RankLost:
        assert self.is_lost, "it would wait for ever"
        return RankLost(1, 2, "its process was ended by signal 9 (Killed)")


def test_results_that_came_of_exchanges_given_up_are_nobodys() -> None:
    group = Group()

    def logits(_batch: object) -> str:
        group.is_lost = is_lost_meanwhile
        return "numbers"

    shard = SimpleNamespace(prepare=lambda batch: None, logits=logits)
    runner = object.__new__(GroupRunner)  # nothing is loaded
    vars(runner).update(_group=group, _size=2, _model=1, _runner=shard, _is_closed=False)
    [lane] = lanes_for([[1, 2]], 4, 1)
    batch = batch_of([(lane, 2)], 4)
    is_lost_meanwhile = False
    assert cast(Any, runner.logits(batch)) == "numbers"
    is_lost_meanwhile = True
    with pytest.raises(RankLost, match="signal 9"):
        runner.logits(batch)
