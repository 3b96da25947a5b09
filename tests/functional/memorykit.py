"""Guests for memory experiments: machines of the real driver with the real agent, started from an image store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsecd.agent import files
from dsecd.agent.command import STDERR, STDOUT, Command
from dsecd.agent.frames import Field, Tag
from dsecd.agent.link import AgentLink
from dsecd.container.seccomp import caps_mask, command_filter
from dsecd.damon import guest, policy
from dsecd.erofs.model import Manifest
from dsecd.erofs.store import ImageStore
from dsecd.pmem import account
from dsecd.pmem.backing import Backing
from dsecd.vmm import disk
from dsecd.vmm.kernel import KernelStore
from dsecd.vmm.machine import Drive, MachineSpec
from dsecd.vmm.qemu import QemuDriver, QemuMachine

MIB = 1 << 20
DISK = 1024 * MIB
TREE = Path(__file__).resolve().parents[2]
AGENT = TREE / "build/native/dsec-agent"
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Box:
    """A guest that answers."""

    machine: QemuMachine
    link: AgentLink

    @property
    def rss(self) -> int:
        """What the VMM alone holds, in bytes: anonymous memory, and the guest's RAM (a file on tmpfs)."""
        lines = Path(f"/proc/{self.machine.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

    async def run(self, *argv: str, timeout: float = 120, check: bool = True) -> str:
        """Standard output of a command that ended well."""
        command = Command(self.link)
        command.start(
            [(Tag.ARG, word.encode()) for word in argv]
            + [(Tag.ENV, PATH.encode()), (Tag.TIMEOUT_MS, int(timeout * 1000)), (Tag.CAP, 1 << 20)]
        )
        async with asyncio.timeout(timeout + 30):
            ended = await asyncio.shield(command.ended)
        out, err = (command.kept(stream, ended).head for stream in (STDOUT, STDERR))
        command.forget()
        if check and ended.code:
            raise AssertionError(f"{argv} ended with {ended.code}: {err[-2000:].decode(errors='replace')}")
        return out.decode(errors="replace")

    async def start_damon(self, settings: policy.Policy) -> None:
        iomem = (await files.knobs_read(self.link, [guest.IOMEM]))[0].decode("ascii", "replace")
        await files.knobs(self.link, guest.start(guest.system_ram(iomem), settings))


@dataclass
class Guests:
    """Starts guests of one image; all of them end with the block they were started in."""

    work: Path
    memory_dir: Path
    kernels: KernelStore
    store: ImageStore
    driver: QemuDriver = field(default_factory=lambda: QemuDriver.find(kvm=False))

    def __post_init__(self) -> None:
        self.work.mkdir(exist_ok=True)
        self.backing = Backing(self.work / "pmem")
        self.backing.open()
        found = self.kernels.default()
        self.kernel, self.initrd = self.kernels.vmlinux(found), self.kernels.initrd(found, AGENT)

    async def files_of(self, layers: list[Manifest], *, pmem: bool) -> list[Path]:
        """meta and data of each layer, as the devices are backed."""
        found: list[Path] = []
        for layer in layers:
            meta, data = self.store.meta_path(layer), self.store.data_path(layer)
            if not pmem:
                found += [meta, data]
                continue
            found.append((await self.backing.get(meta, layer.meta_digest.removeprefix("sha256:"))).path)
            found.append((await self.backing.get(data, layer.data_digest.removeprefix("sha256:"))).path)
        return found

    def scratch(self, name: str) -> Path:
        """The file behind a guest's writable disk."""
        return self.work / f"{name}.img"

    async def make_scratch(self, path: Path) -> None:
        """Unless it is there: whoever wants to watch the file makes it before the guest starts."""
        if not path.exists():
            await disk.make(path, DISK, 0, self.work / "templates")

    @contextlib.asynccontextmanager
    async def box(
        self, name: str, layers: list[Manifest], *, pmem: bool, reporting: bool, memory: int = 512 * MIB,
        change: Callable[[MachineSpec], MachineSpec] = lambda spec: spec,
    ) -> AsyncIterator[Box]:  # fmt: skip
        directory = self.work / name
        directory.mkdir(mode=0o700)
        scratch = self.scratch(name)
        await self.make_scratch(scratch)
        backing = await self.files_of(layers, pmem=pmem)
        names = [f"pmem{n}" if pmem else f"vd{chr(ord('a') + n)}" for n in range(len(backing))]
        words = [f"dsec.lower={meta}:{data}" for meta, data in zip(names[::2], names[1::2], strict=True)]
        drives = [] if pmem else [Drive(path, read_only=True) for path in backing]
        cost = account.guest_cost(path.stat().st_size for path in backing) if pmem else 0
        spec = change(
            MachineSpec(
                id=name, directory=directory, vcpus=1, memory=memory + cost, kernel=self.kernel, initrd=self.initrd,
                cmdline=(*words, f"dsec.upper=vd{chr(ord('a') + len(drives))}", "dsec.pids=512",
                         "dsec.link=serial:dsec.agent"),
                pmem=tuple(backing) if pmem else (), drives=(*drives, Drive(scratch)), reporting=reporting,
                memory_dir=self.memory_dir,
            )
        )  # fmt: skip
        hello: list[Field] = [(Tag.SECCOMP, command_filter()), (Tag.CAPS, caps_mask()), (Tag.HOSTNAME, name.encode())]
        machine = await self.driver.start(spec)
        try:
            try:
                link = await AgentLink.connect(machine.agent, hello, 120)
            except Exception as exc:
                said = (await machine.console()).decode(errors="replace")
                raise AssertionError(f"{name} did not come up ({exc}); its console: {said[-3000:]}") from exc
            try:
                yield Box(machine, link)
            finally:
                await link.close()
        finally:
            await machine.release()
            await self.driver.end(spec)
            directory.rmdir()
            scratch.unlink()
