"""Who may start an environment: where accounts are to be separate, not who packed it."""

from __future__ import annotations

from dsecd.envconfig import EnvConfig
from dsecd.erofs.compose import Stack
from dsecd.errors import DsecError
from dsecd.wire import sandbox as wire


def check_account(config: EnvConfig, stack: Stack, owner: wire.Owner) -> None:
    """`denied` to whoever packed a layer of it."""
    if not config.separate_accounts:
        return
    for layer in stack.lowers:
        if layer.builder is not None and layer.builder.uid == owner.uid:
            raise DsecError(
                "denied",
                f"user {owner.uid} packed {layer.name or layer.digest[:19]}, and whoever packed an environment may not "
                "start it here (environments.separate_accounts): use another account",
            )
