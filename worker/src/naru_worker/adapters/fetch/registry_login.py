"""How an OCI registry wants to be told who asks: by a token of its token service, or by name and password.

Called by the registry client. Source: the distribution project's token authentication, RFC 7617.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.credentials import DOCKER_CONFIG_KEY, decode_basic
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.transport import Broken, check_status

if TYPE_CHECKING:
    import httpx

_MAX_TOKEN_BYTES = 1 << 20
_MAX_LOGINS = 50
"""Of one fetch: a token lasts some minutes, and a registry that never takes one must not be asked for ever."""
_CHALLENGE = re.compile(r"(bearer|basic)\b([^,]*(?:,\s*[a-z_]+=(?:\"[^\"]*\"|[^\s,]*))*)", re.IGNORECASE)
_PARAMETER = re.compile(r"([a-z_]+)=(?:\"([^\"]*)\"|([^\s,]*))", re.IGNORECASE)


class RegistryLogin:
    """The login at one registry for one repository; see `transport.Login`. One thread."""

    def __init__(self, client: httpx.Client, base_url: str, repository: str, account: tuple[str, str] | None) -> None:
        """`account` None: as anybody."""
        self._client = client
        self._base_url = base_url
        self._repository = repository
        self._account = account
        self._authorization = ""
        self._num_logins = 0

    def headers(self) -> dict[str, str]:
        """The last answer, before any challenge nothing."""
        return {"Authorization": self._authorization} if self._authorization else {}

    def answer(self, response: httpx.Response) -> bool:
        """Gets what the registry asks for; False when there is nothing better to say than what was said.

        Raises:
            LoadError: the token service cannot be used.
            Broken: it may be later.
        """
        origin = urllib.parse.urlsplit(str(response.request.url))[:2]
        if origin != urllib.parse.urlsplit(self._base_url)[:2] or self._num_logins >= _MAX_LOGINS:
            return False
        self._num_logins += 1
        challenges = parse_challenges(response.headers.get("WWW-Authenticate", ""))
        if "bearer" in challenges:
            before, self._authorization = self._authorization, f"Bearer {self._token(challenges['bearer'])}"
            return before != self._authorization
        if "basic" in challenges and self._account is not None and not self._authorization:
            self._authorization = f"Basic {self._basic()}"
            return True
        return False

    def _token(self, challenge: Mapping[str, str]) -> str:
        import httpx

        realm = challenge.get("realm", "")
        is_safe = realm.startswith("https://") or (realm.startswith("http://") and self._base_url.startswith("http://"))
        if not is_safe:
            raise LoadError(
                f"{self._base_url}: its token service {realm[:200]!r} has no safe address; ask its operator"
            )
        query = {"scope": challenge.get("scope") or f"repository:{self._repository}:pull"}
        if service := challenge.get("service"):
            query["service"] = service
        headers = {"Authorization": f"Basic {self._basic()}"} if self._account is not None else {}
        try:
            with self._client.stream("GET", realm, params=query, headers=headers) as response:
                check_status(response, f"{self._base_url}'s token service")
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > _MAX_TOKEN_BYTES:
                        raise LoadError(f"{self._base_url}: its token service sends too much; ask its operator")
            answer = json.loads(bytes(body))
            token = answer.get("token") or answer["access_token"]
        except httpx.TransportError as exc:
            raise Broken(f"its token service does not answer ({type(exc).__name__})") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, AttributeError) as exc:
            raise LoadError(f"{self._base_url}: its token service's answer is broken ({type(exc).__name__})") from exc
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise LoadError(f"{self._base_url}: its token service sends no token; ask its operator")
        return token

    def _basic(self) -> str:
        assert self._account is not None
        return base64.b64encode(":".join(self._account).encode()).decode()


def parse_challenges(header: str) -> dict[str, dict[str, str]]:
    """A WWW-Authenticate header as scheme (lower case) to its parameters; what is neither bearer nor basic is left."""
    return {
        match[1].lower(): {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(match[2])}
        for match in _CHALLENGE.finditer(header[:4096])
    }


def find_account(job: FetchJob, registry: str, repository: str) -> tuple[str, str] | None:
    """Name and password for a repository: of the named credentials, else of the user's Docker configuration.

    Raises:
        LoadError: the named credentials hold none for this registry.
    """
    own = job.credentials
    if own.name:
        if "username" in own.values and DOCKER_CONFIG_KEY not in own.values:
            return own.values["username"], own.values.get("password", "")
        account = _from_docker_config(own.values.get(DOCKER_CONFIG_KEY, ""), registry, repository)
        if account is None:
            raise LoadError(
                f"credentials {own.name!r}: its {DOCKER_CONFIG_KEY} has no name and password for {registry!r}; add "
                "them under auths",
                param="model.credentialsSecret",
            )
        return account
    folder = Path(job.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    try:
        return _from_docker_config((folder / "config.json").read_text(encoding="utf-8"), registry, repository)
    except (OSError, ValueError, RuntimeError):
        return None


def _from_docker_config(text: str, registry: str, repository: str) -> tuple[str, str] | None:
    """The longest of the ``auths`` that names the registry, or a path that the repository is below."""
    try:
        auths = json.loads(text)["auths"]
        known = {_plain_host(str(key)): value for key, value in auths.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    place = f"{_plain_host(registry)}/{repository}"
    for key in sorted(known, key=len, reverse=True):
        if (place == key or place.startswith(key + "/")) and (account := _account(known[key])):
            return account
    return None


def _account(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("username"), str) and isinstance(value.get("password"), str) and value["username"]:
        return value["username"], value["password"]
    return decode_basic(value["auth"]) if isinstance(value.get("auth"), str) else None


def _plain_host(key: str) -> str:
    """Without scheme and API version; the one registry with two names gets one."""
    host = re.sub(r"^https?://", "", key).rstrip("/")
    host = re.sub(r"/v[12]$", "", host)
    return re.sub(r"^(index\.docker\.io|registry-1\.docker\.io)\b", "docker.io", host)
