"""What the installation gives worker pods: the settings and their file, read once at the start. Called by the app."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from naru_operator.core.kube import Object
from naru_operator.core.pools.model import PodSettings
from naru_operator.core.pools.pod_template import check_template
from naru_operator.settings import Settings
from naru_proto.errors import InvalidRequest
from naru_proto.settings import SettingsError

_MAX_BYTES = 1024 * 1024
"""What a ConfigMap can hold."""


def read_pod_settings(settings: Settings) -> PodSettings:
    """The settings of worker pods.

    Raises:
        SettingsError: there is no worker image, or the template's file cannot be used.
    """
    if not settings.worker_image:
        raise SettingsError("worker_image is empty; name the container image of the workers")
    return PodSettings(
        image=settings.worker_image,
        redis_secret=settings.worker_redis_secret,
        service_account=settings.worker_service_account,
        image_pull_policy=settings.worker_image_pull_policy,
        template=_read_template(Path(settings.worker_template_file)) if settings.worker_template_file else {},
    )


def _read_template(path: Path) -> Object:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise SettingsError(f"worker_template_file {str(path)!r} cannot be read: {exc.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise SettingsError(f"worker_template_file {str(path)!r} has more than {_MAX_BYTES} bytes")
    try:
        template = yaml.safe_load(data)
        # Through JSON, as it goes to the API server: no dates, no loops, no keys that are not text.
        template = json.loads(json.dumps({} if template is None else template, allow_nan=False))
    except yaml.YAMLError as exc:
        at = getattr(exc, "problem_mark", None)  # not the text itself: it may hold what somebody should not log
        where = f" in line {at.line + 1}" if at is not None else ""
        raise SettingsError(f"worker_template_file {str(path)!r} is no YAML{where}") from None
    except (ValueError, TypeError, RecursionError) as exc:
        raise SettingsError(f"worker_template_file {str(path)!r} holds what JSON cannot: {exc}") from None
    if not isinstance(template, dict):
        raise SettingsError(f"worker_template_file {str(path)!r} must hold a mapping")
    try:
        check_template(template)
    except InvalidRequest as exc:
        raise SettingsError(f"worker_template_file {str(path)!r}: {exc.message}") from None
    return template
