"""Paths of this machine that a container may see: checked, made, opened."""

import os
from collections.abc import Iterable, Mapping
from typing import Any


class NotStarted(Exception):
    """The program never ran; the text says why, in AWS's words."""


def mount(source: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """A bind mount, of a folder that is made if it is missing. Raises NotStarted, OSError."""
    roots = [source["below"]] if source["below"] else allowed
    real = _checked(source["path"], roots)
    if source["make"] and not os.path.exists(real):
        os.makedirs(real, exist_ok=True)
        os.chmod(real, 0o755)
        real = _checked(source["path"], roots)
    if source["ours"]:
        open_up(real)
    return {
        "Type": "bind", "Source": real, "Target": source["target"],
        "ReadOnly": source["read_only"],
    }  # fmt: skip


def _checked(path: str, roots: Iterable[str]) -> str:
    """Where a path leads, which must be below one of `roots`."""
    real = os.path.realpath(path)
    for root in map(os.path.realpath, roots):
        if real == root or real.startswith(root.rstrip("/") + "/"):
            return real
    raise NotStarted(
        f"CannotCreateContainerError: {path} may not be mounted. Start the server with "
        f"--allow-path {path} to let jobs have it"
    )


def open_up(path: str) -> None:
    """Let any user of a container in. On this machine the state folder above lets nobody pass."""
    mode = 0o777 if os.path.isdir(path) else 0o644
    if os.stat(path).st_mode & 0o777 != mode:
        os.chmod(path, mode)


def let_read(folder: str) -> None:
    """The same for all that lies in a folder, to be read alone."""
    for place, _, names in os.walk(folder):
        os.chmod(place, 0o755)
        for name in names:
            os.chmod(os.path.join(place, name), 0o644)
