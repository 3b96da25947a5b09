"""The page server with a store that misbehaves as `<path>/behaviour` says; tests start it in place of the real one."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from dsecd.erofs.pages import __main__ as real
from dsecd.erofs.stores import BlobStore, StoreConfig, unreadable


class Moody:
    """A directory. `requests` beside the blobs logs what was asked."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.log = os.open(path / "requests", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        mood = json.loads((self.path / "behaviour").read_text())
        os.write(self.log, f"{blob} {offset} {size}\n".encode())
        time.sleep(mood.get("delay_s", 0))
        match mood["mode"]:
            case "down":
                raise unreadable(self.name, blob, "connection refused")
            case "hang":
                time.sleep(timeout_s)
                raise unreadable(self.name, blob, "no answer")
            case "truncated":
                size //= 2
        with (self.path / blob).open("rb") as f:
            data = os.pread(f.fileno(), size, offset)
        if mood["mode"] == "lying":
            data = bytes([data[0] ^ 1]) + data[1:]
        return data

    def close(self) -> None:
        os.close(self.log)


def main() -> None:
    honest = real.open_store

    def opened(name: str, config: StoreConfig) -> BlobStore:
        return Moody(name, Path(config.path)) if config.kind == "path" else honest(name, config)

    real.open_store = opened
    sys.exit(real.main())


if __name__ == "__main__":
    main()
