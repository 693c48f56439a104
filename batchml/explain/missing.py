"""Explain a file, module or command that a run missed, by a search in its folder here."""

import re
import shlex
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from batchml.errors import did_you_mean
from batchml.explain.clues import ClueMatch
from batchml.explain.suggest import CommandWriter, own_image
from batchml.jobs.code import find_files
from batchml.model.explanation import Explanation
from batchml.model.run import Run

# --- the search in the folder and in images -------------------------------------------------


class FileState(StrEnum):
    """Where a missed file or module is on this machine."""

    UNKNOWN = "unknown"  # not searched, or the folder is gone
    SENT = "sent"  # it was sent with the run
    KEPT = "kept"  # an ignore file excludes it
    ABOVE = "above"  # it is in the folder above, which is not sent
    ABSENT = "absent"


class MissingItem(Struct, frozen=True):
    """A file (by path) or a Python module (by name) that a run did not find."""

    name: str
    is_module: bool = False


class LocalFindings(Struct, frozen=True):
    """The result of the search for a missing item.

    `path`: the item, or the ignored folder that contains it, in `folder`; `by`: the file that
    ignores it. `images`: images whose requirements name the module. `recipe`: the requirements.txt
    of the run's image, if that is the user's own.
    """

    state: FileState = FileState.UNKNOWN
    folder: str = ""
    path: str = ""
    by: str = ""
    meant: str = ""  # " Did you mean 'train.py'?"
    images: tuple[str, ...] = ()
    recipe: str = ""


def search_folder(
    folder: Path | None, missed: MissingItem, state_folder: Path | None = None
) -> LocalFindings:
    """Search the folder of a run's files for a missing item."""
    if folder is None or not folder.is_dir():
        return LocalFindings()
    try:
        found = find_files(folder, state_folder)
        names = _names(missed)
        for name in names:
            if not (folder / name).exists():
                continue
            for ignored, by in found.ignored.items():
                if f"{name}/".startswith(ignored.rstrip("/") + "/"):
                    return LocalFindings(FileState.KEPT, str(folder), ignored, by)
            return LocalFindings(FileState.SENT, str(folder), name)
        above = next((name for name in names if (folder.parent / name).exists()), "")
    except OSError:
        return LocalFindings()
    if above and missed.is_module:
        return LocalFindings(FileState.ABOVE, str(folder), above)
    meant = "" if missed.is_module else did_you_mean(missed.name, found.files)
    return LocalFindings(FileState.ABSENT, str(folder), meant=meant)


def _names(missed: MissingItem) -> list[str]:
    """The paths that the item may have in the folder; none for a path outside."""
    if not missed.is_module:
        path = Path(missed.name.removeprefix("./"))
        return [] if path.is_absolute() or ".." in path.parts else [path.as_posix()]
    inner = missed.name.replace(".", "/")
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
    wanted = _canonical(package_of(module))
    found = dict[str, bool]()
    for folder in folders:
        for path in sorted(folder.glob("*/requirements.txt")):
            found.setdefault(path.parent.name, wanted in _required(path))
    # PyTorch's image first: other images may have old versions for an old framework.
    return tuple(sorted((n for n, has in found.items() if has), key=lambda n: (n != "pytorch", n)))


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


def refine(
    found: ClueMatch, run: Run, words: CommandWriter, here: LocalFindings, array: int
) -> Explanation | None:
    """A better explanation than the clue alone; None if nothing more is known."""
    if not _NOT_RUN.match(found.line) or not found.groups:
        pass
    elif " " in found.groups[0] and len(run.command) == 1:
        return explain_quoted_command(run, words, array, found.line)
    elif "/" not in found.groups[0] and found.cause == "missing-command":
        return _misspelt(found, run, words, array)
    missed = missing_item(found)
    if missed is None:
        return None
    if here.state is FileState.KEPT:
        return _kept(found, missed, run, words, here, array)
    if missed.is_module:
        return _module(found, missed.name, run, words, here, array)
    if here.state is FileState.ABSENT:
        is_absolute = missed.name.startswith("/")
        where = "in the run's container" if is_absolute else f"in {here.folder}"
        is_data = "FileNotFoundError" in found.line
        more = " Data may lie in BATCHML_DATA_DIR." if is_data else ""
        return Explanation(
            found.cause, f"{missed.name} is not {where}.", (found.line,),
            f"Correct its name.{here.meant}{more}",
            words.submit(run, "--dry-run", array=array),
        )  # fmt: skip
    if here.state is FileState.SENT and found.cause == "permission":
        name = missed.name
        return Explanation(
            found.cause, f"{name} in {here.folder} may not be executed.", (found.line,),
            f"Make it executable (chmod +x {shlex.quote(name)}), or name its interpreter.",
            words.submit(run, command=("bash", *run.command), array=array),
        )  # fmt: skip
    return None


def explain_quoted_command(run: Run, words: CommandWriter, array: int, line: str) -> Explanation:
    """A whole command line was given as one word, which is not the name of a program."""
    text = run.command[0]
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
        (line or f"command: {text!r}",), fix, words.submit(run, command=command, array=array),
    )  # fmt: skip


def _misspelt(found: ClueMatch, run: Run, words: CommandWriter, array: int) -> Explanation | None:
    name = found.groups[0]
    meant = did_you_mean(name, _COMMANDS)
    if not meant or not run.command or run.command[0] != name or name in _COMMANDS:
        return None
    right = meant.split("'")[1]
    return Explanation(
        found.cause, f"There is no command {name}.{meant}", (found.line,), "Correct its name.",
        words.submit(run, command=(right, *run.command[1:]), array=array),
    )  # fmt: skip


def _kept(
    found: ClueMatch,
    missed: MissingItem,
    run: Run,
    words: CommandWriter,
    here: LocalFindings,
    array: int,
) -> Explanation:
    what = f"The module {missed.name}" if missed.is_module else missed.name
    data = "" if missed.is_module else " Put large data into BATCHML_DATA_DIR instead."
    if here.by == ".gitignore":
        fix = f"Add the line `!{here.path}` to {here.folder}/.batchmlignore.{data}"
    else:
        fix = f"Remove its line from {here.by}.{data}"
    return Explanation(
        found.cause, f"{what} was not sent: {here.by} excludes {here.path}.",
        (found.line, f"{here.path} is in {here.folder}"), fix, words.submit(run, array=array),
    )  # fmt: skip


def _module(
    found: ClueMatch, name: str, run: Run, words: CommandWriter, here: LocalFindings, array: int
) -> Explanation | None:
    if here.state is FileState.ABOVE:
        folder = here.folder.rpartition("/")[0] or "/"
        fix = (
            'Set `code = ".."` in its job.toml, or install it in the image.'
            if words.job
            else f"Submit from {folder}, or install it in the image."
        )
        return Explanation(
            found.cause, f"The module {name} was not sent: only the folder itself is sent.",
            (found.line, f"{here.path} is in {folder}, above {here.folder}"), fix,
            words.submit(run, array=array),
        )  # fmt: skip
    if here.state is FileState.SENT:
        return Explanation(
            found.cause, f"The module {name} is in the run, but not where Python looks.",
            (found.line, f"{here.path} is in {here.folder}, which is sent"),
            "Python searches only beside the program file: let it search the run's folder.",
            words.submit(run, "--set-env", "PYTHONPATH=.", array=array),
        )  # fmt: skip
    wants, image = package_of(name), own_image(run.image)
    verdict = f"The image {image or run.image} has no Python module {name}."
    if here.recipe:
        return Explanation(
            found.cause, verdict, (found.line,), f"Add {wants} to {here.recipe}.",
            words.submit(run, array=array) if words.is_local
            else words.batchml("image", "push", _pushed(here.recipe, image)),
        )  # fmt: skip
    others = [each for each in here.images if each != image]
    if others:
        return Explanation(
            found.cause, verdict, (found.line,), f"The image {others[0]} has {wants}.",
            words.submit(run, image=others[0], array=array),
        )  # fmt: skip
    if here.state is FileState.UNKNOWN and not words.is_local:
        return None
    more = "" if words.is_local else ", with a Dockerfile like that of images/python,"
    return Explanation(
        found.cause, verdict, (found.line,),
        f"Make your own image: write {wants} into images/mine/requirements.txt{more} "
        "and use it.", words.submit(run, image="mine", array=array),
    )  # fmt: skip


def _pushed(recipe: str, image: str) -> str:
    """The argument of `image push`: a name, or the folder of an image in a job's own folder."""
    folder, _, _ = recipe.rpartition("/")
    return image if folder == f"images/{image}" else folder or "."
