"""This package's own files, as they are put into an image."""

import os
from typing import Dict


def sources() -> Dict[str, bytes]:
    """Path below the image's folder for modules -> content, for `batchml.runtime` and no more."""
    runtime = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(runtime)
    found = {"batchml/__init__.py": _read(os.path.join(package, "__init__.py"))}
    for name in sorted(os.listdir(runtime)):
        if name.endswith(".py"):
            found["batchml/runtime/" + name] = _read(os.path.join(runtime, name))
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
