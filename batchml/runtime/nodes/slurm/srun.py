"""The programs of Slurm that a script finds inside a run: `srun`, `scontrol show` and others.

`srun` runs the tasks of a step on this node and on the others (`steps.py`). `module` and `conda` do
nothing. `hostname -i` prints this node's address in the network of the run. Programs that need a
Slurm cluster, such as `squeue`, name batchml's own command instead.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Dict, List, Optional, Tuple, Union

from batchml.runtime.entry.stopping import STOPS
from batchml.runtime.nodes.link.remote_start import RemoteCommand
from batchml.runtime.nodes.slurm.server import gather
from batchml.runtime.nodes.slurm.steps import (
    FOLDER,
    SrunStep,
    StepNode,
    StepTasks,
    node_number,
    start_remote_tasks,
    task_variables,
)
from batchml.runtime.package import write_program
from batchml.runtime.protocol.variables import number_of

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two checks of all tasks
_GRACE = 30.0  # seconds that the other tasks of a step have after one was killed

# Short options of srun(1) with a value, which is in the same word or the next one
_WITH_VALUE = frozenset("ABCDGJMNScdeimnopqrtwx")
# Long options without a value in the next word
_LONG_BARE = frozenset((
    "label", "unbuffered", "exclusive", "overlap", "kill-on-bad-exit", "quiet", "verbose", "pty",
    "disable-status", "no-kill", "overcommit", "oversubscribe", "preserve-env", "multi-prog",
    "exact", "mpi", "wait", "whole", "immediate", "hold", "contiguous", "no-container-remap-root",
    "container-remap-root", "no-container-mount-home", "container-mount-home",
))  # fmt: skip
_LONG_NAMES = {"N": "nodes", "n": "ntasks", "w": "nodelist", "l": "label"}


StepPart = Union[StepTasks, RemoteCommand]  # the tasks of a step on one node


def read_step(words: Sequence[str], environ: Mapping[str, str]) -> SrunStep:
    """Read the words after `srun`. Mistakes are in `SrunStep.wrong`."""
    command, options = _parse_options(words)
    if "multi-prog" in options:
        return SrunStep(
            [], wrong="--multi-prog is not supported: start the programs with & and wait"
        )
    if not command:
        return SrunStep([], wrong="no command is given")
    nodes, wrong = _choose_nodes(options, environ)
    total = number_of(options.get("ntasks", ""), 0)
    if total and total < len(nodes) and "nodelist" not in options:
        nodes = nodes[:total]
    if "ntasks-per-node" in options:
        per_node = number_of(options["ntasks-per-node"], 1)
    elif total and nodes:
        per_node, rest = divmod(total, len(nodes))
        if rest:
            wrong = f"{total} tasks cannot be shared evenly by {len(nodes)} nodes"
    else:
        per_node = number_of(environ.get("SLURM_NTASKS_PER_NODE", ""), 1)
    gpus = options.get("gpus-per-task", environ.get("SLURM_GPUS_PER_TASK", ""))
    gpu_count = number_of(gpus.rpartition(":")[2], 0)
    return SrunStep(command, nodes, max(1, per_node), gpu_count, "label" in options, wrong)


def _parse_options(words: Sequence[str]) -> Tuple[List[str], Dict[str, str]]:
    """The command, and the options before it by their long names."""
    left = list(words)
    options: Dict[str, str] = {}
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in _LONG_BARE:
                value = left.pop(0) if left else ""
        else:
            name, value = word[1:2], word[2:].lstrip("=")
            if not value and name in _WITH_VALUE:
                value = left.pop(0) if left else ""
        options[_LONG_NAMES.get(name, name)] = value
    return left, options


def _choose_nodes(options: Mapping[str, str], environ: Mapping[str, str]) -> Tuple[List[int], str]:
    """The nodes of a step: the named ones, else the first ones; and what is wrong with them."""
    names = node_names(environ)
    this_node = node_number(environ)
    if this_node:  # an srun inside a task runs its tasks on the same node
        return [this_node], ""
    if options.get("nodelist"):
        requested = options["nodelist"].split(",")
        unknown = [name for name in requested if name not in names]
        if unknown:
            return [0], f"{', '.join(unknown)} is none of this run's nodes, {', '.join(names)}"
        return sorted({names.index(name) for name in requested}), ""
    count = number_of(options.get("nodes", "").partition("-")[0], len(names))
    if count > len(names):
        return [0], f"{count} nodes are requested, and the run has {len(names)}"
    return list(range(max(1, count))), ""


def node_names(environ: Mapping[str, str]) -> List[str]:
    """The addresses of the run's nodes. Waits for the nodes if nobody has done that before."""
    names = environ.get("SLURM_JOB_NODELIST", "")
    return names.split(",") if names else gather(environ, environ.get(FOLDER, ""))


def srun(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a step, and return the greatest exit code of its tasks."""
    step = read_step(words, environ)
    if step.wrong:
        print(f"srun: batchml: {step.wrong}", file=sys.stderr, flush=True)
        return 1
    this_node = StepNode(node_number(environ), environ)
    if step.nodes == [this_node.node] and step.tasks == 1 and not step.label:
        variables = task_variables(step, this_node, 0)
        os.execvpe(step.command[0], step.command, {**environ, **variables})
    parts: List[StepPart] = []
    if step.nodes != [this_node.node]:
        parts += start_remote_tasks(step, environ)
    if this_node.node in step.nodes:
        parts.append(StepTasks(step, this_node))
    for number in STOPS:
        signal.signal(number, lambda received, _frame: _pass_on(parts, received))
    return _wait(parts)


def _wait(parts: Sequence[StepPart]) -> int:
    """Wait until all tasks have ended. Once one was killed, the others are ended after `_GRACE`."""
    end_at: Optional[float] = None  # when to end the other tasks
    pause = _FIRST_PAUSE
    while True:
        codes = [part.poll() for part in parts]
        if None not in codes:
            return max(code for part_codes in codes for code in part_codes or ())
        if end_at is None and any(part.was_one_killed() for part in parts):
            end_at = time.monotonic() + _GRACE
        if end_at is not None and time.monotonic() >= end_at:
            _pass_on(parts, signal.SIGTERM)
            end_at = float("inf")
        links = [
            part.socket
            for part, part_codes in zip(parts, codes)  # noqa: B905
            if isinstance(part, RemoteCommand) and part_codes is None
        ]
        select.select(links, [], [], pause)
        pause = min(_LONGEST_PAUSE, pause * 1.2)


def _pass_on(parts: Sequence[StepPart], number: int) -> None:
    for part in parts:
        part.signal(number)


# --- Slurm's other programs -----------------------------------------------------------------------


_ALWAYS = (
    "srun", "scontrol", "module", "ml", "sbatch", "squeue", "scancel", "sacct", "sinfo", "hostname",
)  # fmt: skip
_UNLESS_INSTALLED = ("conda", "mamba", "micromamba")  # an image may have them
_IN_IMAGE = "nothing is done, because the packages are part of the image"


def scontrol(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """`show hostnames [LIST]`: one name a line; `show job`: the fields that the run's variables
    have.
    """
    if list(words[:1]) == ["show"] and words[1:2] in (["hostnames"], ["hostname"]):
        names = words[2].split(",") if words[2:] and words[2] else node_names(environ)
        print("\n".join(names), flush=True)
        return 0
    if list(words[:2]) == ["show", "job"]:
        fields = {"JobId": "JOB_ID", "JobName": "JOB_NAME", "NumNodes": "JOB_NUM_NODES",
                 "NodeList": "JOB_NODELIST", "WorkDir": "SUBMIT_DIR"}  # fmt: skip
        words = [f"{name}={environ.get(f'SLURM_{end}', '')}" for name, end in fields.items()]
        print(" ".join(words), flush=True)
        return 0
    return refuse("scontrol")


def conda(name: str, words: Sequence[str]) -> int:
    """`conda` in an image without conda: activating an environment does nothing."""
    if words[:1] and words[0] in ("activate", "deactivate", "shell.bash", "shell", "init", "info"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    print(f"{name}: batchml: this image has no {name}", file=sys.stderr)
    return 127


def hostname(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print this node's address for -i and -I; otherwise run the image's own `hostname`, if any."""
    address = environ.get("SLURMD_NODENAME", "")
    if address and list(words) in (["-i"], ["-I"], ["--ip-address"], ["--all-ip-addresses"]):
        print(address, flush=True)
        return 0
    tools = os.path.realpath(environ.get(FOLDER, ""))
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    others = os.pathsep.join(folder for folder in folders if os.path.realpath(folder) != tools)
    program = shutil.which("hostname", path=others)
    if program is not None:
        os.execv(program, ["hostname", *words])
    print(os.uname().nodename, flush=True)
    return 0


def refuse(name: str) -> int:
    """Print that a program of Slurm needs a cluster, and batchml's command for the same."""
    commands = {"sbatch": "submit", "squeue": "ls", "scancel": "cancel", "sacct": "show"}
    hint = f": use batchml {commands[name]}, outside of the run" if name in commands else ""
    print(f"{name}: batchml: there is no Slurm in a run{hint}", file=sys.stderr, flush=True)
    return 127


def put_tools(folder: str) -> str:
    """Write the programs into a folder, and return it."""
    for name in (*_ALWAYS, *(name for name in _UNLESS_INSTALLED if shutil.which(name) is None)):
        path = os.path.join(folder, name)
        write_program(path, "batchml.runtime.nodes.slurm.srun", f'["{name}", *words]')
    return folder


def main(words: Sequence[str]) -> int:
    name, rest = words[0], words[1:]
    if name == "srun":
        try:
            return srun(rest, os.environ)
        except (OSError, ValueError) as error:
            print(f"srun: {error}", file=sys.stderr, flush=True)
            return 127
    if name == "scontrol":
        return scontrol(rest, os.environ)
    if name == "hostname":
        return hostname(rest, os.environ)
    if name in ("module", "ml"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    return conda(name, rest) if name in _UNLESS_INSTALLED else refuse(name)
