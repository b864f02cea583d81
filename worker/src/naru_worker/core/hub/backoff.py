"""When a failed load may be tried again. Pure."""

from __future__ import annotations

from naru_worker.core.hub.config import HubConfig

_MAX_DOUBLINGS = 60


def failures_in_row(config: HubConfig, num_failures: int, failed_at_s: float, now_s: float) -> int:
    """Failures that still count before another one: none when the last is longer ago than the limit."""
    return 0 if now_s - failed_at_s >= config.backoff_expires_s else num_failures


def retry_at_s(config: HubConfig, num_failures: int, now_s: float, *, is_permanent: bool) -> float:
    """The earliest next try after `num_failures` failures in a row, the last of them just now.

    The pause doubles with each failure up to its cap, and never outlasts the failure's own expiry; a permanent
    failure waits for that.
    """
    if is_permanent:
        return now_s + config.backoff_expires_s
    doublings = min(max(num_failures, 1) - 1, _MAX_DOUBLINGS)
    pause_s = min(config.backoff_first_s * 2.0**doublings, config.backoff_max_s)
    return now_s + min(pause_s, config.backoff_expires_s)
