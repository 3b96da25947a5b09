"""The one table of methods: name, params, result, and how the server treats them."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from dsecd.wire import base, daemon, execs, files, images, sandbox


class Method(Struct, frozen=True):
    """once: obeys request_id (it changes something). own_timeout: timeout_s has a meaning of its own in the handler.

    upload, download: stream.data goes to the server, to the client. events: name of the notifications it sends.
    """

    params: type[base.Params]
    result: type[base.Result]
    help: str
    once: bool = False
    own_timeout: bool = False
    upload: bool = False
    download: bool = False
    events: str = ""


METHODS: Final[dict[str, Method]] = {
    "daemon.hello": Method(daemon.Hello, daemon.Welcome, "Agree on the protocol."),
    "daemon.info": Method(daemon.InfoParams, daemon.Info, "What the host is and has left."),
    "daemon.stats": Method(daemon.StatsParams, daemon.Counters, "Counters and the daemon's own size."),
    "daemon.doctor": Method(daemon.DoctorParams, daemon.Doctor, "What the host can do, and what to install."),
    "sandbox.create": Method(sandbox.Create, sandbox.Sandbox, "Create one (or get it, by name).", once=True),
    "sandbox.create_many": Method(sandbox.CreateMany, sandbox.Created, "Create many, one result each.", once=True),
    "sandbox.get": Method(sandbox.ById, sandbox.Sandbox, "One sandbox, by id or name."),
    "sandbox.list": Method(sandbox.List, sandbox.Sandboxes, "Sandboxes by label, state or owner."),
    "sandbox.wait": Method(sandbox.Wait, sandbox.Sandbox, "Wait until it reaches a state."),
    "sandbox.stop": Method(sandbox.Stop, sandbox.Sandbox, "Kill and remove it.", once=True),
    "sandbox.stop_many": Method(sandbox.StopMany, sandbox.StoppedMany, "Stop many by id or label.", once=True),
    "sandbox.pause": Method(sandbox.ById, sandbox.Sandbox, "Freeze it.", once=True),
    "sandbox.resume": Method(sandbox.ById, sandbox.Sandbox, "Thaw it.", once=True),
    "sandbox.extend": Method(sandbox.Extend, sandbox.Sandbox, "New deadlines from now."),
    "sandbox.stats": Method(sandbox.ById, sandbox.Stats, "What it uses."),
    "sandbox.events": Method(sandbox.Events, base.Empty, "Follow life-cycle events.", events="sandbox.event"),
    "lease.renew": Method(sandbox.Renew, sandbox.Renewed, "The owner is alive."),
    "exec.run": Method(execs.Run, execs.Ran, "Run a command to its end.", once=True, own_timeout=True),
    "exec.start": Method(execs.Start, execs.Started, "Start a command.", once=True, own_timeout=True),
    "exec.attach": Method(execs.Attach, execs.Ran, "Follow its output.", events="exec.output"),
    "exec.stdin": Method(execs.Stdin, base.Empty, "Feed its standard input."),
    "exec.signal": Method(execs.Signal, base.Empty, "Signal it."),
    "exec.resize": Method(execs.Resize, base.Empty, "Resize its terminal."),
    "exec.wait": Method(execs.Wait, execs.Ran, "Wait for its end and fetch what it wrote."),
    "exec.list": Method(execs.ListExecs, execs.Execs, "Commands of a sandbox."),
    "session.open": Method(execs.SessionOpen, execs.Session, "Open a shell that keeps its state.", once=True),
    "session.run": Method(execs.SessionRun, execs.Ran, "Run a line in it.", once=True, own_timeout=True),
    "session.close": Method(execs.SessionRef, base.Empty, "End it."),
    "file.read": Method(files.Read, files.FileRead, "Read a file.", download=True),
    "file.write": Method(files.Write, files.Written, "Replace a file.", upload=True),
    "file.list": Method(files.ListDir, files.Entries, "Entries of a directory."),
    "file.stat": Method(files.StatParams, files.Stat, "One entry."),
    "file.mkdir": Method(files.Mkdir, base.Empty, "Make a directory."),
    "file.remove": Method(files.Remove, base.Empty, "Remove an entry."),
    "file.rename": Method(files.Rename, base.Empty, "Rename an entry."),
    "tree.upload": Method(files.Upload, files.TreeDone, "Unpack a tar stream.", upload=True),
    "tree.download": Method(files.Download, files.TreeDone, "Pack a tree as a tar stream.", download=True),
    "port.connect": Method(execs.PortConnect, execs.PortClosed, "Tunnel to a port inside.", upload=True, download=True),
    "image.import": Method(images.Import, images.Image, "Import an image.", upload=True, events="progress"),
    "image.bootstrap": Method(images.Bootstrap, images.Image, "Make a Debian base.", events="progress"),
    "image.collapse": Method(images.Collapse, images.Image, "Merge layers into one image.", events="progress"),
    "image.push": Method(images.Push, images.Pushed, "Bring an image to a registry.", events="progress"),
    "image.pull": Method(images.Pull, images.Image, "Get an image that was pushed.", events="progress"),
    "image.list": Method(images.ListImages, images.Images, "All images."),
    "image.get": Method(images.ByRef, images.Image, "One image."),
    "image.remove": Method(images.ByRef, base.Empty, "Remove an image nothing uses."),
    "image.gc": Method(images.Gc, images.Collected, "Remove what nothing names or uses."),
}
