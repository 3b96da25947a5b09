"""Which function answers which method."""

from __future__ import annotations

from dsecd.api.daemon import DaemonApi
from dsecd.api.execs import ExecApi
from dsecd.api.files import FileApi
from dsecd.api.images import ImageApi
from dsecd.api.sandboxes import SandboxApi
from dsecd.config import Config
from dsecd.sandbox.manager import Manager
from dsecd.wire.server import Handler


def handlers(config: Config, manager: Manager) -> tuple[dict[str, Handler], DaemonApi]:
    """The whole API of one daemon."""
    daemon = DaemonApi(manager)
    sandbox = SandboxApi(manager)
    execs = daemon.execs = ExecApi(manager)
    files = FileApi(manager)
    images = ImageApi(config, manager.rooms.images, manager.rooms.mounts)
    table: dict[str, Handler] = {
        "daemon.hello": daemon.hello,
        "daemon.info": daemon.info,
        "daemon.stats": daemon.stats,
        "daemon.doctor": daemon.doctor,
        "sandbox.create": sandbox.create,
        "sandbox.create_many": sandbox.create_many,
        "sandbox.get": sandbox.get,
        "sandbox.list": sandbox.list,
        "sandbox.wait": sandbox.wait,
        "sandbox.stop": sandbox.stop,
        "sandbox.stop_many": sandbox.stop_many,
        "sandbox.pause": sandbox.pause,
        "sandbox.resume": sandbox.resume,
        "sandbox.extend": sandbox.extend,
        "sandbox.stats": sandbox.stats,
        "sandbox.events": sandbox.events,
        "lease.renew": sandbox.renew,
        "exec.run": execs.run,
        "exec.start": execs.start,
        "exec.attach": execs.attach,
        "exec.stdin": execs.stdin,
        "exec.signal": execs.signal,
        "exec.resize": execs.resize,
        "exec.wait": execs.wait,
        "exec.list": execs.list,
        "session.open": execs.open,
        "session.run": execs.line,
        "session.close": execs.close,
        "port.connect": execs.connect,
        "file.read": files.read,
        "file.write": files.write,
        "file.list": files.list,
        "file.stat": files.stat,
        "file.mkdir": files.mkdir,
        "file.remove": files.remove,
        "file.rename": files.rename,
        "tree.upload": files.upload,
        "tree.download": files.download,
        "image.import": images.import_,
        "image.bootstrap": images.bootstrap,
        "image.collapse": images.collapse,
        "image.push": images.push,
        "image.pull": images.pull,
        "image.list": images.list,
        "image.get": images.get,
        "image.remove": images.remove,
        "image.gc": images.gc,
    }
    return table, daemon
