"""What a run did not find, and what to do where it is known why. Pure."""

import re
import shlex

from batchml.errors import did_you_mean
from batchml.model.explanation import Explanation
from batchml.model.run import Run
from batchml.ops.explain.clues import Found
from batchml.ops.explain.folder import Here, Missed, State, package
from batchml.ops.explain.words import Words, own_image

_FOLDER = "/job/"  # the working directory of the shipped images

# What people start, for a word that is nearly one of them.
_COMMANDS = ("accelerate", "bash", "deepspeed", "jupyter", "make", "mpirun", "node", "pip",
             "pytest", "python", "python3", "ray", "Rscript", "sh", "torchrun", "uv")  # fmt: skip
_SHELL = re.compile(r"[;|&<>`$\n]|\*|^(?:for|while|if|cd|export|source|set|until|case|eval) ")
_NOT_RUN = re.compile(r"batchml: cannot run ")


def missed_by(found: Found) -> Missed | None:
    """The file or module that a clue names; None for another clue."""
    if not found.groups:
        return None
    name = found.groups[0]
    if found.cause == "missing-module":
        return Missed(name, is_module=True) if len(found.groups) == 1 else None
    is_file = found.cause == "missing-file"
    was_run = _NOT_RUN.match(found.line) and "/" in name
    if is_file or (was_run and found.cause in ("missing-command", "permission")):
        return Missed(name.removeprefix(_FOLDER).removeprefix("./"))
    return None


def refined(found: Found, run: Run, words: Words, here: Here, array: int) -> Explanation | None:
    """More than the clue alone tells; None where nothing more is known."""
    if not _NOT_RUN.match(found.line) or not found.groups:
        pass
    elif " " in found.groups[0] and len(run.command) == 1:
        return quoted(run, words, array, found.line)
    elif "/" not in found.groups[0] and found.cause == "missing-command":
        return _misspelt(found, run, words, array)
    missed = missed_by(found)
    if missed is None:
        return None
    if here.state is State.KEPT:
        return _kept(found, missed, run, words, here, array)
    if missed.is_module:
        return _module(found, missed.name, run, words, here, array)
    if here.state is State.ABSENT:
        is_elsewhere = missed.name.startswith("/")
        where = "where the run is" if is_elsewhere else f"in {here.folder}"
        is_data = "FileNotFoundError" in found.line
        more = " Data may lie in BATCHML_DATA_DIR." if is_data else ""
        return Explanation(
            found.cause, f"{missed.name} is not {where}.", (found.line,),
            f"Correct its name.{here.meant}{more}",
            words.submit(run, "--dry-run", array=array),
        )  # fmt: skip
    if here.state is State.SENT and found.cause == "permission":
        name = missed.name
        return Explanation(
            found.cause, f"{name} in {here.folder} may not be executed.", (found.line,),
            f"Make it executable (chmod +x {shlex.quote(name)}), or name its interpreter.",
            words.submit(run, command=("bash", *run.command), array=array),
        )  # fmt: skip
    return None


def quoted(run: Run, words: Words, array: int, line: str) -> Explanation:
    """A whole command line was given as one word, which is no program's name."""
    text = run.command[0]
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = []
    if not parts or _SHELL.search(text):
        fix, command = "For what a shell understands, name the shell.", ["bash", "-c", text]
    else:
        fix, command = "Give its words one by one, without quotes around them all.", parts
    return Explanation(
        "missing-command", "The whole command is one word with spaces, and no program's name.",
        (line or f"command: {text!r}",), fix, words.submit(run, command=command, array=array),
    )  # fmt: skip


def _misspelt(found: Found, run: Run, words: Words, array: int) -> Explanation | None:
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
    found: Found, missed: Missed, run: Run, words: Words, here: Here, array: int
) -> Explanation:
    what = f"The module {missed.name}" if missed.is_module else missed.name
    data = "" if missed.is_module else " Large data belongs into BATCHML_DATA_DIR instead."
    if here.by == ".gitignore":
        fix = f"The line `!{here.path}` in {here.folder}/.batchmlignore takes it along.{data}"
    else:
        fix = f"Without its line in {here.by} it travels.{data}"
    return Explanation(
        found.cause, f"{what} stayed behind: {here.by} keeps {here.path} out of the run.",
        (found.line, f"{here.path} is in {here.folder}"), fix, words.submit(run, array=array),
    )  # fmt: skip


def _module(
    found: Found, name: str, run: Run, words: Words, here: Here, array: int
) -> Explanation | None:
    if here.state is State.ABOVE:
        folder = here.folder.rpartition("/")[0] or "/"
        fix = (
            'Set `code = ".."` in its job.toml, or install it in the image.'
            if words.job
            else f"Submit from {folder}, or install it in the image."
        )
        return Explanation(
            found.cause, f"The module {name} stayed behind: only the folder itself travels.",
            (found.line, f"{here.path} is in {folder}, above {here.folder}"), fix,
            words.submit(run, array=array),
        )  # fmt: skip
    if here.state is State.SENT:
        return Explanation(
            found.cause, f"The module {name} is in the run, but not where Python looks.",
            (found.line, f"{here.path} is in {here.folder}, which travels"),
            "Python looks beside the program file: have it look in the whole folder.",
            words.submit(run, "--set-env", "PYTHONPATH=.", array=array),
        )  # fmt: skip
    wants, image = package(name), own_image(run.image)
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
    if here.state is State.UNKNOWN and not words.is_local:
        return None
    more = "" if words.is_local else ", with a Dockerfile like that of images/python,"
    return Explanation(
        found.cause, verdict, (found.line,),
        f"Make an image of your own: write {wants} into images/mine/requirements.txt{more} "
        "and use it.", words.submit(run, image="mine", array=array),
    )  # fmt: skip


def _pushed(recipe: str, image: str) -> str:
    """How `image push` is told of an image: one of a job's own files is named by its folder."""
    folder, _, _ = recipe.rpartition("/")
    return image if folder == f"images/{image}" else folder or "."
