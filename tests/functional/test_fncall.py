"""Every verdict by a program made for it, in C, C++ and Python; batches, checkers, produced files, bad requests."""

from __future__ import annotations

import asyncio
import contextlib

import daemonkit
import pytest
from daemonkit import Daemon
from fnkit import IMAGE, c, calls, cold_python, cpp, judge, python, sh

from dsecd.client import DSecClient, DsecError, DSecFnCallArgs, DSecSyncClient
from dsecd.fncall.runner import POOLS_MAX
from dsecd.wire.fncall import Case, Checker

__all__ = ["calls", "judge"]

HOG = "#include <stdlib.h>\n#include <string.h>\n#include <sys/mman.h>\n#include <stdio.h>\n"
SMALL = {"memory_limit_mb": 64, "cpu_s": 5.0}

PROGRAMS: dict[str, tuple[str, DSecFnCallArgs]] = {
    "c answers": ("ok", c('#include <stdio.h>\nint main(){int a,b;scanf("%d%d",&a,&b);printf("%d\\n",a+b);}',
                          stdin=b"2 40\n", expected=b"42")),
    "c++ answers": ("ok", cpp('#include <iostream>\nint main(){int a;std::cin>>a;std::cout<<a*2<<"\\n";}', stdin=b"21",
                              expected=b"42")),
    "python answers": ("ok", python("print(int(input())*2)", stdin=b"21\n", expected=b"42\n")),
    "cold python answers": ("ok", cold_python("print(int(input())*2)", stdin=b"21\n", expected=b"42\n")),
    "no output wanted": ("ok", python("print('anything')")),
    "wrong": ("wrong_answer", python("print(41)", expected=b"42")),
    "c wrong": ("wrong_answer", c("int main(){}", expected=b"42")),
    "c does not compile": ("compile_error", c("int main(){return x;}")),
    "c++ does not compile": ("compile_error", cpp("int main(){")),
    "python does not parse": ("runtime_error", python("def")),
    "c segfault": ("runtime_error", c("int main(){volatile int*p=0;*p=1;}")),
    "c++ throws": ("runtime_error", cpp("#include <stdexcept>\nint main(){throw std::runtime_error(\"x\");}")),
    "python raises": ("runtime_error", python("1/0")),
    "exit status": ("runtime_error", sh("exit 7")),
    "signal to itself": ("runtime_error", python("import os; os.kill(os.getpid(), 10)")),
    "abort": ("runtime_error", c("#include <stdlib.h>\nint main(){abort();}")),
    "c spins": ("time_limit", c("int main(){for(;;);}", cpu_s=0.3)),
    "python spins": ("time_limit", python("while True: pass", cpu_s=0.3)),
    "children spin": ("time_limit", sh("(while :; do :; done) & while :; do :; done", cpu_s=0.3)),
    "c sleeps": ("wall_limit", c("#include <unistd.h>\nint main(){sleep(60);}", wall_s=0.3)),
    "python sleeps": ("wall_limit", python("import time; time.sleep(60)", wall_s=0.3)),
    "reads for ever": ("wall_limit", sh("exec 3<>/tmp/f 2>/dev/null; mkfifo /tmp/p; cat /tmp/p", wall_s=0.3)),
    "malloc": ("memory_limit", c(HOG + "int main(){for(;;)memset(malloc(1<<20),1,1<<20);}", **SMALL)),
    "mmap": ("memory_limit", c(HOG + "int main(){for(;;)memset(mmap(0,1<<20,3,33,-1,0),1,1<<20);}",
                               **SMALL)),
    "tmpfs": ("memory_limit", sh("cat /dev/zero >/tmp/zero || exit 1", disk_limit_mb=16, **SMALL)),
    "python hog": ("memory_limit", python("a=[]\nwhile True: a.append(bytearray(1<<20))", **SMALL)),
    "a child is the hog": ("memory_limit", sh("python3 -c 'x=bytearray(1<<28)'; exit 0", **SMALL)),
    "c prints 1 GB": ("output_limit", c('#include <stdio.h>\nint main(){for(long i=0;i<1L<<27;i++)puts("xxxxxxx");}')),
    "python prints 1 GB": ("output_limit", python("while True: print('x'*1000000)")),
    "a file too large": ("output_limit", c('#include <stdio.h>\nint main(){FILE*f=fopen("x","w");for(;;)putc(1,f);}',
                                           file_limit_mb=1)),
    "fork bomb": ("process_limit", c("#include <unistd.h>\nint main(){for(;;)fork();}", processes=20, wall_s=2.0)),
    "python forks": ("process_limit", python("import os\nwhile True: os.fork()", processes=20, wall_s=2.0)),
    "threads": ("process_limit", cpp("#include <thread>\n#include <unistd.h>\n#include <vector>\nint main(){"
                                     "std::vector<std::thread> v;for(int i=0;i<99;i++)v.emplace_back([]{sleep(9);});}",
                                     processes=20, wall_s=2.0)),
    "not executable": ("denied", DSecFnCallArgs(argv=["/etc/passwd"])),
    "no such program": ("runtime_error", DSecFnCallArgs(argv=["/no/such"])),
    "closes everything": ("ok", python("import os\nfor fd in range(3): os.close(fd)")),
    "c closes stdout": ("ok", c("#include <unistd.h>\nint main(){close(0);close(1);close(2);}")),
    "exec of another": ("ok", python("import os; os.execv('/bin/echo', ['echo', 'hi'])", expected=b"hi")),
    "thousands of files": ("ok", python("for n in range(3000): open(str(n), 'w').close()")),
    "too many files": ("memory_limit", python("for n in range(30000): open(str(n), 'w').close()")),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_gets_its_verdict(calls: DSecSyncClient, name: str) -> None:
    verdict, args = PROGRAMS[name]
    result = calls.fncall(args)
    assert result.verdict == verdict, result
    assert result.queued_ms >= 0
    assert bool(result.detail) == (verdict != "ok")


def test_memory_limit_is_never_a_signal_to_look_at_and_has_its_figure(calls: DSecSyncClient) -> None:
    result = calls.fncall(PROGRAMS["malloc"][1])
    assert (result.verdict, result.detail) == ("memory_limit", "more than 64 MiB of memory")
    assert 60 << 10 < result.memory_kb < 68 << 10
    within = calls.fncall(python("x = bytearray(32 << 20)", memory_limit_mb=64))
    assert within.verdict == "ok"
    assert 32 << 10 < within.memory_kb < 50 << 10


def test_figures_are_of_the_program_alone(calls: DSecSyncClient) -> None:
    busy = calls.fncall(c("#include <time.h>\nint main(){while(clock()<200000);}"))
    assert busy.verdict == "ok"
    assert 190 < busy.cpu_ms < 400
    assert busy.compile_ms > 1
    idle = calls.fncall(python("import time; time.sleep(0.2)"))
    assert idle.wall_ms >= 200
    assert idle.cpu_ms < 150


def test_python_is_warm_and_says_what_python_says(calls: DSecSyncClient) -> None:
    result = calls.fncall(python("import sys\ndef f():\n    raise ValueError(sys.argv[1])\nf()", args=["why"]))
    assert result.warm
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        b"Traceback (most recent call last):",
        b'  File "main.py", line 4, in <module>', b"    f()",
        b'  File "main.py", line 3, in f', b"    raise ValueError(sys.argv[1])",
        b"ValueError: why",
    ]  # fmt: skip
    assert calls.fncall(python("import sys; sys.exit('bye')")).stderr == b"bye\n"
    assert calls.fncall(python("import sys; sys.exit(300)")).exit_code == 300 & 255
    ends = (
        "import atexit, threading\natexit.register(print, 'last')\nthreading.Thread(target=print, args=['t']).start()"
    )
    assert sorted(calls.fncall(python(ends)).stdout.split()) == [b"last", b"t"]
    assert calls.fncall(
        python("print(__name__, __file__); import helper", files={"helper.py": b"print('h')"})
    ).stdout == (b"__main__ main.py\nh\n")


def test_produced_files_come_back_by_name_and_nothing_else_does(calls: DSecSyncClient) -> None:
    code = (
        "import os\nopen('out','wb').write(b'\\x00made\\xff')\nos.symlink('/etc/passwd','link')\nos.mkdir('dir')\n"
        "os.mkfifo('fifo')\nopen('big','wb').truncate(40 << 20)"
    )
    result = calls.fncall(
        python(code, want=["out", "link", "dir", "fifo", "big", "absent", "given"], files={"given": b"g"})
    )
    assert result.verdict == "ok", result
    assert result.files == {"out": b"\x00made\xff", "given": b"g"}


def test_a_program_gets_its_own_files_arguments_and_environment(calls: DSecSyncClient) -> None:
    result = calls.fncall(
        DSecFnCallArgs(
            argv=["./tool", "a b", "ü"], files={"tool": b"#!/bin/sh\necho $1-$2-$X; pwd; env | sort"}, env={"X": "y"}
        )
    )
    assert result.verdict == "ok", result
    assert result.stdout.decode().splitlines() == [
        "a b-ü-y", "/box", "HOME=/tmp", "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin", "PWD=/box", "X=y",
    ]  # fmt: skip


def test_a_batch_compiles_once_and_gives_each_case_its_verdict(calls: DSecSyncClient) -> None:
    add = cpp("#include <iostream>\nint main(){int a,b;std::cin>>a>>b;if(a==7)return 1;std::cout<<a+b;}")
    cases = [Case(stdin=f"{n} 1".encode(), expected=str(n + 1).encode()) for n in range(12)]
    got = dict(calls.fncall_batch(add, cases))
    assert {n for n, one in got.items() if one.verdict == "ok"} == set(range(12)) - {7}
    assert got[7].verdict == "runtime_error"


def test_a_batch_stops_at_the_first_failure_when_asked(judge: Daemon) -> None:
    async def work() -> None:
        async with judge.client() as client:
            cases = [Case(stdin=b"x", expected=b"x" if n < 3 else b"no") for n in range(200)]
            batch = client.fncall_batch(sh("cat"), cases, stop_at_first=True)
            seen = [index async for index, _ in batch]
            assert batch.total is not None
            assert len(seen) < 20
            assert batch.total.verdict == "wrong_answer"
            broken = client.fncall_batch(c("int main(){"), cases)
            assert [one async for one in broken] == []
            assert broken.total is not None
            assert broken.total.verdict == "compile_error"

    asyncio.run(work())


CHECK = Checker(
    language="python",
    code="import sys\na, b, c = (open(p).read().split() for p in sys.argv[1:])\n"
    "print('sum', sum(map(int, b)))\nsys.exit(0 if sum(map(int, b)) == int(a[0]) else 1)",
)


def test_a_checker_judges_and_one_that_cheats_gains_nothing(calls: DSecSyncClient) -> None:
    def verdicts(code: str, checker: Checker) -> list[tuple[str, str]]:
        results = dict(calls.fncall_batch(sh(code), [Case(stdin=b"10"), Case(stdin=b"11")], checker=checker))
        return [(results[n].verdict, results[n].detail) for n in sorted(results)]

    assert verdicts("echo 4 6", CHECK) == [("ok", "sum 10"), ("wrong_answer", "sum 10")]
    slow = Checker(language="sh", code="while :; do :; done", limits=python("", cpu_s=0.2).limits())
    assert [v for v, _ in verdicts("echo 4 6", slow)] == ["infra", "infra"]
    cheat = Checker(language="sh", code="echo x >output; rm -f expected; kill -9 1; (sleep 60 &); exit 1")
    assert [v for v, _ in verdicts("echo 4 6", cheat)] == ["wrong_answer", "wrong_answer"]
    assert verdicts("exit 3", CHECK) == [("runtime_error", "exit status 3")] * 2


BAD: dict[str, tuple[DSecFnCallArgs, str]] = {
    "unknown language": (DSecFnCallArgs(language="cobol", code="x"), "unknown language"),
    "empty code": (python(""), "code is empty"),
    "nothing": (DSecFnCallArgs(), "either a language"),
    "both": (DSecFnCallArgs(language="c", code="x", argv=["x"]), "either a language or an argv"),
    "code too long": (python("#" * (9 << 20)), "length"),
    "NUL in an argument": (DSecFnCallArgs(argv=["a\0b"]), "regex"),
    "NUL in a name": (DSecFnCallArgs(argv=["x"], files={"a\0": b""}), "regex"),
    "a path for a name": (DSecFnCallArgs(argv=["x"], files={"../x": b""}), "regex"),
    "dots": (DSecFnCallArgs(argv=["x"], files={"..": b""}), "not the name"),
    "a limit of 0": (python("pass", memory_limit_mb=0), ">= 8"),
    "beyond the host": (python("pass", memory_limit_mb=1 << 19), "over this host's"),
    "no time": (python("pass", cpu_s=0), "> 0"),
    "a long command line": (DSecFnCallArgs(argv=["x"] + ["y" * 60_000] * 2), "are over"),
    "no such image": (python("pass", container_image="nothing:here"), "nothing:here"),
    "no such compiler": (DSecFnCallArgs(language="rust", code="fn main(){}"), "has no rustc"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_get_one_clear_sentence(calls: DSecSyncClient, name: str) -> None:
    args, words = BAD[name]
    with pytest.raises(DsecError, match=words) as caught:
        calls.fncall(args)
    assert caught.value.kind in ("invalid", "not_found", "unsupported")
    assert "\n" not in caught.value.message
    assert calls.fncall(python("print(1)", expected=b"1")).verdict == "ok"


def test_nuls_and_strange_bytes_in_code_are_the_programs_own_affair(calls: DSecSyncClient) -> None:
    assert calls.fncall(python("print(1)\0")).verdict == "runtime_error"
    assert calls.fncall(c("int main(){return 0;}//\0ü")).verdict == "ok"


def test_an_expected_output_may_be_long(calls: DSecSyncClient) -> None:
    assert calls.fncall(python("print('x' * 100)", expected=b"y" * (8 << 20))).verdict == "wrong_answer"


def test_a_compiler_that_never_ends_is_stopped(judge: Daemon, calls: DSecSyncClient) -> None:
    endless = "template<int n> struct X { typename X<n+1>::t t; }; X<0> x; int main(){}"
    deep = cpp(f'#pragma GCC optimize "O0"\n{endless}')
    assert calls.fncall(deep).verdict == "compile_error"
    assert calls.fncall(cpp('#include "/dev/zero"\nint main(){}')).verdict == "compile_error"


def test_a_cancelled_call_ends_and_its_place_is_used_again(judge: Daemon) -> None:
    async def work() -> None:
        async with judge.client() as client:
            with pytest.raises(DsecError) as caught:
                await client.fncall(sh("sleep 100"), timeout=0.5)
            assert caught.value.kind == "timeout"
            await all_places_serve(client)

    daemonkit.run(work())


async def all_places_serve(client: DSecClient) -> None:
    results = await asyncio.gather(*(client.fncall(sh("echo 1", expected=b"1")) for _ in range(20)))
    assert {one.verdict for one in results} == {"ok"}


def test_a_call_cancelled_while_its_files_are_on_the_way_costs_its_place_alone(judge: Daemon) -> None:
    """A deadline before the agent has all of its input, which may well be several times what the link takes at once."""

    async def work() -> None:
        async with judge.client() as client:
            for n in range(24):
                with contextlib.suppress(DsecError):
                    await client.fncall(sh("cat >/dev/null", stdin=bytes(7 << 20)), timeout=0.005 * (n % 12 + 1))
            async with asyncio.timeout(120):
                await all_places_serve(client)

    daemonkit.run(work())


def test_names_of_no_images_end_nobodys_calls(judge: Daemon) -> None:
    """More of them than pools are kept, while a call runs in one."""

    async def work() -> None:
        async with judge.client() as client:
            running = asyncio.create_task(client.fncall(sh("sleep 3; echo 1", expected=b"1")))
            await asyncio.sleep(0.5)
            for n in range(POOLS_MAX + 1):
                with pytest.raises(DsecError) as caught:
                    await client.fncall(sh("true", container_image=f"nothing:{n}"))
                assert caught.value.kind == "not_found"
            assert not running.done()
            assert (await running).verdict == "ok"

    daemonkit.run(work())


def test_an_image_without_ctypes_runs_python_cold(judge: Daemon, calls: DSecSyncClient, base_tar: object) -> None:
    """The small test base: its python3-minimal can be no zygote."""

    async def fill() -> None:
        async with judge.client() as client:
            await judge.import_tar(client, daemonkit.base_tar(), "small:test")

    daemonkit.run(fill())
    result = calls.fncall(python("print(1)", expected=b"1", container_image="small:test"))
    assert (result.verdict, result.warm) == ("ok", False)
    assert IMAGE != "small:test"


def test_images_that_nobody_listed_run_python_cold(judge: Daemon, calls: DSecSyncClient) -> None:
    """A warm python3 has rights that commands have not: the same image by a name that is not in the configuration."""
    (digest,) = [image.digest for image in calls.images() if image.name == IMAGE]
    result = calls.fncall(python("print(1)", expected=b"1", container_image=digest))
    assert (result.verdict, result.warm) == ("ok", False)
    assert calls.fncall(python("print(1)", expected=b"1")).warm


def test_a_reply_holds_all_that_a_call_may_say(calls: DSecSyncClient) -> None:
    code = (
        "import sys\nsys.stdout.write('o' * (4 << 20))\nsys.stderr.write('e' * (4 << 20))\n"
        "open('f', 'wb').write(b'f' * (3 << 20))\nopen('g', 'wb').write(b'g')"
    )
    result = calls.fncall(python(code, output_limit_kb=4096, want=["f", "g"]))
    assert result.verdict == "ok", result.detail
    assert (len(result.stdout), len(result.stderr), len(result.files["f"])) == (4 << 20, 4 << 20, 3 << 20)
    assert "g" not in result.files  # more than a reply holds
