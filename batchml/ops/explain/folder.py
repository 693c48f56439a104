"""What the folder that a run's files came from, and the images here, tell of what it misses."""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct


class State(StrEnum):
    UNKNOWN = "unknown"  # nobody looked, or the folder is gone
    SENT = "sent"
    KEPT = "kept"  # it is there, and an ignore file keeps it there
    ABOVE = "above"  # it is in the folder above, which does not travel
    ABSENT = "absent"


class Missed(Struct, frozen=True):
    """What a run did not find: a file by its path, or a module by its name."""

    name: str
    is_module: bool = False


class Here(Struct, frozen=True):
    """What is known here of it. `path` is how it, or the ignored folder that holds it, is called
    in `folder`; `by` is the file that ignores it.

    `images` are those whose requirements name the module; `recipe` is the requirements.txt of the
    run's own image, where that is the user's.
    """

    state: State = State.UNKNOWN
    folder: str = ""
    path: str = ""
    by: str = ""
    meant: str = ""  # " Did you mean 'train.py'?"
    images: tuple[str, ...] = ()
    recipe: str = ""


def look(folder: Path | None, missed: Missed, state_folder: Path | None = None) -> Here:
    """What has become of a file or module of the folder, if that is still there."""
    from batchml.errors import did_you_mean
    from batchml.ops.code import find

    if folder is None or not folder.is_dir():
        return Here()
    try:
        found = find(folder, state_folder)
        names = _names(missed)
        for name in names:
            if not (folder / name).exists():
                continue
            for ignored, by in found.ignored.items():
                if f"{name}/".startswith(ignored.rstrip("/") + "/"):
                    return Here(State.KEPT, str(folder), ignored, by)
            return Here(State.SENT, str(folder), name)
        above = next((name for name in names if (folder.parent / name).exists()), "")
    except OSError:
        return Here()
    if above and missed.is_module:
        return Here(State.ABOVE, str(folder), above)
    meant = "" if missed.is_module else did_you_mean(missed.name, found.files)
    return Here(State.ABSENT, str(folder), meant=meant)


def _names(missed: Missed) -> list[str]:
    """The paths that it could have in the folder. Outside it nothing is looked for."""
    if not missed.is_module:
        path = Path(missed.name.removeprefix("./"))
        return [] if path.is_absolute() or ".." in path.parts else [path.as_posix()]
    inner = missed.name.replace(".", "/")
    top = inner.partition("/")[0]
    return [f"{inner}.py", f"{inner}/__init__.py", inner, f"{top}.py", f"{top}/__init__.py"]


# Packages that are not called as the module in them.
_PACKAGES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil", "dotenv": "python-dotenv", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip


def package(module: str) -> str:
    """The package that has a module, as far as that is known: `scikit-learn` for `sklearn.svm`."""
    top = module.partition(".")[0]
    return _PACKAGES.get(top, top)


def images_with(folders: Iterable[Path], module: str) -> tuple[str, ...]:
    """The images whose requirements.txt names the package of a module."""
    wanted = _canonical(package(module))
    found = dict[str, bool]()
    for folder in folders:
        for path in sorted(folder.glob("*/requirements.txt")):
            found.setdefault(path.parent.name, wanted in _required(path))
    # PyTorch's, where several have it: others hold old versions for an old framework.
    return tuple(sorted((n for n, has in found.items() if has), key=lambda n: (n != "pytorch", n)))


def _required(path: Path) -> set[str]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    return {_canonical(name[0]) for line in lines if (name := re.match(r"[\w.-]+", line))}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
