"""Talks to an OCI registry for `push` and `pull`: blobs and manifests both ways, tokens, redirects, honest lengths.

A connection for each request: an image is a handful of blobs. Reading ranges, many and fast, is `stores.registry`'s.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, NoReturn, Protocol
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

from dsecd.erofs.artifact import OCI_MANIFEST, sha256, small_blob
from dsecd.erofs.fetch import plain_http
from dsecd.erofs.logins import check_authfile, login_of
from dsecd.erofs.model import DIGEST, REFERENCE, Limits
from dsecd.erofs.stores.http import REDIRECTS_MAX, Connections
from dsecd.erofs.stores.registry import REPOSITORY, TAG, authorize, is_loopback
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

TIMEOUT_S: Final = 60.0
PIECE: Final = 1 << 20


class Reference(NamedTuple):
    """docker://host[:port]/repository[:tag][@digest]"""

    host: str
    repository: str
    tag: str
    digest: str

    @property
    def url(self) -> str:
        """As a store of the config has it."""
        return f"{self.host}/{self.repository}"

    @classmethod
    def parse(cls, text: str) -> Reference:
        path, _, digest = text.removeprefix("docker://").partition("@")
        head, slash, last = path.rpartition("/")
        last, _, tag = last.partition(":")
        match = REPOSITORY.fullmatch(head + slash + last)
        well = REFERENCE.fullmatch(text) and (not digest or DIGEST.fullmatch(digest)) and TAG.fullmatch(tag or "latest")
        if not well or match is None:
            raise DsecError("invalid", f"reference {text[:128]!r} is not docker://HOST[:PORT]/NAME[:TAG]")
        return cls(match[1], match[2], tag or "latest", digest)


class Body(Protocol):
    def read(self, n: int, /) -> bytes: ...


class Remote:
    """One repository of one registry. actions: `pull` or `pull,push`."""

    def __init__(self, reference: Reference, limits: Limits, actions: str) -> None:
        self.reference = reference
        self._insecure = limits.insecure_registries
        scheme = "http" if plain_http(reference.host, self._insecure) else "https"
        self._base = f"{scheme}://{reference.host}/v2/{reference.repository}"
        self._scope = f"repository:{reference.repository}:{actions}"
        check_authfile(limits.authfile)
        self._login = login_of(limits.authfile, reference.host)
        self._authorization = ""
        self._tls = ssl.create_default_context()

    # -- what is there -------------------------------------------------------------------------------------------

    def manifest(self, limit: int) -> bytes:
        """By digest where the reference has one, and then it is held against it."""
        wanted = self.reference.digest or self.reference.tag
        with self._answer("GET", f"{self._base}/manifests/{wanted}", headers={"Accept": OCI_MANIFEST}) as answer:
            self._expect(answer, 200, f"{self.reference.url}:{wanted}")
            data = answer.read(limit + 1)
        if len(data) > limit:
            raise bad(f"the artifact's manifest is longer than {limit} bytes")
        if self.reference.digest and sha256(data) != self.reference.digest:
            raise bad("the artifact's manifest is altered: its sha256 is another")
        return data

    def blob(self, digest: str, size: int) -> Iterator[bytes]:
        """Pieces of 1 MiB, `size` bytes in all; the caller compares their digest."""
        with self._answer("GET", f"{self._base}/blobs/{digest}") as answer:
            self._expect(answer, 200, f"blob {digest[:19]}")
            if answer.length not in (None, size):
                raise bad(f"blob {digest[:19]} has {answer.length} bytes, and {size} in the manifest")
            left = size
            while left:
                piece = answer.read(min(left, PIECE))
                if len(piece) < min(left, PIECE):
                    raise DsecError("network", f"{self.reference.host}: blob {digest[:19]} ended too soon")
                left -= len(piece)
                yield piece
            if answer.read(1):
                raise bad(f"blob {digest[:19]} is longer than the {size} bytes of the manifest")

    def whole(self, digest: str, size: int, limit: int) -> bytes:
        """A small blob, checked."""
        return small_blob(lambda: self.blob(digest, size), digest, size, limit)

    def has(self, digest: str) -> int | None:
        """The blob's size there; None: there is none."""
        with self._answer("HEAD", f"{self._base}/blobs/{digest}") as answer:
            if answer.status == 404:
                return None
            self._expect(answer, 200, f"blob {digest[:19]}")
            length = answer.getheader("Content-Length") or ""
            return int(length) if length.isdecimal() else -1

    # -- what is brought -----------------------------------------------------------------------------------------

    def put_blob(self, digest: str, size: int, body: Callable[[], Body]) -> bool:
        """Whether it had to be sent. body: a new reader from the start, each time it is called."""
        if self.has(digest) is not None:
            return False
        with self._answer("POST", f"{self._base}/blobs/uploads/") as answer:
            self._expect(answer, 202, "an upload")
            where = urlsplit(urljoin(self._base, answer.getheader("Location") or ""))
        query = "&".join(filter(None, (where.query, urlencode({"digest": digest}))))
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with self._answer("PUT", where._replace(query=query).geturl(), headers=headers, body=body) as answer:
            self._expect(answer, 201, f"blob {digest[:19]}")
        return True

    def put_manifest(self, data: bytes) -> None:
        url = f"{self._base}/manifests/{self.reference.tag}"
        headers = {"Content-Type": OCI_MANIFEST, "Content-Length": str(len(data))}
        with self._answer("PUT", url, headers=headers, body=lambda: data) as answer:
            self._expect(answer, 201, "the manifest")

    # -- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answer(
        self, method: str, url: str, *, headers: dict[str, str] | None = None,
        body: Callable[[], bytes | Body] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
        """The answer after redirects and a login; whatever breaks is the network's fault, and says so."""
        try:
            with contextlib.ExitStack() as held:
                yield self._followed(held, method, url, dict(headers or {}), body)
        except (OSError, http.client.HTTPException) as e:
            raise DsecError("network", f"{self.reference.host}: {e or type(e).__name__}") from e

    def _followed(
        self, held: contextlib.ExitStack, method: str, url: str, headers: dict[str, str],
        body: Callable[[], bytes | Body] | None,
    ) -> http.client.HTTPResponse:  # fmt: skip
        asked = False
        for _ in range(REDIRECTS_MAX + 1):
            parts = urlsplit(url)
            ours = parts.netloc == self.reference.host
            login = {"Authorization": self._authorization} if ours and self._authorization else {}
            answer = self._once(held, method, parts, headers | login, body)
            if answer.status == 401 and ours and not asked:
                asked = True  # a token may have run out; one that is refused at once is not renewed again
                self._log_in(answer.getheader("WWW-Authenticate") or "")
            elif answer.status in (301, 302, 303, 307, 308) and method in ("GET", "HEAD"):
                url = urljoin(url, answer.getheader("Location") or "")
                self._check_redirect(urlsplit(url))
            else:
                return answer
        raise DsecError("network", f"{self.reference.host}: more than {REDIRECTS_MAX} redirects")

    def _once(
        self, held: contextlib.ExitStack, method: str, parts: SplitResult, headers: dict[str, str],
        body: Callable[[], bytes | Body] | None,
    ) -> http.client.HTTPResponse:  # fmt: skip
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.netloc, timeout=TIMEOUT_S, context=self._tls, blocksize=PIECE
            )
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S, blocksize=PIECE)
        held.callback(connection.close)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            content = body() if body is not None else None
            connection.request(method, target, body=content, headers={"Accept-Encoding": "identity", **headers})  # type: ignore[arg-type]
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server may refuse an upload before its end, and has said why
        return connection.getresponse()

    def _check_redirect(self, to: SplitResult) -> None:
        """A registry may keep its blobs elsewhere. The digests say what is right; the login stays with the registry."""
        plain = to.scheme == "http" and (is_loopback(to.netloc) or plain_http(to.netloc, self._insecure))
        if to.scheme != "https" and not plain:
            raise DsecError("network", f"{self.reference.host}: redirects to {to.geturl()[:128]!r}, which has no TLS")

    def _log_in(self, challenge: str) -> None:
        connections = Connections()
        try:
            self._authorization, _ = authorize(challenge, self._scope, self._login, connections, TIMEOUT_S)
        except ValueError as e:
            raise DsecError("denied", f"{self.reference.host}: {e}") from e
        finally:
            connections.close()

    def _expect(self, answer: http.client.HTTPResponse, status: int, what: str) -> None:
        if answer.status == status:
            return
        _refused(self.reference.host, answer, what)


def _refused(host: str, answer: http.client.HTTPResponse, what: str) -> NoReturn:
    said = answer.read(500).decode("utf-8", "replace").strip()
    if answer.status in (401, 403):
        raise DsecError("denied", f"{host}: {what}: refused ({answer.status})", detail={"said": said})
    if answer.status == 404:
        raise DsecError("not_found", f"{host}: {what} is not there")
    raise DsecError("network", f"{host}: {what}: status {answer.status}", detail={"said": said})
