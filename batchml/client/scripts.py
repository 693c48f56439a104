"""A script given to `submit` where a job would be: an order made of its own lines.

Its lines `#BATCHML` win over its lines `#SBATCH`, and flags of the command line over both.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchml.errors import BatchmlError, ConfigError

if TYPE_CHECKING:
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.model.job import JobSpec
    from batchml.model.script import Script

STDIN = "-"
MOST = 1024**2  # bytes of a script; a larger file is none
RUNNER = ("python3", "-m", "batchml.runtime.entry.script")

_NAMED_STDIN = "stdin"


class NoScript(BatchmlError):
    """There is no file of the name that is to be submitted."""


def refuse_missing(place: "Place", job: str | None) -> None:
    """Raises NoScript for a word that can only be a script's name, where no such file is."""
    from batchml.model.script import is_script_name

    folders = (place.here, *place.job_folders)
    if not job or any((folder / job).exists() for folder in folders):
        return
    if is_script_name(Path(job).name):
        raise NoScript(f"There is no file {job} here.")


def is_script(place: "Place", job: str | None) -> bool:
    """Whether the JOB of a command line is a script: `-`, or a file that looks like one."""
    from batchml.model.script import looks_like_script

    if job is None or job == STDIN:
        return job == STDIN
    path = place.here / job
    if path.name == "job.toml" or not path.is_file() or path.stat().st_size > MOST:
        return False
    try:
        return looks_like_script(path.name, path.read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return False


def from_script(
    place: "Place",
    order: "Order",
    notices: list[str],
    *,
    read: Callable[[], bytes] = lambda: sys.stdin.buffer.read(MOST + 1),
    environ: Mapping[str, str] = os.environ,
) -> "Order":
    """The order with what the script that it names asks for; any other order as it is.

    `notices` get what the script says and nothing comes of. `read` reads the script of `-`,
    `environ` has the variables that `#SBATCH --export=NAME` takes along.

    Raises ConfigError with every mistake of the script's lines, NoScript where it is not there.
    """
    if order.job is None or not is_script(place, order.job):
        refuse_missing(place, order.job)
        return order
    from batchml.model.script import by_line, read_ours, read_script
    from batchml.model.slurm import read_slurm
    from batchml.runtime.entry.script import ARRAY, interpreter

    path = None if order.job == STDIN else place.here / order.job
    shown = order.job if path else "The script on stdin"
    text = _text(shown, path.read_bytes() if path else read())
    program = interpreter(text.encode().split(b"\n", 1)[0])
    script = read_script(text, program)
    ours, wrong = read_ours(script.ours)
    slurm = read_slurm(script.slurms, environ)
    mistakes = by_line([*script.mistakes, *wrong, *slurm.mistakes])
    if mistakes:
        raise ConfigError(shown, mistakes)
    said = by_line((*_login(program, script), *script.notices, *slurm.notices))
    notices += [f"{shown}, {words}" for words in said]
    folder = _folder(place, path, slurm.folder, shown)
    command = _command(path, folder, text, order.command or ())
    lower = _over(_order(ours), _order(slurm.wanted))
    merged = _over(replace(order, job=None, command=command, folder=str(folder)), lower)
    if merged.changes.get("queue") and not order.changes.get("queue"):
        named = _queue_line(script, environ)
        merged = replace(merged, queue_at=f"{path.name if path else shown}, line {named}")
    facts = dict(slurm.facts)
    if merged.array != slurm.wanted.get("array"):  # the numbers are not the script's own
        facts.pop(ARRAY, None)
    if not merged.changes.get("name"):
        name = Path(order.job).stem if path else _NAMED_STDIN
        merged = replace(merged, changes={**merged.changes, "name": _name(name)})
    return _with_facts(merged, script, facts)


def _login(program: list[str], script: "Script") -> list[str]:
    from batchml.runtime.entry.script import without_login

    if not script.has_slurm or without_login(program) == program:
        return []
    return [
        f"line 1: {' '.join(program)} is run without {program[1]}: a profile would set PATH anew, "
        "and hide the programs of the image."
    ]


def _text(shown: str, data: bytes) -> str:
    if len(data) > MOST:
        raise ConfigError(shown, [f"it is larger than {MOST // 1024} KiB."])
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(shown, ["it is not UTF-8 text."]) from None


def _folder(place: "Place", path: Path | None, named: str, shown: str) -> Path:
    """Whose files travel: what `-D` names, else the current folder, as sbatch works in it; that of
    the script where it lies elsewhere."""
    if named:
        folder = place.here / named
        if not folder.is_dir():
            raise ConfigError(shown, [f"--chdir: {folder} is not a folder."])
        return folder
    if path is None or path.resolve().is_relative_to(place.here.resolve()):
        return place.here
    return path.resolve().parent


def _command(
    path: Path | None, folder: Path, text: str, arguments: tuple[str, ...]
) -> tuple[str, ...]:
    """How the script is run: from the files that travel, else packed into the command."""
    from batchml.runtime.entry.script import PACKED, pack

    if path is not None and path.resolve().is_relative_to(folder.resolve()):
        return (*RUNNER, path.resolve().relative_to(folder.resolve()).as_posix(), *arguments)
    return (*RUNNER, PACKED, pack(text.encode()), path.name if path else _NAMED_STDIN, *arguments)


def _name(text: str) -> str:
    from batchml.model.names import to_name

    return to_name(text)


def _order(wanted: Mapping[str, Any]) -> "Order":
    from batchml.client.client import Client

    return Client.order(**wanted)


def _over(upper: "Order", lower: "Order") -> "Order":
    """What `upper` says, and of the rest what `lower` does."""
    return replace(
        upper,
        changes=_merged(upper.changes, lower.changes),
        params={**lower.params, **upper.params},
        tags={**lower.tags, **upper.tags},
        after=upper.after or lower.after,
        share=upper.share or lower.share,
        array=lower.array if upper.array is None else upper.array,
        max_cost=lower.max_cost if upper.max_cost is None else upper.max_cost,
        strict=upper.strict or lower.strict,
        include_secrets=upper.include_secrets or lower.include_secrets,
    )


def _merged(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(lower)
    for name, value in upper.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = _merged(value, found[name])
        elif value is not None:
            found[name] = value
    return found


def _queue_line(script: "Script", environ: Mapping[str, str]) -> int:
    """The line that names the queue: the last of ours that does, else of Slurm's."""
    from batchml.model.script import read_ours
    from batchml.model.slurm import read_slurm

    ours = [line.number for line in script.ours if read_ours([line])[0].get("queue")]
    if ours:
        return ours[-1]
    return max(
        (each.number for each in script.slurms if read_slurm([each], environ).wanted.get("queue")),
        default=1,
    )


def true_sizes(spec: "JobSpec") -> "JobSpec":
    """A job that speaks Slurm, with the sizes in its variables that it will have: flags, and the
    machine here, may give others than its script asks for. Any other job as it is."""
    from batchml.runtime.entry.script import SLURM
    from batchml.runtime.nodes.slurm.steps import number_of

    if not spec.env.get(SLURM):
        return spec
    has, env = spec.resources, dict(spec.env)
    tasks = max(1, number_of(str(env.get("SLURM_NTASKS_PER_NODE", "")), 1))
    env |= {"SLURM_CPUS_ON_NODE": str(has.vcpus), "SLURM_MEM_PER_NODE": str(has.memory_mib)}
    for name in [name for name in env if name.startswith("SLURM_GPUS") and not has.gpus]:
        del env[name]
    if has.gpus:
        env |= {"SLURM_GPUS": str(has.gpus * spec.nodes), "SLURM_GPUS_ON_NODE": str(has.gpus)}
    for name, count in (("SLURM_CPUS_PER_TASK", has.vcpus), ("SLURM_GPUS_PER_TASK", has.gpus)):
        if name in env:
            most = max(1, count // tasks)
            env[name] = str(min(number_of(str(env[name]), most), most))
    return replace(spec, env=env)


def _with_facts(order: "Order", script: "Script", facts: Mapping[str, str]) -> "Order":
    """With the variables that tell the run what Slurm would have; none for a script that does not
    speak Slurm: programs that find them take themselves to be on a cluster."""
    from batchml.runtime.entry.script import SLURM

    if not script.has_slurm:
        return order
    told = {SLURM: "1", "SLURM_JOB_NAME": order.changes["name"], **facts}
    env = {**told, **(order.changes.get("env") or {})}
    return replace(order, changes={**order.changes, "env": env})
