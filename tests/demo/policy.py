"""The trainer's model: an OpenAI-compatible endpoint that knows each task's commands and remembers nothing.

It decides by the messages it is sent alone, so any trainer's process is as good as the one before it.
"""

from __future__ import annotations

import http.server
import json
import re
import shlex
import threading
import time
from typing import Any, Final

from tests.demo.faults import FAULTS
from tests.demo.scaffold import COMMANDS, SEED, TEST

THINKS_S: Final = 0.3
UNSOLVED: Final = (7, 13)  # tasks that it gets wrong: rewards differ, and must stay different


def commands(number: int) -> list[str]:
    """What it does about a task, in order. Each leaves a line of its own, and prints how often that line is there."""
    fault = FAULTS[number]
    if number in UNSOLVED:
        mend = f"echo '# looked at' >> {fault.path}"
    else:
        mend = "python3 -c " + shlex.quote(SEED.format(path=fault.path, was=fault.now, now=fault.was))
    lines = [f"git log --oneline; wc -l {fault.path}", f"grep -nF -- {shlex.quote(fault.now)} {fault.path}", mend,
             f"git diff --stat; {TEST} tests/test_basic.py | tail -3"]  # fmt: skip
    marked = [
        f"echo {mark(number, at)} >> {COMMANDS}; grep -c '^{mark(number, at)}$' {COMMANDS}; {line}"
        for at, line in enumerate(lines)
    ]
    return [*marked, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]


def mark(number: int, at: int) -> str:
    return f"task-{number}-command-{at}"


def answer(body: Any) -> dict[str, Any]:
    """The next command of that conversation, as a tool call."""
    messages = body["messages"]
    told = next(one["content"] for one in messages if one["role"] == "user")
    found = re.search(r"Task (\d+):", told if isinstance(told, str) else json.dumps(told))
    assert found is not None
    turn = sum(one["role"] == "assistant" for one in messages)
    function = {"name": "bash", "arguments": json.dumps({"command": commands(int(found[1]))[turn]})}
    call = {"id": f"call-{turn}", "type": "function", "function": function}
    message = {"role": "assistant", "content": f"Step {turn}.", "tool_calls": [call]}
    sampled = {"content": [{"token": "x", "token_id": turn, "logprob": -0.25 * (turn + 1), "top_logprobs": []}]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message, "logprobs": sampled}
    return {
        "id": f"policy-{found[1]}-{turn}", "object": "chat.completion", "created": 0, "model": "policy",
        "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip


class _Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(THINKS_S)
        said = json.dumps(answer(body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def serve() -> str:
    """Start it in this process; its URL. Nothing in a sandbox can reach it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1"
