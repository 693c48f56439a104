"""`srun` inside a run: the tasks of a step, on this node and on the others (`slurm_steps.py`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Dict, List, Optional, Tuple, Union

from batchml.runtime.slurm_tasks import Place, Step, Tasks, number_of, task_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.slurm_steps import Far

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
    from batchml.runtime.slurm_steps import gather

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
        from batchml.runtime.slurm_steps import send

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
