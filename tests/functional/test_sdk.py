"""The SDK as a user meets it."""

from __future__ import annotations

from daemonkit import BASE, Daemon, run

from dsecd.client import DSecClient, DSecContainerRunArgs
from dsecd.client_sync import SyncSandbox


def test_papers_listing(daemon: Daemon) -> None:
    """The session of the paper's listing works as it stands: open, run_container, run_shell, stop."""

    async def session() -> None:
        client = DSecClient(daemon.url)
        await client.open()
        args = DSecContainerRunArgs(
            container_image=BASE, network_rules={"pypi": False}, ttl_running_stop=600, disk_limit_mb=512
        )
        sandbox = await client.run_container(args, timeout=60)
        result = await sandbox.run_shell("echo hello")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "hello\n", "")
        await sandbox.stop()
        assert sandbox.info.state == "stopped"
        await client.close()

    run(session())


def test_sync_client(sandbox: SyncSandbox) -> None:
    """DSecSyncClient mirrors it without an event loop."""
    assert sandbox.exec(["echo", "a b"]).stdout == "a b\n"
