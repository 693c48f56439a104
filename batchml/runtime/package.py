"""The source files of batchml that are copied into an image."""

import os
from typing import Dict


def package_root() -> str:
    """The folder that must be in `sys.path` for `import batchml`."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def sources(whole: bool = False) -> Dict[str, bytes]:
    """Path below the image's module folder -> content, of `batchml.runtime`.

    With `whole`, of all of batchml, for the image of sweep controllers.
    """
    if whole:
        return _below("batchml")
    first = "batchml/__init__.py"
    return {first: _read(os.path.join(package_root(), first)), **_below("batchml/runtime")}


def _below(top: str) -> Dict[str, bytes]:
    root, found = package_root(), {}
    for folder, folders, names in os.walk(os.path.join(root, top)):
        # `share` has data that is installed with the package: images, jobs, templates.
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "share"))
        below = os.path.relpath(folder, root)
        for name in sorted(names):
            if name.endswith(".py"):
                found[os.path.join(below, name)] = _read(os.path.join(folder, name))
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
