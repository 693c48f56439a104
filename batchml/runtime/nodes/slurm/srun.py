"""The programs of Slurm that a script finds inside a run: `srun`, `scontrol show` and others.

`srun` runs the tasks of a step on this node and on the others (`steps.py`). `module` and `conda` do
nothing, `hostname` knows this node's address in the network of the run, and the programs that need
a cluster refer to batchml's own commands.
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

from batchml.runtime.nodes.link.remote_start import RemoteCommand
from batchml.runtime.nodes.slurm.server import gather
from batchml.runtime.nodes.slurm.steps import (
    FOLDER,
    SrunStep,
    StepNode,
    StepTasks,
    send,
    task_variables,
)
from batchml.runtime.package import package_root
from batchml.runtime.protocol.variables import number_of

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks at all tasks
_GRACE = 30.0  # seconds for the other tasks of a step after one was killed

# Options of srun(1) with a value, in their own word or the next one.
_WITH_VALUE = frozenset("ABCDGJMNScdeimnopqrtwx")
_LONG_BARE = frozenset((
    "label", "unbuffered", "exclusive", "overlap", "kill-on-bad-exit", "quiet", "verbose", "pty",
    "disable-status", "no-kill", "overcommit", "oversubscribe", "preserve-env", "multi-prog",
    "exact", "mpi", "wait", "whole", "immediate", "hold", "contiguous", "no-container-remap-root",
    "container-remap-root", "no-container-mount-home", "container-mount-home",
))  # fmt: skip
_LONG = {"N": "nodes", "n": "ntasks", "w": "nodelist", "l": "label"}


StepPart = Union[StepTasks, RemoteCommand]  # its tasks on one node


def read_step(words: Sequence[str], environ: Mapping[str, str]) -> SrunStep:
    """Read the words after `srun`."""
    command, given = _options(words)
    if "multi-prog" in given:
        return SrunStep(
            [], wrong="--multi-prog is not known here: start the programs with & and wait"
        )
    if not command:
        return SrunStep([], wrong="no command is given")
    nodes, wrong = _nodes(given, environ)
    in_all, per_node = number_of(given.get("ntasks", ""), 0), 0
    if in_all and in_all < len(nodes) and "nodelist" not in given:
        nodes = nodes[:in_all]
    if "ntasks-per-node" in given:
        per_node = number_of(given["ntasks-per-node"], 1)
    elif in_all and nodes:
        per_node, over = divmod(in_all, len(nodes))
        if over:
            wrong = f"{in_all} tasks cannot be shared evenly by {len(nodes)} nodes"
    else:
        per_node = number_of(environ.get("SLURM_NTASKS_PER_NODE", ""), 1)
    gpus = given.get("gpus-per-task", environ.get("SLURM_GPUS_PER_TASK", ""))
    gpu_count = number_of(gpus.rpartition(":")[2], 0)
    return SrunStep(command, nodes, max(1, per_node), gpu_count, "label" in given, wrong)


def _options(words: Sequence[str]) -> Tuple[List[str], Dict[str, str]]:
    """The command, and the options before it by their long names."""
    left, given = list(words), {}  # type: List[str], Dict[str, str]
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
        given[_LONG.get(name, name)] = value
    return left, given


def _nodes(given: Mapping[str, str], environ: Mapping[str, str]) -> Tuple[List[int], str]:
    """The nodes of a step: those named, else the first ones; and what is wrong with them."""
    names = node_names(environ)
    count, here = len(names), _here(environ)
    if here:  # the srun of a task runs its tasks on the same node
        return [here], ""
    if given.get("nodelist"):
        wanted = given["nodelist"].split(",")
        unknown = [name for name in wanted if name not in names]
        if unknown:
            return [0], f"{', '.join(unknown)} is none of this run's nodes, {', '.join(names)}"
        return sorted({names.index(name) for name in wanted}), ""
    wanted_count = number_of(given.get("nodes", "").partition("-")[0], count)
    if wanted_count > count:
        return [0], f"{wanted_count} nodes are wanted, and the run has {count}"
    return list(range(max(1, wanted_count))), ""


def node_names(environ: Mapping[str, str]) -> List[str]:
    """The addresses of the run's nodes. Waits for the nodes if the script did not."""
    known = environ.get("SLURM_JOB_NODELIST", "")
    if known:
        return known.split(",")
    return gather(environ, environ.get(FOLDER, ""))


def _here(environ: Mapping[str, str]) -> int:
    return number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0)


def srun(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a step, and return the greatest exit code of its tasks."""
    step = read_step(words, environ)
    if step.wrong:
        print(f"srun: batchml: {step.wrong}", file=sys.stderr, flush=True)
        return 1
    here = StepNode(_here(environ), environ)
    if step.nodes == [here.node] and step.tasks == 1 and not step.label:
        variables = task_variables(step, here, 0)
        os.execvpe(step.command[0], step.command, {**environ, **variables})
    parts: List[StepPart] = [] if step.nodes == [here.node] else [*send(step, environ)]
    if here.node in step.nodes:
        parts.append(StepTasks(step, here))
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _frame: _pass_on(parts, number))
    return _wait(parts)


def _wait(parts: Sequence[StepPart]) -> int:
    """Wait until all tasks have ended. Once one was killed, the others are ended after a while."""
    until: Optional[float] = None
    pause = _FIRST_PAUSE
    while True:
        codes = [part.poll() for part in parts]
        if None not in codes:
            return max(code for some in codes for code in some or ())
        if until is None and any(part.was_one_killed() for part in parts):
            until = time.monotonic() + _GRACE
        if until is not None and time.monotonic() >= until:
            _pass_on(parts, signal.SIGTERM)
            until = float("inf")
        links = [
            part.socket
            for part, codes_of in zip(parts, codes)  # noqa: B905
            if isinstance(part, RemoteCommand) and codes_of is None
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
_UNLESS_THERE = ("conda", "mamba", "micromamba")  # an image may have them
# The tools do not use the PYTHONPATH and the environment that a script may have.
_TOOL = """#!/bin/sh
exec "{python}" -I -c 'import sys
sys.path.insert(0, "{root}")
from batchml.runtime.nodes.slurm.srun import main
sys.exit(main(sys.argv[1:]))' {name} "$@"
"""
_IN_IMAGE = "nothing is done, an image has its packages"


def scontrol(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """`show hostnames [LIST]`: one name a line; `show job`: what is known inside the run."""
    if list(words[:1]) == ["show"] and words[1:2] in (["hostnames"], ["hostname"]):
        names = words[2].split(",") if words[2:] and words[2] else node_names(environ)
        print("\n".join(names), flush=True)
        return 0
    if list(words[:2]) == ["show", "job"]:
        fields = {"JobId": "JOB_ID", "JobName": "JOB_NAME", "NumNodes": "JOB_NUM_NODES",
                 "NodeList": "JOB_NODELIST", "WorkDir": "SUBMIT_DIR"}  # fmt: skip
        found = [f"{name}={environ.get(f'SLURM_{ours}', '')}" for name, ours in fields.items()]
        print(" ".join(found), flush=True)
        return 0
    return refuse("scontrol")


def conda(name: str, words: Sequence[str]) -> int:
    """`conda` in an image without it: activating an environment does nothing."""
    if words[:1] and words[0] in ("activate", "deactivate", "shell.bash", "shell", "init", "info"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    print(f"{name}: batchml: this image has no {name}", file=sys.stderr)
    return 127


def hostname(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """This node's address for -i and -I; else the program of the image, if it has one."""
    address = environ.get("SLURMD_NODENAME", "")
    if address and list(words) in (["-i"], ["-I"], ["--ip-address"], ["--all-ip-addresses"]):
        print(address, flush=True)
        return 0
    own = os.path.realpath(environ.get("BATCHML_SLURM_FOLDER", ""))
    folders = [each for each in environ.get("PATH", "").split(os.pathsep) if each]
    others = os.pathsep.join(each for each in folders if os.path.realpath(each) != own)
    program = shutil.which("hostname", path=others)
    if program is not None:
        os.execv(program, ["hostname", *words])
    print(os.uname().nodename, flush=True)
    return 0


def refuse(name: str) -> int:
    ours = {"sbatch": "submit", "squeue": "ls", "scancel": "cancel", "sacct": "show"}
    hint = f": use batchml {ours[name]}, outside of the run" if name in ours else ""
    print(f"{name}: batchml: there is no Slurm in a run{hint}", file=sys.stderr, flush=True)
    return 127


def put_tools(folder: str) -> str:
    """Write the programs into a folder, and return it."""
    root = package_root()
    for name in (*_ALWAYS, *(each for each in _UNLESS_THERE if shutil.which(each) is None)):
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(_TOOL.format(python=sys.executable, root=root, name=name))
        os.chmod(path, 0o755)
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
    return conda(name, rest) if name in _UNLESS_THERE else refuse(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
