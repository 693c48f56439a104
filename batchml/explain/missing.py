"""Explain which file, module or command a run did not find, by a search on this machine."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import did_you_mean
from batchml.explain.clues import ClueMatch, find_last_exception, informative_lines
from batchml.explain.resumed import SavedFile
from batchml.explain.suggest import LOCAL_FIXES, CommandWriter, function_of, own_image
from batchml.jobs.code import find_exclusions, find_files
from batchml.jobs.ignore import IGNORE_FILE
from batchml.jobs.written import WRITTEN
from batchml.model.explanation import Explanation, InstanceState
from batchml.model.image import REQUIREMENTS
from batchml.model.run import Run

# --- the search in the folder and in images -------------------------------------------------


class FileState(StrEnum):
    """Where the file or module is that a run did not find."""

    UNKNOWN = "unknown"  # it was not searched for, or the folder does not exist any more
    SENT = "sent"  # it was sent with the run
    IGNORED = "ignored"  # an ignore file excludes it
    ABOVE = "above"  # it is in the folder above, which is not sent
    OUTSIDE = "outside"  # its path leads out of the folder, and it exists there
    ABSENT = "absent"


NOT_SENT = (FileState.IGNORED, FileState.OUTSIDE)  # it exists here, but not in the run


class MissingItem(Struct, frozen=True):
    """A file (by path) or a Python module (by name) that a run did not find.

    `line`: the error that names the file, if no clue says that it is missing.
    """

    name: str
    is_module: bool = False
    line: str = ""


class LocalFindings(Struct, frozen=True):
    """The result of the search for a missing item.

    `path`: the item in `folder`, or the ignored folder that contains it; `ignored_by`: the ignore
    file; `also_ignored`: what else is ignored on the way to the item. `images`: images whose
    requirements.txt names the module. `requirements`: the requirements.txt of the run's image, if
    the image is the user's own; `is_newer`: whether that file names the module, and the run's image
    was made before. `own_file`: the file of the folder from which an image could be made;
    `is_listed`: whether it names the module. `saved`: the file as another run has saved it.
    """

    state: FileState = FileState.UNKNOWN
    folder: str = ""
    path: str = ""
    ignored_by: str = ""
    also_ignored: dict[str, str] = {}  # path -> ignore file
    suggestion: str = ""  # " Did you mean 'train.py'?"
    images: tuple[str, ...] = ()
    requirements: str = ""
    is_newer: bool = False
    own_file: str = ""
    is_listed: bool = False
    saved: SavedFile | None = None


_NONE: Mapping[str, Any] = {}


RESUMES = "with --resume it goes on from its checkpoint"


class EndedRun(Struct, frozen=True):
    """A run that has ended, and what AWS and this machine know about it.

    For an array, `run` is a failed child, and `array` the array itself.
    """

    run: Run
    commands: CommandWriter = CommandWriter()
    array: Run | None = None
    lines: tuple[str, ...] | None = None  # the last page of its log, without the runtime's marks
    dependencies: tuple[Run, ...] = ()
    instance: InstanceState | None = None
    item: MissingItem | None = None  # the file or module that it missed
    findings: LocalFindings = LocalFindings()  # about the item
    max_cost: float | None = None  # USD
    memory: float | None = None  # MiB, the most that its last attempt used
    variables: tuple[str, ...] = ()  # the names of those set by --set-env
    resuming: str = RESUMES  # what a rerun finds of what it has saved

    @property
    def size(self) -> int:
        """The size of the array; 0 without one."""
        return self.array.array_size if self.array else 0

    def submit(
        self,
        *flags: str,
        command: Sequence[str] = (),
        image: str = "",
        params: Mapping[str, Any] = _NONE,
    ) -> str:
        """The command that submits the run, or its array, again with the folder's present files.
        `params` replace those of the run.
        """
        return self.commands.submit(
            self.run, *flags, command=command, image=image, array=self.size, params=params
        )


LocalSearch = Callable[[Run, MissingItem], LocalFindings]


def search_folder(
    folder: Path | None, item: MissingItem, state_folder: Path | None = None
) -> LocalFindings:
    """Search the folder of a run's files for a missing item."""
    if folder is None or not folder.is_dir():
        return LocalFindings()
    try:
        names = _possible_paths(folder, item)
        for name in names:
            if not (folder / name).exists():
                continue
            excluded = list(find_exclusions(folder, name, state_folder).items())
            if not excluded:
                return LocalFindings(FileState.SENT, str(folder), name)
            (path, ignored_by), *more = excluded
            return LocalFindings(FileState.IGNORED, str(folder), path, ignored_by, dict(more))
        above = next((name for name in names if (folder.parent / name).exists()), "")
        if above and item.is_module:
            return LocalFindings(FileState.ABOVE, str(folder), above)
        if not names and (folder / item.name).exists():
            return LocalFindings(FileState.OUTSIDE, str(folder))
        is_guess = item.is_module or item.line
        files = () if is_guess else find_files(folder, state_folder).files
        suggestion = did_you_mean(item.name, files)
    except OSError:
        return LocalFindings()
    return LocalFindings(FileState.ABSENT, str(folder), suggestion=suggestion)


def _possible_paths(folder: Path, item: MissingItem) -> list[str]:
    """The paths that the item may have in the folder; none for a path outside."""
    if not item.is_module:
        path = Path(os.path.normpath(folder / item.name))
        return [path.relative_to(folder).as_posix()] if path.is_relative_to(folder) else []
    inner = item.name.replace(".", "/")
    top = inner.partition("/")[0]
    return [f"{inner}.py", f"{inner}/__init__.py", inner, f"{top}.py", f"{top}/__init__.py"]


# Module -> package, where the names differ.
_PACKAGES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil", "dotenv": "python-dotenv", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip


def package_of(module: str) -> str:
    """The package of a module, as far as known: `scikit-learn` for `sklearn.svm`."""
    top = module.partition(".")[0]
    return _PACKAGES.get(top, top)


def images_with(folders: Iterable[Path], module: str) -> tuple[str, ...]:
    """The images whose requirements.txt names the package of a module."""
    found = dict[str, bool]()
    for folder in folders:
        for path in sorted(folder.glob("*/requirements.txt")):
            found.setdefault(path.parent.name, names_package(path, module))
    # PyTorch's image first: other images may have old versions for an old framework.
    return tuple(sorted((n for n, has in found.items() if has), key=lambda n: (n != "pytorch", n)))


def names_package(path: Path, module: str) -> bool:
    """Whether a requirements.txt names the package of a module."""
    return _canonical(package_of(module)) in _required(path)


def _required(path: Path) -> set[str]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    return {_canonical(name[1]) for line in lines if (name := _PACKAGE.match(line))}


_PACKAGE = re.compile(r" *(?:- +)?([\w.-]+)")  # also in the lists of an environment.yml


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- explanations ---------------------------------------------------------------------------

_FOLDER = "/job/"  # the working directory of the shipped images

# Commands that users start often, for "Did you mean".
_COMMANDS = ("accelerate", "bash", "deepspeed", "jupyter", "make", "mpirun", "node", "pip",
             "pytest", "python", "python3", "ray", "Rscript", "sh", "torchrun", "uv")  # fmt: skip
_SHELL = re.compile(r"[;|&<>`$\n]|\*|^(?:for|while|if|cd|export|source|set|until|case|eval) ")
_NOT_RUN = re.compile(r"batchml: cannot run ")


def missing_item(found: ClueMatch) -> MissingItem | None:
    """The file or module that a clue names; None for any other clue."""
    if not found.groups:
        return None
    name = found.groups[0]
    if found.cause == "missing-module":
        return MissingItem(name, is_module=True) if len(found.groups) == 1 else None
    is_file = found.cause == "missing-file"
    was_run = _NOT_RUN.match(found.line) and "/" in name
    if is_file or (was_run and found.cause in ("missing-command", "permission")):
        return MissingItem(name.removeprefix(_FOLDER).removeprefix("./"))
    return None


# Paths in errors, and lines of errors that are no exception of Python.
_PATH = re.compile(r"/|\.\w+$")
_QUOTED, _BETWEEN = re.compile("['\"`]([^'\"`]+)['\"`]"), re.compile("[\\s'\"`()\\[\\]<>,;:=]+")
_ERROR = re.compile(
    r"(?i)error|fatal|can't|cannot|could not|unable|failed|no such|not found|not exist"
)
_SEARCHED = 3  # last lines
_MOST_GUESSED = 20  # words of an error that are searched for


def possible_items(found: ClueMatch | None, lines: Sequence[str]) -> list[MissingItem]:
    """What a run may have missed: by its clue, or else each path that its last error names.

    Programs and libraries report a missing file in many words: `Could not open results/m.txt`.
    """
    item = missing_item(found) if found is not None else None
    if item is not None:
        return [item]
    if found is not None and found.cause != "bad-argument":
        return []
    exception = find_last_exception(lines)
    errors = [exception] if exception else [
        line for line in reversed(informative_lines(lines)[-_SEARCHED:]) if _ERROR.search(line)
    ]  # fmt: skip
    names: dict[str, str] = {}
    for line in errors:
        words = (*_QUOTED.findall(line), *_BETWEEN.split(line))
        for word in words:
            name = word.rstrip(".:!?").removeprefix(_FOLDER)
            if _PATH.search(name) and not name.startswith("/"):
                names.setdefault(name, line)
    return [MissingItem(name, line=line) for name, line in list(names.items())[:_MOST_GUESSED]]


def with_findings(ended: EndedRun, items: Iterable[MissingItem], search: LocalSearch) -> EndedRun:
    """The run with the item that it missed: of an error's paths one that was not sent."""
    for item in items:
        findings = search(ended.run, item)
        if not item.line or findings.state in NOT_SENT:
            return replace(ended, item=item, findings=findings)
    return ended


def explain_guess(ended: EndedRun) -> Explanation | None:
    """The explanation for a file that an error names, and that was not sent; else None."""
    item = ended.item
    return _explain_not_sent("missing-file", item.line, item, ended) if item and item.line else None


def refine(found: ClueMatch, ended: EndedRun) -> Explanation | None:
    """A better explanation than the clue alone; None if nothing more is known."""
    run, findings = ended.run, ended.findings
    if found.cause == "no-gpu" and run.gpus:
        return _explain_missing_gpu(found, ended)
    if not _NOT_RUN.match(found.line) or not found.groups:
        pass
    elif " " in found.groups[0] and len(run.command) == 1:
        return explain_quoted_command(ended, found.line)
    elif "/" not in found.groups[0] and found.cause == "missing-command":
        return _explain_misspelt(found, ended)
    item = missing_item(found)
    if item is None:
        return explain_guess(ended)
    if findings.state in NOT_SENT:
        return _explain_not_sent(found.cause, found.line, item, ended)
    if item.is_module:
        return _explain_module(found, item.name, ended)
    if findings.saved is not None:
        return _explain_saved(found, item.name, findings.saved, ended)
    if findings.state is FileState.ABSENT:
        is_absolute = item.name.startswith("/")
        where = "in the run's container" if is_absolute else f"in {findings.folder}"
        more = " Data may lie in BATCHML_DATA_DIR." if "FileNotFoundError" in found.line else ""
        return Explanation(
            found.cause, f"{item.name} is not {where}.", (found.line,),
            f"Correct its name.{findings.suggestion}{more}", _submit_corrected(ended, item.name),
        )  # fmt: skip
    if findings.state is FileState.SENT and found.cause == "permission":
        name = item.name
        return Explanation(
            found.cause, f"{name} in {findings.folder} may not be executed.", (found.line,),
            f"Make it executable (chmod +x {shlex.quote(name)}), or name its interpreter.",
            ended.submit(command=("bash", *run.command)),
        )  # fmt: skip
    return None


def _explain_saved(found: ClueMatch, missed: str, saved: SavedFile, ended: EndedRun) -> Explanation:
    """The run missed a file that another run has saved under another path."""
    rerun, who = ("rerun", "--resume", saved.job_id), f"{saved.name} {saved.job_id}"
    if not saved.has_resumed:
        return Explanation(
            found.cause, f"{saved.path} is not there: this run did not resume another run.",
            (found.line,),
            "The run of before, with the same command, had resumed. Without --resume {checkpoints} "
            "is empty at the start.",
            ended.commands.batchml(*rerun),
        )  # fmt: skip
    verdict = f"{missed} is not in the run: the file of that name from {who} is {saved.path}."
    failed = ("--failed",) if saved.is_partial else ()
    if typed := saved.parameters(ended.run, missed):
        return Explanation(
            found.cause, verdict, (found.line,), "Give that path.",
            ended.commands.batchml(*rerun, *failed, *typed),
        )  # fmt: skip
    is_typed = missed in [each.removeprefix("./") for each in ended.run.command]
    return Explanation(
        found.cause, verdict, (found.line,),
        f"Write that path into the {'command' if is_typed else 'program'}.",
        _submit_corrected(ended, missed) if is_typed
        else ended.commands.batchml(*rerun, *failed, "--code"),
    )  # fmt: skip


def _submit_corrected(ended: EndedRun, name: str) -> str:
    """The command with the file's name corrected, if a file of the folder has a similar name.

    Else `submit` for a run whose command does not have the name: the user corrects a file.
    """
    words, suggestion = ended.run.command, ended.findings.suggestion
    right = suggestion.split("'")[1] if suggestion else ""
    own = {each for each in words if each.removeprefix("./") == name}
    given = {key: right for key, value in ended.run.params.items() if value in (name, f"./{name}")}
    is_parameter = bool(given and right and ended.commands.job)
    if is_parameter and not (own and ended.commands.is_other):
        return ended.submit(params=given)
    if not own:
        return ended.submit()
    if not right:
        return ended.submit() if ended.commands.job else ""
    corrected = [right if each in own else each for each in words]
    return ended.submit(command=corrected, params=given)


def explain_quoted_command(ended: EndedRun, line: str) -> Explanation:
    """A whole command line was given as one word, which is not the name of a program.

    `line`: the log line that shows it, or "".
    """
    text = ended.run.command[0]
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = []
    if not parts or _SHELL.search(text):
        fix, command = "For shell syntax, start a shell.", ["bash", "-c", text]
    else:
        fix, command = "Give its words one by one, without quotes around them all.", parts
    return Explanation(
        "missing-command", "The whole command is one word with spaces, not a program's name.",
        (line or f"command: {text!r}",), fix, ended.submit(command=command),
    )  # fmt: skip


def _explain_misspelt(found: ClueMatch, ended: EndedRun) -> Explanation | None:
    run, name = ended.run, found.groups[0]
    suggestion = did_you_mean(name, _COMMANDS)
    if not suggestion or not run.command or run.command[0] != name or name in _COMMANDS:
        return None
    right = suggestion.split("'")[1]
    return Explanation(
        found.cause, f"There is no command {name}.{suggestion}", (found.line,), "Correct its name.",
        ended.submit(command=(right, *run.command[1:])),
    )  # fmt: skip


def _explain_not_sent(cause: str, line: str, item: MissingItem, ended: EndedRun) -> Explanation:
    findings = ended.findings
    what = f"The module {item.name}" if item.is_module else item.name
    if findings.state is FileState.OUTSIDE:
        return Explanation(
            cause, f"{what} was not sent: it is not in {findings.folder}, and a run gets only "
            "that folder.",
            (line,), "Put it there, or large data into BATCHML_DATA_DIR.", ended.submit(),
        )  # fmt: skip
    excluded = {findings.path: findings.ignored_by, **findings.also_ignored}
    rules = [
        "batchml itself wrote it"
        if by == WRITTEN
        else f"{by} excludes {' and '.join(path for path in excluded if excluded[path] == by)}"
        for by in dict.fromkeys(excluded.values())
    ]
    lines = [f"`!{path}`" for path, by in excluded.items() if by != IGNORE_FILE]
    own = [path for path, by in excluded.items() if by == IGNORE_FILE]
    fixes = []
    if lines:
        many = "s" if len(lines) > 1 else ""
        place = f"{findings.folder}/{IGNORE_FILE}"
        fixes.append(f"Add the line{many} {' and '.join(lines)} to {place}.")
    if own:
        its = "its line" if len(own) == 1 else f"the lines for {' and '.join(own)}"
        fixes.append(f"Remove {its} from {IGNORE_FILE}.")
    if not item.is_module and WRITTEN not in excluded.values():
        fixes.append("Put large data into BATCHML_DATA_DIR instead.")
    return Explanation(
        cause, f"{what} was not sent: {', and '.join(rules)}.",
        (line, f"{findings.path} is in {findings.folder}"), " ".join(fixes), ended.submit(),
    )  # fmt: skip


def _explain_module(found: ClueMatch, name: str, ended: EndedRun) -> Explanation | None:
    findings, is_local = ended.findings, ended.commands.is_local
    if findings.state is FileState.ABOVE:
        folder = findings.folder.rpartition("/")[0] or "/"
        fix = (
            'Set `code = ".."` in its job.toml, or install it in the image.'
            if ended.commands.job
            else f"Submit from {folder}, or install it in the image."
        )
        return Explanation(
            found.cause, f"The module {name} was not sent: only the folder itself is sent.",
            (found.line, f"{findings.path} is in {folder}, above {findings.folder}"), fix,
            ended.submit(),
        )  # fmt: skip
    if findings.state is FileState.SENT:
        return Explanation(
            found.cause, f"The module {name} is in the run, but not where Python looks.",
            (found.line, f"{findings.path} is in {findings.folder}, which is sent"),
            "Python searches only beside the program file: let it search the run's folder."
            + _in_python(ended, 'set_env={"PYTHONPATH": "."}'),
            ended.submit("--set-env", "PYTHONPATH=."),
        )  # fmt: skip
    wants, image = package_of(name), own_image(ended.run.image)
    verdict = f"The image {image or ended.run.image} has no Python module {name}."
    if findings.requirements:
        again = " Submit the function again." if function_of(ended.run) else ""
        if findings.is_newer:
            return Explanation(
                found.cause, verdict, (found.line,),
                f"{findings.requirements} has {wants} now, but the run used the image of before."
                f"{again or ' Submit it anew: a rerun keeps its image.'}",
                ended.submit(),
            )  # fmt: skip
        return Explanation(
            found.cause, verdict, (found.line,), f"Add {wants} to {findings.requirements}.{again}",
            ended.submit() if is_local
            else ended.commands.batchml("image", "push", _pushed(findings.requirements, image)),
        )  # fmt: skip
    own = findings.own_file
    others = [each for each in findings.images if each != image]
    if others and not own:
        return Explanation(
            found.cause, verdict, (found.line,),
            f"The image {others[0]} has {wants}."
            + _in_python(ended, f'image="{others[0]}"'),
            ended.submit(image=others[0]),
        )  # fmt: skip
    if findings.state is FileState.UNKNOWN and not is_local:
        return None
    fix = f"{own} has {wants}" if findings.is_listed else f"Add {wants} to {own or REQUIREMENTS}"
    image = "." if own in ("", REQUIREMENTS) else f"./{own}"
    how = _in_python(ended, f'image="{image}"')
    return Explanation(
        found.cause, verdict, (found.line,),
        f"{fix}.{how}" if how else f"{fix}: with --image the run gets an image of that file.",
        ended.submit(image=image),
    )  # fmt: skip


def _in_python(ended: EndedRun, option: str) -> str:
    """How a function is submitted with an option: it has no command line. Empty for other runs."""
    name = function_of(ended.run)
    if not name:
        return ""
    name = name if name.replace(".", "").isidentifier() else "function"  # `<lambda>`
    return f" In Python: client.{'map' if ended.array else 'submit'}({name}, ..., {option})."


def _pushed(requirements: str, image: str) -> str:
    """The argument of `image push`: a name, or the folder of an image in a job's own folder."""
    folder, _, _ = requirements.rpartition("/")
    return image if folder == f"images/{image}" else folder or "."


def _explain_missing_gpu(found: ClueMatch, ended: EndedRun) -> Explanation:
    """Explain a program without a GPU in a run that requested some."""
    run, commands = ended.run, ended.commands
    if "ompile" in found.line:  # `Torch not compiled with CUDA`, MXNet's `Compile with USE_CUDA=1`
        image = own_image(run.image)
        return Explanation(
            "no-gpu", "The framework in its image was built without CUDA.", (found.line,),
            "Use an image with CUDA. batchml's own have it for a job that requests GPUs.",
            commands.batchml("image", "build" if commands.is_local else "push", image)
            if image else "",
        )  # fmt: skip
    fix = "Use the GPU AMI and GPU instance types in batchml.toml, and run setup."
    return Explanation(
        "no-gpu-driver", f"It requested {run.gpus} GPU, and its container has no driver or device.",
        (found.line,), LOCAL_FIXES["no-gpu-driver"] if commands.is_local else fix,
        "" if commands.is_local else commands.batchml("setup"),
    )  # fmt: skip
