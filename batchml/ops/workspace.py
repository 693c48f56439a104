"""Where what is pushed and pulled goes: decided before anything moves."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from batchml.errors import UsageError


class Way(Struct, frozen=True):
    """One source, and what it becomes: `name` is that in the workspace."""

    source: Path  # of this machine, every link on the way followed
    name: str
    is_folder: bool

    @property
    def into(self) -> str:
        """The folder of the workspace in which what the source holds will lie; of a file, it."""
        return self.name if self.is_folder else self.name.rpartition("/")[0]


def ways(sources: Sequence[Path], dest: str, is_folder: Callable[[str], bool]) -> list[Way]:
    """What each source becomes in the workspace; `dest` is a path below it, and may end with `/`.

    The same answer a second time, unlike that of cp: a folder that was pushed as `sets` is not
    pushed into `sets` again. Raises UsageError, naming all that is wrong.
    """
    target = dest.strip("/")
    goes_into = not target or dest.endswith("/") or len(sources) > 1
    found, wrong = [], []
    for source in sources:
        real = Path(os.path.realpath(source))
        name = os.path.basename(os.path.abspath(source))
        if not real.exists():
            wrong.append(f"{source} does not exist.")
        elif not (real.is_dir() or real.is_file()):
            wrong.append(f"{source} is neither a file nor a folder.")
        elif goes_into and not name:
            wrong.append(f"{source} has no name: say what it becomes.")
        else:
            into = goes_into or (real.is_file() and is_folder(target))
            found.append(
                Way(real, f"{target}/{name}".strip("/") if into else target, real.is_dir())
            )
    names = [way.name for way in found]
    wrong += [f"Two of the sources would become {name}." for name in _twice(names)]
    if wrong:
        raise UsageError("Nothing was pushed:\n" + "\n".join(f"  - {each}" for each in wrong))
    return found


def _twice(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def landing(name: str, is_folder: bool, dest: Path | None, here: Path) -> Path:
    """What something pulled becomes on this machine: `dest` itself, or below it where it is there.

    A folder becomes `dest`, and into one that is there goes what it lacks; a file goes into a
    folder that is there, or where `dest` ends with a slash (which Path forgets: give `dest/.`).
    """
    if dest is None:
        return here / (name.rpartition("/")[2] or "workspace")
    target = here / dest
    return target / name.rpartition("/")[2] if not is_folder and target.is_dir() else target
