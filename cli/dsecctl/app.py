"""What all commands share: which daemon, how to print, and how a click command becomes a coroutine on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import click

from dsecctl import output
from dsecd.client import DSecClient, Sandbox
from dsecd.errors import DsecError

WIDTH: Final = 80
PREFIX_LEAST: Final = 6  # a shorter prefix is more likely a typing error than an id


class App:
    """State of one invocation. failure: exit status of a DsecError in the command that runs."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.token_file: str | None = None
        self.json = False
        self.quiet = False
        self.failure = 1

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[DSecClient]:
        """A connection to the daemon."""
        async with DSecClient(self.url, token_file=self.token_file) as client:
            yield client

    @contextlib.asynccontextmanager
    async def sandbox(self, text: str) -> AsyncIterator[tuple[DSecClient, Sandbox]]:
        """A connection and the sandbox that `text` means."""
        async with self.client() as client:
            yield client, await find(client, text)

    def note(self, text: str) -> None:
        """A line on stderr that is no error; nothing with --quiet."""
        if not self.quiet:
            output.note(text)


async def find(client: DSecClient, text: str) -> Sandbox:
    """By id, by name, or by the beginning of an id, with its host tag or without."""
    try:
        return await client.get(text)
    except DsecError as exc:
        if exc.kind != "not_found" or len(text) < PREFIX_LEAST:
            raise
        alive = await client.list()
        found = [one for one in alive if one.id.startswith(text) or one.id.rpartition("-")[2].startswith(text)]
        if len(found) > 1:
            raise DsecError("not_found", f"{len(found)} sandboxes have ids that begin with {text!r}") from exc
        if not found:
            raise
        return found[0]


def pass_app(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a callback the App as its first argument."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(click.get_current_context().ensure_object(App), *args, **kwargs)

    return wrapped


class Command(click.Command):
    """A command whose callback may be a coroutine function. Takes the global options too, and shows examples.

    failure: exit status for a failure that is not the caller's command's own.
    """

    def __init__(self, *args: Any, examples: str = "", failure: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._examples = inspect.cleandoc(examples)
        self._failure = failure
        taken = {name for param in self.params for name in param.opts}
        self.params += [option for option in global_options(hidden=True) if not taken & set(option.opts)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            return asyncio.run(result) if inspect.iscoroutine(result) else result
        except click.UsageError as exc:
            exc.ctx = exc.ctx or ctx  # so that the message names the command
            raise
        except BrokenPipeError as exc:  # here, because click would call it exit status 1
            output.close_stdout()
            raise click.exceptions.Exit(128 + signal.SIGPIPE) from exc

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (app := ctx.find_object(App)) is not None:
            app.failure = self._failure
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self._examples.splitlines():
                formatter.write(f"  {line}\n" if line else "\n")


class Group(click.Group):
    """A group whose commands are imported when they are needed: `dsecctl exec` does not load `image`."""

    def __init__(self, *args: Any, lazy: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "no_args_is_help": False})
        self._lazy = lazy or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            output.help_text(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy) or list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, name = self._lazy[cmd_name].partition(":")
        found = getattr(importlib.import_module(f"dsecctl.{module}"), name)
        assert isinstance(found, click.Command)
        return found


def global_options(*, hidden: bool) -> list[click.Option]:
    """They may stand before the command or behind it."""

    def setter(attribute: str) -> Callable[[click.Context, click.Parameter, Any], None]:
        def keep(ctx: click.Context, _param: click.Parameter, value: Any) -> None:
            if value:
                setattr(ctx.ensure_object(App), attribute, value)

        return keep

    shared: dict[str, Any] = {"expose_value": False, "hidden": hidden, "is_eager": True}
    return [
        click.Option(
            ["-H", "--host"], metavar="URL", callback=setter("url"), **shared,
            help="The daemon: unix:///path or ssh://[user@]host[/path].  [default: $DSEC_URL, else the local one]",
        ),
        click.Option(
            ["--token-file"], metavar="FILE", callback=setter("token_file"), **shared,
            help="Act as the principal of its token.  [default: $DSEC_TOKEN_FILE]",
        ),
        click.Option(["--json"], is_flag=True, callback=setter("json"), help="Print JSON on stdout.", **shared),
        click.Option(
            ["-q", "--quiet"], is_flag=True, callback=setter("quiet"), help="No progress and no notes.", **shared
        ),
    ]  # fmt: skip


def command(name: str, *, examples: str, failure: int = 1, **settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a Command; the callback's docstring is its help."""
    return click.command(name, cls=Command, examples=examples, failure=failure, **settings)
