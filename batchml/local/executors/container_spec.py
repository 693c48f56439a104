"""The runner's spec of a container attempt, made from its job.

Making it changes nothing: it reads published images, stored endpoints, and whether paths exist. The
spec contains the engine's own JSON (`config`), so that a test can check a job's rights, and the
preparations of the runner: folders to mount, an image to fetch or build.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchml.local import images
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.executors.choice import CONTAINER, Permits
from batchml.local.executors.spec import (
    ExecutorHost,
    RunnerSpecError,
    SpecMaker,
    controller_spec,
    has_init,
    job_environment,
    needs_runtime,
    preamble,
    runner_spec,
)
from batchml.local.home import Home
from batchml.model.image import parse_reference
from batchml.runtime.checkpoint.resume import VARIABLE, ResumeSource, checkpoint_folder, kept_folder
from batchml.runtime.protocol.variables import DATA_CACHE, RuntimeEnv, read_data

MIB = 1024**2
LEAST_MEMORY = 6 * MIB  # the engine's minimum; AWS Batch accepts jobs from 4 MiB on
LEAST_PIDS = 4096
PIDS_PER_VCPU = 1024
MOST_CPU_SHARES = 262_144  # the engine's maximum

# Paths in a container of the files and folders that lie in the state folder on this machine.
CODE = "/batchml/code.tar.gz"
COMMAND_FILE = "/batchml/order.json"
SWEEP = "/batchml/sweep"
RESUMED = "/batchml/resumed"
FOLDERS = {
    "BATCHML_OUTPUT_DIR": "/batchml/output",
    "BATCHML_CHECKPOINT_DIR": "/batchml/checkpoints",
    "BATCHML_STORE": "/batchml/store",
    "BATCHML_DATA_DIR": "/batchml/data",
    DATA_CACHE: "/batchml/cache",
    "BATCHML_WORKSPACE": "/workspace",
}

# Folders of a sweep that its trials write to. Trials only read the rest, such as its ledger.
SWEEP_WRITTEN = ("checkpoints", "claims", "inbox", "rungs")
SWEEP_READ = ("stop", "waves")  # read-only folders, which any user of the container may open

# The engine's default set, without the capabilities for raw sockets, device files and the audit log
# (docs/decisions/011).
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID",
    "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip

# Devices that give no control over the machine itself.
_HARMLESS_DEVICES = re.compile(
    r"/dev/(null|zero|full|random|urandom|tty|fuse|shm|infiniband/\w+|nvidia[\w-]*|neuron\d+"
    r"|dri/\w+|kfd)"
)


def spec_maker(host: ExecutorHost, permits: Permits) -> SpecMaker:
    """The function that makes the runner's spec of an attempt, by its kind."""

    def make(kind: str, job: Job, attempt: JobAttempt) -> dict[str, Any]:
        if attempt.is_controller:
            return controller_spec(host, job, attempt)
        if kind == CONTAINER:
            return container_spec(host, permits, job, attempt)
        return runner_spec(host, job, attempt)

    return make


def container_name(identity: str, task_id: str) -> str:
    """The name of an attempt's container, with the identity of its state folder."""
    return f"batchml-{identity[:8]}-{task_id}"


def container_spec(
    host: ExecutorHost, permits: Permits, job: Job, attempt: JobAttempt
) -> dict[str, Any]:
    """The spec for a container's runner. Raises RunnerSpecError."""
    container = job.container
    env, host_paths = _environment(host, job, attempt)
    sources = [*_volumes(host, permits, container), *_own_folders(host, host_paths, container)]
    # These change variables in `env` to paths in the container.
    sources += [*_code(host, env), *_sweep_folders(host, env), *_resumed(host, env)]
    sources += _data_folders(host, permits, env)
    labels = {"batchml.home": host.identity, "batchml.task": attempt.task_id}
    config = {
        "Image": container["image"],
        "Cmd": list(container["command"]),
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": {**labels, "batchml.job": job.id},
        "HostConfig": {
            **_limits(job),
            **_rights(container, permits),
            **_linux(container.get("linuxParameters") or {}, permits),
            "DeviceRequests": _gpus(attempt),
            "Mounts": _temporary_volumes(container),
            # This driver keeps raw bytes: a new runner reads the output of a lost one again from
            # there.
            "LogConfig": {
                "Type": "local",
                "Config": {"max-size": "1000000g", "max-file": "1", "compress": "false"},
            },
        },
    }
    if container.get("user"):
        config["User"] = container["user"]
    published = images.find(host.home.images, container["image"])
    parsed = parse_reference(container["image"])
    return {
        "task_id": attempt.task_id,
        "name": container_name(host.identity, attempt.task_id),
        "grace": RuntimeEnv.read(env).grace,
        "preamble": preamble(job, f"executor=docker image={container['image']}"),
        "config": config,
        "sources": sources,
        "runtime": str(host.runtime),
        "wrap": needs_runtime(env),
        "build": str(published.folder) if published else "",
        "pull": parsed is None,  # no registry has the images `batchml/NAME`
        "add_processor": parsed is not None and not parsed.processor,
        "engine": host.environ.get("DOCKER_HOST", ""),
        "lock": str(host.home.local / "engine.lock"),
        "network": _network(host, job, attempt),
        "labels": labels,
    }


def _network(host: ExecutorHost, job: Job, attempt: JobAttempt) -> dict[str, Any] | None:
    """The network that the nodes of a job share. Each attempt gets a new one."""
    if job.node is None:
        return None
    name = f"batchml-{host.identity[:8]}-{job.parent}-{attempt.number}"
    return {"name": name, "aliases": [f"node-{job.node}"]}


# --- Variables and folders ------------------------------------------------------------------------


def _environment(
    host: ExecutorHost, job: Job, attempt: JobAttempt
) -> tuple[dict[str, str], dict[str, str]]:
    """The variables as for a process, but with paths inside the container, and without this
    machine's variables.

    The second value has the paths of folders on this machine, by variable.
    """
    env = job_environment(replace(host, environ={}), job, attempt)
    set_by_job = {entry["name"] for entry in job.container["environment"]}
    host_paths = {name: env[name] for name in FOLDERS if name in env and name not in set_by_job}
    env |= {name: FOLDERS[name] for name in host_paths}
    for name in ("BATCHML_METRICS", "BATCHML_STOP_FILE"):
        if name not in set_by_job:
            del env[name]  # the runtime makes them in the container
    env.pop("BATCHML_TASK", None)  # a container is identified by its label
    env.pop("CUDA_VISIBLE_DEVICES", None)  # the engine shows no other GPUs
    env["NVIDIA_VISIBLE_DEVICES"] = ",".join(attempt.gpus) or "void"
    return env, host_paths


def _own_folders(
    host: ExecutorHost, host_paths: Mapping[str, str], container: dict[str, Any]
) -> list[dict[str, Any]]:
    """The run's folders and the shared ones, except where the job mounts something else."""
    taken = {point["containerPath"].rstrip("/") for point in container.get("mountPoints") or ()}
    return [
        _source(
            path,
            FOLDERS[name],
            _mountable_folders(host.home, True),
            make=True,
            ours=True,
            fixed=True,
        )
        for name, path in host_paths.items()
        if FOLDERS[name] not in taken
    ]


def _mountable_folders(home: Home, read_only: bool) -> list[str]:
    """The folders that any job may mount. Those of the runs and of the cache are among them only
    for reading, because no container may rename anything in them.
    """
    folders = [str(home.root / "workspace"), str(home.root / "data")]
    return [*folders, str(home.runs), str(home.cache)] if read_only else folders


def _code(host: ExecutorHost, env: dict[str, str]) -> list[dict[str, Any]]:
    """The code package and the command file of a run. Their variables are changed to paths in the
    container.
    """
    sources = []
    for name, inside in (("BATCHML_CODE", CODE), ("BATCHML_ORDER", COMMAND_FILE)):
        path = env.get(name, "")
        if Path(os.path.normpath(path)).parent == host.home.code:
            env[name] = inside
            sources.append(
                _source(path, inside, [str(host.home.code)], read_only=True, ours=True, fixed=True)
            )
    return sources


def _sweep_folders(host: ExecutorHost, env: dict[str, str]) -> list[dict[str, Any]]:
    """The folders of a trial's sweep. Its variable is changed to the path in the container."""
    path = os.path.normpath(env.get("BATCHML_SWEEP", ""))
    if Path(path).parent != host.home.sweeps:
        return []
    env["BATCHML_SWEEP"] = SWEEP
    sweeps = str(host.home.sweeps)

    def source(name: str, read_only: bool) -> dict[str, Any]:
        return _source(
            f"{path}{name}", f"{SWEEP}{name}", [sweeps], read_only=read_only, make=True,
            ours=True, fixed=True,
        )  # fmt: skip

    read = [source(f"/{name}", True) for name in SWEEP_READ]
    return [source("", True), *read, *(source(f"/{name}", False) for name in SWEEP_WRITTEN)]


def _resumed(host: ExecutorHost, env: dict[str, str]) -> list[dict[str, Any]]:
    """The checkpoints and kept files that the run resumes from, read-only. Their variable is
    changed to the path in the container.
    """
    if VARIABLE not in env:
        return []
    try:
        resumed = ResumeSource.read(env[VARIABLE])
        child = resumed.child(RuntimeEnv.read(env).array_index)
    except (TypeError, ValueError):
        return []  # the runtime reports the mistake
    path = checkpoint_folder(os.path.normpath(resumed.folder), child)
    if Path(path).parent.parent != host.home.runs or not os.path.isdir(path):
        return []
    env[VARIABLE] = resumed._replace(folder=RESUMED).to_json()
    runs = str(host.home.runs)
    folders = [(path, checkpoint_folder(RESUMED, child))]
    kept = kept_folder(os.path.normpath(resumed.folder), child)
    if os.path.isdir(kept):
        folders.append((kept, kept_folder(RESUMED, child)))
    return [
        _source(path, inside, [runs], read_only=True, ours=True, fixed=True)
        for path, inside in folders
    ]


def _data_folders(
    host: ExecutorHost, permits: Permits, env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The folders of this machine that are data sets of the job, read-only at their own paths.

    A path that this machine does not have may be one of the image.
    """
    try:
        addresses = read_data(env).values()
    except ValueError:
        return []  # the runtime reports the mistake
    roots = [*_mountable_folders(host.home, True), *permits.paths]
    paths = dict.fromkeys(os.path.normpath(each) for each in addresses if each.startswith("/"))
    return [_source(each, each, roots, read_only=True) for each in paths if os.path.exists(each)]


def _volumes(
    host: ExecutorHost, permits: Permits, container: dict[str, Any]
) -> list[dict[str, Any]]:
    """The job's volumes that are folders of this machine."""
    sources = []
    for volume, point in _volumes_and_points(container):
        efs = volume.get("efsVolumeConfiguration")
        path = (volume.get("host") or {}).get("sourcePath")
        read_only, target = bool(point.get("readOnly")), point["containerPath"]
        if efs:
            sources.append(_efs(host.home, efs, target, read_only))
        elif path:
            roots = [*_mountable_folders(host.home, read_only), *permits.paths]
            sources.append(_source(path, target, roots, read_only=read_only, make=True))
    return sources


def _temporary_volumes(container: dict[str, Any]) -> list[dict[str, Any]]:
    """The job's volumes without a folder of this machine: volumes of the engine, deleted with the
    attempt.
    """
    return [
        {
            "Type": "volume",
            "Target": point["containerPath"],
            "ReadOnly": bool(point.get("readOnly")),
        }
        for volume, point in _volumes_and_points(container)
        if not volume.get("efsVolumeConfiguration")
        and not (volume.get("host") or {}).get("sourcePath")
    ]


def _volumes_and_points(container: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each mount point of a job with its volume: (volume, mount point). Raises RunnerSpecError."""
    volumes = {volume.get("name"): volume for volume in container.get("volumes") or ()}
    pairs = []
    for point in container.get("mountPoints") or ():
        name = point.get("sourceVolume")
        if name not in volumes:
            raise RunnerSpecError(
                f"CannotCreateContainerError: mountPoints name the volume {name!r}, "
                f"and volumes has none of that name"
            )
        pairs.append((volumes[name], point))
    return pairs


def _efs(home: Home, efs: dict[str, Any], target: str, read_only: bool) -> dict[str, Any]:
    """The folder of this machine that stands for a file system of EFS. No container can rename
    it.
    """
    name = re.sub(r"[^A-Za-z0-9-]", "-", efs["fileSystemId"]) or "-"
    below = os.path.normpath("/" + (efs.get("rootDirectory") or "/")).lstrip("/")
    root = f"{home.volumes}/{name}"
    before = (f"{home.root}/workspace", "efs", name)
    path = f"{root}/{below}".rstrip("/")
    return _source(path, target, [root], read_only=read_only, make=True, ours=True, before=before)


def _source(
    path: str,
    target: str,
    roots: list[str],
    *,
    read_only: bool = False,
    make: bool = False,
    ours: bool = False,
    fixed: bool = False,
    before: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A path of this machine to mount at `target`, in one of `roots`. `make`: make a missing
    folder.

    `ours`: give any user of the container access. `fixed`: no container may write to the roots.
    `before`: the path in an older version, as the workspace and then the names below it.
    """
    return {
        "path": path, "target": target, "roots": roots, "read_only": read_only, "make": make,
        "ours": ours, "fixed": fixed, "before": before,
    }  # fmt: skip


# --- Limits and rights ----------------------------------------------------------------------------


def _limits(job: Job) -> dict[str, Any]:
    linux = job.container.get("linuxParameters") or {}
    memory = max(job.needs.memory * MIB, LEAST_MEMORY)
    swap = linux.get("maxSwap")
    limits: dict[str, Any] = {
        "Memory": memory,
        "MemorySwap": memory + (swap or 0) * MIB,
        "CpuShares": min(1024 * max(job.needs.vcpus, 1), MOST_CPU_SHARES),
        "PidsLimit": max(LEAST_PIDS, PIDS_PER_VCPU * job.needs.vcpus),
        "Ulimits": [
            {"Name": limit["name"], "Soft": limit["softLimit"], "Hard": limit["hardLimit"]}
            for limit in job.container.get("ulimits") or ()
        ],
    }
    # As on AWS, swappiness applies only together with maxSwap.
    if swap and linux.get("swappiness") is not None:
        limits["MemorySwappiness"] = linux["swappiness"]
    return limits


def _rights(container: dict[str, Any], permits: Permits) -> dict[str, Any]:
    common = {
        # As on AWS: without an init process a program that does not handle TERM is killed after the
        # grace period, and a program that is missing in the image cannot be started at all.
        "Init": has_init(container),
        "NetworkMode": "bridge",
        "ReadonlyRootfs": bool(container.get("readonlyRootFilesystem")),
    }
    if not container.get("privileged"):
        return {
            **common,
            "CapDrop": ["ALL"],
            "CapAdd": list(CAPABILITIES),
            "SecurityOpt": ["no-new-privileges"],
        }
    if not permits.privileged:
        raise RunnerSpecError(
            "CannotCreateContainerError: `privileged` gives a job the whole machine. "
            "Start the server with --allow-privileged to let jobs have it"
        )
    return {**common, "Privileged": True}


def _linux(linux: dict[str, Any], permits: Permits) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if linux.get("sharedMemorySize"):
        config["ShmSize"] = linux["sharedMemorySize"] * MIB
    if linux.get("tmpfs"):
        config["Tmpfs"] = {
            entry["containerPath"]: ",".join(
                [f"size={entry['size']}m", *(entry.get("mountOptions") or ())]
            )
            for entry in linux["tmpfs"]
        }
    if linux.get("devices"):
        config["Devices"] = [_device(entry, permits) for entry in linux["devices"]]
    return config


def _device(entry: dict[str, Any], permits: Permits) -> dict[str, str]:
    path = os.path.normpath(entry["hostPath"])
    if not (permits.privileged or _HARMLESS_DEVICES.fullmatch(path)):
        raise RunnerSpecError(
            f"CannotCreateContainerError: the device {path} gives a job control of the machine. "
            f"Start the server with --allow-privileged to let jobs have it"
        )
    letters = {"READ": "r", "WRITE": "w", "MKNOD": "m"}
    permissions = entry.get("permissions") or ["READ", "WRITE", "MKNOD"]
    return {
        "PathOnHost": path,
        "PathInContainer": entry.get("containerPath") or path,
        "CgroupPermissions": "".join(letters[name] for name in permissions),
    }


def _gpus(attempt: JobAttempt) -> list[dict[str, Any]]:
    if not attempt.gpus:
        return []
    ids = list(attempt.gpus)
    return [{"Driver": "nvidia", "DeviceIDs": ids, "Capabilities": [["gpu"]]}]
