"""This package's own files, as they are put into an image."""

import os
from typing import Dict


def package_root() -> str:
    """The folder that has to be on the module path for `batchml` to be imported."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def sources(whole: bool = False) -> Dict[str, bytes]:
    """Path below the image's folder for modules -> content, for `batchml.runtime` and no more.

    With `whole`, for all of batchml: what a sweep's controller runs in.
    """
    if whole:
        return _below("batchml")
    first = "batchml/__init__.py"
    return {first: _read(os.path.join(package_root(), first)), **_below("batchml/runtime")}


def _below(top: str) -> Dict[str, bytes]:
    root, found = package_root(), {}
    for folder, folders, names in os.walk(os.path.join(root, top)):
        # What ships beside the code is not code: images, jobs, templates.
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "share"))
        below = os.path.relpath(folder, root)
        for name in sorted(names):
            if name.endswith(".py"):
                found[os.path.join(below, name)] = _read(os.path.join(folder, name))
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
