"""What a runner is told, worked out from a job. Pure but for a look at the published images."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.local.batch.state import Attempt, Job
from batchml.local.endpoints import kept_endpoints
from batchml.local.environments import is_whole
from batchml.local.executors.record import mark_of
from batchml.local.home import Home
from batchml.local.images import LocalImage, conda_tool, find
from batchml.local.server import auth as access
from batchml.local.server.auth import Keys
from batchml.model.endpoints import endpoint_variables
from batchml.model.environment import LOCAL
from batchml.model.names import is_key
from batchml.runtime.protocol.log_marks import MARK
from batchml.runtime.protocol.variables import DEFAULT_GRACE, RuntimeEnv

# What a job sees of the server's own environment. Keys, agents and tokens are not among them.
_PASSED_ON = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "TERM", "TMPDIR", "TZ", "USER",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip


# What only our runtime can do: fetch and unpack, start ranks, look at the host, go on from another.
_NEEDING = (
    "BATCHML_CODE", "BATCHML_ORDER", "BATCHML_LAUNCH", "BATCHML_HEALTH", "BATCHML_RESUME",
)  # fmt: skip

_SWEEP = "BATCHML_SWEEP"  # the folder through which a sweep's trials and its controller talk

# What a run keeps beside its outputs and checkpoints: what its attempts took, which generations of
# its nodes there were, and which hosts were unfit.
_STORING = ("BATCHML_MAX_SECONDS", "BATCHML_LAUNCH", "BATCHML_HEALTH", "BATCHML_SLURM")


class Host(Struct, frozen=True):
    """Where processes run: the state folder, the runtime's copy, the server's environment, and
    where and with which keys the server answers, if jobs are to reach it. `identity` is the state
    folder's, which marks what runs for it.
    """

    home: Home
    runtime: Path
    environ: Mapping[str, str]
    has_gpus: bool = False
    endpoint: str = ""
    keys: Keys | None = None
    identity: str = ""


SpecOf = Callable[[str, Job, Attempt], dict[str, Any]]  # what a runner of a kind is told


class NoEnvironment(Exception):
    """The image's environment cannot be made here; the text says why."""


def runner_spec(host: Host, job: Job, attempt: Attempt) -> dict[str, Any]:
    """What the runner is told. Never written to disk. Raises NoEnvironment."""
    runs = run_folder(host, job)
    image = find(host.home.images, job.container["image"])
    env = _with_access(host, job, attempt, job_environment(host, job, attempt))
    spec = {
        "task_id": attempt.task_id,
        "cwd": work_folder(host, attempt),
        "command": list(job.container["command"]),
        "init": has_init(job.container),
        "env": env,
        "grace": RuntimeEnv.read(env).grace,
        # A job may name none, as AWS Batch does.
        "folders": list(filter(None, (env["BATCHML_OUTPUT_DIR"], env["BATCHML_CHECKPOINT_DIR"]))),
        # When it is nobody else's and has these folders: it is left to another job if unused.
        "own": runs if job.node is None and _are_in(runs, env) else "",
        "shared": [env["BATCHML_WORKSPACE"]],
        "needs": {"memory": job.needs.memory, "vcpus": job.needs.vcpus},
        "preamble": preamble(job, f"executor=process image={job.container['image']}"),
    }
    if image is not None:
        return spec | _in_environment(host, image, spec)
    # The image itself is not to be had here. What it would not need our runtime for, a run of ours
    # has from it all the same: its code, its metrics, its stop file, the end mark.
    is_wrapped = needs_runtime(env) or "BATCHML_KEY" in env
    return spec | _through_runtime(host, sys.executable, spec) if is_wrapped else spec


def needs_runtime(env: Mapping[str, str]) -> bool:
    """True when our runtime has something to do before the command is run, or starts it."""
    return not env.keys().isdisjoint(_NEEDING)


def has_init(container: Mapping[str, Any]) -> bool:
    """Whether an init process is to be the parent of the program."""
    return bool((container.get("linuxParameters") or {}).get("initProcessEnabled"))


def preamble(job: Job, how: str) -> str:
    """The first line of the log, for our own client: how the attempt runs.

    Nothing for the jobs of any other client, which get their own output and not a line more.
    """
    ours = not _given(job).keys().isdisjoint(("BATCHML_PARAMS", "BATCHML_KEY"))
    return f"{MARK}host {how}" if ours else ""


def _given(job: Job) -> dict[str, str]:
    """The variables that whoever submitted a job gave it."""
    return {entry["name"]: entry["value"] for entry in job.container["environment"]}


def with_moved_paths(home: Home, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job that was submitted before the state folder was moved: a path into it
    that is gone becomes the path of the same file here."""
    found = dict(given)
    folders = (("BATCHML_CODE", home.code), ("BATCHML_ORDER", home.code), (_SWEEP, home.sweeps))
    for name, folder in folders:
        path = given.get(name, "")
        if path.startswith("/") and not os.path.exists(path):
            here = folder / os.path.basename(path)
            found |= {name: str(here)} if here.exists() else {}
    return found


def work_folder(host: Host, attempt: Attempt) -> str:
    """Where a process starts; made by its runner, and removed with what it leaves there."""
    return f"{host.home.attempts}/{attempt.task_id}/work"


def run_folder(host: Host, job: Job) -> str:
    """Where what a run leaves behind lies: that of the whole job for each of its nodes, which
    resume from what any of them has saved.
    """
    return f"{host.home.runs}/{job.id if job.node is None else job.parent}"


def _are_in(runs: str, env: Mapping[str, str]) -> bool:
    """A job may have its own idea of where its outputs and checkpoints go."""
    given = (env["BATCHML_OUTPUT_DIR"], env["BATCHML_CHECKPOINT_DIR"])
    return given == (f"{runs}/output", f"{runs}/checkpoints")


def _through_runtime(host: Host, python: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The command, run by `batchml.runtime`, as the entry point of our images does."""
    modules = [str(host.runtime), *filter(None, [spec["env"].get("PYTHONPATH")])]
    return {
        "command": [python, "-m", "batchml.runtime.run", *spec["command"]],
        "env": {**spec["env"], "PYTHONPATH": os.pathsep.join(modules), "PYTHONUNBUFFERED": "1"},
        "marks": True,
    }


def _in_environment(host: Host, image: LocalImage, spec: dict[str, Any]) -> dict[str, Any]:
    way = _way(image, host.environ)
    target = _target(host.home.envs, way.label)
    script = Path(__file__).parent.parent / "environments.py"
    env = spec["env"]
    search = os.pathsep.join(part for part in (str(target / "bin"), env.get("PATH", "")) if part)
    spec = spec | {"env": {**env, "PATH": search, way.variable: str(target)}}
    return {
        **_through_runtime(host, str(target / "bin" / "python"), spec),
        "prepare": [way.python, "-I", str(script), str(way.file), str(target), way.maker],
        "made": str(target),  # when it is whole, there is nothing to prepare
        "prepare_env": {**_maker_environment(host.environ), "BATCHML_TASK": env["BATCHML_TASK"]},
        "preamble": spec["preamble"] and f"{MARK}host executor=process environment={target.name}",
        "label": target.name,
    }


def _target(envs: Path, label: str) -> Path:
    """Where an environment is, or is to be made. One that is there under the name of another image,
    from a file that says the same, serves as well: they can be gigabytes.
    """
    named = envs / label
    if not is_whole(str(named)):
        same = sorted(envs.glob(f"*-{label.rpartition('-')[2]}"))
        return next((path for path in same if is_whole(str(path))), named)
    return named


class _Way(Struct, frozen=True):
    """How an image's environment is made: from which file, by which program."""

    label: str
    file: Path
    maker: str  # a Python, or a tool of conda
    variable: str = "VIRTUAL_ENV"  # says to programs where it is
    python: str = sys.executable  # that runs the maker


def _way(image: LocalImage, environ: Mapping[str, str]) -> _Way:
    """Raises NoEnvironment."""
    tool = conda_tool(environ.get("PATH", "")) if image.conda else None
    if image.conda and tool:
        return _Way(image.conda_label, image.conda, tool, "CONDA_PREFIX")
    refused = f"CannotPullContainerError: the image {image.name} "
    if not image.requirements.is_file():
        why = _NO_TOOL if image.conda else "is made by a Dockerfile alone. Run it"
        raise NoEnvironment(f"{refused}{why} with Docker: batchml local start --executor docker")
    python = image.python()
    if python is None:
        version = (image.folder / ".python-version").read_text("utf-8").strip()
        more = ", or micromamba" if image.conda else ""
        raise NoEnvironment(
            f"{refused}needs Python {version}, and no python{version} is on the PATH. Install it"
            f"{more}, or run the image with Docker"
        )
    return _Way(image.label, image.requirements, python, python=python)


_NO_TOOL = (
    "needs conda, and no micromamba, mamba or conda is on the server's PATH. Install one "
    "(curl -L micro.mamba.pm/install.sh | bash; batchml local stop), or run it"
)


def _maker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What pip, and conda's tools, are told by the server's environment."""
    wanted = (*_PASSED_ON, "XDG_CACHE_HOME")
    told = ("PIP_", "CONDA_", "MAMBA_", "CONDARC", "MAMBARC")
    return {k: v for k, v in environ.items() if k in wanted or k.startswith(told)}


def _with_access(host: Host, job: Job, attempt: Attempt, env: dict[str, str]) -> dict[str, str]:
    """The variables of a job with those by which it reaches the server. Its own win."""
    if host.keys is None:
        return env
    given = {entry["name"] for entry in job.container["environment"]}
    told = access.variables(
        host.endpoint,
        access.job_keys(host.keys, attempt.task_id),
        given,
        has_role=bool(job.container.get("jobRoleArn")),
        has_others=_has_credentials(env.get("HOME", "")),
    )
    return {**told, **env, **access.past_proxies(env, given)}


def _has_credentials(folder: str) -> bool:
    """True where AWS's tools find credentials of the user's."""
    aws = os.path.join(folder, ".aws")
    return bool(folder) and any(
        os.path.exists(os.path.join(aws, name)) for name in ("credentials", "config")
    )


def job_environment(host: Host, job: Job, attempt: Attempt) -> dict[str, str]:
    """The variables that a job sees: Batch's, ours, and its own, which win over ours."""
    runs, root, given = run_folder(host, job), host.home.root, _given(job)
    given = with_moved_paths(host.home, given)
    ours = {
        "BATCHML_RUN": job.id,
        "BATCHML_ATTEMPT": str(attempt.number),
        "BATCHML_OUTPUT_DIR": f"{runs}/output",
        "BATCHML_CHECKPOINT_DIR": f"{runs}/checkpoints",
        "BATCHML_WORKSPACE": f"{root}/workspace",
        "BATCHML_DATA_DIR": f"{root}/data",
        # Of this attempt, whose working directory goes with it.
        "BATCHML_METRICS": f"{work_folder(host, attempt)}/.batchml-metrics",
        "BATCHML_STOP_FILE": f"{work_folder(host, attempt)}/.batchml-stop",
    }
    if not given.keys().isdisjoint(_STORING):
        ours["BATCHML_STORE"] = f"{runs}/store"
    if job.index is not None:
        ours["BATCHML_ARRAY_SIZE"] = str(job.spec.array_size)
    passed_on = {name: host.environ[name] for name in _PASSED_ON if name in host.environ}
    batch = {**_facts(host, job, attempt), **_of_many(job, attempt)}
    beside = endpoint_variables(kept_endpoints(host.home))
    return {**passed_on, **ours, **beside, **given, **batch, **_gpu_variables(host, attempt)}


def batch_variables(host: Host, job: Job, attempt: Attempt) -> dict[str, str]:
    """The least that a program of this machine gets: what is passed on, and Batch's own."""
    passed_on = {name: host.environ[name] for name in _PASSED_ON if name in host.environ}
    return {**passed_on, **_facts(host, job, attempt)}


def _facts(host: Host, job: Job, attempt: Attempt) -> dict[str, str]:
    return {
        "BATCHML_TASK": mark_of(host.identity, attempt.task_id),  # finds what is left of it
        "AWS_BATCH_JOB_ID": job.id,
        "AWS_BATCH_JOB_ATTEMPT": str(attempt.number),
        "AWS_BATCH_JQ_NAME": job.queue,
        "AWS_BATCH_CE_NAME": attempt.environment,
        "AWS_EXECUTION_ENV": "AWS_ECS_EC2",
    }


def _of_many(job: Job, attempt: Attempt) -> dict[str, str]:
    """What Batch tells the children of arrays and the nodes of multi-node jobs about themselves."""
    if job.index is not None:
        return {
            "AWS_BATCH_JOB_ARRAY_INDEX": str(job.index),
            "AWS_BATCH_JOB_ARRAY_SIZE": str(job.spec.array_size),
        }
    nodes = job.spec.nodes
    if job.node is None or nodes is None:
        return {}
    found = {
        "AWS_BATCH_JOB_NUM_NODES": str(nodes.count),
        "AWS_BATCH_JOB_NODE_INDEX": str(job.node),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(nodes.main),
    }
    if not job.is_main_node:  # the main node does not get it, in AWS either
        found["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = attempt.main_address
    return found


def _gpu_variables(host: Host, attempt: Attempt) -> dict[str, str]:
    """A job sees the GPUs that it asked for, and no others."""
    if not host.has_gpus:
        return {}
    names = ",".join(attempt.gpus)
    return {"NVIDIA_VISIBLE_DEVICES": names or "void", "CUDA_VISIBLE_DEVICES": names}


# --- controller -----------------------------------------------------------------------------------
# What the runner of a sweep's controller is told: this Python, with batchml's own command.
#
# The same for who looks after a run that may move to another queue.
#
# Whatever its job says beside the key is not looked at. So a job that may submit others, from
# inside a container for instance, cannot run a command of its own on this machine by asking for the
# queue of controllers.


COMMAND = ("sweeps", "attend")  # and the key
WATCH = ("attend",)  # and the key of a run that may move to another queue


def controller_spec(host: Host, job: Job, attempt: Attempt) -> dict[str, Any]:
    """As `runner_spec`. Raises NoEnvironment for a command that is neither a controller's nor a
    watcher's."""
    command = tuple(job.container["command"])
    if command[:-1] not in (COMMAND, WATCH) or not is_key(command[-1]):
        raise NoEnvironment(
            f"CannotCreateContainerError: the queue {job.queue} runs controllers of sweeps and "
            f"nothing else but who moves runs, as `batchml sweep FILE --detach` and "
            f"`batchml submit --fallback QUEUE` submit them"
        )
    return {
        "task_id": attempt.task_id,
        "cwd": work_folder(host, attempt),
        "command": [sys.executable, "-m", "batchml", *command],
        "env": _variables(host, job, attempt),
        "grace": float(DEFAULT_GRACE),
        "folders": [],
        "own": "",
        "shared": [],
        "needs": {"memory": job.needs.memory, "vcpus": job.needs.vcpus},
        "preamble": preamble(job, "executor=process environment=batchml"),
    }


def _variables(host: Host, job: Job, attempt: Attempt) -> Mapping[str, str]:
    """The server's state folder, and this installation wherever it was imported from."""
    return {
        **batch_variables(host, job, attempt),
        "BATCHML_HOME": str(host.home.root),
        "BATCHML_ENV": LOCAL,
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "PYTHONSAFEPATH": "1",  # nothing of the working directory is imported
        "PYTHONUNBUFFERED": "1",
    }
