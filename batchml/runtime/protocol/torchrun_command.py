"""The command of a rank, read from the command of a run, which may be a line with `torchrun`. Pure.

The client checks the line before it submits; the supervisor of each node runs the command.
"""

from __future__ import annotations

import os
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run")
# Flags of torchrun (torch/distributed/run.py, 2.13) without a value; all others take one.
_VALUELESS = {"--standalone", "--module", "--no-python", "--run-path", "--use-env",
              "--virtual-local-rank"}  # fmt: skip
_AS_MANY_AS_FIT = ("auto", "gpu", "cpu", "xpu")
# Flags that batchml sets itself; a user's are ignored, with a line in the log.
_SET_BY_BATCHML = {
    "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone",
    "--max-restarts", "--master-addr", "--master-port", "--local-addr", "--monitor-interval",
    "--start-method", "--log-dir", "--redirects", "--tee", "--local-ranks-filter",
    "--event-log-handler", "--logs-specs", "--signals-to-handle", "--role",
}  # fmt: skip

FindProgram = Callable[[str], Optional[str]]  # as shutil.which


class BadCommand(ValueError):
    """A command line that cannot be run; the text says why."""


class RankCommand(NamedTuple):
    """The command of each rank."""

    words: Tuple[str, ...]
    processes: int  # on each node, by the torchrun line; 0: not given
    ignored: Tuple[str, ...] = ()  # flags that batchml sets itself


def rank_command(words: Sequence[str], nodes: int, find: FindProgram) -> RankCommand:
    """Read the command of a run, which may be a line with `torchrun`. Raises BadCommand."""
    flags = _after_launcher(words)
    if flags is None:
        return RankCommand(tuple(with_python(words, find)), 0)
    return _of_torchrun(flags, nodes, find)


def _after_launcher(words: Sequence[str]) -> Optional[List[str]]:
    """The words after `torchrun` or `python -m torch.distributed.run`; None for other commands."""
    name = os.path.basename(words[0])
    if name == "torchrun":
        return list(words[1:])
    if not name.startswith("python") or "-m" not in words:
        return None
    place = list(words).index("-m")
    options = words[1:place]
    is_launcher = words[place + 1 : place + 2] and words[place + 1] in _LAUNCHERS
    if is_launcher and all(each.startswith("-") for each in options):
        return list(words[place + 2 :])
    return None


def _of_torchrun(words: List[str], nodes: int, find: FindProgram) -> RankCommand:
    processes, ignored, is_module, is_plain = 0, [], False, False
    while words and words[0].startswith("-") and words[0] != "-":
        if words[0] == "--":
            words = words[1:]
            break
        word, words = words[0], words[1:]
        name, has_value, value = word.partition("=")
        name = {"-m": "--module", "-t": "--tee", "-r": "--redirects"}.get(name, name)
        name = name.replace("_", "-")
        if name not in _VALUELESS and not has_value:
            if not words:
                raise BadCommand(f"torchrun's {word} needs a value")
            value, words = words[0], words[1:]
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
            raise BadCommand(f"torchrun's {word} is not known here")
    if not words:
        raise BadCommand("torchrun was given no script")
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
            f"torchrun's --nnodes is {value}, and this run has {nodes}: set nodes in job.toml"
        )


def with_python(words: Sequence[str], find: FindProgram) -> List[str]:
    """The command, with `python -u` before a script that is no program of its own."""
    if words[0].endswith(".py") and find(words[0]) is None:
        return [_python(find), "-u", *words]
    return list(words)


def _python(find: FindProgram) -> str:
    return find("python") or find("python3") or "python"
