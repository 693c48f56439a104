"""What a supervisor finds around it: its place among the nodes, its times, what it is asked for."""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.nodes.torchrun.child import ASKED, OWN_PYTHONPATH, UNFIT, VERDICT
from batchml.runtime.nodes.torchrun.coordinator import Identity
from batchml.runtime.protocol.exit_codes import STOPPED
from batchml.runtime.protocol.launch import TOKEN
from batchml.runtime.protocol.variables import RuntimeEnv

_LIMITS = "BATCHML_GANG_LIMITS"  # JSON: seconds of `Times`, for tests and slow networks

_UNTOLD = 5.0
_ONE_TRY = 0.5


class Times(NamedTuple):
    """Seconds; what they mean is said where they are used."""

    beat: float = 2.0
    silent: float = 15.0
    regroup: float = 60.0
    gone: float = 10.0
    end_grace: float = 3.0
    bring: float = 600.0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Times:
        try:
            found = json.loads(environ.get(_LIMITS) or "{}")
            return cls(**{name: float(value) for name, value in found.items()})
        except (ValueError, TypeError, AttributeError):
            return cls()


class Where(NamedTuple):
    """A node among the nodes, as AWS Batch tells it."""

    node: int  # 0: the main node
    nodes: int
    main: str  # its address; empty on the main node
    identity: Identity

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Where:
        """Ranks go by index, but the main node comes first whatever its index is."""
        number = int(environ.get("AWS_BATCH_JOB_NODE_INDEX", "0"))
        main = int(environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        index = 0 if number == main else number + 1 if number < main else number
        env = RuntimeEnv.read(environ)
        job = env.run.partition("#")[0]
        return cls(
            index,
            int(environ.get("AWS_BATCH_JOB_NUM_NODES", "1")),
            environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", ""),
            Identity(job, env.attempt, environ.get(TOKEN, ""), env.key or job),
        )


def versions() -> Dict[str, str]:
    """Of what nodes have to have alike."""
    found = {"python": platform.python_version()}
    try:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found["torch"] = version("torch")
        except PackageNotFoundError:
            pass
    except ImportError:  # pragma: no cover
        pass
    return found


def quickly(environ: Mapping[str, str]) -> Dict[str, str]:
    """As `environ`, but the host is looked at quickly: all other nodes wait meanwhile."""
    found = dict(environ)
    try:
        told = json.loads(environ.get("BATCHML_HEALTH") or "{}")
        if told.get("checks") == "deep":
            found["BATCHML_HEALTH"] = json.dumps({**told, "checks": "quick"})
    except (ValueError, AttributeError):
        pass
    return found


class Stop(NamedTuple):
    code: int
    why: str
    grace: float  # seconds that the ranks have


def ranks_grace(seconds: float) -> float:
    """Of the ranks: less than that after which the container is killed."""
    return max(seconds * 0.9 - 1.0, seconds / 2)


def until_untold(is_busy: bool, grace: float) -> float:
    """Seconds that a stop waits for a main node that is away, to be told there: where nothing runs
    nothing can be saved either, so for one try.
    """
    return min(_UNTOLD if is_busy else _ONE_TRY, grace)


def asked_for(environ: Mapping[str, str], number: int, grace: float) -> Stop:
    """What a stop signal means: what the entry wrote down before it, or a plain stop.

    `grace`: seconds that the run has, unless the host has less.
    """
    try:
        with open(environ.get(VERDICT, "") + ASKED, encoding="utf-8") as file:
            found = json.load(file)
        within = min(grace, float(found["grace"]))
        return Stop(int(found["code"]), str(found["why"]), ranks_grace(within))
    except (OSError, ValueError, TypeError, KeyError):
        return Stop(STOPPED, f"stopped ({signal.Signals(number).name})", ranks_grace(grace))


def write_verdict(environ: Mapping[str, str], code: int, why: str, is_untold: bool) -> None:
    """Say that the exit code to come was chosen by the runtime; `is_untold`: the main node has not
    heard of it.
    """
    path = environ.get(VERDICT)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "untold": is_untold}, file)


def rank_base(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of the ranks, without what is between us and the entry."""
    found = {k: v for k, v in environ.items() if k not in (VERDICT, TOKEN, UNFIT)}
    own = found.pop(OWN_PYTHONPATH, None)
    if own is not None:
        found.pop("PYTHONPATH", None)
        if own:
            found["PYTHONPATH"] = own
    return found


# --- the command of a rank ------------------------------------------------------------------------
# The command of a rank, from what a user wrote, be it a line with `torchrun`. Pure.


_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run")
# Flags of torchrun (torch/distributed/run.py, 2.13) that stand alone; all others take a value.
_VALUELESS = {"--standalone", "--module", "--no-python", "--run-path", "--use-env",
              "--virtual-local-rank"}  # fmt: skip
_AS_MANY_AS_FIT = ("auto", "gpu", "cpu", "xpu")
# What we set; a user's is passed over with a line.
_OURS = {
    "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone",
    "--max-restarts", "--master-addr", "--master-port", "--local-addr", "--monitor-interval",
    "--start-method", "--log-dir", "--redirects", "--tee", "--local-ranks-filter",
    "--event-log-handler", "--logs-specs", "--signals-to-handle", "--role",
}  # fmt: skip

Find = Callable[[str], Optional[str]]  # as shutil.which


class BadCommand(ValueError):
    """What a user wrote cannot be meant; the text says why."""


class RankCommand(NamedTuple):
    words: Tuple[str, ...]
    processes: int  # on a node, as the line said; 0: it did not
    ignored: Tuple[str, ...] = ()  # flags that are ours to set


def rank_command(words: Sequence[str], nodes: int, find: Find) -> RankCommand:
    """Raises BadCommand."""
    flags = _after_launcher(words)
    if flags is None:
        return RankCommand(tuple(_with_python(words, find)), 0)
    return _of_torchrun(flags, nodes, find)


def _after_launcher(words: Sequence[str]) -> Optional[List[str]]:
    """What follows `torchrun` or `python -m torch.distributed.run`; None for any other command."""
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


def _of_torchrun(words: List[str], nodes: int, find: Find) -> RankCommand:
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
        elif name in _OURS:
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


def _with_python(words: Sequence[str], find: Find) -> List[str]:
    if words[0].endswith(".py") and find(words[0]) is None:
        return [_python(find), "-u", *words]
    return list(words)


def _python(find: Find) -> str:
    return find("python") or find("python3") or "python"
