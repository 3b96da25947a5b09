"""What may be typed on the command line: sizes, times, pairs, sandboxes and images, and how they are completed."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from dsecctl.app import App
from dsecd.client import DSecClient
from dsecd.errors import DsecError

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # no generic before click 8.5

COMPLETE_S: Final = 1.0  # a shell that waits for longer seems to hang
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", re.IGNORECASE)
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MIB: Final = {"k": 1 / 1024, "m": 1, "": 1, "g": 1024, "t": 1 << 20}


class Size(ParamType):
    """MiB on the wire: `512m`, `2g`; a bare number is MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r} is not a size: write 512m or 2g", param, ctx)
        mib = float(match[1]) * _MIB[match[2].lower()]
        if mib < 1:
            self.fail(f"{value!r} is less than 1 MiB", param, ctx)
        return round(mib)


class Duration(ParamType):
    """Seconds on the wire: `30s`, `5m`, `1h`, `2d`; a bare number is seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float | int):
            return float(value)
        match = _TIME.fullmatch(value.strip())
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a time: write 30s, 5m, 1h or 2d", param, ctx)
        return float(match[1]) * _SECONDS[match[2] or "s"]


class Pair(ParamType):
    """`KEY=VALUE`. With `from_environment`, a bare `KEY` takes its value from ours."""

    name = "key=value"

    def __init__(self, *, from_environment: bool = False) -> None:
        self._from_environment = from_environment

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not key or (not equals and not self._from_environment):
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        if not equals:
            if key not in os.environ:
                self.fail(f"{key} is not set here: write {key}=VALUE", param, ctx)
            text = os.environ[key]
        return key, text


class Listen(ParamType):
    """Where to listen: `127.0.0.1:5901`, `[::1]:5901`, or `/path` of a Unix socket. Of networks only the loopback."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | tuple[str, int]:
        if isinstance(value, tuple) or value.startswith("/"):
            return value  # type: ignore[no-any-return]
        host, _, port = value.rpartition(":")
        try:
            address, number = ipaddress.ip_address(host.strip("[]")), int(port)
        except ValueError:
            self.fail(f"{value!r} is no address: write 127.0.0.1:5901 or /path/of/a/socket", param, ctx)
        if not address.is_loopback:
            self.fail(f"{host} is not of this host alone, and nobody is asked for a password", param, ctx)
        if not 0 <= number <= 0xFFFF:
            self.fail(f"{number} is no port", param, ctx)
        return str(address), number


class SandboxRef(ParamType):
    """An id, a name, or the beginning of an id."""

    name = "sandbox"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        async def ask(client: DSecClient) -> list[str]:
            alive = await client.list()
            return [one.info.name for one in alive if one.info.name] + [one.id for one in alive]

        return _complete(ctx, ask, incomplete)


class ImageRef(ParamType):
    """An image's name or digest."""

    name = "image"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        async def ask(client: DSecClient) -> list[str]:
            return [image.name for image in await client.images() if image.name]

        return _complete(ctx, ask, incomplete)


class KernelRef(ParamType):
    """A guest kernel's name."""

    name = "kernel"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        async def ask(client: DSecClient) -> list[str]:
            return [kernel.name for kernel in await client.kernels()]

        return _complete(ctx, ask, incomplete)


def _complete(ctx: click.Context, ask: Any, incomplete: str) -> list[CompletionItem]:
    """No daemon, no completions: a shell's prompt is no place for errors."""
    app = ctx.find_object(App) or App()

    async def found() -> Iterable[str]:
        async with asyncio.timeout(COMPLETE_S), app.client() as client:
            names: list[str] = await ask(client)
            return names

    try:
        return [CompletionItem(name) for name in asyncio.run(found()) if name.startswith(incomplete)]
    except (DsecError, OSError, TimeoutError):
        return []


SIZE: Final = Size()
DURATION: Final = Duration()
PAIR: Final = Pair()
ENV: Final = Pair(from_environment=True)
SANDBOX: Final = SandboxRef()
IMAGE: Final = ImageRef()
KERNEL: Final = KernelRef()
LISTEN: Final = Listen()
