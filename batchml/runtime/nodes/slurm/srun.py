"""`srun` inside a run: the tasks of a step, on this node and on the others (`steps.py`)."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Dict, List, Optional, Tuple, Union

from batchml.runtime.nodes.slurm.steps import Place, Step, Tasks, number_of, task_variables
from batchml.runtime.package import package_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.nodes.slurm.steps import Far

_SOON, _LATER = 0.02, 0.5  # seconds between two looks at all tasks, ever longer
_GRACE = 30.0  # seconds for the other tasks of a step, once one was killed

# Of srun(1): options that have a value, in their own word or the next.
_WITH_VALUE = frozenset("ABCDGJMNScdeimnopqrtwx")
_LONG_BARE = frozenset((
    "label", "unbuffered", "exclusive", "overlap", "kill-on-bad-exit", "quiet", "verbose", "pty",
    "disable-status", "no-kill", "overcommit", "oversubscribe", "preserve-env", "multi-prog",
    "exact", "mpi", "wait", "whole", "immediate", "hold", "contiguous", "no-container-remap-root",
    "container-remap-root", "no-container-mount-home", "container-mount-home",
))  # fmt: skip
_LONG = {"N": "nodes", "n": "ntasks", "w": "nodelist", "l": "label"}


def read_step(words: Sequence[str], environ: Mapping[str, str]) -> Step:
    """Read the words behind `srun`."""
    command, given = _options(words)
    if "multi-prog" in given:
        return Step([], wrong="--multi-prog is not known here: start the programs with & and wait")
    if not command:
        return Step([], wrong="no command is given")
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
    return Step(command, nodes, max(1, per_node), gpu_count, "label" in given, wrong)


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
    """The nodes of a step, and what is wrong with them: those named, else the first of all."""
    names = node_names(environ)
    count, here = len(names), _here(environ)
    if here:  # a task's own srun: what it starts is beside it
        return [here], ""
    if given.get("nodelist"):
        wanted = given["nodelist"].split(",")
        unknown = [name for name in wanted if name not in names]
        if unknown:
            return [0], f"{', '.join(unknown)} is none of this run's nodes, {', '.join(names)}"
        return sorted({names.index(name) for name in wanted}), ""
    asked = number_of(given.get("nodes", "").partition("-")[0], count)
    if asked > count:
        return [0], f"{asked} nodes are wanted, and the run has {count}"
    return list(range(max(1, asked))), ""


def node_names(environ: Mapping[str, str]) -> List[str]:
    """Of the run's nodes, their addresses; waited for where nobody did yet."""
    known = environ.get("SLURM_JOB_NODELIST", "")
    if known:
        return known.split(",")
    from batchml.runtime.nodes.slurm.steps import gather

    return gather(environ)


def _here(environ: Mapping[str, str]) -> int:
    return number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0)


def srun(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a step, and return its code: the greatest of its tasks'."""
    step = read_step(words, environ)
    if step.wrong:
        print(f"srun: batchml: {step.wrong}", file=sys.stderr, flush=True)
        return 1
    here = Place(_here(environ), environ)
    if step.nodes == [here.node] and step.tasks == 1 and not step.label:
        variables = task_variables(step, here, 0)
        os.execvpe(step.command[0], step.command, {**environ, **variables})
    far: "List[Far]" = []
    if step.nodes != [here.node]:
        from batchml.runtime.nodes.slurm.steps import send

        far = send(step, environ)
    parts: "List[Union[Tasks, Far]]" = [*far]
    if here.node in step.nodes:
        parts.append(Tasks(step, here))
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _frame: _pass_on(parts, number))
    code = _wait(parts)
    for part in far[:1]:
        part.forget()
    return code


def _wait(parts: "Sequence[Union[Tasks, Far]]") -> int:
    """Until all have ended; those that go on long after one was killed are ended, too."""
    until: Optional[float] = None
    pause = _SOON
    while True:
        codes = [part.poll() for part in parts]
        if None not in codes:
            return max(code for some in codes for code in some or ())
        if until is None and any(part.was_one_killed() for part in parts):
            until = time.monotonic() + _GRACE
        if until is not None and time.monotonic() >= until:
            _pass_on(parts, signal.SIGTERM)
            until = float("inf")
        time.sleep(pause)
        pause = min(_LATER, pause * 1.2)


def _pass_on(parts: "Sequence[Union[Tasks, Far]]", number: int) -> None:
    for part in parts:
        part.pass_on(number)


# --- Slurm's other programs -----------------------------------------------------------------------
# Programs of a cluster that scripts call inside a run: `srun`, `scontrol show`, `module`, `conda`,
# and `hostname`, which knows this node's address in the network of the run.
#
# What else there is of Slurm belongs outside.


_ALWAYS = (
    "srun", "scontrol", "module", "ml", "sbatch", "squeue", "scancel", "sacct", "sinfo", "hostname",
)  # fmt: skip
_UNLESS_THERE = ("conda", "mamba", "micromamba")  # an image may have them
# A script may have a PYTHONPATH and an environment of its own; its tools do without.
_TOOL = """#!/bin/sh
exec "{python}" -I -c 'import sys
sys.path.insert(0, "{root}")
from batchml.runtime.nodes.slurm.srun import main
sys.exit(main(sys.argv[1:]))' {name} "$@"
"""
_IN_IMAGE = "nothing is done, an image has its packages"


def scontrol(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """`show hostnames [LIST]`: one a line; `show job`: the little that is known inside."""
    if list(words[:1]) == ["show"] and words[1:2] in (["hostnames"], ["hostname"]):
        names = words[2].split(",") if words[2:] and words[2] else node_names(environ)
        print("\n".join(names), flush=True)
        return 0
    if list(words[:2]) == ["show", "job"]:
        shown = {"JobId": "JOB_ID", "JobName": "JOB_NAME", "NumNodes": "JOB_NUM_NODES",
                 "NodeList": "JOB_NODELIST", "WorkDir": "SUBMIT_DIR"}  # fmt: skip
        found = [f"{name}={environ.get(f'SLURM_{ours}', '')}" for name, ours in shown.items()]
        print(" ".join(found), flush=True)
        return 0
    return elsewhere("scontrol")


def conda(name: str, words: Sequence[str]) -> int:
    """Where an image has none: what would make an environment active does nothing."""
    if words[:1] and words[0] in ("activate", "deactivate", "shell.bash", "shell", "init", "info"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    print(f"{name}: batchml: this image has no {name}", file=sys.stderr)
    return 127


def hostname(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """This node's address for -i and -I; all else by the program of the image, if it has one."""
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


def elsewhere(name: str) -> int:
    ours = {"sbatch": "submit", "squeue": "ls", "scancel": "cancel", "sacct": "show"}
    hint = f": batchml {ours[name]}, outside of the run, does such things" if name in ours else ""
    print(f"{name}: batchml: there is no Slurm in a run{hint}", file=sys.stderr, flush=True)
    return 127


def put_tools(folder: str) -> str:
    """Programs of these names in a folder, which is returned."""
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
        except OSError as error:
            print(f"srun: {error}", file=sys.stderr, flush=True)
            return 127
    if name == "scontrol":
        return scontrol(rest, os.environ)
    if name == "hostname":
        return hostname(rest, os.environ)
    if name in ("module", "ml"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    return conda(name, rest) if name in _UNLESS_THERE else elsewhere(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
