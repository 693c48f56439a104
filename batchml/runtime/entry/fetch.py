"""What a run brings along: its code, and its command where that is too long for AWS Batch."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import Store, StoreError, open_store

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


# --- code -----------------------------------------------------------------------------------------
# Unpack the code that travelled with a run. Regular files and folders, inside, and no more.


MAX_BYTES = 1024**3  # of all files; what a client sends is a quarter of that
MAX_FILES = 200_000
_BLOCK = 1 << 20


class BadArchive(Exception):
    """The archive holds what a code archive may not hold, or cannot be read."""


class _Hashed:
    """A stream that is read once from its start to its end, and its SHA-256."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = bytes(self._stream.read(size))
        self.hash.update(data)
        return data


def unpack(archive: str, folder: str, digest: str = "") -> int:
    """Unpack into `folder` and return the number of files.

    With a `digest`, the SHA-256 of the archive before compression must be that.

    Raises BadArchive for absolute names, `..`, links and devices: `tarfile` lets them pass by
    default, and its own filter has been bypassed before (CVE-2025-4517).
    """
    count = size = 0
    try:
        with gzip.open(archive) as packed:
            stream = _Hashed(packed)
            # As a pipe: nothing is sought, so that all of it goes through the hash, once.
            tar = tarfile.open(fileobj=stream, mode="r|")  # type: ignore[call-overload]  # noqa: SIM115
            for member in tar:
                path = _inside(folder, member.name)
                if member.isdir():
                    os.makedirs(path, exist_ok=True)
                    continue
                regular = member.isfile() and not member.issparse()
                content = tar.extractfile(member) if regular else None
                if content is None:
                    raise BadArchive(f"{member.name!r} is not a regular file")
                count, size = count + 1, size + member.size
                if count > MAX_FILES or size > MAX_BYTES:
                    raise BadArchive("it unpacks to more than a code archive may hold")
                _write(path, 0o755 if member.mode & 0o100 else 0o644, content)
            while stream.read(_BLOCK):  # to the end, where the checksum of it all is
                pass
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise BadArchive(f"the code archive {archive} cannot be unpacked: {error}") from error
    if digest and stream.hash.hexdigest() != digest:
        raise BadArchive(f"the code archive {archive} is not the one that was sent")
    return count


def _write(path: str, mode: int, content: Any) -> None:
    """A new file. Raises OSError where there is anything of that name."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        while True:
            block = content.read(_BLOCK)
            if not block:
                break
            file.write(block)


def _inside(folder: str, name: str) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name:
        raise BadArchive(f"{name!r} would be written outside the folder")
    return os.path.join(folder, *parts)


# --- the claim of a run ---------------------------------------------------------------------------
# One submission, one run: who of two jobs with the same key may go on.
#
# A submission whose answer was lost may, very rarely, have become two jobs. Each of them starts
# here, and only the first to say so in the store trains. A later attempt of the same job finds its
# own name there.


_TRIES = 3


def claim(store: Store, env: RuntimeEnv, key: str = "") -> Optional[str]:
    """The id of the job that has this run's claim; None when it is this one.

    `key` names another claim than that of the run. The nodes of a job claim together.
    Raises StoreError when the store cannot be had.
    """
    ours = env.run.partition("#")[0]
    if not ours:  # not in Batch
        return None
    key = key or f"claims/{_follower(env)}{env.array_index or 0}"
    for _ in range(_TRIES):
        if store.create(key, ours.encode()):
            return None
        holder = store.get(key)
        if holder is not None:  # else it was removed between the two calls
            name = holder.decode("utf-8", "replace").strip()
            return None if name == ours else name
    return None


def _follower(env: RuntimeEnv) -> str:
    """A job that follows one which was cancelled in another queue: of several such, one runs."""
    return f"after-{env.moved}/" if env.moved else ""


def refusal(holder: str) -> str:
    """What the second job says before it ends."""
    return f"batchml: this is a second run of one submission; {holder} goes on. Nothing was run."
