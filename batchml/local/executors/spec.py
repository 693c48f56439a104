"""The runner's spec of an attempt that is a process: its command, variables and folders.

Making a spec changes nothing. It reads published images, complete environments, stored endpoints,
and whether paths exist.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batchml.local import images, secrets
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.environments import is_complete, maker_command
from batchml.local.executors.choice import PROCESS, read_endpoints
from batchml.local.executors.network import NodeAddress, NodeNetwork, NodeNetworkError
from batchml.local.executors.record import mark_of
from batchml.local.home import AccessKeys, Home
from batchml.local.images import LocalImage, conda_tool, uv_program
from batchml.local.server import auth
from batchml.model.environment import LOCAL, endpoint_variables
from batchml.model.names import is_key
from batchml.runtime.protocol.launch import GPUS, VCPUS
from batchml.runtime.protocol.log_marks import MARK
from batchml.runtime.protocol.variables import (
    DATA,
    DATA_CACHE,
    DEFAULT_GRACE,
    FILL,
    IDLE_AFTER,
    RuntimeEnv,
)

T = TypeVar("T")

# Variables of the server that jobs receive. Keys, agents and tokens are not among them.
_PASSED_ON = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "TERM", "TMPDIR", "TZ", "USER",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip


# Variables of steps that only batchml's runtime performs: fetch code, start ranks, check the host,
# resume, copy data sets, fill in the paths of folders.
_NEEDING_RUNTIME = (
    "BATCHML_CODE", "BATCHML_ORDER", "BATCHML_LAUNCH", "BATCHML_HEALTH", "BATCHML_RESUME", FILL,
    IDLE_AFTER, DATA,
)  # fmt: skip

_SWEEP = "BATCHML_SWEEP"  # the folder of messages between a sweep's trials and its controller

# Variables of runs that also store the usage of attempts, restarts or idleness of nodes, or unfit
# hosts.
_STORING = (
    "BATCHML_MAX_SECONDS", "BATCHML_LAUNCH", "BATCHML_HEALTH", "BATCHML_SLURM", IDLE_AFTER,
)  # fmt: skip


class ExecutorHost(Struct, frozen=True):
    """What attempts of one server have in common: the state folder, the copy of the runtime, and
    the server's variables.

    `endpoint` and `keys` are the server's, or empty if jobs may not reach it. `identity` is the id
    of the state folder, which marks the processes of its jobs.
    """

    home: Home
    runtime: Path
    environ: Mapping[str, str]
    has_gpus: bool = False
    endpoint: str = ""
    keys: AccessKeys | None = None
    identity: str = ""


# Makes the spec for the runner of a kind, PROCESS or CONTAINER.
SpecMaker = Callable[[str, Job, JobAttempt], dict[str, Any]]


class RunnerSpecError(Exception):
    """This machine cannot run the attempt; the text is the reason, in AWS's words."""


def runner_spec(host: ExecutorHost, job: Job, attempt: JobAttempt) -> dict[str, Any]:
    """The spec for a runner. Never written to disk. Raises RunnerSpecError."""
    folder = run_folder(host, job)
    image = images.find(host.home.images, job.container["image"])
    env = _with_access(host, job, attempt, job_environment(host, job, attempt))
    spec = {
        "task_id": attempt.task_id,
        "cwd": work_folder(host, attempt),
        "command": list(job.container["command"]),
        "init": has_init(job.container),
        "env": env,
        "grace": RuntimeEnv.read(env).grace,
        # A job may set them to empty values.
        "folders": list(filter(None, (env["BATCHML_OUTPUT_DIR"], env["BATCHML_CHECKPOINT_DIR"]))),
        # The run's folder, if only this attempt uses it: when unused, another job gets it.
        "own": folder if job.node is None and _are_in(folder, env) else "",
        "shared": [env["BATCHML_WORKSPACE"], *_own_data(host, env)],
        "needs": {"memory": job.needs.memory, "vcpus": job.needs.vcpus},
        "preamble": preamble(job, f"executor=process image={job.container['image']}"),
    }
    if image is not None:
        return spec | _in_environment(host, image, spec)
    # The image itself is not available here. A run of batchml is still started by the runtime, even
    # if no variable requires it, for its metrics, its stop file and its end mark.
    is_wrapped = needs_runtime(env) or "BATCHML_KEY" in env
    return spec | _through_runtime(host, sys.executable, spec) if is_wrapped else spec


def _own_data(host: ExecutorHost, env: Mapping[str, str]) -> list[str]:
    """The folder of data sets, unless the user has one elsewhere, which is not ours to make."""
    return [path for path in (f"{host.home.root}/data",) if env["BATCHML_DATA_DIR"] == path]


def needs_runtime(env: Mapping[str, str]) -> bool:
    """True when batchml's runtime must prepare or start the command."""
    return not env.keys().isdisjoint(_NEEDING_RUNTIME)


def has_init(container: Mapping[str, Any]) -> bool:
    """Whether an init process must be the parent of the program."""
    return bool((container.get("linuxParameters") or {}).get("initProcessEnabled"))


def preamble(job: Job, how: str) -> str:
    """The first line of the log, for batchml's client: how the attempt runs.

    Empty for jobs of other clients, whose logs contain only their own output.
    """
    is_ours = not _own_variables(job).keys().isdisjoint(("BATCHML_PARAMS", "BATCHML_KEY"))
    return f"{MARK}host {how}" if is_ours else ""


def _own_variables(job: Job) -> dict[str, str]:
    """The variables that the job definition or the submission sets."""
    return {entry["name"]: entry["value"] for entry in job.container["environment"]}


def with_moved_paths(home: Home, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job, also if it was submitted before the state folder was moved: missing
    paths in the old folder become the paths of the same files in the new folder.
    """
    variables = dict(given)
    folders = (("BATCHML_CODE", home.code), ("BATCHML_ORDER", home.code), (_SWEEP, home.sweeps))
    for name, folder in folders:
        path = given.get(name, "")
        if path.startswith("/") and not os.path.exists(path):
            moved = folder / os.path.basename(path)
            variables |= {name: str(moved)} if moved.exists() else {}
    return variables


def work_folder(host: ExecutorHost, attempt: JobAttempt) -> str:
    """The working directory of a process. Its runner makes it, and removes it with its content."""
    return f"{host.home.attempts}/{attempt.task_id}/work"


def run_folder(host: ExecutorHost, job: Job) -> str:
    """The folder of a run's results. All nodes share the folder of the whole job, because each
    resumes from checkpoints that any node may have saved.
    """
    return f"{host.home.runs}/{job.id if job.node is None else job.parent}"


def _are_in(folder: str, env: Mapping[str, str]) -> bool:
    """Whether outputs and checkpoints go to the run's folder; a job may choose others."""
    folders = (env["BATCHML_OUTPUT_DIR"], env["BATCHML_CHECKPOINT_DIR"])
    return folders == (f"{folder}/output", f"{folder}/checkpoints")


def _through_runtime(host: ExecutorHost, python: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The changes to a spec that start its command by `batchml.runtime`, as the entry point of
    batchml's images does.
    """
    modules = [str(host.runtime), *filter(None, [spec["env"].get("PYTHONPATH")])]
    return {
        "command": [python, "-m", "batchml.runtime.run", *spec["command"]],
        "env": {**spec["env"], "PYTHONPATH": os.pathsep.join(modules), "PYTHONUNBUFFERED": "1"},
        "marks": True,  # the command writes log marks itself
    }


def _in_environment(host: ExecutorHost, image: LocalImage, spec: dict[str, Any]) -> dict[str, Any]:
    """The changes to a spec that run its command in the image's environment."""
    plan = _plan_environment(image, host.environ)
    target = _target(host.home.envs, plan.label)
    env = spec["env"]
    search = os.pathsep.join(part for part in (str(target / "bin"), env.get("PATH", "")) if part)
    spec = spec | {"env": {**env, "PATH": search, plan.variable: str(target)}}
    return {
        **_through_runtime(host, str(target / "bin" / "python"), spec),
        "prepare": [
            *maker_command(plan.python),
            str(plan.file),
            str(target),
            plan.maker,
            uv_program(),
        ],
        "made": str(target),  # if it is complete, nothing needs to be prepared
        "prepare_env": {**_maker_environment(host.environ), "BATCHML_TASK": env["BATCHML_TASK"]},
        "preamble": spec["preamble"] and f"{MARK}host executor=process environment={target.name}",
        "label": target.name,
    }


def _target(envs: Path, label: str) -> Path:
    """The path of an environment. A complete environment of another image with the same
    requirements is used as well, because environments can take gigabytes.
    """
    named = envs / label
    if not is_complete(str(named)):
        same = sorted(envs.glob(f"*-{label.rpartition('-')[2]}"))
        return next((path for path in same if is_complete(str(path))), named)
    return named


class _EnvironmentPlan(Struct, frozen=True):
    """How to make an image's environment: from which file, by which program."""

    label: str
    file: Path
    maker: str  # a Python, or a conda program
    variable: str = "VIRTUAL_ENV"  # the variable that contains its path
    python: str = sys.executable  # the Python that runs the maker


def _plan_environment(image: LocalImage, environ: Mapping[str, str]) -> _EnvironmentPlan:
    """How to make an image's environment. Raises RunnerSpecError if that is impossible here."""
    tool = conda_tool(environ.get("PATH", "")) if image.conda else None
    if image.conda and tool:
        return _EnvironmentPlan(image.conda_label, image.conda, tool, "CONDA_PREFIX")
    refused = f"CannotPullContainerError: the image {image.name} "
    if not image.requirements.is_file():
        why = _NO_TOOL if image.conda else "is made by a Dockerfile alone. Run it"
        raise RunnerSpecError(f"{refused}{why} with Docker: batchml local start --executor docker")
    python = image.python()
    if python is None:
        version = (image.folder / ".python-version").read_text("utf-8").strip()
        more = ", or micromamba" if image.conda else ""
        raise RunnerSpecError(
            f"{refused}needs Python {version}, and no python{version} is on the PATH. Install it"
            f"{more}, or run the image with Docker"
        )
    return _EnvironmentPlan(image.label, image.requirements, python, python=python)


_NO_TOOL = (
    "needs conda, and no micromamba, mamba or conda is on the server's PATH. Install one "
    "(curl -L micro.mamba.pm/install.sh | bash; batchml local stop), or run it"
)


def _maker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the server that uv, pip and conda programs receive."""
    names = (*_PASSED_ON, "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")
    prefixes = ("UV_", "PIP_", "CONDA_", "MAMBA_", "CONDARC", "MAMBARC")
    return {k: v for k, v in environ.items() if k in names or k.startswith(prefixes)}


def _with_access(
    host: ExecutorHost, job: Job, attempt: JobAttempt, env: dict[str, str]
) -> dict[str, str]:
    """The variables of a job, and those with which it reaches the server. The job's own win."""
    if host.keys is None:
        return env
    set_by_job = {entry["name"] for entry in job.container["environment"]}
    access = auth.access_variables(
        host.endpoint,
        auth.job_keys(host.keys, attempt.task_id),
        set_by_job,
        has_role=bool(job.container.get("jobRoleArn")),
        has_user_credentials=_has_credentials(env.get("HOME", "")),
    )
    return {**access, **env, **auth.proxy_exceptions(env, set_by_job)}


def _has_credentials(folder: str) -> bool:
    """True where AWS's tools find credentials of the user."""
    aws = os.path.join(folder, ".aws")
    return bool(folder) and any(
        os.path.exists(os.path.join(aws, name)) for name in ("credentials", "config")
    )


def job_environment(host: ExecutorHost, job: Job, attempt: JobAttempt) -> dict[str, str]:
    """The variables of a job: Batch's, batchml's, and its own, which win over batchml's."""
    folder, root = run_folder(host, job), host.home.root
    own = with_moved_paths(host.home, _own_variables(job))
    ours = {
        "BATCHML_RUN": job.id,
        "BATCHML_ATTEMPT": str(attempt.number),
        VCPUS: str(job.needs.vcpus),
        "BATCHML_OUTPUT_DIR": f"{folder}/output",
        "BATCHML_CHECKPOINT_DIR": f"{folder}/checkpoints",
        "BATCHML_WORKSPACE": f"{root}/workspace",
        "BATCHML_DATA_DIR": f"{root}/data",
        # In this attempt's working directory, which is removed with it.
        "BATCHML_METRICS": f"{work_folder(host, attempt)}/.batchml-metrics",
        "BATCHML_STOP_FILE": f"{work_folder(host, attempt)}/.batchml-stop",
    }
    if job.needs.gpus:
        ours[GPUS] = str(job.needs.gpus)
    if job.needs.gpus or not own.keys().isdisjoint(_STORING):
        ours["BATCHML_STORE"] = f"{folder}/store"
    if DATA in own:
        ours[DATA_CACHE] = str(host.home.cache)
    if job.index is not None:
        ours["BATCHML_ARRAY_SIZE"] = str(job.spec.array_size)
    endpoints = endpoint_variables(read_endpoints(host.home))
    return {
        **_passed_on(host), **ours, **endpoints, **own,
        **_batch_variables(host, job, attempt), **_array_or_node_variables(job, attempt),
        **_gpu_variables(host, attempt),
    }  # fmt: skip


def _passed_on(host: ExecutorHost) -> dict[str, str]:
    return {name: host.environ[name] for name in _PASSED_ON if name in host.environ}


def _batch_variables(host: ExecutorHost, job: Job, attempt: JobAttempt) -> dict[str, str]:
    """Batch's variables for every attempt, and the mark of its processes."""
    return {
        "BATCHML_TASK": mark_of(host.identity, attempt.task_id),
        "AWS_BATCH_JOB_ID": job.id,
        "AWS_BATCH_JOB_ATTEMPT": str(attempt.number),
        "AWS_BATCH_JQ_NAME": job.queue,
        "AWS_BATCH_CE_NAME": attempt.environment,
        "AWS_EXECUTION_ENV": "AWS_ECS_EC2",
    }


def _array_or_node_variables(job: Job, attempt: JobAttempt) -> dict[str, str]:
    """Batch's variables for the children of arrays and the nodes of multi-node jobs."""
    if job.index is not None:
        return {
            "AWS_BATCH_JOB_ARRAY_INDEX": str(job.index),
            "AWS_BATCH_JOB_ARRAY_SIZE": str(job.spec.array_size),
        }
    nodes = job.spec.nodes
    if job.node is None or nodes is None:
        return {}
    variables = {
        "AWS_BATCH_JOB_NUM_NODES": str(nodes.count),
        "AWS_BATCH_JOB_NODE_INDEX": str(job.node),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(nodes.main),
    }
    if not job.is_main_node:  # the main node does not get it, as in AWS
        variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = attempt.main_address
    return variables


def _gpu_variables(host: ExecutorHost, attempt: JobAttempt) -> dict[str, str]:
    """Make only the job's GPUs visible to it."""
    if not host.has_gpus:
        return {}
    names = ",".join(attempt.gpus)
    return {"NVIDIA_VISIBLE_DEVICES": names or "void", "CUDA_VISIBLE_DEVICES": names}


# --- Controllers ----------------------------------------------------------------------------------
# A controller of a sweep or of a fallback runs with this Python and batchml's own command. Only the
# key comes from its job. So a job that can submit others, for instance from a container, cannot run
# its own command on this machine by submitting to the queue of controllers.

CONTROLLER_COMMAND = ("sweeps", "attend")  # of a sweep; its key follows
WATCHER_COMMAND = ("attend",)  # of a fallback; its run's key follows


def controller_spec(host: ExecutorHost, job: Job, attempt: JobAttempt) -> dict[str, Any]:
    """The spec of a controller. Raises RunnerSpecError for any other command."""
    command = tuple(job.container["command"])
    if command[:-1] not in (CONTROLLER_COMMAND, WATCHER_COMMAND) or not is_key(command[-1]):
        raise RunnerSpecError(
            f"CannotCreateContainerError: the queue {job.queue} runs only controllers of sweeps "
            f"and of fallbacks, as `batchml sweep FILE --detach` and `batchml submit --fallback "
            f"QUEUE` submit them"
        )
    return {
        "task_id": attempt.task_id,
        "cwd": work_folder(host, attempt),
        "command": [sys.executable, "-m", "batchml", *command],
        "env": _controller_variables(host, job, attempt),
        "grace": float(DEFAULT_GRACE),
        "folders": [],
        "own": "",
        "shared": [],
        "needs": {"memory": job.needs.memory, "vcpus": job.needs.vcpus},
        "preamble": preamble(job, "executor=process environment=batchml"),
    }


def _controller_variables(host: ExecutorHost, job: Job, attempt: JobAttempt) -> dict[str, str]:
    """The variables of a controller: Batch's, the server's state folder, and the folder of this
    installation.
    """
    return {
        **_passed_on(host),
        **_batch_variables(host, job, attempt),
        "BATCHML_HOME": str(host.home.root),
        "BATCHML_ENV": LOCAL,
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "PYTHONSAFEPATH": "1",  # nothing is imported from the working directory
        "PYTHONUNBUFFERED": "1",
    }


# --- Specs that take time to make -----------------------------------------------------------------
# Secrets are fetched from AWS and become variables of the job, only for its runner. Nodes that run
# as processes get a network address. Meanwhile the event loop continues.

_SECRETS = "ResourceInitializationError: unable to pull secrets or registry auth: "
_NETWORK = "ResourceInitializationError: unable to set up the network of this node: "


class SpecPrefetch:
    """Makes the specs of attempts for which that takes time. A call returns a coroutine that makes
    the spec, or None if making it takes no time.
    """

    def __init__(self, root: Path, make_spec: SpecMaker, network: NodeNetwork) -> None:
        self._root = root
        self._make_spec = make_spec
        self._network = network

    def __call__(
        self, kind: str, job: Job, attempt: JobAttempt
    ) -> Coroutine[Any, Any, dict[str, Any]] | None:
        if job.container.get("secrets") or job.node is not None:
            return self._make(kind, job, attempt)
        return None

    async def _make(self, kind: str, job: Job, attempt: JobAttempt) -> dict[str, Any]:
        """Make the spec of an attempt. Raises RunnerSpecError."""
        entries = job.container.get("secrets")
        if entries:
            try:
                values = await _run_in_thread(
                    lambda: secrets.resolve(entries, self._root), secrets.LIMIT, "secrets"
                )
            except TimeoutError:
                names = ", ".join(entry["name"] for entry in entries)
                text = f"{_SECRETS}{names}: no answer within {secrets.LIMIT:.0f} s"
                raise RunnerSpecError(text) from None
            except secrets.SecretError as error:
                raise RunnerSpecError(f"{_SECRETS}{error}") from None
            job = _with_variables(job, values)
        spec = self._make_spec(kind, job, attempt)
        if job.node is None or kind != PROCESS:
            return spec
        try:
            return with_address(spec, await self._network.assign(attempt.task_id))
        except NodeNetworkError as error:
            raise RunnerSpecError(f"{_NETWORK}{error}") from None


def _with_variables(job: Job, values: Mapping[str, str]) -> Job:
    """The job with more variables, only for its runner: it is never stored."""
    environment = [entry for entry in job.container["environment"] if entry["name"] not in values]
    environment += [{"name": name, "value": value} for name, value in values.items()]
    container = {**job.container, "environment": environment}
    return replace(job, spec=replace(job.spec, container=container))


def with_address(spec: dict[str, Any], node: NodeAddress) -> dict[str, Any]:
    """The spec of a node that has got its network address."""
    kind = "namespace" if node.namespace else "loopback"
    return {
        **spec,
        "command": node.command(spec["command"]) if spec["command"] else [],
        "env": node.variables(spec["env"]),
        "address": node.address,
        "preamble": spec["preamble"]
        and f"{spec['preamble']} network={kind} address={node.address}",
    }


async def _run_in_thread(work: Callable[[], T], limit: float, name: str) -> T:
    """Run a function in a new thread, and wait for at most `limit` seconds.

    In a pool of threads a function that hangs would delay others, and the server's end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(outcome: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            outcome(value)

    def run() -> None:
        try:
            outcome, value = done.set_result, work()
        except BaseException as error:
            outcome, value = done.set_exception, error  # type: ignore[assignment]
        try:
            loop.call_soon_threadsafe(finish, outcome, value)
        except RuntimeError:
            pass  # the server has ended meanwhile

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wait_for(done, limit)
