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
    runtime = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(runtime)
    if whole:
        return _below(package, package)
    found = {"batchml/__init__.py": _read(os.path.join(package, "__init__.py"))}
    return {**found, **_below(runtime, package)}


def _below(top: str, package: str) -> Dict[str, bytes]:
    found = {}
    for folder, folders, names in os.walk(top):
        # What ships beside the code is not code: images, jobs, templates.
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "share"))
        below = os.path.relpath(folder, os.path.dirname(package))
        for name in sorted(names):
            if name.endswith(".py"):
                found[os.path.join(below, name)] = _read(os.path.join(folder, name))
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
