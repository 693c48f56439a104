"""How the command of a run is started on its nodes: the launch kinds, and the plan of one run.

The plan is `[launch]` and `[[groups]]` of job.toml as JSON. The client writes it into
BATCHML_LAUNCH (`aws/batch/requests.py`), and the runtime reads it. Runs of the kind `plain`, whose
command simply runs once on each node, have no plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

VARIABLE = "BATCHML_LAUNCH"
VCPUS = "BATCHML_VCPUS"  # of one node, as the job requested them
GPUS = "BATCHML_GPUS"  # the same for GPUs; unset if the job requested none
NEURONS = "BATCHML_NEURONS"  # the same for Neuron chips
NEURON_DEVICE = "/dev/neuron"  # the chip's number follows
TOKEN = "BATCHML_GANG_TOKEN"  # 32 hex digits: the secret that all nodes of a run share
ENDED_BY_HEAD = "The head of its group run has ended"  # the reason of TerminateJob for workers
AGAIN = "It begins again in place"  # ends the main node's log line about a restart
MEMORY_IS_FULL = "its container's memory is full"  # of a rank that the kernel killed, in its line

PLAIN, TORCHRUN, RAY, MPI = "plain", "torchrun", "ray", "mpi"
HEAD, WORKER = "head", "worker"
ALL, MAIN = "all", "main"

SCRIPT_RUNNER = ("python3", "-m", "batchml.runtime.entry.script")  # starts a script
PACKED = "--packed"  # for SCRIPT_RUNNER; the script's text follows, and the script's name


class LaunchKind(NamedTuple):
    """A way to start the command of a run. To add a kind, add a row to `KINDS`, its module, and its
    name to `launch.kind` in `model/job.py`.
    """

    module: str  # the supervisor's, which runs on each node instead of the command
    is_supervised: bool  # whether the nodes of one job obey the supervisor of the main node
    # Whether failed ranks are restarted within the attempt. After three starts in a row without a
    # new checkpoint the run ends with exit code 76.
    restarts: bool
    settings: FrozenSet[str]  # the keys of [launch] that this kind understands


_NODES = "batchml.runtime.nodes"
KINDS = {
    TORCHRUN: LaunchKind(
        f"{_NODES}.torchrun", is_supervised=True, restarts=True,
        settings=frozenset(("processes_per_node", "logs", "hang_after", "start_within")),
    ),
    MPI: LaunchKind(
        f"{_NODES}.mpi.main", is_supervised=True, restarts=False,
        settings=frozenset(("processes_per_node", "hang_after", "start_within")),
    ),
    RAY: LaunchKind(
        f"{_NODES}.ray.main", is_supervised=False, restarts=False,
        settings=frozenset(("start_within",)),
    ),
}  # fmt: skip


class WorkerGroup(NamedTuple):
    """A group of Ray workers, which is a job of its own: what the head needs to find it."""

    name: str
    size: int  # workers
    least: int  # workers that must have joined before the program starts
    job_name: str  # in AWS Batch
    queue: str


class LaunchPlan(NamedTuple):
    """How the nodes of a run start its command together. Times are seconds."""

    kind: str  # a key of `KINDS`, unless a newer client wrote the plan
    role: str = HEAD  # of a Ray job: HEAD or WORKER
    processes: int = 0  # on each node; 0: one for each GPU, or one on a node without GPUs
    logs: str = ALL  # which output is in the log: ALL, of every rank; MAIN, of rank 0, and errors
    hang_after: float = 0.0  # a rank hangs after this time without output or progress; 0: never
    start_within: float = 1200.0  # the limit until all nodes, or enough workers, have joined
    bandwidth: float = 0.0  # the least bytes a second between nodes; 0: not measured
    groups: Tuple[WorkerGroup, ...] = ()  # in the head's plan: the groups of its workers

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Optional[LaunchPlan]:
        """The plan of this run; None for the kind `plain`.

        Raises ValueError if the variable has no valid plan.
        """
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        try:
            found: Dict[str, Any] = json.loads(text)
            groups = tuple(WorkerGroup(**group) for group in found.pop("groups", ()))
            return cls(**found, groups=groups)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{VARIABLE} is not a launch plan: {error}") from None

    def to_json(self) -> str:
        """The plan as the text that `read` reads, without the fields that have their default."""
        document: Dict[str, Any] = {"kind": self.kind}
        for name, value in self._asdict().items():
            if name not in ("kind", "groups") and value != self._field_defaults[name]:
                document[name] = value
        if self.groups:
            document["groups"] = [group._asdict() for group in self.groups]
        return json.dumps(document, separators=(",", ":"))

    @property
    def is_supervised(self) -> bool:
        return self.kind in KINDS and KINDS[self.kind].is_supervised

    @property
    def restarts(self) -> bool:
        return self.kind in KINDS and KINDS[self.kind].restarts


# --- The command of a rank ------------------------------------------------------------------------
# The command of a run may be a line with `torchrun`. The client checks it before it submits; the
# supervisor of each node replaces `torchrun` and starts the command of each rank itself. Pure.


MPI_LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "mpirun.openmpi",
    "mpirun.mpich",
    "orterun",
)
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run")
# Flags of torchrun (torch/distributed/run.py, 2.13) without a value; all others take one.
_VALUELESS = {"--standalone", "--module", "--no-python", "--run-path", "--use-env",
              "--virtual-local-rank"}  # fmt: skip
_AS_MANY_AS_FIT = ("auto", "gpu", "cpu", "xpu")
# Flags that batchml sets itself. In a user's command they are ignored, with a line in the log.
_SET_BY_BATCHML = {
    "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone",
    "--max-restarts", "--master-addr", "--master-port", "--local-addr", "--monitor-interval",
    "--start-method", "--log-dir", "--redirects", "--tee", "--local-ranks-filter",
    "--event-log-handler", "--logs-specs", "--signals-to-handle", "--role",
}  # fmt: skip

# Flags with which a launcher finds the other nodes itself, without batchml.
_FINDS_NODES = {
    "--rdzv-endpoint", "--master-addr", "-H", "-host", "--host", "-hosts", "-hostfile",
    "--hostfile", "-machinefile", "--machinefile", "--default-hostfile",
}  # fmt: skip

FindProgram = Callable[[str], Optional[str]]  # as shutil.which


class BadCommand(ValueError):
    """A command line that cannot be run; the text says why."""


class RankCommand(NamedTuple):
    """The command that every rank of a run executes."""

    words: Tuple[str, ...]
    processes: int  # on each node, as the torchrun line says; 0 if it does not
    ignored: Tuple[str, ...] = ()  # flags that batchml sets itself


def rank_command(words: Sequence[str], nodes: int, find: FindProgram) -> RankCommand:
    """Read the command of a run, which may be a line with `torchrun`. Raises BadCommand."""
    flags = _after_launcher(words)
    if flags is None:
        return RankCommand(tuple(with_python(words, find)), 0)
    return _of_torchrun(flags, nodes, find)


def choose_kind(words: Sequence[str], nodes: int) -> str:
    """The kind for a command whose job names none: that of the launcher that it calls.

    `PLAIN` for other commands, on one node, and for launchers that find the other nodes by flags of
    their own. Raises BadCommand for a launch line that cannot work on this number of nodes.
    """
    name, own = os.path.basename(words[0]), _after_launcher(words)
    if own is not None:
        flags = {flag: value for _, flag, value in _torchrun_flags(own)[0]}
        if flags.get("--nnodes", "").replace(":", "").isdigit():
            _check_nodes(flags["--nnodes"], nodes)
        kind = TORCHRUN
    elif name in MPI_LAUNCHERS:
        kind, flags = MPI, {word.partition("=")[0]: "" for word in words}
    elif name == "srun" and nodes > 1:
        raise BadCommand(
            "srun works in a Slurm script (batchml submit train.sh): leave it out, with --launch "
            "torchrun or mpi, or give --launch plain if the image has an srun of its own"
        )
    else:
        return PLAIN
    return PLAIN if nodes == 1 or _FINDS_NODES & set(flags) else kind


def _after_launcher(words: Sequence[str]) -> Optional[List[str]]:
    """The words after `torchrun` or `python -m torch.distributed.run`; None for other commands."""
    name = os.path.basename(words[0])
    if name == "torchrun":
        return list(words[1:])
    if not name.startswith("python") or "-m" not in words:
        return None
    at = list(words).index("-m")
    module, options = words[at + 1 : at + 2], words[1:at]
    if module and module[0] in _MODULES and all(word.startswith("-") for word in options):
        return list(words[at + 2 :])
    return None


def _torchrun_flags(words: List[str]) -> Tuple[List[Tuple[str, str, str]], List[str]]:
    """torchrun's own flags, each as it is written, its name and its value; and the words after."""
    flags = []
    while words and words[0].startswith("-") and words[0] != "-":
        if words[0] == "--":
            words = words[1:]
            break
        word, words = words[0], words[1:]
        name, has_value, value = word.partition("=")
        name = {"-m": "--module", "-t": "--tee", "-r": "--redirects"}.get(name, name)
        name = name.replace("_", "-")
        if name not in _VALUELESS and not has_value:
            value, words = "".join(words[:1]), words[1:]
        flags.append((word, name, value))
    return flags, words


def _of_torchrun(words: List[str], nodes: int, find: FindProgram) -> RankCommand:
    processes, ignored, is_module, is_plain = 0, [], False, False
    flags, words = _torchrun_flags(words)
    for word, name, value in flags:
        if name not in _VALUELESS and not value:
            raise BadCommand(f"torchrun's {word} needs a value")
        if name == "--nproc-per-node":
            processes = _count(name, value)
        elif name == "--nnodes":
            _check_nodes(value, nodes)
        elif name == "--module":
            is_module = True
        elif name in ("--no-python", "--run-path"):
            is_plain = True
        elif name in _SET_BY_BATCHML:
            ignored.append(name)
        elif name not in _VALUELESS:
            raise BadCommand(f"torchrun's {word} is not a flag that batchml knows")
    if not words:
        raise BadCommand("torchrun has no script to run: name it after torchrun's flags")
    if is_module:
        command = [_python(find), "-u", "-m", *words]
    else:
        command = words if is_plain else [_python(find), "-u", *words]
    return RankCommand(tuple(command), processes, tuple(ignored))


def _count(name: str, value: str) -> int:
    if value in _AS_MANY_AS_FIT:
        return 0
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    raise BadCommand(f"torchrun's {name} is {value!r}: give a number, or gpu")


def _check_nodes(value: str, nodes: int) -> None:
    least, _, most = value.partition(":")
    if not least.isdigit() or (most and not most.isdigit()):
        raise BadCommand(f"torchrun's --nnodes is {value!r}: give a number")
    if not int(least) <= nodes <= int(most or least):
        raise BadCommand(
            f"torchrun's --nnodes is {value}, and this run has {nodes}: set nodes in job.toml, or "
            f"give --nodes {least}"
        )


def own_command(command: Tuple[str, ...]) -> Tuple[str, ...]:
    """The command of a run without the program of batchml that starts a script: `train.sh 3`."""
    if command[: len(SCRIPT_RUNNER)] != SCRIPT_RUNNER:
        return command
    words = command[len(SCRIPT_RUNNER) :]
    return words[2:] if words[:1] == (PACKED,) else words


def with_python(words: Sequence[str], find: FindProgram) -> List[str]:
    """The command, with `python -u` before a Python script that cannot be executed itself."""
    if words[0].endswith(".py") and find(words[0]) is None:
        return [_python(find), "-u", *words]
    return list(words)


def _python(find: FindProgram) -> str:
    return find("python") or find("python3") or "python"
