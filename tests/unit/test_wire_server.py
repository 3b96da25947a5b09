"""The server loop against clients that are wrong, slow, greedy or gone. Toy handlers, a real socket."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from typing import Any

import pytest
from wirekit import asynchronous, house

from dsecd import flow
from dsecd.errors import CODES, DsecError
from dsecd.wire import base, files
from dsecd.wire import sandbox as wire
from dsecd.wire.limits import MAX_UNSENT, Limits


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# -- what is not a request --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "line",
    [
        b"not json", b"{", b"[]", b"[1, 2]", b'"text"', b"null", b"3", b"\x00\x01\x02", b"\xff\xfe",
        b'{"jsonrpc": "2.0"}', b'{"jsonrpc": "1.0", "id": 1, "method": "daemon.hello"}', b'{"id": 1, "method": "x"}',
        b'{"jsonrpc": "2.0", "id": 1, "method": 5}', b'{"jsonrpc": "2.0", "id": [1], "method": "daemon.hello"}',
        b'{"jsonrpc": "2.0", "id": 1.5, "method": "daemon.hello"}', b'{"jsonrpc": "2.0", "id": NaN, "method": "m"}',
        b'{"jsonrpc": "2.0", "id": 1, "method": "daemon.hello", "extra": 1}',
        b'{"jsonrpc": "2.0", "id": 1, "method": "\\ud800"}', b'{"jsonrpc": "2.0", "id": true, "method": "m"}',
        b'[{"jsonrpc": "2.0", "id": 1, "method": "daemon.hello"}]', b"GET / HTTP/1.1\r",
    ],
)  # fmt: skip
@asynchronous
async def test_not_a_request(line: bytes) -> None:
    """One error with id null, and the connection goes on."""
    async with house() as h, h.talker() as talker:
        talker.say(line + b"\n")
        error = await talker.error(None, "invalid", "not a request")
        assert error["code"] == -32700
        await talker.alive()


@pytest.mark.parametrize("where", ["message", "params", "labels"])
@asynchronous
async def test_deeply_nested(where: str) -> None:
    """A hundred thousand brackets are an error, not a crash."""
    deep = "[" * 100_000 + "]" * 100_000
    line = {
        "message": deep,
        "params": f'{{"jsonrpc": "2.0", "id": 1, "method": "sandbox.wait", "params": {deep}}}',
        "labels": f'{{"jsonrpc": "2.0", "id": 1, "method": "sandbox.wait", "params": {{"id": "x", "states": {deep}}}}}',
    }[where]
    async with house() as h, h.talker() as talker:
        talker.say(line.encode() + b"\n")
        message = await talker.reply()
        assert message["error"]["data"]["kind"] == "invalid"
        await talker.alive()


@asynchronous
async def test_frame_too_long() -> None:
    """A line over 16 MiB: one error that names the limit, then the connection is closed; others go on."""

    def flood(path: str) -> tuple[int, bytes]:
        sent = 0
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(path)
            with pytest.raises(ConnectionError):
                while sent < 400 << 20:
                    sent += sock.send(b"x" * (1 << 20))
            return sent, sock.recv(65536)

    async with house() as h, h.talker() as other:
        sent, reply = await asyncio.to_thread(flood, h.path)
        assert sent < 20 << 20, "never more than the cap is taken"
        assert b"longer than 16777216" in reply
        await other.alive()


@asynchronous
async def test_frame_of_the_cap_is_served() -> None:
    """Exactly 16 MiB is fine; one byte more is not."""
    async with house() as h, h.talker() as talker:
        head, tail = b'{"jsonrpc": "2.0", "id": 1, "method": "daemon.hello", "params": {"client": "', b'"}}'
        talker.say(head + b"c" * (base.MAX_FRAME - len(head) - len(tail)) + tail + b"\n")
        assert (await talker.reply())["id"] == 1
        talker.say(head + b"c" * (base.MAX_FRAME - len(head) - len(tail) + 1) + tail + b"\n")
        await talker.error(None, "invalid", "longer than")
        assert await talker.closed()


@asynchronous
async def test_frame_that_is_never_finished() -> None:
    """A client that leaves in the middle of a line, or dribbles it byte by byte, harms nobody."""
    async with house() as h, h.talker() as other:
        async with h.talker() as talker:
            talker.say(b'{"jsonrpc": "2.0", "id": 1, "method"')
            await talker.writer.drain()
        async with h.talker() as talker:
            for byte in b'{"jsonrpc": "2.0", "id": 7, "method": "daemon.hello"}\n':
                talker.say(bytes([byte]))
                await talker.writer.drain()
            assert (await talker.reply())["id"] == 7
        await other.alive()


# -- requests that are wrong ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "params", "word"),
    [
        ("no.such", {}, "unknown method"),
        ("sandbox.fork", {}, "unknown method"),
        ("sandbox.create", {}, "unknown method"),  # of the protocol, but not served here
        ("daemon.hello", {"protocl": 1}, "protocl"),
        ("daemon.hello", {"protocol": "1"}, "protocol"),
        ("daemon.hello", {"protocol": 1.5}, "protocol"),
        ("daemon.hello", {"protocol": None}, "protocol"),
        ("daemon.hello", [1], "array"),
        ("daemon.hello", "x", "str"),
        ("sandbox.wait", {}, "`id`"),
        ("sandbox.wait", {"id": ""}, "length"),
        ("sandbox.wait", {"id": "x" * 129}, "length"),
        ("sandbox.wait", {"id": "x", "timeout_s": 0}, "timeout_s"),
        ("sandbox.wait", {"id": "x", "timeout_s": -1}, "timeout_s"),
        ("sandbox.wait", {"id": "x", "timeout_s": 1e300}, "timeout_s"),
        ("sandbox.wait", {"id": "x", "states": ["sleeping"]}, "sleeping"),
        ("sandbox.wait", {"id": "x", "request_id": "with space"}, "request_id"),
        ("sandbox.wait", {"id": "x", "request_id": "x" * 129}, "request_id"),
        ("exec.run", {"id": "x", "stdin": "not base64!"}, "base64"),
        ("exec.run", {"id": "x", "cap_bytes": 1 << 40}, "cap_bytes"),
        ("exec.run", {"id": "x", "env": {"A=B": "c"}}, "env"),
        ("file.write", {"id": "x", "path": "/x", "mode": 0o10000}, "mode"),
        ("file.write", {"id": "x", "path": "/x", "uid": -1}, "uid"),
        ("file.write", {"id": "x", "path": "x" * 10_000}, "path"),
    ],
)
@asynchronous
async def test_wrong_request(method: str, params: Any, word: str) -> None:
    """One `invalid` that names what is wrong, and nothing has run."""
    async with house() as h, h.talker() as talker:
        talker.say(json.dumps({"jsonrpc": "2.0", "id": 5, "method": method, "params": params}).encode() + b"\n")
        message = await talker.reply()
        assert message["id"] == 5
        data = message["error"]["data"]
        assert (data["kind"], data["infra"], data["retryable"]) == ("invalid", False, False)
        assert word in message["error"]["message"]
        assert h.toys.running == 0
        await talker.alive()


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "01", "0x10", "1_000"])
@asynchronous
async def test_numbers_that_are_none(text: str) -> None:
    async with house() as h, h.talker() as talker:
        line = f'{{"jsonrpc": "2.0", "id": 1, "method": "sandbox.wait", "params": {{"id": "x", "timeout_s": {text}}}}}'
        talker.say(line.encode() + b"\n")
        assert (await talker.reply())["error"]["data"]["kind"] == "invalid"
        await talker.alive()


@pytest.mark.parametrize(
    "ident", [0, -1, 2**31, 2**63 - 1, 2**64 - 1, 2**64, -(2**63), 10**30, "", "x" * 1000, "ünï\n"]
)
@asynchronous
async def test_any_id_comes_back(ident: Any) -> None:
    """Whatever id JSON can say is given back as it was, or refused in one error; never a broken connection."""
    async with house() as h, h.talker() as talker:
        talker.send("daemon.hello", ident=ident)
        message = await talker.reply()
        assert message["id"] == ident or (message["id"] is None and message["error"]["data"]["kind"] == "invalid")
        await talker.alive()


@asynchronous
async def test_duplicate_id_in_flight() -> None:
    """An id that is in flight is refused, the first call goes on; afterwards the id is free again."""
    async with house() as h, h.talker() as talker:
        talker.send("sandbox.wait", {"id": "a"}, ident=1)
        talker.send("sandbox.wait", {"id": "b"}, ident=1)
        await talker.error(1, "invalid", "still in flight")
        h.toys.gate.set()
        assert (await talker.reply())["result"]["id"] == "a"
        talker.send("sandbox.wait", {"id": "c"}, ident=1)
        assert (await talker.reply())["result"]["id"] == "c"


@asynchronous
async def test_errors_carry_their_kind_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """A DsecError arrives as it is; a bug becomes `internal` with its text in the log alone."""
    async with house() as h, h.talker() as talker:
        talker.send("daemon.hello", {"client": "refuse"}, ident=1)
        error = await talker.error(1, "denied", "not you")
        assert error["code"] == CODES["denied"]
        assert error["data"] == {
            "kind": "denied", "infra": False, "retryable": False, "sandbox_id": "s1", "detail": {"why": 1},
        }  # fmt: skip
        for method, params in (("daemon.hello", {"client": "bug"}), ("sandbox.wait", {"id": "bug"})):
            talker.send(method, params, ident=2)
            error = await talker.error(2, "internal")
            assert error["data"]["infra"] is True
            assert "secret" not in json.dumps(error)
        assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
            "secret of the daemon", "'secret of the daemon'",
        ]  # fmt: skip


# -- many in flight ---------------------------------------------------------------------------------------------------
@asynchronous
async def test_pipelined_in_any_order() -> None:
    """Ten thousand plain requests while a slow one waits: one reply each, the slow one last."""
    async with house() as h, h.talker() as talker:
        talker.send("sandbox.wait", {"id": "slow"}, ident="slow")
        for n in range(10_000):
            talker.send("daemon.hello", ident=n)
        got = [(await talker.reply())["id"] for _ in range(10_000)]
        assert got == list(range(10_000))
        h.toys.gate.set()
        assert (await talker.reply())["id"] == "slow"


@asynchronous
async def test_too_many_in_flight() -> None:
    """More calls at once than allowed: `capacity`, and the others go on."""
    async with house(limits=Limits(calls=10)) as h, h.talker() as talker:
        for n in range(11):
            talker.send("sandbox.wait", {"id": "x"}, ident=n)
        error = await talker.error(10, "capacity")
        assert error["data"]["retryable"] is True
        h.toys.gate.set()
        assert sorted([(await talker.reply())["id"] for _ in range(10)]) == list(range(10))


@asynchronous
async def test_what_one_holds_on_all_connections_is_bounded() -> None:
    """Requests that are not answered count, and so do lines that are not finished; answered, they do no more."""

    def wait(size: int) -> bytes:
        line = b'{"jsonrpc": "2.0", "id": 1, "method": "sandbox.wait", "params": {"id": "x"}}'
        return line + b" " * (size - len(line)) + b"\n"

    async with house(limits=Limits(held=100_000)) as h, h.talker() as one, h.talker() as other, h.talker() as third:
        one.say(wait(60_000))
        while not h.toys.running:
            await asyncio.sleep(0.001)
        other.say(wait(60_000))
        error = await other.error(1, "quota", "wait for answers")
        assert error["data"]["retryable"] is True
        other.say(wait(30_000))
        await other.alive()
        third.say(b"{" * 30_000)
        await third.error(None, "quota")
        assert await third.closed()
        h.toys.gate.set()
        assert [(await talker.reply())["id"] for talker in (one, other)] == [1, 1]
        one.say(wait(90_000))
        assert (await one.reply())["id"] == 1


@asynchronous
async def test_deadline() -> None:
    """timeout_s ends the call with `timeout`, and its handler is cancelled."""
    async with house() as h, h.talker() as talker:
        talker.send("sandbox.wait", {"id": "late", "timeout_s": 0.05}, ident=1)
        await talker.error(1, "timeout", "0.05 s")
        assert h.toys.cancelled == ["late"]
        talker.send("exec.run", {"id": "x", "timeout_s": 3}, ident=2)
        assert (await talker.reply())["result"]["exit_code"] == 3, "here it is the command's own"


@asynchronous
async def test_deadline_holds_with_a_request_id() -> None:
    """timeout_s of a call that changes something counts with a request_id too; the work itself goes on."""

    async def interceptor(call: Any, params: Any, invoke: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(asyncio.sleep(0.5, await invoke())))

    async with house(interceptor) as h, h.talker() as talker:
        h.server.handlers["sandbox.create"] = slow_create
        talker.send("sandbox.create", {"spec": {"image": "i"}, "timeout_s": 0.1, "request_id": "k"}, ident=1)
        await talker.error(1, "timeout", "0.1 s")
        await asyncio.sleep(0.6)


async def slow_create(call: Any, params: wire.Create) -> wire.Sandbox:
    return wire.Sandbox(id="x", state="running", backend="container", image="i")


@asynchronous
async def test_cancel() -> None:
    """$/cancelRequest ends a call with an answer; of an unknown or ended call it is nothing; then the id is free."""
    async with house() as h, h.talker() as talker:
        talker.send("sandbox.wait", {"id": "gone"}, ident=1)
        await talker.alive()
        talker.send("$/cancelRequest", {"id": 99})
        talker.send("$/cancelRequest", {"id": 1})
        error = await talker.error(1, "timeout", "cancelled")
        assert error["data"]["detail"] == {"cancelled": True}
        assert h.toys.cancelled == ["gone"]
        talker.send("$/cancelRequest", {"id": 1})
        await talker.alive()


@asynchronous
async def test_cancel_right_behind_its_request() -> None:
    """A cancel in the same packet finds the call not begun: it is answered all the same, and its id is free."""
    async with house() as h, h.talker() as talker:
        for _ in range(2):
            talker.send("sandbox.wait", {"id": "x"}, ident=1)
            talker.send("$/cancelRequest", {"id": 1})
            await talker.error(1, "timeout", "cancelled")
        assert h.toys.cancelled == []


@asynchronous
async def test_left_client_cancels_its_calls() -> None:
    async with house() as h:
        async with h.talker() as talker:
            for n in range(5):
                talker.send("sandbox.wait", {"id": str(n)}, ident=n)
            await talker.alive()
        async with asyncio.timeout(5):
            while len(h.toys.cancelled) < 5:
                await asyncio.sleep(0.001)
        assert not h.server.connections


@asynchronous
async def test_close_answers_everybody() -> None:
    """A server that closes says nothing wrong: the call ends with a broken connection, which means outcome unknown."""
    async with house() as h, h.peer() as peer:
        changing = peer.start("file.write", files.Write(id="x", path="/wait", stream=True))
        reading = peer.start("sandbox.wait", wire.Wait(id="x"))
        await asyncio.sleep(0.05)
        await h.server.close()
        for pending, kinds in ((changing, {"outcome_unknown"}), (reading, {"network", "shutting_down"})):
            with pytest.raises(DsecError) as caught:
                await pending.finish()
            assert caught.value.kind in kinds
            assert caught.value.infra


# -- clients that do not read -----------------------------------------------------------------------------------------
@asynchronous
async def test_client_that_never_reads() -> None:
    """Pipelined requests of a client that reads nothing are not read any more; the others are served meanwhile."""
    async with house() as h, h.talker() as other:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(h.path)
        sock.setblocking(False)
        request = b'{"jsonrpc": "2.0", "id": 1, "method": "daemon.hello", "params": {}}\n' * 1000
        sent = idle = 0
        while idle < 20:
            try:
                sent += sock.send(request)
                idle = 0
            except BlockingIOError:
                idle += 1
            await asyncio.sleep(0.005)
            assert sent < 256 << 20, "the server reads on although nobody takes its replies"
        held = sum(c.transport.get_write_buffer_size() for c in h.server.connections if c.transport is not None)
        assert held < 2 * MAX_UNSENT
        await other.alive()
        sock.close()


@asynchronous
async def test_stream_of_a_client_that_never_reads_waits() -> None:
    """Notifications wait for the client; a handler never runs ahead of it by more than the buffer."""
    async with house() as h:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(h.path)
            sock.send(b'{"jsonrpc": "2.0", "id": 1, "method": "sandbox.events", "params": {}}\n')
            async with asyncio.timeout(10):
                before = -1
                while h.toys.told != before:
                    before = h.toys.told
                    await asyncio.sleep(0.3)
            (connection,) = h.server.connections
            assert connection.transport is not None
            held = connection.transport.get_write_buffer_size()
            assert flow.HIGH < held < flow.HIGH + (1 << 20)


@asynchronous
async def test_client_with_too_many_unread_replies_is_cut_off() -> None:
    async with house(limits=Limits(unsent=1 << 20)) as h, h.talker() as talker:
        big = b64(os.urandom(5 << 20))
        for n in range(20):
            talker.send("exec.run", {"id": "x", "stdin": big}, ident=n)
        with pytest.raises((ConnectionError, AssertionError)):
            await talker.writer.drain()
            async with asyncio.timeout(5):
                while h.server.connections:
                    await asyncio.sleep(0.01)
            while await talker.reply():
                pass
        assert not h.server.connections


# -- streams ----------------------------------------------------------------------------------------------------------
def stream(sub: Any, offset: int, data: bytes) -> dict[str, Any]:
    return {"sub": sub, "offset": offset, "data": b64(data)}


@asynchronous
async def test_upload_within_credit() -> None:
    async with house() as h, h.talker() as talker:
        talker.send("file.write", {"id": "x", "path": "/f", "stream": True}, ident=1)
        sent, data = 0, os.urandom(300_000)
        while sent < len(data):
            message = await talker.reply()
            assert message["method"] == "stream.credit"
            limit = message["params"]["limit"]
            assert sent < limit <= sent + 2 * h.toys.window
            piece = data[sent:limit]
            talker.send("stream.data", stream(1, sent, piece))
            sent += len(piece)
        talker.send("stream.eof", {"sub": 1})
        while "result" not in (message := await talker.reply()):
            assert message["method"] == "stream.credit"
        assert message["result"]["size"] == len(data)
        assert h.toys.uploaded == data


@pytest.mark.parametrize("fault", ["beyond", "gap", "overlap", "negative", "after eof", "before credit"])
@asynchronous
async def test_upload_out_of_order_or_over_credit(fault: str) -> None:
    """The call fails with `invalid`, nothing of the bad data is taken, the connection goes on."""
    async with house() as h, h.talker() as talker:
        path = "/wait" if fault == "before credit" else "/f"
        talker.send("file.write", {"id": "x", "path": path, "stream": True}, ident=1)
        if fault == "before credit":
            talker.send("stream.data", stream(1, 0, b"early"))
            h.toys.gate.set()
        else:
            await talker.reply()
            talker.send("stream.data", stream(1, 0, b"good"))
            match fault:
                case "beyond":
                    talker.send("stream.data", stream(1, 4, b"x" * (h.toys.window + 1)))
                case "gap":
                    talker.send("stream.data", stream(1, 5, b"x"))
                case "overlap":
                    talker.send("stream.data", stream(1, 3, b"x"))
                case "negative":
                    talker.send("stream.data", stream(1, -1, b"x"))
                case "after eof":
                    talker.say(b'{"jsonrpc": "2.0", "method": "stream.eof", "params": {"sub": 1}}\n')
                    talker.send("stream.data", stream(1, 4, b"x"))
        while "error" not in (message := await talker.reply()):
            if fault == "after eof" and "result" in message:
                break
            assert message["method"] == "stream.credit"
        if "error" in message:
            assert message["error"]["data"]["kind"] == "invalid"
            assert h.toys.uploaded in (b"", b"good")
        else:
            assert message["result"]["size"] == 4, "ended before the bytes behind the end came"
        await talker.alive()


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","method":"stream.data","params":{"sub":1}}',
        b'{"jsonrpc":"2.0","method":"stream.data","params":{"sub":1,"offset":0,"data":"!"}}',
        b'{"jsonrpc":"2.0","method":"stream.data","params":{"sub":1,"offset":"0","data":""}}',
        b'{"jsonrpc":"2.0","method":"stream.data","params":{"sub":{},"offset":0,"data":""}}',
        b'{"jsonrpc":"2.0","method":"stream.data","params":{"sub":1,"offset":0,"data":"","x":1}}',
        b'{"jsonrpc":"2.0","method":"stream.data","params":{"sub":1,"offset":0,"data":"',
        b'{"jsonrpc":"2.0","method":"stream.credit","params":{"sub":1,"limit":"all"}}',
        b'{"jsonrpc":"2.0","method":"stream.eof","params":[]}',
        b'{"jsonrpc":"2.0","method":"stream.nonsense","params":{}}',
        b'{"jsonrpc":"2.0","method":"daemon.hello","params":{}}',
        b'{"jsonrpc":"2.0","method":"$/cancelRequest","params":{"id":[]}}',
    ],
)
@asynchronous
async def test_bad_notification(line: bytes) -> None:
    """One error with id null; the connection goes on."""
    async with house() as h, h.talker() as talker:
        talker.say(line + b"\n")
        await talker.error(None, "invalid")
        await talker.alive()


@asynchronous
async def test_stream_for_a_call_without_one() -> None:
    """Data for a call that takes none is an error; for an unknown call it may be late, and is nothing."""
    async with house() as h, h.talker() as talker:
        talker.send("stream.data", stream(77, 0, b"late"))
        talker.send("stream.eof", {"sub": 77})
        talker.send("stream.credit", {"sub": 77, "limit": 5})
        talker.send("sandbox.wait", {"id": "x"}, ident=1)
        talker.send("stream.data", stream(1, 0, b"x"))
        await talker.error(None, "invalid", "takes no stream")
        talker.send("stream.eof", {"sub": 1})
        talker.send("stream.credit", {"sub": 1, "limit": 1 << 60})
        h.toys.gate.set()
        assert (await talker.reply())["result"]["id"] == "x"


@asynchronous
async def test_download_keeps_within_credit() -> None:
    """Nothing is sent beyond the window until more is granted; less or negative credit takes nothing back."""
    async with house() as h, h.talker() as talker:
        talker.send("file.read", {"id": "x", "path": "/f", "stream": True, "size": 65536, "window": 8192}, ident=1)
        got = 0
        while got < 8192:
            params = (await talker.reply())["params"]
            assert params["offset"] == got
            got += len(base64.b64decode(params["data"]))
        assert got == 8192
        for limit in (0, -5, 8192):
            talker.send("stream.credit", {"sub": 1, "limit": limit})
        await talker.alive()
        talker.send("stream.credit", {"sub": 1, "limit": 8193})
        params = (await talker.reply())["params"]
        assert (params["offset"], base64.b64decode(params["data"])) == (8192, b"x")
        talker.send("stream.credit", {"sub": 1, "limit": 1 << 62})
        got = 8193
        while "result" not in (message := await talker.reply()):
            got += len(base64.b64decode(message["params"]["data"]))
        assert got == message["result"]["size"] == 65536


@asynchronous
async def test_cancelled_download_stops() -> None:
    async with house() as h, h.talker() as talker:
        talker.send("file.read", {"id": "x", "path": "/f", "stream": True, "size": 1 << 20, "window": 4096}, ident=1)
        assert (await talker.reply())["method"] == "stream.data"
        talker.send("$/cancelRequest", {"id": 1})
        await talker.error(1, "timeout", "cancelled")
        talker.send("stream.credit", {"sub": 1, "limit": 1 << 20})
        await talker.alive()


@asynchronous
async def test_early_end_of_an_upload() -> None:
    """A call that fails while the client still sends: its error arrives, and what comes late is nothing."""
    async with house() as h, h.talker() as talker:
        talker.send("file.write", {"id": "x", "path": "/early", "stream": True}, ident=1)
        await talker.error(1, "disk_full")
        talker.send("stream.data", stream(1, 0, b"late"))
        talker.send("stream.eof", {"sub": 1})
        await talker.alive()
