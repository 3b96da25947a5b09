"""A streaming reader of tar archives: ustar, GNU and pax, sparse files included. Bytes in, `Entry`s out.

Written for hostile input: every length is bounded before it is believed, names stay bytes, and nothing here touches a
file system. Python's tarfile reads pax headers of any size into memory and loses raw bytes of xattrs.
"""

from __future__ import annotations

import base64
import binascii
import struct
import urllib.parse
from typing import Final, Literal, Protocol, runtime_checkable

from dsecd.errors import DsecError

BLOCK: Final = 512
ZERO: Final = bytes(BLOCK)
MAX_HEADER: Final = 1 << 20  # one pax header or GNU long name: a name is 4 KiB, an xattr 64 KiB
MAX_EXTENTS: Final = 1 << 20
MAX_SIZE: Final = 1 << 62

Type = Literal["file", "dir", "symlink", "hardlink", "char", "block", "fifo"]
_TYPES: Final[dict[bytes, Type]] = {
    b"0": "file", b"\0": "file", b"7": "file", b"S": "file", b"1": "hardlink", b"2": "symlink", b"3": "char",
    b"4": "block", b"5": "dir", b"D": "dir", b"6": "fifo",
}  # fmt: skip
_SKIPPED: Final = b"VN"  # volume label, old long names: nothing of the tree
_XATTR: Final = b"SCHILY.xattr."
_LIBARCHIVE_XATTR: Final = b"LIBARCHIVE.xattr."

Pax = dict[bytes, bytes]
Extents = list[tuple[int, int]]


class Source(Protocol):
    """Where archives come from: at least one byte and at most `n`, or b"" at the end."""

    def read(self, n: int) -> bytes: ...


@runtime_checkable
class SeekableSource(Source, Protocol):
    """A source that can leave bytes out; False: there are not that many."""

    def seek_by(self, n: int) -> bool: ...


def bad(message: str) -> DsecError:
    return DsecError("image", message)


class Truncated(DsecError):
    """The archive ends too soon, which may be the fault of whoever was writing it."""

    def __init__(self) -> None:
        super().__init__("image", "tar: the archive is truncated (it ends before its end marker)")


class Entry:
    """One member. size: of the file as it unpacks; extents: (offset, length) of its data where it is sparse.

    links: how many names the file had, where the archive says so, or 1.
    """

    __slots__ = ("extents", "gid", "link", "links", "mode", "mtime_ns", "name", "rdev", "size", "type", "uid", "xattrs")

    def __init__(self, name: bytes, kind: Type) -> None:
        self.name = name
        self.type: Type = kind
        self.mode = self.uid = self.gid = self.size = self.mtime_ns = 0
        self.link = b""
        self.links = 1
        self.rdev = (0, 0)
        self.xattrs: dict[bytes, bytes] = {}
        self.extents: Extents | None = None

    @property
    def shown(self) -> str:
        """The name for an error message: never raw, never long."""
        return repr(self.name[:200])[2:-1]


class TarReader:
    """Walks an archive once. `need_end`: an archive without its end-of-archive block is truncated.

    (OCI layers may leave that block out; there the digest tells a truncated one.)
    """

    def __init__(self, source: Source, *, need_end: bool) -> None:
        self._source = source
        self._seekable = source if isinstance(source, SeekableSource) else None
        self._need_end = need_end
        self._buffer = b""
        self._at = 0
        self._left = 0  # data of the current member not read yet
        self._padding = 0
        self._globals: Pax = {}

    def next(self) -> Entry | None:
        """The next member, or None after the last. What is left of the current member's data is skipped."""
        self.skip(self._left + self._padding)
        self._left = self._padding = 0
        pax: Pax = {}
        long_name = long_link = None
        while True:
            header = self._header()
            if header is None:
                if pax or long_name is not None or long_link is not None:
                    raise bad("tar: the archive ends after an extended header")
                return None
            flag = header[156:157]
            if flag in (b"x", b"X", b"g", b"L", b"K"):
                body = self._extended(header)
                if flag == b"L":
                    long_name = body.rstrip(b"\0")
                elif flag == b"K":
                    long_link = body.rstrip(b"\0")
                elif flag == b"g":
                    _parse_pax(body, self._globals)
                else:
                    _parse_pax(body, pax)
            elif flag in _SKIPPED:
                size = _number(header[124:136], "size")
                self.skip(size + -size % BLOCK)
            else:
                return self._entry(header, self._globals | pax if self._globals else pax, long_name, long_link)

    def read(self, n: int) -> bytes:
        """Exactly n bytes of the current member's data; the caller knows how much there is."""
        assert n <= self._left
        self._left -= n
        return self._exactly(n)

    def drain(self) -> None:
        """Read the source to its end, so that digests see every byte and writers no broken pipe."""
        self._buffer = b""
        while self._source.read(1 << 20):
            pass

    @property
    def buffered(self) -> int:
        """How many bytes have left the source and not yet been passed on."""
        return len(self._buffer) - self._at

    def skip(self, n: int) -> None:
        have = self.buffered
        if n <= have:
            self._at += n
            return
        self._buffer, self._at, n = b"", 0, n - have
        if self._seekable is not None and self._seekable.seek_by(n):
            return
        while n:
            chunk = self._source.read(min(n, 1 << 20))
            if not chunk:
                raise Truncated
            n -= len(chunk)

    def _exactly(self, n: int) -> bytes:
        buffer, at = self._buffer, self._at
        if at + n <= len(buffer):
            self._at = at + n
            return buffer[at : at + n]
        parts = [buffer[at:]]
        n -= len(parts[0])
        self._buffer, self._at = b"", 0
        while n:
            chunk = self._source.read(max(n, 1 << 16))
            if not chunk:
                raise Truncated
            if len(chunk) > n:
                self._buffer, self._at = chunk, n
                chunk = chunk[:n]
            parts.append(chunk)
            n -= len(chunk)
        return b"".join(parts)

    def _header(self) -> bytes | None:
        if self._at == len(self._buffer):
            self._buffer, self._at = self._source.read(1 << 16), 0
            if not self._buffer:
                if self._need_end:
                    raise Truncated
                return None
        header = self._exactly(BLOCK)
        if header == ZERO:
            return None
        if _number(header[148:156], "checksum") != sum(header[:148]) + 256 + sum(header[156:]):
            raise bad("tar: not a tar archive, or an altered one (a header's checksum is wrong)")
        return header

    def _extended(self, header: bytes) -> bytes:
        size = _number(header[124:136], "size")
        if size > MAX_HEADER:
            raise bad(f"tar: an extended header of {size} bytes (at most {MAX_HEADER})")
        body = self._exactly(size)
        self.skip(-size % BLOCK)
        return body

    def _entry(self, header: bytes, pax: Pax, long_name: bytes | None, long_link: bytes | None) -> Entry:
        flag = header[156:157]
        kind = _TYPES.get(flag)
        if kind is None:
            raise bad(f"tar: a member of unknown type {flag!r}")
        magic = header[257:265]
        name = _text(header[0:100])
        if magic[:6] == b"ustar\0" and header[345]:
            name = _text(header[345:500]) + b"/" + name
        name = pax.get(b"GNU.sparse.name") or pax.get(b"path") or long_name or name
        if kind == "file" and name.endswith(b"/") and flag in (b"0", b"\0"):
            kind = "dir"  # before POSIX, a directory was a file whose name ends so
        entry = Entry(name, kind)
        entry.mode = _number(header[100:108], "mode") & 0o7777
        entry.uid = _pax_number(pax, b"uid", header[108:116])
        entry.gid = _pax_number(pax, b"gid", header[116:124])
        if entry.uid > 0xFFFFFFFE or entry.gid > 0xFFFFFFFE:
            raise bad(f"tar: {entry.shown}: an owner beyond 32 bits")
        entry.mtime_ns = _mtime(pax, header[136:148])
        entry.link = pax.get(b"linkpath") or long_link or _text(header[157:257])
        if kind in ("char", "block"):
            entry.rdev = (_number(header[329:337], "device"), _number(header[337:345], "device"))
            if entry.rdev[0] > 0xFFF or entry.rdev[1] > 0xFFFFF:
                raise bad(f"tar: {entry.shown}: a device number beyond 12+20 bits")
        entry.xattrs = _xattrs(pax)
        if b"SCHILY.nlink" in pax:
            entry.links = _decimal(pax[b"SCHILY.nlink"])
        self._size(entry, header, pax)
        return entry

    def _size(self, entry: Entry, header: bytes, pax: Pax) -> None:
        """Set size and extents, and how much data follows. Only files and GNU's dumped directories carry any."""
        flag = header[156:157]
        if entry.type != "file" and flag != b"D":
            return
        stored = _pax_number(pax, b"size", header[124:136])
        self._left, self._padding = stored, -stored % BLOCK
        if entry.type != "file":
            return
        entry.size = stored
        if flag == b"S":
            entry.size = _number(header[483:495], "size")
            entry.extents = self._old_sparse(header)
        elif pax.get(b"GNU.sparse.major") == b"1":
            entry.size = _decimal(pax.get(b"GNU.sparse.realsize", b""))
            entry.extents = self._pax_sparse()
        elif b"GNU.sparse.map" in pax:
            entry.size = _decimal(pax.get(b"GNU.sparse.size", b""))
            numbers = [_decimal(x) for x in pax[b"GNU.sparse.map"].split(b",") if x]
            entry.extents = list(zip(numbers[::2], numbers[1::2], strict=False))
        if entry.extents is not None:
            _check_extents(entry, self._left)

    def _old_sparse(self, header: bytes) -> Extents:
        extents = _gnu_extents(header[386:482])
        more = header[482]
        while more:
            # Extension blocks lie between header and data and are not part of the size.
            block = self._exactly(BLOCK)
            extents += _gnu_extents(block[:504])
            more = block[504]
            if len(extents) > MAX_EXTENTS:
                raise bad("tar: a sparse file of too many pieces")
        return extents

    def _pax_sparse(self) -> Extents:
        """The map of format 1.0: decimal lines at the start of the data, padded to a block."""
        text = b""

        def number() -> int:
            nonlocal text
            while b"\n" not in text:
                if self._left < BLOCK or len(text) > 64:
                    raise bad("tar: a sparse file's map is broken")
                text += self.read(BLOCK)
            line, text = text.split(b"\n", 1)
            return _decimal(line)

        count = number()
        if count > MAX_EXTENTS:
            raise bad("tar: a sparse file of too many pieces")
        return [(number(), number()) for _ in range(count)]


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes, what: str, *, signed: bool = False) -> int:
    """Octal text, or GNU's base-256."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(
            bytes([field[0] & 0x7F]) + field[1:], "big"
        )  # fmt: skip
    else:
        text = field.replace(b"\0", b" ").strip()
        try:
            value = int(text, 8) if text else 0
        except ValueError:
            raise bad(f"tar: a header's {what} is not a number") from None
    if not (-MAX_SIZE if signed else 0) <= value <= MAX_SIZE:
        raise bad(f"tar: a header's {what} is out of range")
    return value


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19 or (value := int(text)) > MAX_SIZE:
        raise bad("tar: a pax header's number is not one")
    return value


def _pax_number(pax: Pax, key: bytes, field: bytes) -> int:
    return _decimal(pax[key]) if key in pax else _number(field, key.decode())


def _mtime(pax: Pax, field: bytes) -> int:
    if b"mtime" not in pax:
        return _number(field, "mtime", signed=True) * 10**9
    text = pax[b"mtime"]
    whole, _, fraction = text.lstrip(b"-").partition(b".")
    ns = _decimal(whole or b"0") * 10**9 + _decimal((fraction + b"0" * 9)[:9])
    if ns > 10**9 << 62:
        raise bad("tar: a modification time out of range")
    return -ns if text.startswith(b"-") else ns


def _parse_pax(body: bytes, pax: Pax) -> None:
    """`LENGTH KEY=VALUE\\n` records; GNU's 0.0 sparse map repeats its keys, so it is gathered here."""
    sparse: list[bytes] = []
    at = 0
    while at < len(body) and body[at]:
        space = body.find(b" ", at, at + 20)
        length = _decimal(body[at:space]) if space > 0 else 0
        record = body[space + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        if not equals or record[-1:] != b"\n" or at + length > len(body):
            raise bad("tar: a pax header is broken")
        at += length
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            sparse.append(value)
        elif value:
            pax[key] = value
        elif key.startswith((_XATTR, _LIBARCHIVE_XATTR)):
            pax[key] = b""
        else:
            pax.pop(key, None)
    if sparse:
        pax[b"GNU.sparse.map"] = b",".join(sparse)


def _xattrs(pax: Pax) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for key, value in pax.items():
        if key.startswith(_XATTR):
            found[key[len(_XATTR) :]] = value
        elif key.startswith(_LIBARCHIVE_XATTR):
            try:
                plain = base64.b64decode(value + b"=" * (-len(value) % 4))
            except binascii.Error:
                raise bad("tar: an xattr's value is not base64") from None
            found.setdefault(urllib.parse.unquote_to_bytes(key[len(_LIBARCHIVE_XATTR) :]), plain)
    return found


def _gnu_extents(table: bytes) -> Extents:
    extents = []
    for offset, length in struct.iter_unpack("12s12s", table):
        if not offset.strip(b"\0 ") and not length.strip(b"\0 "):
            break
        extents.append((_number(offset, "sparse offset"), _number(length, "sparse length")))
    return extents


def _check_extents(entry: Entry, stored: int) -> None:
    assert entry.extents is not None
    end = total = 0
    for offset, length in entry.extents:
        if offset < end:
            raise bad(f"tar: {entry.shown}: a sparse file's pieces overlap")
        end = offset + length
        total += length
    if end > entry.size or total != stored:
        raise bad(f"tar: {entry.shown}: a sparse file's pieces do not add up")
