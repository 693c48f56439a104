"""What a run brings along: its code, and its command where that is too long for AWS Batch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple

from batchml.runtime.store import StoreError, open_store

BY_ORDER = "batchml-order"  # the command that stands for the one in the order
_DIGEST = re.compile(r"([0-9a-f]{64})\.")
MAX_ORDER = 8 * 1024**2  # bytes; the kernel takes 2 MiB of arguments and variables


class BadOrder(Exception):
    """The order is not there, damaged, or not one."""


class Order(NamedTuple):
    """What to run."""

    command: List[str]
    env: Dict[str, str]


def bring(url: str, folder: str, environ: Mapping[str, str], check: Callable[[], None]) -> str:
    """Fetch a file from S3 into `folder`; its path. Raises StoreError when it is not to be had."""
    base, _, name = url.rpartition("/")
    path = os.path.join(folder, name)
    if not open_store(base, environ, check).get_file(name, path):
        raise StoreError(f"{url} is not there: it was deleted, or never sent")
    return path


def digest_in(url: str) -> str:
    """The SHA-256 that a file is named by; empty for any other name."""
    found = _DIGEST.match(url.rpartition("/")[2])
    return found[1] if found else ""


def read_order(path: str, digest: str = "") -> Order:
    """The order in a file, whose content has this SHA-256 if one is given. Raises BadOrder."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_ORDER + 1)
    except OSError as error:
        raise BadOrder(f"the order {path} cannot be read: {error.strerror}") from error
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise BadOrder(f"the order {path} is damaged: its content is not what its name says")
    try:
        found = json.loads(data)
        command, env, params = found["command"], found.get("env", {}), found.get("params")
        if not (_are_texts(command) and command and _are_texts([*env, *env.values()])):
            raise ValueError("command and env must be texts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadOrder(f"{path} is not an order of batchml: {error}") from error
    told = {} if params is None else {"BATCHML_PARAMS": json.dumps(params, sort_keys=True)}
    return Order(command, {**told, **env})


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
