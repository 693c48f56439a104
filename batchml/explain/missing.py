"""Explain which file, module or command a run did not find, by a search on this machine."""

import re
import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from batchml.errors import did_you_mean
from batchml.explain.clues import ClueMatch
from batchml.explain.suggest import CommandWriter, function_of, own_image
from batchml.jobs.code import find_files
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
    ABSENT = "absent"


class MissingItem(Struct, frozen=True):
    """A file (by path) or a Python module (by name) that a run did not find."""

    name: str
    is_module: bool = False


class LocalFindings(Struct, frozen=True):
    """The result of the search for a missing item.

    `path`: the item in `folder`, or the ignored folder that contains it; `ignored_by`: the ignore
    file. `images`: images whose requirements.txt names the module. `requirements`: the
    requirements.txt of the run's image, if the image is the user's own. `own_file`: the file of
    the folder from which an image could be made; `is_listed`: whether it names the module.
    """

    state: FileState = FileState.UNKNOWN
    folder: str = ""
    path: str = ""
    ignored_by: str = ""
    suggestion: str = ""  # " Did you mean 'train.py'?"
    images: tuple[str, ...] = ()
    requirements: str = ""
    own_file: str = ""
    is_listed: bool = False


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
    findings: LocalFindings = LocalFindings()  # about the file or module that it missed
    max_cost: float | None = None  # USD
    memory: float | None = None  # MiB, the most that its last attempt used
    variables: tuple[str, ...] = ()  # the names of those set by --set-env

    @property
    def size(self) -> int:
        """The size of the array; 0 without one."""
        return self.array.array_size if self.array else 0

    def submit(self, *flags: str, command: Sequence[str] = (), image: str = "") -> str:
        """The command that submits the run, or its array, again with the folder's present files."""
        return self.commands.submit(self.run, *flags, command=command, image=image, array=self.size)


def search_folder(
    folder: Path | None, item: MissingItem, state_folder: Path | None = None
) -> LocalFindings:
    """Search the folder of a run's files for a missing item."""
    if folder is None or not folder.is_dir():
        return LocalFindings()
    try:
        found = find_files(folder, state_folder)
        names = _possible_paths(item)
        for name in names:
            if not (folder / name).exists():
                continue
            for path, ignored_by in found.ignored.items():
                if f"{name}/".startswith(path.rstrip("/") + "/"):
                    return LocalFindings(FileState.IGNORED, str(folder), path, ignored_by)
            return LocalFindings(FileState.SENT, str(folder), name)
        above = next((name for name in names if (folder.parent / name).exists()), "")
    except OSError:
        return LocalFindings()
    if above and item.is_module:
        return LocalFindings(FileState.ABOVE, str(folder), above)
    suggestion = "" if item.is_module else did_you_mean(item.name, found.files)
    return LocalFindings(FileState.ABSENT, str(folder), suggestion=suggestion)


def _possible_paths(item: MissingItem) -> list[str]:
    """The paths that the item may have in the folder; none for a path outside."""
    if not item.is_module:
        path = Path(item.name.removeprefix("./"))
        return [] if path.is_absolute() or ".." in path.parts else [path.as_posix()]
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
    return {_canonical(name[0]) for line in lines if (name := re.match(r"[\w.-]+", line))}


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


def refine(found: ClueMatch, ended: EndedRun) -> Explanation | None:
    """A better explanation than the clue alone; None if nothing more is known."""
    run, findings = ended.run, ended.findings
    if not _NOT_RUN.match(found.line) or not found.groups:
        pass
    elif " " in found.groups[0] and len(run.command) == 1:
        return explain_quoted_command(ended, found.line)
    elif "/" not in found.groups[0] and found.cause == "missing-command":
        return _explain_misspelt(found, ended)
    item = missing_item(found)
    if item is None:
        return None
    if findings.state is FileState.IGNORED:
        return _explain_ignored(found, item, ended)
    if item.is_module:
        return _explain_module(found, item.name, ended)
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


def _submit_corrected(ended: EndedRun, name: str) -> str:
    """The command with the file's name corrected, if a file of the folder has a similar name.

    Else `submit` for a run whose command does not have the name: the user corrects a file.
    """
    words = ended.run.command
    own = {each for each in words if each.removeprefix("./") == name}
    if not own:
        return ended.submit()
    if not ended.findings.suggestion:
        return ended.submit() if ended.commands.job else ""
    right = ended.findings.suggestion.split("'")[1]
    return ended.submit(command=[right if each in own else each for each in words])


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


def _explain_ignored(found: ClueMatch, item: MissingItem, ended: EndedRun) -> Explanation:
    findings = ended.findings
    what = f"The module {item.name}" if item.is_module else item.name
    data = "" if item.is_module else " Put large data into BATCHML_DATA_DIR instead."
    if findings.ignored_by == ".gitignore":
        fix = f"Add the line `!{findings.path}` to {findings.folder}/.batchmlignore.{data}"
    elif findings.ignored_by == WRITTEN:
        return Explanation(
            found.cause, f"{what} was not sent: batchml itself wrote it.",
            (found.line, f"{findings.path} is in {findings.folder}"),
            f"Add the line `!{findings.path}` to {findings.folder}/.batchmlignore.", ended.submit(),
        )  # fmt: skip
    else:
        fix = f"Remove its line from {findings.ignored_by}.{data}"
    return Explanation(
        found.cause, f"{what} was not sent: {findings.ignored_by} excludes {findings.path}.",
        (found.line, f"{findings.path} is in {findings.folder}"), fix, ended.submit(),
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
