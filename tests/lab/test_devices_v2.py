"""Devices on cgroup v2, where the right to one is a BPF program of the OCI runtime's: given, held, and taken back.

Runs in the lab VM after `make install`; the CDI file is where an operator would put it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from systemd_kit import run, sandbox, sh, shell, show, until

from dsecd.client import DSecClient
from dsecd.wire import images as image_wire

pytestmark = pytest.mark.lab

CONFIG = Path("/etc/dsecd/dsecd.toml")
CDI = Path("/etc/cdi/lab.json")
DEVICE = {
    "env": ["LAB=1"],
    "deviceNodes": [
        {"path": "/dev/fuse", "fileMode": 0o666},
        {"path": "/dev/lab-control", "hostPath": "/dev/loop-control", "permissions": "r", "fileMode": 0o666},
    ],
    "mounts": [{"hostPath": "/etc/os-release", "containerPath": "/opt/os-release"}],
}


@pytest.fixture(scope="module", autouse=True)
def units() -> Iterator[None]:
    before = CONFIG.read_text()
    CDI.parent.mkdir(exist_ok=True)
    document = {
        "cdiVersion": "0.6.0",
        "kind": "lab.example/thing",
        "devices": [{"name": "0", "containerEdits": DEVICE}],
    }
    CDI.write_text(json.dumps(document))
    CONFIG.write_text(f'{before}\n[devices.thing]\nmatch = ["lab.example/thing=*"]\n')
    sh("systemctl start dsecd.socket && systemctl restart dsecd.service")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")

    async def chunks() -> AsyncIterator[bytes]:
        with Path("/srv/base.tar").open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    async def fill(client: DSecClient) -> None:
        await client.import_image(image_wire.Import(name="base:devices"), chunks())

    run(fill)
    yield
    CONFIG.write_text(before)
    CDI.unlink()
    sh("systemctl disable --now dsecd.service dsecd.socket dsecd-sandboxes.service")


def test_rights_are_those_of_the_file() -> None:
    async def look(client: DSecClient) -> None:
        line = "exec 3<>/dev/fuse && exec 4</dev/lab-control && test -s /opt/os-release && echo $LAB"
        said = await shell(client, ident, line)
        assert (said.stdout, said.exit_code) == ("1\n", 0), said.stderr
        for line in ("exec 3<>/dev/lab-control", "echo x > /opt/os-release"):
            assert (await shell(client, ident, line)).exit_code != 0, line
        assert (await client.get(ident)).info.devices == {"thing": ("lab.example/thing=0",)}

    with sandbox("base:devices", memory_limit_mb=128, devices=["thing"]) as ident:
        run(look)
        sh("systemctl restart dsecd.service")
        until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
        run(look)
    with sandbox("base:devices", memory_limit_mb=128, devices=["thing"], device_wait_s=0) as ident:
        run(look)
