"""Which function answers which method."""

from __future__ import annotations

from dsecd.api.daemon import DaemonApi
from dsecd.api.devices import DeviceApi
from dsecd.api.environments import EnvironmentApi
from dsecd.api.execs import ExecApi
from dsecd.api.files import FileApi
from dsecd.api.fncall import FnCallApi
from dsecd.api.images import ImageApi
from dsecd.api.jobs import JobApi
from dsecd.api.kernels import KernelApi
from dsecd.api.networks import NetworkApi
from dsecd.api.rollouts import RolloutApi
from dsecd.api.sandboxes import SandboxApi
from dsecd.api.tenants import TenantApi
from dsecd.api.trajectory import TrajectoryApi
from dsecd.api.vmimages import VmImages
from dsecd.api.vms import VmApi
from dsecd.config import Config
from dsecd.fncall.runner import Runner
from dsecd.reload import Reloader
from dsecd.rollout.service import Rollouts
from dsecd.sandbox.jobs import Jobs
from dsecd.sandbox.manager import Manager
from dsecd.wire.call import Handler
from dsecd.wire.watch import TraceCalls, Watch


def handlers(
    config: Config,
    manager: Manager,
    runner: Runner,
    rollouts: Rollouts,
    tenants: TenantApi,
    reloader: Reloader,
    watch: Watch,
) -> tuple[dict[str, Handler], DaemonApi]:
    """The whole API of one daemon."""
    execs = ExecApi(manager)
    daemon = DaemonApi(manager, execs, runner, reloader)
    sandbox = SandboxApi(manager)
    jobs = JobApi(Jobs(manager))
    files = FileApi(manager)
    fncall = FnCallApi(runner)
    rooms = manager.rooms

    def vm_images_used() -> list[str]:
        return [record.spec.image for record in manager.all((), {}, None) if record.backend == "fullvm"]

    vm_images = VmImages(rooms.vms.disks, rooms.vms.agent, config.image_max_mb << 20, vm_images_used)
    images = ImageApi(config, rooms.images, rooms.mounts, rooms.pages, vm_images, lambda: rooms.vms.tidy(rooms.images))
    environments = EnvironmentApi(manager, images)
    kernels = KernelApi(rooms.vms.kernels, config.vm_kernel)
    vms = VmApi(manager)
    devices = DeviceApi(manager)
    trajectory = TrajectoryApi(manager)
    network = NetworkApi(manager)
    rollout = RolloutApi(rollouts)
    traces = TraceCalls(watch)
    table: dict[str, Handler] = {
        "daemon.hello": daemon.hello,
        "daemon.info": daemon.info,
        "daemon.stats": daemon.stats,
        "daemon.cordon": daemon.cordon,
        "daemon.drain": daemon.drain,
        "daemon.reload": daemon.reload,
        "trace.get": traces.get,
        "trace.list": traces.list,
        "daemon.doctor": daemon.doctor,
        "daemon.fix": daemon.fix,
        "session.login": tenants.login,
        "session.whoami": tenants.whoami,
        "project.create": tenants.create,
        "project.list": tenants.list,
        "project.show": tenants.show,
        "project.set": tenants.set,
        "project.remove": tenants.remove,
        "principal.add": tenants.add,
        "principal.list": tenants.principals,
        "principal.remove": tenants.remove_principal,
        "token.create": tenants.create_token,
        "token.revoke": tenants.revoke_token,
        "audit.read": tenants.audit,
        "sandbox.create": sandbox.create,
        "sandbox.create_many": sandbox.create_many,
        "sandbox.choose": sandbox.choose,
        "sandbox.get": sandbox.get,
        "sandbox.list": sandbox.list,
        "sandbox.wait": sandbox.wait,
        "sandbox.stop": sandbox.stop,
        "sandbox.stop_many": sandbox.stop_many,
        "sandbox.pause": sandbox.pause,
        "sandbox.resume": sandbox.resume,
        "sandbox.fork": sandbox.fork,
        "sandbox.pack_diff": environments.pack_diff,
        "sandbox.extend": sandbox.extend,
        "sandbox.set_network": network.set,
        "sandbox.stats": sandbox.stats,
        "sandbox.events": sandbox.events,
        "trajectory.read": trajectory.read,
        "trajectory.verify": trajectory.verify,
        "trajectory.export": trajectory.export,
        "job.list": jobs.list,
        "job.pause": jobs.pause,
        "job.resume": jobs.resume,
        "job.stop": jobs.stop,
        "device.list": devices.list,
        "network.get": network.get,
        "network.log": network.log,
        "network.services": network.services,
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
        "fncall.run": fncall.run,
        "fncall.batch": fncall.batch,
        "rollout.start": rollout.start,
        "rollout.get": rollout.get,
        "rollout.list": rollout.list,
        "rollout.stop": rollout.stop,
        "rollout.steps": rollout.steps,
        "rollout.attach": rollout.attach,
        "rollout.answer": rollout.answer,
        "rollout.results": rollout.results,
        "rollout.ack": rollout.ack,
        "rollout.worker.task": rollout.not_a_worker,
        "rollout.worker.ask": rollout.not_a_worker,
        "rollout.worker.partial": rollout.not_a_worker,
        "rollout.worker.result": rollout.not_a_worker,
        "file.read": files.read,
        "file.write": files.write,
        "file.list": files.list,
        "file.stat": files.stat,
        "file.mkdir": files.mkdir,
        "file.remove": files.remove,
        "file.rename": files.rename,
        "tree.upload": files.upload,
        "tree.download": files.download,
        "vm.snapshots": vms.snapshots,
        "vm.snapshot": vms.snapshot,
        "vm.revert": vms.revert,
        "vm.drop": vms.drop,
        "screen.capture": vms.capture,
        "screen.input": vms.input,
        "vm.console": vms.console,
        "image.import": images.import_,
        "image.bootstrap": images.bootstrap,
        "image.collapse": images.collapse,
        "image.push": images.push,
        "image.pull": images.pull,
        "image.list": images.list,
        "image.get": images.get,
        "image.verify": images.verify,
        "image.remove": images.remove,
        "image.gc": images.gc,
        "environment.export": environments.export,
        "environment.import": environments.import_,
        "environment.rules": environments.rules,
        "kernel.list": kernels.list_,
        "kernel.import_deb": kernels.import_deb,
        "kernel.build": kernels.build,
        "kernel.remove": kernels.remove,
    }
    return table, daemon
