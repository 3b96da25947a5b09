"""Nothing of a call is there for the next, and nothing of the platform is there for a call."""

from __future__ import annotations

import pytest
from daemonkit import Daemon
from fnkit import c, calls, cold_python, judge, python, sh
from leftovers import command_lines

from dsecd.client import DSecFnCallArgs, DSecSyncClient

__all__ = ["calls", "judge"]

ROUNDS = 8  # places are used in turn: more calls than there are places

LEAVE = r"""
import ctypes, mmap, os, random, socket, subprocess, sys, time
def tried(f, *a):
    try: return f(*a)
    except Exception as exc: return exc
for place in ('/tmp', '/dev/shm', '/box', '.', '/var/tmp', '/root', '/dev', '/run', '/', '/proc', '/sys', '/etc',
              '/dev/mqueue'):
    tried(lambda: open(place + '/trace', 'w').write('trace'))
    tried(os.mkdir, place + '/trace.d')
    tried(os.symlink, '/etc/passwd', place + '/trace.l')
os.environ['TRACE'] = 'trace'
libc = ctypes.CDLL(None, use_errno=True)
key = 0x7ace
made = libc.shmget(key, 4096, 0o1666), libc.semget(key, 1, 0o1666), libc.msgget(key, 0o1666)
queue = libc.mq_open(b'/trace', 0o102, 0o666, None)
listening = []
ports = (socket.AF_INET, ('127.0.0.1', 7777)), (socket.AF_UNIX, '\0trace'), (socket.AF_INET6, ('::1', 7778))
for family, address in ports:
    s = tried(socket.socket, family); tried(s.bind, address); tried(s.listen); listening.append(s)
one = socket.socket(); tried(one.connect, ('127.0.0.1', 7777)); other = tried(listening[0].accept)
if isinstance(other, tuple): other[0].close()
for how in ({}, {'start_new_session': True}):
    subprocess.Popen(['sh', '-c', 'trap "" TERM HUP; while :; do sleep 1; done'], **how)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(100)
    os._exit(0)
random.seed(1)
print(made, queue)
sys.stdout.flush()
"""

LOOK = r"""
import ctypes, os, socket
found = []
for place in ('/tmp', '/dev/shm', '/box', '/var/tmp', '/root', '/dev', '/run', '/', '/etc'):
    names = os.listdir(place) if os.access(place, os.R_OK) else []
    found += [place + '/' + name for name in names if 'trace' in name]
found += ['variable'] * ('TRACE' in os.environ)
libc = ctypes.CDLL(None, use_errno=True)
key = 0x7ace
found += [name for name, args in (('shmget', (key, 0, 0)), ('semget', (key, 0, 0)), ('msgget', (key, 0)))
          if getattr(libc, name)(*args) >= 0]
found += ['queue'] * (libc.mq_open(b'/trace', 0) >= 0)
ports = (socket.AF_INET, ('127.0.0.1', 7777)), (socket.AF_UNIX, '\0trace'), (socket.AF_INET6, ('::1', 7778))
for family, address in ports:
    try:
        with socket.socket(family) as s: s.bind(address)
    except OSError as exc:
        found.append(f'port {address}: {exc}')
found += ['processes'] * (len([p for p in os.listdir('/proc') if p.isdigit()]) > 2)
found += ['files ' + ' '.join(os.listdir('.'))] * (len(os.listdir('.')) > 1)
print(found)
"""


@pytest.mark.parametrize("make", [python, cold_python], ids=["warm", "cold"])
def test_a_call_that_leaves_every_trace_it_can_leaves_none(calls: DSecSyncClient, make: object) -> None:
    for _ in range(ROUNDS):
        left = calls.fncall(make(LEAVE))  # type: ignore[operator]
        assert left.verdict == "ok", left
        assert left.stdout.startswith(b"(0, 0, 0) 3"), left
        seen = calls.fncall(make(LOOK))  # type: ignore[operator]
        assert seen.stdout == b"[]\n", seen


def test_every_call_draws_other_numbers_and_is_another_user(calls: DSecSyncClient) -> None:
    draw = python(
        "import random, os, numpy; print(random.random(), numpy.random.random(), os.urandom(4).hex(), os.getuid())"
    )
    rows = [calls.fncall(draw).stdout.decode().split() for _ in range(ROUNDS)]
    for n in range(3):
        assert len({row[n] for row in rows}) == ROUNDS
    # Places count for themselves, so only in one of them users differ; never is it anybody with rights.
    assert all(int(row[3]) >= 200_000 for row in rows)


def test_survivors_of_a_call_are_gone_when_it_is_answered(judge: Daemon, calls: DSecSyncClient) -> None:
    for n in range(ROUNDS):
        mark = f"8{n}77777"
        assert calls.fncall(sh(f"(setsid sleep {mark} &) ; (setsid sleep {mark} &) ; exit 0")).verdict == "ok"
        assert not running(f"sleep\0{mark}")


def running(command: str) -> list[int]:
    return [pid for pid, found in command_lines().items() if command.encode() in found]


ATTACKS = {
    "kill PID 1": "import os; os.kill(1, 9)",
    "kill all": "import os; os.kill(-1, 9)",
    "mount": "import ctypes, os; l = ctypes.CDLL(None, use_errno=True)\n"
    "assert l.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0, os.strerror(ctypes.get_errno())",
    "unshare": "import ctypes; l = ctypes.CDLL(None, use_errno=True)\nassert l.unshare(0x10000000) == 0",
    "setuid": "import os; os.setuid(0)",
    "write the root": "open('/etc/passwd', 'a')",
    "remount": "import ctypes; l = ctypes.CDLL(None)\nassert l.mount(None, b'/', None, 32 | 4096, None) == 0",
    "ptrace PID 1": "import ctypes; l = ctypes.CDLL(None)\nassert l.ptrace(16, 1, 0, 0) == 0",
    "memory of PID 1": "open('/proc/1/mem', 'rb').read(1)",
    "descriptors of PID 1": "import os; os.listdir('/proc/1/fd')",
    "environment of PID 1": "open('/proc/1/environ').read()",
    "root of PID 1": "import os; os.listdir('/proc/1/root')",
    "enter namespaces": "import os, ctypes\n"
    "fd = os.open('/proc/1/ns/mnt', 0)\nassert ctypes.CDLL(None).setns(fd, 0) == 0",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (999999, 999999))",
    "bpf": "import ctypes; assert ctypes.CDLL(None).syscall(321, 0, 0, 0) == 0",
    "clone3": "import ctypes; assert ctypes.CDLL(None).syscall(435, 0, 0) == -1 and ctypes.get_errno() != 38\n1/0",
    "raw device": "import os; os.mknod('x', 0o60600, os.makedev(8, 0)); open('x', 'rb')",
    "chroot": "import os; os.chroot('/tmp')",
    "cgroups": "import os; assert 'cgroup.procs' in os.listdir('/sys/fs/cgroup')",
    "out of memory later than others": "open('/proc/self/oom_score_adj', 'w')",
    "sysctl": "open('/proc/sys/kernel/core_pattern', 'w')",
    "raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "network": "import socket; socket.create_connection(('10.0.0.1', 80), 2)",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_and_the_next_call_is_served(calls: DSecSyncClient, name: str) -> None:
    for make in (python, cold_python):
        result = calls.fncall(make(ATTACKS[name], wall_s=5.0))
        if name == "kill all":  # everybody it may signal: nobody else is there
            assert result.verdict in ("ok", "runtime_error"), result
        else:
            assert result.verdict == "runtime_error", result
    assert calls.fncall(python("print(1)", expected=b"1")).verdict == "ok"


def test_a_call_holds_only_its_three_descriptors_and_knows_no_capability(calls: DSecSyncClient) -> None:
    code = (
        "import os\nprint(sorted(os.listdir('/proc/self/fd'), key=int)[:3], len(os.listdir('/proc/self/fd')))\n"
        "s = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
        "print({s[k].strip() for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')}, s['NoNewPrivs'].strip(),"
        " s['Seccomp'].strip(), s['Groups'].strip(), os.getgid() == os.getuid())\n"
    )
    for make in (python, cold_python):
        lines = calls.fncall(make(code)).stdout.decode().splitlines()
        # The fourth is the listing's own.
        assert lines == ["['0', '1', '2'] 4", "{'0000000000000000'} 1 2  True"]


def test_stdin_is_read_only_and_nobody_elses(calls: DSecSyncClient) -> None:
    code = "import os\ntry: os.write(0, b'x')\nexcept OSError as e: print(e.errno)\nprint(os.read(0, 9))"
    assert calls.fncall(python(code, stdin=b"in")).stdout == b"9\nb'in'\n"
    reopened = "try: open('/dev/stdin', 'w')\nexcept OSError as e: print(e.errno)"
    assert calls.fncall(python(reopened, stdin=b"in")).stdout == b"13\n"
    assert calls.fncall(python("print(repr(open('/dev/stdin').read()))", stdin=b"in")).stdout == b"'in'\n"
    assert calls.fncall(python("import sys; print(repr(sys.stdin.read()))")).stdout == b"''\n"


def test_what_a_call_changes_in_its_python_no_later_one_sees(calls: DSecSyncClient) -> None:
    spoil = "import builtins, json, sys\nbuiltins.print = json.dumps = None\nsys.path.clear()\nsys.modules['os'] = None"
    for _ in range(ROUNDS):
        assert calls.fncall(python(spoil)).verdict == "ok"
        assert calls.fncall(python("import json, os; print(json.dumps([1]))", expected=b"[1]")).verdict == "ok"


def test_locks_end_with_the_call(calls: DSecSyncClient) -> None:
    lock = (
        "import fcntl, os, time\nf = open('/etc/passwd')\nfcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "if os.fork() == 0: time.sleep(99)"
    )
    for _ in range(ROUNDS):
        assert calls.fncall(python(lock)).verdict == "ok"


def test_a_call_that_fills_its_space_and_memory_leaves_the_place_usable(calls: DSecSyncClient) -> None:
    fill = "cat /dev/zero >/tmp/a; cat /dev/zero >/dev/shm/b; cat /dev/zero >c; exit 1"
    hog = c(
        '#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\nint main(){for(int i=0;i<9;i++)fork();'
        "for(;;)memset(malloc(1<<20),1,1<<20);}",
        memory_limit_mb=64, processes=600, wall_s=20.0,
    )  # fmt: skip
    for _ in range(3):
        assert calls.fncall(sh(fill, disk_limit_mb=32, memory_limit_mb=64)).verdict == "memory_limit"
        assert calls.fncall(hog).verdict == "memory_limit"
        result = calls.fncall(DSecFnCallArgs(argv=["echo", "fine"], expected=b"fine"))
        assert result.verdict == "ok", result
