"""Before the command: fetch the code, read a command that is too long for AWS Batch, claim the run.

In the environment's store, the names of code archives and command files begin with their SHA-256.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import Store, StoreError

IN_FILE = "batchml-order"  # stands for the job's command if that is in a command file
_DIGEST = r"([0-9a-f]{64})\."
MAX_COMMAND_FILE = 8 * 1024**2  # bytes; Linux accepts 2 MiB of arguments and variables


class NotStarted(Exception):
    """The attempt ends before its command, with this message and exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class BadCommandFile(Exception):
    """The command file is missing or damaged, or is a file of another kind."""


class CommandFile(NamedTuple):
    """A command and variables that are too long for AWS Batch's job definition and overrides."""

    command: List[str]
    env: Dict[str, str]


def download(url: str, folder: str, environ: Mapping[str, str], check: Callable[[], None]) -> str:
    """Fetch a file from S3 into `folder`. Return its path. Raises StoreError."""
    base, _, name = url.rpartition("/")
    path = os.path.join(folder, name)
    if not open_store(base, environ, check).get_file(name, path):
        raise StoreError(f"{url} does not exist: it was deleted, or never sent")
    return path


def digest_in_name(url: str) -> str:
    """The SHA-256 in a file's name; empty for any other name."""
    found = re.match(_DIGEST, url.rpartition("/")[2])
    return found[1] if found else ""


def read_command_file(path: str, digest: str = "") -> CommandFile:
    """Read a command file; check the SHA-256 of its content, if given. Raises BadCommandFile."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_COMMAND_FILE + 1)
    except OSError as error:
        raise BadCommandFile(f"the command file {path} cannot be read: {error.strerror}") from error
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise BadCommandFile(f"the command file {path} is damaged: its SHA-256 has changed")
    try:
        found = json.loads(data)
        command, env, params = found["command"], found.get("env", {}), found.get("params")
        if not (_are_texts(command) and command and _are_texts([*env, *env.values()])):
            raise ValueError("command and env must be texts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCommandFile(f"{path} is not a command file of batchml: {error}") from error
    variables = {} if params is None else {"BATCHML_PARAMS": json.dumps(params, sort_keys=True)}
    return CommandFile(command, {**variables, **env})


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


# --- Code -----------------------------------------------------------------------------------------


MAX_BYTES = 1024**3  # of all files; a client sends at most a quarter of this
MAX_FILES = 200_000
_BLOCK = 1 << 20


class BadArchive(Exception):
    """A code archive has entries that are neither files nor folders, or cannot be read."""


class _HashedStream:
    """A stream that is read once from start to end, and the SHA-256 of what was read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = bytes(self._stream.read(size))
        self.hash.update(data)
        return data


def unpack(archive: str, folder: str, digest: str = "") -> int:
    """Unpack regular files and folders into `folder`, and return the number of files.

    `digest` is the SHA-256 of the archive before compression.

    Raises BadArchive for another SHA-256, and for absolute names, `..`, links and devices:
    `tarfile` allows them by default, and its own filter has been bypassed before (CVE-2025-4517).
    """
    count = size = 0
    try:
        with gzip.open(archive) as packed:
            stream = _HashedStream(packed)
            # Read as a pipe, without seeking, so that every byte is hashed once.
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
                    raise BadArchive("it unpacks to more than a code archive may contain")
                _write(path, 0o755 if member.mode & 0o100 else 0o644, content)
            while stream.read(_BLOCK):  # to the end, where gzip verifies its checksum
                pass
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise BadArchive(f"the code archive {archive} cannot be unpacked: {error}") from error
    if digest and stream.hash.hexdigest() != digest:
        raise BadArchive(f"the code archive {archive} is not the one that was sent")
    return count


def _write(path: str, mode: int, content: Any) -> None:
    """Write a new file. Raises OSError if the name exists."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        shutil.copyfileobj(content, file, _BLOCK)


def _inside(folder: str, name: str) -> str:
    """The path of an entry below `folder`. Raises BadArchive for a name that leads outside."""
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name:
        raise BadArchive(f"{name!r} would be written outside the folder")
    return os.path.join(folder, *parts)


# --- The claim of a run ---------------------------------------------------------------------------
# A submission whose answer was lost may, very rarely, have become two jobs. Both start, and only
# the first to write its claim into the store continues. A later attempt of that job finds its own
# id in the claim.


_TRIES = 3


def claim(store: Store, env: RuntimeEnv, key: str = "") -> Optional[str]:
    """Claim the run, and return None; if another job has claimed it, return that job's id.

    `key` is the claim's key in the store, by default that of the run. All nodes of a job share one
    claim. Raises StoreError.
    """
    ours = env.run.partition("#")[0]
    if not ours:  # this is no job of AWS Batch
        return None
    # Jobs that replace a job which was cancelled in another queue have a claim of their own.
    moved = f"after-{env.moved}/" if env.moved else ""
    key = key or f"claims/{moved}{env.array_index or 0}"
    for _ in range(_TRIES):
        if store.create(key, ours.encode()):
            return None
        holder = store.get(key)
        if holder is not None:  # else the claim was removed between the two calls
            name = holder.decode("utf-8", "replace").strip()
            return None if name == ours else name
    return None


def describe_duplicate(holder: str) -> str:
    """Why this job ends at once: the job `holder` has claimed its run."""
    return f"this is a second run of one submission; {holder} goes on. Nothing was run."
