"""Addresses of services beside the embedded server, as this state folder keeps them."""

import os
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from batchml.local.ecs import KEPT
from batchml.local.home import Home, read_record


class Kept(Struct, frozen=True):
    """The part of the kept settings that says where other services are: service -> URL."""

    endpoints: dict[str, str] = {}


def kept_endpoints(home: Home) -> dict[str, str]:
    """Looked at for each attempt, so that a change needs no restart."""
    path = f"{home.local}/{KEPT}"
    try:
        changed = os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return {}
    return _read(path, changed)


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> dict[str, str]:
    found = read_record(Path(path), Kept)
    return found.endpoints if found else {}
