"""The commands that an explanation names, and how times and sizes are said."""

import re
import shlex
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.environment import LOCAL
from batchml.model.run import JobStatus, Run
from batchml.ops.rerun import plain_command

_OURS = re.compile(r"(?:^|/)batchml/([a-z0-9][a-z0-9._-]*)[:@]")
_ORDER = "batchml-order"  # the command of a run whose own was too long for AWS Batch


class Words(Struct, frozen=True):
    """Whom a command is for. `job` is the job's folder, empty where it is not known here."""

    env: str = LOCAL
    job: str = ""

    @property
    def is_local(self) -> bool:
        return self.env == LOCAL

    def batchml(self, *words: str) -> str:
        """A command of ours; the environment is named where it is not this machine."""
        place = () if self.is_local else ("--env", self.env)
        return shlex.join(("batchml", *words, *place))

    def about(self, run: Run) -> "Words":
        """The same for a run that may be of another environment, as its tag says."""
        return replace(self, env=run.tags.get("batchml:env") or self.env)

    def submit(
        self, run: Run, *flags: str, command: Sequence[str] = (), image: str = "", array: int = 0
    ) -> str:
        """The run once more with other flags; where that cannot be said, what the run was.

        Its files are packed anew. `array` is the size of the array that a child stands for.
        """
        if is_out_of_reach(run):
            return self.batchml("show", run.job_id)
        flags = (*(("--nodes", str(run.nodes)) if run.nodes else ()), *flags)
        given = [word for name, value in run.params.items() for word in ("-p", f"{name}={value}")]
        more = (*(("--array", str(array)) if array else ()), *flags)
        argv = shlex.join(command or plain_command(run.command))
        if self.job:
            other = ("--image", image) if image else ()
            again = self.batchml("submit", self.job, *given, *other, *more)
            return f"{again} -- {argv}" if command else again
        image = image or own_image(run.image) or run.image
        is_part = run.array_index is not None and not array
        is_part = is_part or "BATCHML_LAUNCH" in run.environment  # no flag says how it is started
        if not image or not run.command or run.command[0] == _ORDER or is_part:
            return self.batchml("show", run.job_id)
        again = self.batchml("submit", "--name", run.name, "--image", image, *more)
        return f"{again} -- {argv}"

    def rerun(self, run: Run, *flags: str, array: Run | None = None) -> str:
        """The same once more; what it was, where `rerun` refuses it.

        Of an array that a child stands for, what failed of it.
        """
        if is_out_of_reach(run):
            return self.batchml("show", run.job_id)
        if array is None:
            return self.batchml("rerun", run.job_id, *flags)
        some = ("--failed",) if array.children.get(JobStatus.SUCCEEDED) else ()
        return self.batchml("rerun", array.job_id, *some, *flags)

    def log(self, run: Run) -> str:
        return self.batchml("logs", run.job_id)

    def bare(self, name: str) -> str:
        """A queue or compute environment as our commands call it: `batchml-dev-gpu` is `gpu`."""
        return name.removeprefix(f"batchml-{self.env}-")


def is_out_of_reach(run: Run) -> bool:
    """True for what batchml does not submit: one node of a run, or nodes that others submitted."""
    return run.node_index is not None or (run.nodes > 0 and not run.key)


def own_image(reference: str) -> str:
    """The folder of images/ that an image is of; empty for one that is not ours.

    `pytorch` for `pytorch`, `batchml/pytorch:0a1b` and `.../batchml/pytorch@sha256:0`.
    """
    ours = _OURS.search(reference)
    return ours[1] if ours else reference if not set(reference) & set("/:@.") else ""


def minutes(milliseconds: float) -> str:
    """`40 s`, `12 min`, `3 h`, `2 days`"""
    seconds = max(0, int(milliseconds / 1000))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 2 * 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h" if seconds < 48 * 3600 else f"{seconds // 86_400} days"


def memory(mib: int) -> str:
    """`512 MiB`, `2 GiB`"""
    return f"{mib // 1024} GiB" if mib >= 1024 and mib % 1024 == 0 else f"{mib} MiB"


def listed(numbers: Sequence[int], most: int = 10) -> str:
    """`2`, `2 and 4`, `2, 4 and 5`, `0, 1, 2 and 997 more`"""
    if len(numbers) > most:
        return f"{', '.join(map(str, numbers[:most]))} and {len(numbers) - most} more"
    first = ", ".join(map(str, numbers[:-1]))
    return f"{first} and {numbers[-1]}" if first else "".join(map(str, numbers))


def count(number: int, what: str, many: str = "") -> str:
    """`1 run`, `2 runs`"""
    return f"{number} {what if number == 1 else many or what + 's'}"


def named(run: Run) -> str:
    """A run among others: its name, and its id for a command."""
    return f"{run.name} {run.job_id}"


def needs(run: Run) -> str:
    """`4 vCPU, 15 GiB, 1 GPU`"""
    parts = [f"{run.vcpus} vCPU", memory(run.memory_mib)]
    parts += [f"{run.gpus} GPU"] if run.gpus else []
    return ", ".join(parts) + (f" on each of {run.nodes} nodes" if run.nodes else "")
