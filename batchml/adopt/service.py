"""Read a program, prepare the attempt on this machine, and watch it."""

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from batchml.adopt.observe import Observation, find_metrics, placed_files, written_files
from batchml.adopt.packages import ImageChoice, ask_python, choose_image, find_packages
from batchml.adopt.propose import missing_arguments, write_job
from batchml.clock import Clock
from batchml.context import Context
from batchml.errors import BatchmlError, UsageError, did_you_mean
from batchml.jobs.code import MAX_BYTES
from batchml.jobs.find import own_image_files
from batchml.jobs.source import ProgramSource, read_program
from batchml.model.image import REQUIREMENTS
from batchml.model.job import JobSpec, read_job
from batchml.model.names import long_duration
from batchml.model.outcome import describe_outcome
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.groups.members import terminate_all
from batchml.runs.options import to_request
from batchml.runs.outputs import CHECKPOINTS, CompleteCheckpoints, FolderOutputs
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.watch.events import OutputLine, RunEnded, RunEvent, StatusChanged, UsageReported

JOB_FILE = "job.toml"


class AdoptedProgram(Struct, frozen=True):
    """A program that a job.toml is proposed for. `script` is its path below `folder`; `sent` are
    values of its arguments that name files or folders there, which travel with the code;
    `on_machine` those that are absolute paths of this machine.
    """

    folder: Path
    script: str
    arguments: tuple[str, ...]
    source: ProgramSource
    image: ImageChoice
    sent: frozenset[str] = frozenset()
    on_machine: frozenset[str] = frozenset()

    def files(self, seen: Observation | None) -> dict[str, str]:
        """The texts of the proposed files, by name. Raises ConfigError for a mistake of ours."""
        text = write_job(
            self.script, self.arguments, self.source, self.image, seen, self.sent, self.on_machine
        )
        read_proposed(text)
        lines = self.image.requirements
        return {JOB_FILE: text, **({REQUIREMENTS: "\n".join(lines) + "\n"} if lines else {})}


def read_proposed(text: str) -> JobSpec:
    """The job of a proposed job.toml."""
    return read_job(tomllib.loads(text), JOB_FILE)


def read_adopted(context: Context, script: str, arguments: Sequence[str]) -> AdoptedProgram:
    """Read a program below the current folder, and choose its image. Starts one process.

    Raises UsageError for a program that does not exist, lies elsewhere, or is no Python.
    """
    path, folder = find_script(context.folder, script), context.folder
    source = read_program(path, folder)
    missing = missing_arguments(source, arguments)
    if missing:
        raise UsageError(
            f"{script} needs {', '.join(missing)}. Give them as you would to the program: "
            f"batchml adopt {script} {' '.join(missing)}"
        )
    packages = find_packages(
        source.imports, source.optional, ask_python(_users_python(), source.imports)
    )
    own = {name: (folder / name).read_text("utf-8", "replace") for name in own_image_files(folder)}
    image = choose_image(packages, own, _image_requirements(context))
    below = path.resolve().relative_to(folder.resolve()).as_posix()
    values = [*(flag.default for flag in source.flags), *arguments]
    words = [word.rpartition("=")[2] for word in values if isinstance(word, str)]
    sent = frozenset(word for word in words if is_sent(folder, word))
    on_machine = frozenset(word for word in words if os.path.isabs(word) and os.path.exists(word))
    return AdoptedProgram(folder, below, tuple(arguments), source, image, sent, on_machine)


def is_sent(folder: Path, word: str) -> bool:
    """Whether a word names a file or a folder below `folder` that is small enough to travel with
    the code.
    """
    path = folder / word
    if not word or os.path.isabs(word) or not os.path.exists(path):
        return False
    root = folder.resolve()
    if root == path.resolve() or not path.resolve().is_relative_to(root):
        return False
    total = 0
    for each in (path, *path.rglob("*")):
        total += each.stat().st_size if each.is_file() else 0
        if total > MAX_BYTES // 2:
            return False
    return True


def find_script(folder: Path, script: str) -> Path:
    """The path of a program below `folder`. Raises UsageError."""
    path = folder / script
    if path.is_dir():
        raise UsageError(f"{script} is a folder. Name the program: batchml adopt train.py")
    if not path.is_file():
        known = [each.name for each in sorted(folder.glob("*.py"))]
        raise UsageError(
            f"{script} does not exist in {folder}.{did_you_mean(Path(script).name, known)}"
        )
    if path.suffix != ".py":
        raise UsageError(f"{script} is no Python program (.py). adopt reads its source.")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{script} is not below {folder}, the folder that would be sent. Go to its folder: "
            f"cd {path.resolve().parent}"
        )
    return path


def _users_python() -> str:
    """The Python that the user's `python` starts, which has the program's packages."""
    environment = os.environ.get("VIRTUAL_ENV", "")
    own = shutil.which("python", path=f"{environment}/bin") if environment else None
    return own or shutil.which("python") or shutil.which("python3") or sys.executable


def _image_requirements(context: Context) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in reversed(context.image_folders):
        for file in sorted(folder.glob(f"*/{REQUIREMENTS}")):
            found[file.parent.name] = file.read_text("utf-8")
    return found


def prepare_attempt(context: Context, folder: Path) -> PreparedRun:
    """The run of the job in `folder`, as any other job."""
    return prepare(context, to_request(os.fspath(folder)), dry_run=False)


def add_metrics(context: Context, record: Record, job: JobSpec) -> None:
    """Write the metrics of the proposed job into the history of the attempt, which had none yet."""
    spec = {**record.spec, "metrics": msgspec.to_builtins(job.metrics)}
    context.history.add(
        Record(key=record.key, patterns=job.patterns, directions=job.directions, spec=spec)
    )


# --- Watching the attempt -------------------------------------------------------------------------


class AttemptWatch:
    """Passes on the events of the attempt, and stops it after `seconds` of running."""

    def __init__(
        self, seconds: float, clock: Clock, stop: Callable[[], None], notify: Callable[[str], None]
    ) -> None:
        self._seconds, self._clock, self._stop, self._notify = seconds, clock, stop, notify
        self._ends_at: float | None = None
        self.is_stopped = False
        self.lines: list[str] = []
        self.memory_mib = 0.0
        self.run: Run | None = None

    def watch(self, events: Iterator[RunEvent]) -> Iterator[RunEvent]:
        for event in events:
            if isinstance(event, OutputLine):
                self.lines.append(event.text)
            elif isinstance(event, UsageReported):
                self.memory_mib = max(self.memory_mib, event.usage.get("memory", 0.0))
            elif isinstance(event, StatusChanged | RunEnded):
                self.run = event.run
                if event.run.status is JobStatus.RUNNING and self._ends_at is None:
                    self._ends_at = self._clock.monotonic() + self._seconds
            self._stop_when_due()
            yield event

    def _stop_when_due(self) -> None:
        is_due = self._ends_at is not None and self._clock.monotonic() >= self._ends_at
        if is_due and not self.is_stopped and not (self.run and self.run.status.is_terminal):
            self.is_stopped = True
            self._notify(f"It has run for {long_duration(self._seconds)}, and is stopped now.")
            self._stop()

    @property
    def has_failed(self) -> bool:
        """Whether the program failed by itself."""
        return bool(self.run and self.run.status is JobStatus.FAILED and not self.is_stopped)

    def observe(self, outputs: Sequence[tuple[str, int]]) -> Observation:
        end = describe_outcome(self.run) if self.run else ""
        is_whole = bool(self.run and self.run.status is JobStatus.SUCCEEDED)
        return Observation(
            find_metrics(self.lines), written_files(outputs), self.memory_mib, end, is_whole,
            placed_files(outputs),
        )  # fmt: skip


def stop_attempt(context: Context, job_id: str) -> None:
    try:
        terminate_all(context, [job_id], "batchml adopt: it has run long enough")
    except BatchmlError:  # it has just ended
        pass


def list_outputs(context: Context, job_id: str) -> list[tuple[str, int]]:
    """The outputs and checkpoints of a run on this machine, with their sizes.

    Names of checkpoints begin with `{checkpoints}/`.
    """
    folder, found = context.outputs(job_id), []
    if folder is not None:
        found += [(entry.name, entry.size) for entry in FolderOutputs(folder).entries()]
    saved = CompleteCheckpoints(FolderOutputs(context.home.runs / job_id / CHECKPOINTS))
    found += [(f"{{checkpoints}}/{entry.name}", entry.size) for entry in saved.entries()]
    return found
