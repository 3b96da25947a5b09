"""A stand-in for Firecracker on hosts without KVM: the same command line and API, no guest.

Every request is compared with the API description of release 1.16.1, as strictly as the real one does (no unknown
field), and with what may happen before and after the start; the files that it names must be there. It misbehaves as its
plan says. One JSON line for each request goes to the plan's log. Needs the standard library only.

The plan (JSON, `--plan`): log; release and format (what --version and --snapshot-version say); at: {"METHOD /path":
fault}; start: a fault before the API is up; vsock: "echo" or "reset"; flood: bytes written to the console at the start;
memory: "link", "pipe", "short" or "moved", what a snapshot has in place of the guest's memory. arp: [its own address,
another one]: once it runs, the guest asks for the other's card and writes it on the console.
Faults: 400, garbage, close, huge, dribble, hang, slow:S, die:STATUS, kill:SIGNAL.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

SPEC = json.loads((Path(__file__).parents[1] / "data/firecracker-1.16.1.json").read_text())
TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
PMEM_UNIT = 2 << 20
BODY_MAX = 51_200
BEFORE_START = ("/machine-config", "/boot-source", "/drives/", "/pmem/", "/network-interfaces/", "/vsock", "/entropy")


class RefusedError(Exception):
    """400 with this message."""


def check(value: Any, schema: dict[str, Any], at: str) -> None:
    """A value against the description's schema. What it does not name is refused."""
    if "$ref" in schema:
        schema = SPEC["definitions"][schema["$ref"].rpartition("/")[2]]
    kind = TYPES[schema.get("type", "object")]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RefusedError(f"{at}: invalid type, expected {schema.get('type')}")
    if "enum" in schema and value not in schema["enum"]:
        raise RefusedError(f"{at}: unknown variant {value!r}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        raise RefusedError(f"{at}: {value} is out of range")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in value:
                raise RefusedError(f"{at}: missing field `{name}`")
        for name, item in value.items():
            if name not in known:
                raise RefusedError(f"{at}: unknown field `{name}`")
            check(item, known[name], f"{at}.{name}")
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"], f"{at}[]")


def operation(method: str, path: str) -> dict[str, Any]:
    for template, methods in SPEC["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", r"[A-Za-z0-9_]+", template), path) and method.lower() in methods:
            return dict(methods[method.lower()])
    raise RefusedError(f"Invalid request method and/or path: {method} {path}")


class Fake:
    def __init__(self, plan: dict[str, Any], ident: str) -> None:
        self.plan, self.ident = plan, ident
        self.state = "Not started"
        self.config: dict[str, Any] = {}
        self.tap = -1

    # -- one request --------------------------------------------------------------------------------------------------
    def answer(self, method: str, path: str, raw: bytes) -> tuple[int, Any]:
        body = json.loads(raw) if raw else None
        self.log({"method": method, "path": path, "body": body})
        what = operation(method, path)
        schemas = [item["schema"] for item in what.get("parameters", []) if item["in"] == "body"]
        if bool(schemas) != (body is not None):
            raise RefusedError("a body is missing, or out of place")
        if schemas:
            check(body, schemas[0], path)
        if method == "GET":
            info = {"app_name": "Firecracker", "id": self.ident, "state": self.state, "vmm_version": self.release}
            return 200, info
        assert isinstance(body, dict)
        self.act(method, path, body)
        return 204, None

    @property
    def release(self) -> str:
        return str(self.plan.get("release", "1.15.1"))

    @property
    def version(self) -> str:
        return str(self.plan.get("format", "9.0.0"))

    def log(self, entry: dict[str, Any]) -> None:
        with open(self.plan["log"], "a") as file:
            file.write(json.dumps(entry) + "\n")

    def act(self, method: str, path: str, body: dict[str, Any]) -> None:
        if method == "PUT" and path.startswith(BEFORE_START) and self.state != "Not started":
            raise RefusedError("The requested operation is not supported after starting the microVM.")
        if path == "/actions":
            self.start()
        elif path == "/vm":
            if self.state == "Not started":
                raise RefusedError("The requested operation is not supported before starting the microVM.")
            self.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]
            if self.state == "Running" and "arp" in self.plan:
                threading.Thread(target=self.ask, daemon=True).start()
        elif path == "/balloon" and method == "PATCH":
            if "/balloon" not in self.config or self.state == "Not started":
                raise RefusedError("No balloon device found.")
            if body["amount_mib"] >= self.config["/machine-config"]["mem_size_mib"]:
                raise RefusedError("Amount of pages requested cannot be greater than the amount of memory.")
        elif path == "/snapshot/create":
            self.save(body)
        elif path == "/snapshot/load":
            self.load(body)
        else:
            self.device(path, body)
            self.config[path] = body

    def device(self, path: str, body: dict[str, Any]) -> None:
        try:
            if path == "/boot-source":
                self.read(body["kernel_image_path"])
                if "initrd_path" in body:
                    self.read(body["initrd_path"])
            elif path.startswith("/drives/"):
                os.close(os.open(body["path_on_host"], os.O_RDONLY if body.get("is_read_only") else os.O_RDWR))
            elif path.startswith("/pmem/"):
                os.close(os.open(body["path_on_host"], os.O_RDONLY if body.get("read_only") else os.O_RDWR))
                if not (size := os.stat(body["path_on_host"]).st_size) or size % PMEM_UNIT:
                    raise RefusedError("pmem: a file that is empty or not of whole 2 MiB")
            elif path.startswith("/network-interfaces/"):
                self.open_tap(body["host_dev_name"])
            elif path == "/vsock":
                self.listen(body["uds_path"])
        except OSError as exc:
            raise RefusedError(f"{path}: {exc}") from exc

    def open_tap(self, name: str) -> None:
        """As the real one (src/devices/virtio/net/tap.rs): by its name, in the namespace that it is in."""
        self.tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.tap, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0002 | 0x1000 | 0x4000))

    def ask(self) -> None:
        """ARP, until there is an answer."""
        mac = bytes.fromhex(self.config["/network-interfaces/eth0"]["guest_mac"].replace(":", ""))
        own, other = (ipaddress.IPv4Address(text).packed for text in self.plan["arp"])
        header = b"\0\1\x08\0\6\4\0\1"
        frame = b"\xff" * 6 + mac + b"\x08\x06" + header + mac + own + bytes(6) + other
        for _ in range(200):
            with contextlib.suppress(OSError):  # down yet
                os.write(self.tap, bytes(10) + frame)
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                while True:
                    got = os.read(self.tap, 2048)[10:]
                    if got[12:14] == b"\x08\x06" and got[20:22] == b"\0\2" and got[28:32] == other:
                        os.write(1, b"guest: %s has it\n" % got[22:28].hex(":").encode())
                        return

    def read(self, path: str) -> None:
        if not Path(path).read_bytes():
            raise RefusedError(f"{path} is empty")

    def start(self) -> None:
        if self.state != "Not started" or not {"/boot-source", "/machine-config"} <= self.config.keys():
            raise RefusedError("Cannot start microvm without kernel configuration.")
        self.state = "Running"
        threading.Thread(target=self.guest, daemon=True).start()

    def guest(self) -> None:
        """What a guest writes on its console. As the real one: what does not fit is dropped."""
        if "arp" in self.plan:
            self.ask()
        os.set_blocking(1, False)
        left = self.plan.get("flood", 0)
        while left > 0:
            line = b"flood " * 20 + b"\n"
            left -= len(line)
            try:
                os.write(1, line)
            except BlockingIOError:
                time.sleep(0.001)
        for _ in range(1000):
            try:
                os.write(1, b"guest: up\n")
                return
            except BlockingIOError:
                time.sleep(0.01)

    def listen(self, path: str) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)  # EADDRINUSE for a stale one, as with the real one
        server.listen(16)

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                threading.Thread(target=self.connection, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()

    def connection(self, connection: socket.socket) -> None:
        with connection:
            line = b""
            while not line.endswith(b"\n"):
                if not (byte := connection.recv(1)):
                    return
                line += byte
            if self.plan.get("vsock") == "reset" or line != b"CONNECT 1024\n":
                return
            connection.sendall(b"OK 1073741824\n")
            while data := connection.recv(4096):
                connection.sendall(data)

    # -- snapshots ----------------------------------------------------------------------------------------------------
    def save(self, body: dict[str, Any]) -> None:
        if self.state != "Paused":
            raise RefusedError("Cannot save a microVM that is not paused.")
        Path(body["snapshot_path"]).write_text(json.dumps({"format": self.version, "config": self.config}))
        memory = Path(body["mem_file_path"])
        match self.plan.get("memory"):
            case "link":
                memory.symlink_to("/etc/shadow")
            case "pipe":
                os.mkfifo(memory)
            case "short":
                memory.write_bytes(b"short")
            case "moved":
                memory.parent.rename("elsewhere")
                memory.parent.symlink_to("/etc")
            case _:
                with memory.open("wb") as file:
                    file.truncate(self.config["/machine-config"]["mem_size_mib"] << 20)
                    file.seek(5 << 20)
                    file.write(b"memory of the guest")

    def load(self, body: dict[str, Any]) -> None:
        if self.state != "Not started" or self.config:
            raise RefusedError("Loading a microVM snapshot not allowed after configuring boot-specific resources.")
        saved = json.loads(Path(body["snapshot_path"]).read_text())
        memory = os.stat(body["mem_backend"]["backend_path"]).st_size
        if saved["format"] != self.version or memory != saved["config"]["/machine-config"]["mem_size_mib"] << 20:
            raise RefusedError("Failed to restore from snapshot")
        for path, item in saved["config"].items():
            if path != "/boot-source":  # a kernel is not loaded again
                self.device(path, item)
        self.config, self.state = saved["config"], "Running" if body.get("resume_vm") else "Paused"

    # -- HTTP ---------------------------------------------------------------------------------------------------------
    def serve(self, path: str) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(16)
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # who asked may have gone
                self.exchange(connection)

    def exchange(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := connection.recv(65536)):
                return
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        found = re.search(rb"(?i)content-length: (\d+)", head)
        length = int(found[1]) if found else 0
        while len(body) < length:
            body += connection.recv(65536)
        if self.misbehaves(self.plan.get("at", {}).get(f"{method} {path}", ""), connection):
            return
        try:
            if length > BODY_MAX:
                raise RefusedError("payload too large")
            status, value = self.answer(method, path, body)
        except RefusedError as exc:
            self.log({"refused": str(exc)})
            status, value = 400, {"fault_message": str(exc)}
        text = b"" if value is None else json.dumps(value).encode()
        # As micro_http writes it: no reason phrase, no length where there is no body.
        lines = f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
        if text:
            lines += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        connection.sendall(lines.encode() + b"\r\n" + text)

    def misbehaves(self, fault: str, connection: socket.socket | None) -> bool:
        """Do what the plan says; False: then go on as usual."""
        name, _, value = fault.partition(":")
        if name == "die":
            print("fake: dying as told", file=sys.stderr, flush=True)
            os._exit(int(value))
        elif name == "kill":
            os.kill(os.getpid(), int(value))
        elif name == "hang":
            time.sleep(3600)
        elif name == "slow":
            time.sleep(float(value))
        elif connection is not None and name in ("400", "garbage", "close", "huge", "dribble"):
            if name == "400":
                text = json.dumps({"fault_message": "no, because\nof this" + "!" * 9000}).encode()
                connection.sendall(b"HTTP/1.1 400 \r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            elif name == "garbage":
                connection.sendall(b"\x00\xffnot http\r\n\r\n")
            elif name == "huge":
                connection.sendall(b"HTTP/1.1 200 \r\nContent-Length: 99999999999\r\n\r\n")
            elif name == "dribble":
                connection.sendall(b"HTTP/1.1 200 \r\n")
                for _ in range(100_000):
                    connection.sendall(b"X-Header: endless\r\n")
            return True
        return False


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--plan", type=json.loads, required=True)
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--snapshot-version", action="store_true")
    parser.add_argument("--id", default="anonymous-instance")
    parser.add_argument("--api-sock", default="/run/firecracker.socket")
    parser.add_argument("--level", choices=["Off", "Error", "Warn", "Info"])
    parser.add_argument("--enable-pci", action="store_true")
    options = parser.parse_args()
    fake = Fake(options.plan, options.id)
    if options.version:
        print(options.plan.get("says", f"Firecracker v{fake.release}\n"))
        return 0
    if options.snapshot_version:
        print(f"v{fake.version}")
        return 0
    fake.misbehaves(options.plan.get("start", ""), None)
    fake.serve(options.api_sock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
