"""Networks of the installed daemon: systemd, cgroup v2, AppArmor, and a host whose firewall is reloaded.

The far side is a namespace of the guest with a listener on two addresses.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import leftovers
import pytest
from systemd_kit import CONFIG, RELEASES, import_busybox, microvm_host, run, sandbox, sh, shell, show, until
from test_microvm_unit import MADE_S, running

from dsecd.client import DSecClient, DSecMicroVMRunArgs, Sandbox
from dsecd.wire import network as wire

pytestmark = pytest.mark.lab

FAR, OTHER = "203.0.113.10", "203.0.113.11"
# Its wget crashes: it is a static program, and asks for names.
GET = "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w {} {} 80"


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[None]:
    """The units, an image, and a network beyond the host's."""
    leftovers.tolerated.append(_is_the_routers)
    sh("systemctl enable --now dsecd.socket dsecd.service")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
    run(lambda client: import_busybox(client, "base:net"))
    sh("sysctl -qw net.ipv4.ip_forward=1")
    sh("ip netns add far && ip link add out0 type veth peer name in0 netns far")
    sh("ip addr add 203.0.113.1/24 dev out0 && ip link set out0 up")
    sh(f"ip -n far addr add {FAR}/24 dev in0 && ip -n far addr add {OTHER}/24 dev in0 && ip -n far link set in0 up")
    sh("mkdir -p /run/far && echo far >/run/far/index.html")
    server = subprocess.Popen(
        ["ip", "netns", "exec", "far", "python3", "-m", "http.server", "--directory", "/run/far", "80"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield
    server.kill()
    server.wait()
    sh("ip netns del far")
    sh("systemctl disable --now dsecd.service dsecd.socket dsecd-sandboxes.service")
    leftovers.tolerated.remove(_is_the_routers)


def _is_the_routers(item: str) -> bool:
    """It stays as long as the daemon that made it."""
    return item == "link dsec1"


def reaches(ident: str, address: str) -> bool:
    async def work(client: DSecClient) -> bool:
        found = await shell(client, ident, GET.format(3, address))
        if found.exit_code > 127:
            raise AssertionError(f"{address}: {found}")
        return bool(found.stdout.endswith("\r\n\r\nfar\n"))

    return run(work)


def test_a_container_reaches_what_it_may_through_restarts_and_a_reloaded_firewall() -> None:
    if "no marks of connections" in sh("dsecctl doctor --json", False):
        pytest.skip("the lab's kernel has no CONFIG_NF_CONNTRACK_MARK")
    with sandbox("base:net", memory_limit_mb=64, network_rules={f"{FAR}:80/tcp": True}) as ident:
        until("the far side answers", lambda: reaches(ident, FAR))
        assert not reaches(ident, OTHER)
        assert not reaches(ident, "203.0.113.1")
        sh("systemctl restart dsecd.service")
        assert reaches(ident, FAR)
        assert not reaches(ident, OTHER)
        sh("systemctl kill -s KILL dsecd.service")
        until("it is back", lambda: show("dsecd.service", "ActiveState") == "active")
        assert not reaches(ident, OTHER)
        # What Debian's nftables.service does when it is reloaded: nothing opens; the translation is gone until the
        # daemon has put it back.
        sh("nft flush ruleset")
        assert not reaches(ident, OTHER)
        assert not reaches(ident, "203.0.113.1")
        until("it reaches the far side again", lambda: reaches(ident, FAR))

        async def swap(client: DSecClient) -> wire.SandboxNetwork:
            return await (await client.get(ident)).set_network({f"{OTHER}:80": True})

        assert run(swap).attached
        assert reaches(ident, OTHER)
        assert not reaches(ident, FAR)
    router = sh("nsenter --net=/run/dsecd/net/router1 ip -o link show")
    assert "box" not in router


def test_the_doctor_says_that_it_can() -> None:
    assert "networks" in sh("dsecctl doctor", False)


@pytest.mark.skipif(not RELEASES, reason="no Firecracker was sent along")
@pytest.mark.nested
def test_a_microvm_of_the_real_firecracker_reaches_what_it_may_also_saved_and_copied() -> None:
    async def work(client: DSecClient) -> None:
        rules = {f"{FAR}:80/tcp": True}
        args = DSecMicroVMRunArgs(
            container_image="base:net", memory_limit_mb=128, disk_limit_mb=256, network_rules=rules
        )
        box = await client.run_microvm(args, timeout=MADE_S)
        for address, reached in ((FAR, True), (OTHER, False), ("203.0.113.1", False)):
            found = await box.run_shell(GET.format(60, address), timeout=MADE_S)
            assert found.stdout.endswith("far\n") == reached, (address, found)
        (pid,) = running()
        links = {line.split()[1] for line in sh(f"nsenter -t {pid} -n ip -o link").splitlines()}
        assert links <= {"lo:", "sit0@NONE:"}, (
            "the card is not where the VMM is"
        )  # sit0: every namespace of this kernel
        await box.pause()
        assert running() == []
        await box.resume()
        (copy,) = await box.fork()
        assert isinstance(copy, Sandbox), copy
        assert (await copy.network()).addresses != (await box.network()).addresses
        for one in (box, copy):
            found = await one.run_shell(GET.format(60, FAR), timeout=MADE_S)
            assert found.stdout.endswith("far\n"), found
            await one.stop()

    if "no marks of connections" in sh("dsecctl doctor --json", False):
        pytest.skip("the lab's kernel has no CONFIG_NF_CONNTRACK_MARK")
    with microvm_host():
        CONFIG.write_text('vm_driver = "firecracker"\n' + CONFIG.read_text())
        sh("systemctl restart dsecd.service")
        until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
        run(work)
    router = sh("nsenter --net=/run/dsecd/net/router1 ip -o link show", False)
    assert "box" not in router
