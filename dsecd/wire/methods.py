"""The one table of methods: name, params, result, and how the server treats them."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from dsecd.wire import (
    base,
    daemon,
    devices,
    environments,
    execs,
    files,
    fleet,
    fncall,
    images,
    jobs,
    kernels,
    network,
    rollouts,
    sandbox,
    screen,
    tenants,
    trace,
    trajectory,
    vms,
)
from dsecd.wire.access import BY_METHOD, CLOSED, Access


class Method(Struct, frozen=True):
    """once: obeys request_id (it changes something). recorded: that is its sandbox `id`, whose trajectory gets it.
    own_timeout: timeout_s has a meaning of its own in the handler.

    upload, download: stream.data goes to the server, to the client. events: name of the notifications it sends.
    access: who may call it; dsecd.wire.access has it for all.
    """

    params: type[base.Params]
    result: type[base.Result]
    help: str
    once: bool = False
    recorded: bool = False
    own_timeout: bool = False
    upload: bool = False
    download: bool = False
    events: str = ""
    access: Access = CLOSED


_METHODS: Final[dict[str, Method]] = {
    "daemon.hello": Method(daemon.Hello, daemon.Welcome, "Agree on the protocol."),
    "daemon.info": Method(daemon.InfoParams, daemon.Info, "What the host is and has left."),
    "daemon.stats": Method(daemon.StatsParams, daemon.Counters, "Counters and the daemon's own size."),
    "daemon.cordon": Method(daemon.Cordon, daemon.Info, "Take no new sandboxes, or take them again."),
    "daemon.drain": Method(daemon.Drain, daemon.Drained, "End all sandboxes, commands first having time to end."),
    "daemon.reload": Method(daemon.Reload, daemon.Reloaded, "Read the configuration again; for root."),
    "fleet.status": Method(fleet.StatusParams, fleet.Status, "Hosts of a fleet (of its coordinator)."),
    "fleet.cordon": Method(fleet.Cordon, fleet.Cordoned, "Cordon a host of it."),
    "fleet.doctor": Method(fleet.DoctorParams, fleet.Doctors, "What each of its hosts can do."),
    "trace.get": Method(trace.Get, trace.Traces, "What a request did, and when."),
    "trace.list": Method(trace.ListTraces, trace.Traces, "The last requests."),
    "daemon.doctor": Method(daemon.DoctorParams, daemon.Doctor, "What the host can do, and what to install."),
    "daemon.fix": Method(daemon.Fix, daemon.Fixed, "Set up what the doctor found missing; for root."),
    "session.login": Method(tenants.Login, tenants.Whoami, "Be the principal of a token."),
    "session.whoami": Method(tenants.WhoamiParams, tenants.Whoami, "Who the daemon takes one for."),
    "project.create": Method(tenants.CreateProject, tenants.Project, "Make a project below one's own."),
    "project.list": Method(tenants.ListProjects, tenants.Projects, "One's project and those below it."),
    "project.show": Method(tenants.ByPath, tenants.Project, "Quotas of one, and what is used of them."),
    "project.set": Method(tenants.SetProject, tenants.Project, "Change its quotas."),
    "project.remove": Method(tenants.ByPath, base.Empty, "Remove an empty one."),
    "principal.add": Method(tenants.AddPrincipal, tenants.Principal, "Let somebody act in a project."),
    "principal.list": Method(tenants.ListPrincipals, tenants.Principals, "Who may act in one's subtree."),
    "principal.remove": Method(tenants.ByName, base.Empty, "Let him no more."),
    "token.create": Method(tenants.CreateToken, tenants.TokenMade, "Make known a token, by its digest."),
    "token.revoke": Method(tenants.RevokeToken, base.Empty, "Let a token be nobody's."),
    "audit.read": Method(tenants.ReadAudit, tenants.Audit, "Management calls, and what came of them."),
    "sandbox.create": Method(sandbox.Create, sandbox.Sandbox, "Create one (or get it, by name).", once=True),
    "sandbox.create_many": Method(sandbox.CreateMany, sandbox.Created, "Create many, one result each.", once=True),
    "sandbox.choose": Method(sandbox.Choose, sandbox.Chosen, "Which backend `auto` would take, and why."),
    "sandbox.get": Method(sandbox.ById, sandbox.Sandbox, "One sandbox, by id or name."),
    "sandbox.list": Method(sandbox.List, sandbox.Sandboxes, "Sandboxes by label, state or owner."),
    "sandbox.wait": Method(sandbox.Wait, sandbox.Sandbox, "Wait until it reaches a state."),
    "sandbox.stop": Method(sandbox.Stop, sandbox.Sandbox, "Kill and remove it.", once=True, recorded=True),
    "sandbox.stop_many": Method(sandbox.StopMany, sandbox.StoppedMany, "Stop many by id or label.", once=True),
    "sandbox.pause": Method(sandbox.ById, sandbox.Sandbox, "Freeze it.", once=True, recorded=True),
    "sandbox.resume": Method(sandbox.ById, sandbox.Sandbox, "Thaw it.", once=True, recorded=True),
    "sandbox.fork": Method(sandbox.Fork, sandbox.Created, "Copies of it, copy-on-write.", once=True, recorded=True),
    "sandbox.pack_diff": Method(
        environments.PackDiff,
        environments.Packed,
        "Make an environment of what it wrote.",
        once=True,
        recorded=True,
        events="progress",
    ),
    "sandbox.extend": Method(sandbox.Extend, sandbox.Sandbox, "New deadlines from now.", once=True, recorded=True),
    "sandbox.set_network": Method(
        network.SetNetwork, network.SandboxNetwork, "What it may reach.", once=True, recorded=True
    ),
    "sandbox.stats": Method(sandbox.ById, sandbox.Stats, "What it uses."),
    "sandbox.events": Method(sandbox.Events, base.Empty, "Follow life-cycle events.", events="sandbox.event"),
    "trajectory.read": Method(trajectory.Read, trajectory.Entries, "What was done to a sandbox."),
    "trajectory.verify": Method(trajectory.Verify, trajectory.Verified, "Whether its log is intact."),
    "trajectory.export": Method(trajectory.Export, trajectory.Exported, "Its log's file.", download=True),
    "job.list": Method(jobs.ListJobs, jobs.Jobs, "The caller's jobs."),
    "job.pause": Method(jobs.ByJob, jobs.JobDone, "Freeze all sandboxes of one.", once=True),
    "job.resume": Method(jobs.ByJob, jobs.JobDone, "Thaw all of one.", once=True),
    "job.stop": Method(jobs.StopJob, jobs.JobDone, "Kill and remove all of one.", once=True),
    "device.list": Method(devices.ListDevices, devices.DevicePools, "Device pools, and who has what of them."),
    "network.get": Method(network.NetworkOf, network.SandboxNetwork, "What a sandbox may reach."),
    "network.log": Method(network.NetworkOf, network.RefusalLog, "What a sandbox tried to reach and may not."),
    "network.services": Method(network.ServicesParams, network.Services, "What rules may call by name."),
    "lease.renew": Method(sandbox.Renew, sandbox.Renewed, "The owner is alive."),
    "exec.run": Method(execs.Run, execs.Ran, "Run a command to its end.", own_timeout=True, once=True, recorded=True),
    "exec.start": Method(execs.Start, execs.Started, "Start a command.", own_timeout=True, once=True, recorded=True),
    "exec.attach": Method(execs.Attach, execs.Ran, "Follow its output.", events="exec.output"),
    "exec.stdin": Method(execs.Stdin, base.Empty, "Feed its standard input.", once=True, recorded=True),
    "exec.signal": Method(execs.Signal, base.Empty, "Signal it.", once=True, recorded=True),
    "exec.resize": Method(execs.Resize, base.Empty, "Resize its terminal."),
    "exec.wait": Method(execs.Wait, execs.Ran, "Wait for its end and fetch what it wrote."),
    "exec.list": Method(execs.ListExecs, execs.Execs, "Commands of a sandbox."),
    "session.open": Method(
        execs.SessionOpen, execs.Session, "Open a shell that keeps its state.", once=True, recorded=True
    ),
    "session.run": Method(execs.SessionRun, execs.Ran, "Run a line in it.", own_timeout=True, once=True, recorded=True),
    "session.close": Method(execs.SessionRef, base.Empty, "End it.", once=True, recorded=True),
    "fncall.run": Method(fncall.Run, fncall.Judged, "Run a stateless program and judge it."),
    "fncall.batch": Method(fncall.Batch, fncall.BatchJudged, "Compile once, judge many cases.", events="fncall.case"),
    "file.read": Method(files.Read, files.FileRead, "Read a file.", download=True),
    "file.write": Method(files.Write, files.Written, "Replace a file.", upload=True, once=True, recorded=True),
    "file.list": Method(files.ListDir, files.Entries, "Entries of a directory."),
    "file.stat": Method(files.StatParams, files.Stat, "One entry."),
    "file.mkdir": Method(files.Mkdir, base.Empty, "Make a directory.", once=True, recorded=True),
    "file.remove": Method(files.Remove, base.Empty, "Remove an entry.", once=True, recorded=True),
    "file.rename": Method(files.Rename, base.Empty, "Rename an entry.", once=True, recorded=True),
    "tree.upload": Method(files.Upload, files.TreeDone, "Unpack a tar stream.", upload=True, once=True, recorded=True),
    "tree.download": Method(files.Download, files.TreeDone, "Pack a tree as a tar stream.", download=True),
    "port.connect": Method(
        execs.PortConnect, execs.PortClosed, "Tunnel to a port inside.", upload=True, download=True, recorded=True
    ),
    "rollout.start": Method(rollouts.Start, rollouts.Rollout, "Start an agent sandbox and its worker.", once=True),
    "rollout.get": Method(rollouts.ById, rollouts.Rollout, "One rollout, to go on from."),
    "rollout.list": Method(rollouts.ListRollouts, rollouts.Rollouts, "Rollouts of a job."),
    "rollout.stop": Method(rollouts.Stop, rollouts.Rollout, "End it and remove its sandboxes.", once=True),
    "rollout.steps": Method(rollouts.Steps, rollouts.StepList, "What it asked its model, and the answers."),
    "rollout.attach": Method(rollouts.Attach, base.Empty, "Be the model of a job.", events="rollout.step"),
    "rollout.answer": Method(rollouts.Answer, rollouts.Answered, "Answer a step."),
    "rollout.results": Method(rollouts.AskResults, rollouts.Results, "Results, until they are acknowledged."),
    "rollout.ack": Method(rollouts.Ack, rollouts.Acked, "Acknowledge results."),
    "rollout.worker.task": Method(rollouts.GetTask, rollouts.Assignment, "Workers: what to do."),
    "rollout.worker.ask": Method(rollouts.Ask, rollouts.Reply, "Workers: ask the model."),
    "rollout.worker.partial": Method(rollouts.Partial, base.Empty, "Workers: keep a partial result."),
    "rollout.worker.result": Method(rollouts.Deliver, base.Empty, "Workers: the end."),
    "vm.console": Method(vms.ConsoleParams, vms.Console, "What a guest wrote to its serial console."),
    "vm.snapshots": Method(vms.SnapshotsParams, vms.Snapshots, "Snapshots of a full VM's disk."),
    "vm.snapshot": Method(vms.SnapshotParams, base.Empty, "Take one, while it runs.", once=True, recorded=True),
    "vm.revert": Method(vms.SnapshotParams, base.Empty, "Boot it anew from one.", once=True, recorded=True),
    "vm.drop": Method(vms.SnapshotParams, base.Empty, "Forget one.", once=True, recorded=True),
    "screen.capture": Method(screen.Capture, screen.Picture, "A full VM's screen, as PNG."),
    "screen.input": Method(screen.Input, base.Empty, "Keys, text and pointer of a full VM.", once=True, recorded=True),
    "image.import": Method(images.Import, images.Image, "Import an image.", upload=True, events="progress"),
    "image.bootstrap": Method(images.Bootstrap, images.Image, "Make a Debian base.", events="progress"),
    "image.collapse": Method(images.Collapse, images.Image, "Merge layers into one image.", events="progress"),
    "image.push": Method(images.Push, images.Pushed, "Bring an image to a registry.", events="progress"),
    "image.pull": Method(images.Pull, images.Image, "Get an image that was pushed.", events="progress"),
    "image.list": Method(images.ListImages, images.Images, "All images."),
    "image.get": Method(images.ByRef, images.Image, "One image."),
    "image.verify": Method(images.ByRef, images.Verified, "Read all of an image and compare it."),
    "image.remove": Method(images.ByRef, base.Empty, "Remove an image nothing uses."),
    "image.gc": Method(images.Gc, images.Collected, "Remove what nothing names or uses."),
    "environment.export": Method(
        environments.Export, environments.Exported, "All its layers as one file.", download=True, events="progress"
    ),
    "environment.import": Method(
        environments.Load, images.Image, "Get one that was exported.", upload=True, events="progress"
    ),
    "environment.rules": Method(environments.RulesParams, environments.Rules, "What packs are held against."),
    "kernel.list": Method(kernels.ListKernels, kernels.Kernels, "Kernels of virtual machines."),
    "kernel.import_deb": Method(kernels.ImportDeb, kernels.Kernel, "Get one from a Debian package.", events="progress"),
    "kernel.build": Method(kernels.Build, kernels.Kernel, "Build one from source.", events="progress"),
    "kernel.remove": Method(kernels.KernelByName, base.Empty, "Remove a kernel."),
}

METHODS: Final[dict[str, Method]] = {
    name: replace(method, access=BY_METHOD.get(name, CLOSED)) for name, method in _METHODS.items()
}
