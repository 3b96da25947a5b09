"""The zygote: a Python that has loaded libraries, and whose copies run calls. It runs inside, as one text.

`python3 -I -c <this file> PROFILE MODULE...` with the agent's socket as descriptor 3. It holds the rights of the
sandbox's root, to enter the namespaces of cells that the agent made (native/agent/cell.h), hears only the agent, and
gets no byte of any call. Each copy enters one cell, locks itself up, says that it is ready, and only then waits for its
call. Standard library only, for any Python from 3.9.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import errno
import gc
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

AGENT = 3
WORK = b"/box"
READY, FAILED = 1, 2
GO = struct.Struct("<5Q128s2I")
CLONE_ARGS = struct.Struct("<11Q")
SYS_CLONE3, SYS_MOUNT_SETATTR, SYS_SECCOMP = 435, 442, {"x86_64": 317, "aarch64": 277}.get(os.uname().machine, -1)
SYS_CLOSE_RANGE, SYS_CAPSET = 436, {"x86_64": 126, "aarch64": 91}.get(os.uname().machine, -1)
CLONE = 0x00008000 | 0x200000000  # PARENT, INTO_CGROUP
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 24, 38, 47

# The interpreter lock stays held over these calls: the child must find it as it was.
libc = ctypes.PyDLL(None, use_errno=True)
after_fork = ctypes.pythonapi.PyOS_AfterFork_Child


def call(name: str, *args: Any) -> int:
    """A function of libc; OSError with what it was."""
    result = getattr(libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def system(number: int, *args: Any) -> int:
    return call("syscall", ctypes.c_long(number), *args)


def word(sock: socket.socket, what: int, value: int = 0, text: str = "") -> None:
    """One message of cell.h."""
    sock.send(struct.pack("<ii64s", what, value, text.encode()[:63]))


def never_more() -> None:
    """What copies inherit: no program that they execute gives them a right, and nobody may trace or read them."""
    for cap in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(cap), 0, 0, 0) < 0:
            if ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), "bounding set")
            break  # beyond the last one this kernel has
    call("prctl", PR_CAP_AMBIENT, ctypes.c_ulong(4), 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def become_nobody(uid: int, program: bytes, profile: str) -> None:
    """From here on nothing can be taken back: another user, no capability, the filter."""
    if profile:
        try:
            path, text = "/proc/self/attr/apparmor/current", "changeprofile " + profile
            with open(path if os.path.exists(path) else "/proc/self/attr/current", "w") as file:
                file.write(text)
        except OSError as exc:
            raise OSError(exc.errno, "apparmor") from exc
    # The last thing that is written there: a call must not make itself less likely to go than the agent is.
    attr = struct.pack("<4Q", 1, 0, 0, 0)
    system(SYS_MOUNT_SETATTR, -100, b"/proc", 0, attr, ctypes.c_size_t(len(attr)))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    system(SYS_CAPSET, struct.pack("<Ii", 0x20080522, 0), bytes(24))
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # a change of ids may set it
    os.chdir(WORK)
    if program:
        load_filter(program)
        load_filter(NO_CLONE3)
    os.umask(0o022)


NO_CLONE3 = b"".join(
    struct.pack("<HBBI", *one)
    for one in (
        (0x20, 0, 0, 0),
        (0x54, 0, 0, 0xBFFFFFFF),
        (0x15, 0, 1, SYS_CLONE3),
        (0x06, 0, 0, 0x50026),
        (0x06, 0, 0, 0x7FFF0000),
    )
)


def load_filter(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(code))
    system(SYS_SECCOMP, 1, 0, head)


# -- the process that runs the code -----------------------------------------------------------------------------------
def fresh_entropy() -> None:
    """Nothing of what two calls draw may be the same."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def obey(go: tuple[Any, ...]) -> None:
    cpu, file_max, nofile, stack, _space, cpus, _argc, _envc = go
    mask = int.from_bytes(cpus, "little")
    if mask:
        os.sched_setaffinity(0, {n for n in range(1024) if mask >> n & 1})
    wanted = ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_FSIZE, file_max), (resource.RLIMIT_NOFILE, nofile),
              (resource.RLIMIT_STACK, stack), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 65536),
              (resource.RLIMIT_MSGQUEUE, 819200))  # fmt: skip
    for what, value in wanted:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def rehearse() -> None:
    """What every program goes through, once: what the interpreter makes at first use is there then, and its pages."""
    for mode in ("r", "w"):
        open(os.devnull, mode).close()
    exec(compile("def f(): return [1]\nf()", "main.py", "exec", dont_inherit=True), {"__builtins__": builtins})


def prepare(out: int, err: int) -> None:
    """Whatever need not wait for the call: output, entropy, and once through what every program goes through, so
    that the pages that it writes to are copied already."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    fresh_entropy()
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.__dict__.update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    rehearse()


def work(orders: socket.socket) -> NoReturn:
    """Wait for the call, then be the program it names. Does not come back."""
    message, fds, _flags, _from = socket.recv_fds(orders, 1 << 18, 1)
    if not message:
        os._exit(0)
    os.dup2(fds[0], 0)
    orders.detach()
    system(SYS_CLOSE_RANGE, 3, ctypes.c_uint(0xFFFFFFFF), 0)
    go = GO.unpack_from(message)
    obey(go)
    strings = message[GO.size :].split(b"\0")
    argv = [os.fsdecode(one) for one in strings[: go[6]]]
    for one in strings[go[6] : go[6] + go[7]]:
        name, _, value = one.partition(b"=")
        os.environb[name] = value
    sys.stdin = open(0, closefd=False)
    sys.__dict__.update(__stdin__=sys.stdin)
    os._exit(run(argv))


def run(argv: list[str]) -> int:
    """The file argv[0] as `__main__`; its exit status as python3 would give it."""
    sys.argv = argv
    sys.path.insert(0, os.fsdecode(WORK))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=argv[0], __builtins__=builtins)
    sys.modules["__main__"] = main
    status = 0
    try:
        with open(argv[0], "rb") as file:
            text = file.read()
        exec(compile(text, argv[0], "exec", dont_inherit=True), main.__dict__)
    except SystemExit as exc:
        status = leave(exc.code)
    except BaseException as exc:  # noqa: BLE001 - of the tenant's program, and shown as python3 shows it
        status = shown(exc)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as exc:  # noqa: BLE001 - the same: what an exit handler of the program raised
        status = shown(exc) or 120
    return status


def leave(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def shown(exc: BaseException) -> int:
    """Its traceback, from the program's first line on."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
        trace = trace.tb_next
    if isinstance(exc, KeyboardInterrupt):
        return 130
    hook = sys.excepthook
    if hook is sys.__excepthook__:
        traceback.print_exception(type(exc), exc, trace)
    else:
        hook(type(exc), exc, trace)
    return 1


# -- the zygote -------------------------------------------------------------------------------------------------------
def child(
    sock: socket.socket, out: int, err: int, spaces: list[int], uid: int, program: bytes, profile: str
) -> NoReturn:
    """A copy, in the cell's namespace of processes already: enter the others, lock up, prepare, say so, wait."""
    try:
        for fd, kind in zip(spaces, (CLONE_NEWNS, CLONE_NEWIPC), strict=True):
            call("setns", fd, kind)
            os.close(fd)
        os.setsid()
        become_nobody(uid, program, profile)
        prepare(out, err)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        word(sock, READY)
        work(sock)
    except OSError as exc:
        word(sock, FAILED, exc.errno or 0, str(exc.strerror))
    finally:
        os._exit(1)


def make(agent: socket.socket, fds: list[int], uid: int, program: bytes, profile: str, oom: int) -> None:
    sock_fd, out, err, leaf, processes, *spaces = fds
    call("setns", processes, CLONE_NEWPID)
    args = ctypes.create_string_buffer(CLONE_ARGS.pack(CLONE, 0, 0, 0, 0, 0, 0, 0, 0, 0, leaf))
    os.pwrite(oom, b"900", 0)
    pid = system(SYS_CLONE3, args, ctypes.c_size_t(len(args) - 1))
    if pid == 0:
        after_fork()
        agent.close()
        for fd in (oom, leaf, processes):
            os.close(fd)
        child(socket.socket(fileno=sock_fd), out, err, spaces, uid, program, profile)
    os.pwrite(oom, b"0", 0)
    for fd in fds:
        os.close(fd)


def main() -> None:
    profile, modules = sys.argv[1], sys.argv[2:]
    agent = socket.socket(fileno=AGENT)
    program = agent.recv(1 << 17)[8:]
    for name in modules:
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue  # the list is for all images, and this one has not got it
        except Exception as exc:  # noqa: BLE001 - whatever a module of the image raises, the agent is told
            agent.send(f"cannot import {name}: {exc}".encode()[:500])
            return
    rehearse()
    oom = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    never_more()
    gc.collect()
    gc.freeze()  # collections in cells leave these pages alone, so that they stay shared
    agent.send(b"r")
    while True:
        message, fds, _flags, _from = socket.recv_fds(agent, 64, 8)
        if not message:
            return
        make(agent, fds, struct.unpack("<II", message[:8])[1], program, profile, oom)


if __name__ == "__main__":
    main()
