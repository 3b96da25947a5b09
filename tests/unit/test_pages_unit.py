"""How the daemon takes its unit's absence: systemd's word is a fake `systemctl`, the server it finds a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.erofs.pages import client
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pages.model import SOCKET, PagesConfig
from dsecd.errors import DsecError


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put what `systemctl` does."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setattr(client, "SYSTEMD_S", 0.2)

    def put(script: str) -> None:
        tool = tmp_path / "systemctl"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

    return put


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(PagesConfig(run_dir=str(tmp_path / "run"), cache_dir=str(tmp_path / "cache")))


def test_a_unit_that_is_coming_is_waited_for(says: Callable[[str], None], pages: Pages) -> None:
    says("echo activating; exit 3")
    pages.config.run.mkdir()

    def come() -> None:
        time.sleep(1.0)
        late.bind(str(pages.config.run / SOCKET))
        late.listen()

    with socket.socket(socket.AF_UNIX) as late:
        thread = threading.Thread(target=come)
        thread.start()
        talk = pages._await_unit()
        thread.join()
        assert talk is not None
        talk.close()


@pytest.mark.parametrize("state", ["inactive", "failed", "unknown"])
def test_one_that_is_not_is_not(says: Callable[[str], None], pages: Pages, state: str) -> None:
    says(f"echo {state}; exit 3")
    began = time.monotonic()
    assert pages._await_unit() is None
    assert 0.2 <= time.monotonic() - began < 10


def test_it_is_waited_for_with_a_bound(
    says: Callable[[str], None], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("echo active")
    monkeypatch.setattr(client, "COMING_S", 1.0)
    began = time.monotonic()
    assert pages._await_unit() is None
    assert 1.0 <= time.monotonic() - began < 10


def test_a_daemon_that_stops_does_not_wait(
    says: Callable[[str], None], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("echo activating; exit 3")
    monkeypatch.setattr(client, "_systemd_runs_it", lambda: True)
    began = time.monotonic()
    thread = threading.Timer(0.5, pages.close)
    thread.start()
    with pytest.raises(DsecError) as caught:
        pages.stats()
    thread.join()
    assert caught.value.kind == "shutting_down"
    assert time.monotonic() - began < 10


def test_a_daemon_started_by_hand_does_not_wait(
    says: Callable[[str], None], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("echo active")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert pages._await_unit() is None


def test_a_systemd_that_hangs_is_thought_to_be_at_it(
    says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ASK_S", 0.3)
    says("exec sleep 5")
    assert client._systemd_is_at_it()
