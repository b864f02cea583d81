"""Object stores of the S3 and GCS interfaces, by the library obstore, which is loaded when one is first needed.

Called by the bucket scheme. Opens stores, lists objects, reads ranges, and turns what goes wrong into this package's
errors. Retries nothing: its callers do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.credentials import SERVICE_ACCOUNT_KEYS
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.transport import AccessRefused, Broken
from naru_worker.adapters.fetch.uri import BucketUri

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSConfig, GCSStore, RetryConfig, S3Config, S3Store

MAX_OBJECTS = 10_000
"""A folder with a model has far fewer."""
_RANGE_TIMEOUT_S = 600
_STATUS = re.compile(r"status code: (\d{3})|received redirect without LOCATION")
_NO_RETRIES: RetryConfig = {"max_retries": 0}


class Changed(Exception):
    """The object is not the one that was listed any more."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as it was listed."""

    path: str
    size_bytes: int
    e_tag: str
    version: str
    """Empty where the bucket keeps none."""


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """A store with the way to log in that worked or is to be tried."""

    store: S3Store | GCSStore
    label: str
    """The bucket's URI, for messages."""

    def find(self, uri: BucketUri) -> list[StoredObject]:
        """The one object of a .gguf or .onnx URI, or all objects of a folder.

        Raises:
            LoadError: not there, too many, or the store cannot serve it.
            AccessRefused: forbidden.
            Broken: another try may work.
        """
        import obstore

        with _sentences(uri.address, self.label):
            if uri.is_object:
                return [self._look_up(uri)]
            found: list[StoredObject] = []
            for page in obstore.list(self.store, prefix=uri.path or None, chunk_size=1000):
                found += [_stored(item) for item in page]
                if len(found) > MAX_OBJECTS:
                    raise LoadError(f"{uri.address}: holds over {MAX_OBJECTS} objects; name the folder of one model")
            return found

    def read(self, item: StoredObject, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the object that was listed, and of no other content.

        Raises:
            Changed: it was overwritten or deleted.
            AccessRefused: forbidden.
            Broken: another try may work.
        """
        import obstore

        options: dict[str, Any] = {"range": (start, stop)}
        if item.e_tag:
            options["if_match"] = item.e_tag
        if item.version:
            options["version"] = item.version
        label = f"{self.label}/{item.path}"
        with _sentences(label, self.label, is_listed=True):
            block = memoryview(obstore.get(self.store, item.path, options=options).bytes())  # type: ignore[arg-type]
        if len(block) != stop - start:
            raise Broken(f"only {len(block)} of {stop - start} bytes arrived")
        return block

    def signed_url(self, path: str) -> str:
        """An address under which the headers of an object can be seen; empty when these credentials cannot sign.

        It is a secret while it is valid: never shown.
        """
        import obstore

        try:
            return obstore.sign(self.store, "HEAD", path, timedelta(minutes=5))
        except Exception:
            # obstore's errors share no base with those of its credential callbacks; without a signature there is
            # just no second source for the checksum.
            return ""

    def _look_up(self, uri: BucketUri) -> StoredObject:
        import obstore

        if not uri.version:
            return _stored(obstore.head(self.store, uri.path))
        found = obstore.get(self.store, uri.path, options={"head": True, "version": uri.version})
        return _stored({**found.meta, "version": uri.version})


def open_readers(uri: BucketUri, job: FetchJob) -> Iterator[ObjectReader]:
    """The ways to log in, the likeliest first; the next one is for when a store refuses.

    Raises:
        LoadError: the credentials or the endpoint cannot be used.
    """
    label = f"{uri.scheme}://{uri.bucket}"
    make = _s3_stores if uri.scheme == "s3" else _gcs_stores
    try:
        for store in make(uri.bucket, job):
            yield ObjectReader(store, label)
    except LoadError:
        raise
    except Exception as exc:
        # obstore raises many kinds for a setting it cannot use (ValueError, its own, those of parsers).
        raise LoadError(f"{label}: the store cannot be opened ({_first_line(exc)}); check endpoint and keys") from None


def _s3_stores(bucket: str, job: FetchJob) -> Iterator[S3Store]:
    from obstore.store import S3Store

    environ = job.environ
    endpoint = _first(environ, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    config: S3Config = {"region": _first(environ, "AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"}
    if endpoint:
        config["endpoint"] = endpoint
        config["aws_endpoint_url_s3"] = endpoint
    options = _client_options(job, endpoint)
    key, secret = environ.get("AWS_ACCESS_KEY_ID", ""), environ.get("AWS_SECRET_ACCESS_KEY", "")
    if key and secret:
        found = {"access_key_id": key, "secret_access_key": secret, "expires_at": None,
                 "token": _first(environ, "AWS_SESSION_TOKEN", "AWS_TOKEN") or None}  # fmt: skip
        yield S3Store(bucket, config={**config, "skip_signature": False}, client_options=options,
                      retry_config=_NO_RETRIES, credential_provider=lambda: found)  # type: ignore[arg-type]  # fmt: skip
        return
    if job.credentials.name:
        raise LoadError(f"credentials {job.credentials.name!r} lack AWS_SECRET_ACCESS_KEY; add it to the Secret")
    hinted = _first(environ, "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                    "AWS_CONTAINER_CREDENTIALS_FULL_URI")  # fmt: skip
    if not hinted:
        # A public bucket needs nothing, and asking a machine for its role takes seconds where it has none.
        yield S3Store(bucket, config={**config, "skip_signature": True}, client_options=options,
                      retry_config=_NO_RETRIES)  # fmt: skip
    if hinted or environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        yield S3Store(bucket, config=config, client_options=options, retry_config=_NO_RETRIES)


def _gcs_stores(bucket: str, job: FetchJob) -> Iterator[GCSStore]:
    from obstore.store import GCSStore

    environ = job.environ
    base_url = _first(environ, "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST")
    if base_url and "://" not in base_url:
        base_url = f"http://{base_url}"
    config: GCSConfig = {"base_url": base_url} if base_url else {}
    options = _client_options(job, base_url)
    key, content = job.credentials.first_of(SERVICE_ACCOUNT_KEYS)
    if key and job.credentials.folder is not None:
        if '"service_account"' in content or '"disable_oauth"' in content:
            config["service_account_key"] = content
        else:
            config["application_credentials"] = str(job.credentials.folder / key)
        yield GCSStore(bucket, config={**config, "skip_signature": False}, client_options=options,
                       retry_config=_NO_RETRIES)  # fmt: skip
        return
    hinted = _first(environ, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
                    "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN")  # fmt: skip
    if not hinted:
        yield GCSStore(bucket, config={**config, "skip_signature": True}, client_options=options,
                       retry_config=_NO_RETRIES)  # fmt: skip
    if hinted or not environ.get("STORAGE_EMULATOR_HOST"):
        yield GCSStore(bucket, config=config, client_options=options, retry_config=_NO_RETRIES)


def _client_options(job: FetchJob, endpoint: str) -> ClientConfig:
    stall = timedelta(seconds=job.settings.fetch_stall_timeout_s)
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": min(timedelta(seconds=10), stall),
        "read_timeout": stall,
        "timeout": timedelta(seconds=_RANGE_TIMEOUT_S),
        "user_agent": "naru",
    }
    if bundle := _first(job.environ, "AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as exc:
            raise LoadError(
                f"certificate file {bundle!r} cannot be read ({exc.strerror}); check AWS_CA_BUNDLE"
            ) from exc
    return options


def _first(environ: Any, *names: str) -> str:
    return next((value for name in names if (value := environ.get(name, "").strip())), "")


def _stored(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["e_tag"] or "", meta["version"] or "")


@contextlib.contextmanager
def _sentences(label: str, bucket: str, *, is_listed: bool = False) -> Iterator[None]:
    """Turns obstore's errors into this package's."""
    import obstore.exceptions as errors

    try:
        yield
    except LoadError:
        raise
    except (errors.BaseError, OSError) as exc:
        match = _STATUS.search(str(exc))
        status = int(match[1] or 301) if match else 0
        if isinstance(exc, errors.PreconditionError) or status == 412:
            raise Changed from None
        if isinstance(exc, FileNotFoundError) or status == 404:
            if is_listed:
                raise Changed from None
            raise LoadError(
                f"{label}: not found (HTTP 404); check bucket {bucket!r}, path, version and endpoint"
            ) from None
        is_refused = isinstance(exc, errors.PermissionDeniedError | errors.UnauthenticatedError)
        if is_refused or status in (401, 403) or "<Code>ExpiredToken</Code>" in str(exc):
            raise AccessRefused(f"{label}: the store refuses access (HTTP {status or 403})") from None
        if status in (301, 307, 400):
            raise LoadError(
                f"{label}: the store does not serve it like this (HTTP {status}); check region, endpoint and keys"
            ) from None
        raise Broken(_first_line(exc)) from None


def _first_line(exc: BaseException) -> str:
    """What happened, without the library's dump of requests and without queries, which may be signed."""
    line = (str(exc).splitlines() or [""])[0]
    return re.sub(r"\?[^\s)]*", "", line)[:300] or type(exc).__name__
