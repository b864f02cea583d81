"""What kopf says, among the operator's logs."""

from __future__ import annotations

import logging

import pytest

from naru_operator.adapters.kube.kopf_logs import forwarded_logs


def test_warnings_pass_under_our_name_the_same_gist_once(caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.getLogger("kopf._cogs.clients.watching")
    caplog.set_level(logging.DEBUG)
    with forwarded_logs():
        theirs.info("Handler %r succeeded.", "Pod")
        theirs.warning("OS signals are ignored: running not in the main thread.")
        for attempt in range(1, 4):
            theirs.error("Request attempt #%d/4 failed; will retry: GET /api/v1/pods -> Error(%d)", attempt, attempt)
        theirs.error("Request attempt #1/4 failed; will retry: GET /api/v1/nodes -> Error(1)\n%s", "x" * 1000)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all(record.name.startswith("naru_operator.") for record in caplog.records)
    assert told[0].startswith("Request attempt #1/4 failed") and "/nodes" in told[1] and len(told[1]) <= 300


def test_the_logs_are_kopfs_own_again_afterwards() -> None:
    theirs = logging.getLogger("kopf")
    before = (theirs.level, theirs.propagate, list(theirs.handlers))
    with forwarded_logs():
        assert not theirs.propagate
    assert (theirs.level, theirs.propagate, list(theirs.handlers)) == before
