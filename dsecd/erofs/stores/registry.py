"""A store that is an OCI registry: blobs by digest, with the token dance that registries ask for.

The distribution specification: GET /v2/<name>/blobs/<digest>; a 401 names a token server in WWW-Authenticate.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import time
from threading import Lock
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from dsecd.erofs.logins import login_of
from dsecd.erofs.stores import StoreConfig, unreadable
from dsecd.erofs.stores.http import Connections, Ranges
from dsecd.errors import DsecError

REPOSITORY: Final = re.compile(r"([A-Za-z0-9.-]+(?::\d+)?)/([a-z0-9]+(?:[._/-][a-z0-9]+)*)")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')
TOKEN_S: Final = 60.0  # what a token lives at least, when the server does not say
MAX_TOKEN: Final = 1 << 20


def is_loopback(netloc: str) -> bool:
    """Whether a host may be spoken to without TLS."""
    host = netloc.rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RegistryStore:
    """Blobs are digests of one repository."""

    def __init__(self, name: str, config: StoreConfig) -> None:
        found = REPOSITORY.fullmatch(config.url)
        if found is None:
            raise DsecError("invalid", f"store {name}: url {config.url!r} is not host[:port]/repository")
        self.name = name
        self._host, self._repository = found[1], found[2]
        self._scheme = "http" if config.insecure or is_loopback(self._host) else "https"
        self._ranges = Ranges(name, config)
        self._connections = Connections()
        self.close = self._ranges.close
        self._login = login_of(config.authfile, self._host)
        self._lock = Lock()
        self._token, self._until = "", 0.0

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        if DIGEST.fullmatch(blob) is None:
            raise DsecError("image", f"store {self.name}: {blob[:80]!r} is not a digest")
        if not size:
            return b""
        url = f"{self._scheme}://{self._host}/v2/{self._repository}/blobs/{blob}"
        deadline = time.monotonic() + timeout_s
        try:
            return self._ranges.get(url, blob, offset, size, timeout_s, self._headers())
        except PermissionError as exc:
            self._renew(str(exc), blob, max(0.001, deadline - time.monotonic()))
        try:
            left = max(0.001, deadline - time.monotonic())
            return self._ranges.get(url, blob, offset, size, left, self._headers())
        except PermissionError as exc:
            raise unreadable(self.name, blob, "the registry refuses us") from exc

    def _headers(self) -> dict[str, str]:
        with self._lock:
            return {"Authorization": self._token} if self._token and time.monotonic() < self._until else {}

    def _renew(self, challenge: str, blob: str, timeout_s: float) -> None:
        """Answer a challenge: Basic with our login, or a Bearer token from the server that it names."""
        scope = f"repository:{self._repository}:pull"
        try:
            self._keep(*authorize(challenge, scope, self._login, self._connections, timeout_s))
        except ValueError as exc:
            raise unreadable(self.name, blob, str(exc)) from exc

    def _keep(self, token: str, seconds: float) -> None:
        with self._lock:
            self._token, self._until = token, time.monotonic() + min(max(seconds - 5, 5), 86400)


def authorize(challenge: str, scope: str, login: str, connections: Connections, timeout_s: float) -> tuple[str, float]:
    """(the header, how long it is good) that answers a challenge: Basic with our login, or a Bearer token from the
    server that it names. ValueError: why there is none."""
    kind, _, rest = challenge.partition(" ")
    if kind.lower() == "basic" and login:
        return f"Basic {login}", 86400.0
    parameters = dict(PARAMETER.findall(rest))
    realm = urlsplit(parameters.get("realm", ""))
    if kind.lower() != "bearer" or realm.scheme not in ("http", "https"):
        raise ValueError("the registry wants a login")
    if realm.scheme == "http" and not is_loopback(realm.netloc):
        raise ValueError(f"its token server {realm.netloc} has no TLS")
    query = {"scope": scope, **{k: v for k, v in parameters.items() if k == "service"}}
    headers = {"Authorization": f"Basic {login}"} if login else {}
    connection = connections.fresh(realm, timeout_s)
    try:
        connection.request("GET", f"{realm.path}?{urlencode(query, quote_via=quote)}", headers=headers)
        response = connection.getresponse()
        body = response.read(MAX_TOKEN)
        if response.status != 200:
            raise ValueError(f"its token server answers {response.status}")
        answer: dict[str, Any] = msgspec.json.decode(body, type=dict)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as exc:
        raise ValueError(f"its token server: {exc}") from exc
    finally:
        connection.close()
    token = answer.get("token") or answer.get("access_token")
    if not isinstance(token, str) or not token.isprintable():
        raise ValueError("its token server sent no token")
    seconds = answer.get("expires_in")
    return f"Bearer {token}", float(seconds) if isinstance(seconds, int | float) else TOKEN_S
