"""The program of a transfer run: it copies files between the workspace and the bucket.

    python -m batchml.runtime.transfer.worker

The request is JSON in `BATCHML_CARRY`: a verb and its arguments. The report, the progress and a
listing are written to the run's own prefix in the bucket. AWS Batch starts a worker again that was
stopped or lost its host; it continues with the same request.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Dict, List

from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import Store, StoreError
from batchml.runtime.transfer.archive import archive, archive_and_free
from batchml.runtime.transfer.archives import ArchiveStore
from batchml.runtime.transfer.backends import open_posix_archive
from batchml.runtime.transfer.main import describe_progress, list_folder, to_json
from batchml.runtime.transfer.manifest import read_manifest
from batchml.runtime.transfer.parallel import ProgressState, TransferProgress
from batchml.runtime.transfer.receive import TransferResult, combine, receive
from batchml.runtime.transfer.restore import ArchiveSource, remove, restore, stored_entries, verify
from batchml.runtime.transfer.tree import (
    FOLDER,
    LeftOut,
    TransferError,
    Tree,
    TreeEntry,
    to_line,
)

REQUEST_VARIABLE = "BATCHML_CARRY"
REPORT_KEY = "carry/report.json"
PROGRESS_KEY = "carry/progress.json"
LISTING_KEY = "carry/listing.jsonl"
TEMPORARY = 75  # exit code of a failure that a retry may cure

_EVERY = 5.0  # seconds between two progress reports


class SingleFileTree(Tree):
    """A tree with one file of a folder, under its own name or under `alias`."""

    def __init__(self, root: str, name: str, alias: str = "") -> None:
        super().__init__(root)
        self._name, self._alias = name, alias or name

    def walk(self, below: str, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        entry = self.lookup(self._name)
        if entry is not None:
            yield entry._replace(path=self._alias)

    def open(self, path: str) -> int:
        return super().open(self._name if path == self._alias else path)


class NoSuchPath(TransferError):
    """The path does not exist in the workspace."""

    def __init__(self, path: str) -> None:
        super().__init__(f"there is no {path!r} in the workspace")


def open_source(root: str, below: str) -> Tree:
    """Return the tree at a path below a folder: a folder, or a single file. Raises NoSuchPath."""
    entry = Tree(root).lookup(below)
    if entry is None:
        raise NoSuchPath(below)
    if entry.kind == FOLDER:
        return Tree(os.path.join(root, below) if below else root)
    above, _, name = below.rpartition("/")
    return SingleFileTree(os.path.join(root, above) if above else root, name)


class TransferWorker:
    """Executes one request.

    `root` is the folder of the workspace, `store` the run's own prefix in the bucket.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        root: str,
        store: Store,
        open_store: Callable[[str], ArchiveStore],
        progress: TransferProgress,
    ) -> None:
        self._request, self._root, self._store = request, root, store
        self._open, self._progress = open_store, progress
        self._kind = ""  # the kind of a pulled path: "file" or "folder"

    def run(self) -> Dict[str, Any]:
        """Execute the request; return the report. Raises TransferError, StoreError, OSError."""
        actions: Dict[str, Callable[[], TransferResult]] = {
            "list": self._list,
            "push": self._push,
            "pull": self._pull,
            "archive": self._archive,
            "restore": self._restore,
            "verify": self._verify,
            "remove": lambda: remove(Tree(self._root), self._request["paths"]),
        }
        return {**to_json(actions[self._request["verb"]]()), "kind": self._kind}

    @property
    def _checksum(self) -> bool:
        return bool(self._request.get("checksum"))

    @property
    def _overwrite(self) -> bool:
        return bool(self._request.get("overwrite"))

    def _list(self) -> TransferResult:
        path = self._request["path"]
        try:
            entries = list_folder(Tree(self._root), path, bool(self._request.get("deep")))
        except FileNotFoundError:
            raise NoSuchPath(path) from None
        self._store.put(LISTING_KEY, "".join(to_line(entry) + "\n" for entry in entries).encode())
        return TransferResult()

    def _push(self) -> TransferResult:
        """Copy the staged files into the workspace."""
        result = TransferResult()
        for staged in self._request["staged"]:
            staging = self._open(staged["place"])
            manifest = read_manifest(staging)
            if not manifest.is_complete:
                raise TransferError(f"{staged['place']} is not complete: push again")
            source = ArchiveSource(staging, stored_entries(manifest), self._root)
            tree, below = Tree(self._root), staged["below"]
            received = receive(source, tree, below, self._progress, "pushing", self._checksum)
            result = combine(result, received)
        return result

    def _pull(self) -> TransferResult:
        """Stage files of the workspace in the bucket."""
        tree = open_source(self._root, self._request["path"])
        self._kind = "file" if isinstance(tree, SingleFileTree) else "folder"
        staging = self._open(self._request["place"])
        staging.verifies = True  # the client compares the content that it fetches
        return archive(tree, staging, self._progress, self._checksum, overwrite=True)

    def _archive(self) -> TransferResult:
        target = self._open(self._request["place"])
        tree, progress = Tree(self._root), self._progress
        if self._request.get("delete"):
            return archive_and_free(tree, target, progress, self._checksum, self._overwrite)
        sends = not self._request.get("linked")
        return archive(tree, target, progress, self._checksum, sends, self._overwrite)

    def _restore(self) -> TransferResult:
        return restore(
            self._open(self._request["place"]), Tree(self._root), self._progress,
            partial=bool(self._request.get("partial")), checksum=self._checksum,
            overwrite=self._overwrite,
        )  # fmt: skip

    def _verify(self) -> TransferResult:
        return verify(self._open(self._request["place"]), self._progress)


class ProgressUploader:
    """Writes the progress into the bucket every five seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._next = 0.0

    def __call__(self, now: ProgressState) -> None:
        at = self._clock()
        if at < self._next:
            return
        self._next = at + _EVERY
        print(describe_progress(now), flush=True)
        try:
            self._store.put(PROGRESS_KEY, json.dumps(now._asdict()).encode())
        except StoreError:
            pass  # the next report comes soon


def main(environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> int:
    """Execute the request in the environment; return the exit code.

    0 means that the worker finished. Even then files may be missing, which the report names.
    """
    try:
        request = json.loads(environ[REQUEST_VARIABLE])
        root, store = environ["BATCHML_WORKSPACE"], open_store(environ["BATCHML_STORE"], environ)
    except KeyError as error:
        name = error.args[0]
        print(f"batchml: {name} is not set: batchml workspace starts this program", flush=True)
        return 2
    code = 0
    try:
        progress = TransferProgress(ProgressUploader(store, clock))
        report = TransferWorker(
            request, root, store, lambda url: open_posix_archive(url, environ), progress
        ).run()
    except (TransferError, StoreError, OSError) as error:
        code = TEMPORARY if getattr(error, "temporary", False) else 1
        report = {"error": str(error), "absent": isinstance(error, NoSuchPath)}
        print(f"batchml: {error}", flush=True)
    store.put(REPORT_KEY, json.dumps(report).encode())
    return code


def _stop(number: int, _: Any) -> None:
    """Exit at once: no file is left half written, and the next attempt continues."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main(os.environ))
