"""Write the commands that an explanation suggests; describe times, sizes and runs in words."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import BY_DOCUMENT
from batchml.aws.naming import qualified
from batchml.model.environment import LOCAL
from batchml.model.names import to_name
from batchml.model.numbering import plain_command
from batchml.model.run import JobStatus, Run
from batchml.runtime.protocol.function import MODULE
from batchml.runtime.protocol.launch import PACKED, SCRIPT_RUNNER
from batchml.runtime.protocol.variables import takes_all

_OURS = re.compile(r"(?:^|/)batchml/([a-z0-9][a-z0-9._-]*)[:@]")  # the name of an image of ours
_MOST = 10  # numbers in a sentence


_NONE: Mapping[str, Any] = {}


class CommandWriter(Struct, frozen=True):
    """Writes commands for an environment. `job`: the job's folder; empty if unknown.
    `project`: the user's, whose queues on `local` have short names. `image`: the value of --image
    if it names a file of the folder, such as `.`; else empty. `defaults`: the parameters of the
    job, which need no -p. `is_other`: whether the run's command replaced the job's.

    An explanation names a command that removes its cause, perhaps after the user has changed a
    file, or that shows what the cause leads to: a log, another run, a queue. It names no command
    that would leave everything as it is.
    """

    env: str = LOCAL
    job: str = ""
    project: str = ""
    image: str = ""
    defaults: dict[str, Any] = {}
    is_other: bool = False

    @property
    def is_local(self) -> bool:
        return self.env == LOCAL

    def batchml(self, *words: str) -> str:
        """A batchml command, with --env unless the environment is `local`."""
        env = () if self.is_local else ("--env", self.env)
        return shlex.join(("batchml", *words, *env))

    def for_run(self, run: Run) -> "CommandWriter":
        """A writer for a run that may be in another environment, which its tag names."""
        return replace(self, env=run.tags.get("batchml:env") or self.env)

    def submit(
        self,
        run: Run,
        *flags: str,
        command: Sequence[str] = (),
        image: str = "",
        array: int = 0,
        params: Mapping[str, Any] = _NONE,
    ) -> str:
        """The command that submits the run again with other flags and its files as they are now.

        Empty if no command line can submit the run. `array`: the size of the array of which the run
        is a child. `params` replace those of the run.
        """
        if is_out_of_reach(run) or function_of(run):
            return ""
        array_flags = ("--array", str(array)) if array else ()
        node_flags = ("--nodes", str(run.nodes)) if run.nodes else ()
        flags = (*array_flags, *node_flags, *flags)
        words = tuple(command or plain_command(run.command))
        argv = shlex.join(words)
        if self.job:
            is_own = bool(command) or self.is_other
            # A command of one's own takes no other parameters than the job's.
            taken = self.defaults if is_own and not takes_all(words, self.defaults) else None
            typed = [
                word
                for name, value in {**run.params, **params}.items()
                if taken is None or name in taken
                if name not in self.defaults or f"{value}" != f"{self.defaults[name]}"
                for word in ("-p", f"{name}={value}")
            ]
            image_flags = ("--image", image) if image else ()
            again = self.batchml("submit", self.job, *typed, *image_flags, *flags)
            return f"{again} -- {argv}" if is_own else again
        image = image or self.image or own_image(run.image) or run.image
        is_part = run.array_index is not None and not array
        is_part = is_part or "BATCHML_LAUNCH" in run.environment  # no flag sets the launch plan
        if not image or not run.command or run.command[0] == BY_DOCUMENT or is_part:
            return ""
        if words[: len(SCRIPT_RUNNER)] == SCRIPT_RUNNER:
            script = words[len(SCRIPT_RUNNER) :]
            return self._submit_script(run, script, ("--image", image, *flags))
        flags = (*_data_flags(run), *flags)
        again = self.batchml("submit", "--name", run.name, "--image", image, *flags)
        return f"{again} -- {argv}"

    def _submit_script(self, run: Run, words: Sequence[str], flags: Sequence[str]) -> str:
        """`batchml submit --image . train.sh -- 3`; empty for a script that is not in the code."""
        path, *arguments = words
        if path == PACKED:
            return ""
        name = () if run.name == to_name(PurePosixPath(path).stem) else ("--name", run.name)
        again = self.batchml("submit", *name, *flags, path)
        return f"{again} -- {shlex.join(arguments)}" if arguments else again

    def rerun(self, run: Run, *flags: str, array: Run | None = None) -> str:
        """The command that reruns the run, or the failed children of its `array`.

        Empty if `rerun` would refuse the run.
        """
        if is_out_of_reach(run):
            return ""
        if array is None:
            return self.batchml("rerun", run.job_id, *flags)
        failed_only = ("--failed",) if array.children.get(JobStatus.SUCCEEDED) else ()
        return self.batchml("rerun", array.job_id, *failed_only, *flags)

    def log(self, run: Run) -> str:
        return self.batchml("logs", run.job_id)

    def bare(self, name: str) -> str:
        """The short name of a queue or compute environment: `gpu` for `batchml-dev-gpu`."""
        return name.removeprefix(qualified(self.env, "", self.project))


def is_out_of_reach(run: Run) -> bool:
    """Whether batchml cannot submit the run: a single node, or nodes of another program."""
    return run.node_index is not None or (run.nodes > 0 and not run.key)


def function_of(run: Run) -> str:
    """The name of the Python function that the run calls, such as `score`; empty without one."""
    *program, name = plain_command(run.command) or ("",)
    return name if program == ["python3", "-m", MODULE] else ""


def own_image(reference: str) -> str:
    """The folder in images/ from which an image was built; empty for any other image.

    It is `pytorch` for `pytorch`, `batchml/pytorch:0a1b` and `.../batchml/pytorch@sha256:0`.
    """
    ours = _OURS.search(reference)
    return ours[1] if ours else reference if not set(reference) & set("/:@.") else ""


def describe_time(milliseconds: float) -> str:
    """`40 s`, `12 min`, `3 h`, `2 days`"""
    seconds = max(0, int(milliseconds / 1000))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 2 * 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h" if seconds < 48 * 3600 else f"{seconds // 86_400} days"


def describe_memory(mib: int) -> str:
    """`512 MiB`, `2 GiB`"""
    return f"{mib // 1024} GiB" if mib >= 1024 and mib % 1024 == 0 else f"{mib} MiB"


def join_numbers(numbers: Sequence[int]) -> str:
    """`2`, `2 and 4`, `2, 4 and 5`, `0, 1, 2 and 997 more`"""
    if len(numbers) > _MOST:
        return f"{', '.join(map(str, numbers[:_MOST]))} and {len(numbers) - _MOST} more"
    first = ", ".join(map(str, numbers[:-1]))
    return f"{first} and {numbers[-1]}" if first else "".join(map(str, numbers))


def count(number: int, what: str, many: str = "") -> str:
    """`1 run`, `2 runs`"""
    return f"{number} {what if number == 1 else many or what + 's'}"


def name_and_id(run: Run) -> str:
    """The name of a run, and its id for a command."""
    return f"{run.name} {run.job_id}"


def describe_request(run: Run) -> str:
    """`4 vCPU, 15 GiB, 1 GPU`"""
    parts = [f"{run.vcpus} vCPU", describe_memory(run.memory_mib)]
    parts += [f"{run.gpus} GPU"] if run.gpus else []
    parts += [f"{run.neurons} Neuron chips"] if run.neurons else []
    return ", ".join(parts) + (f" on each of {run.nodes} nodes" if run.nodes else "")


# Causes that a user removes on this machine itself, and not in AWS.
LOCAL_FIXES = {
    "disk-full": "Make room on this machine's disk, for example of old environments.",
    "network": "Connect this machine to the network, or correct the name.",
    "image-network": "Connect this machine to the image's registry.",
    "credentials": "Log in to AWS on this machine, or set AWS_PROFILE with --set-env.",
    "secret": "Write it into secrets.toml of the state folder: docs/local.md.",
    "no-gpu-driver": "Install the NVIDIA driver and the NVIDIA Container Toolkit on this machine.",
    "gpu-broken": "Reset this machine's GPU, or restart the machine: nvidia-smi -q names errors.",
}


def _data_flags(run: Run) -> tuple[str, ...]:
    """The flags that give a command its data sets."""
    return tuple(word for name, url in run.data.items() for word in ("--data", f"{name}={url}"))
