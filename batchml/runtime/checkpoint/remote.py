"""Keep the checkpoints of a run without a workspace in the run's store, and fetch them from there.

A complete checkpoint is sent at once, with its manifest last: a checkpoint in the store that has a
manifest is complete. Other files of the folder are sent once they have not changed for a while.
Files that the program removes are removed from the store, too. In the same way a sweep keeps its
trials' checkpoints in the sweep's store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set

from batchml.runtime.checkpoint.layout import (
    FENCE,
    MANIFEST,
    REMOVING,
    SAVING,
    CheckpointName,
    FenceTerm,
    find_damage,
    list_checkpoints,
    looks_whole,
    parse_name,
    prune,
    read_manifest,
    remove,
)
from batchml.runtime.checkpoint.sharded import KEPT_APART
from batchml.runtime.entry.attempt import AttemptHandle
from batchml.runtime.entry.folders import FileState, is_kept_in_store
from batchml.runtime.entry.outputs import OutputSender, StorePoller, files_of
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import RuntimeEnv, is_main_node, seconds_of
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import Store

LATEST = "LATEST.json"  # names the newest checkpoint in the store and the attempt that sent it
EVERY = 5.0  # seconds between two polls
VARIABLE = "BATCHML_KEEP_EVERY"  # sets another interval between two polls, in seconds
RESUMED = (
    ".batchml-resumed.json"  # records that the checkpoint of another run was copied: resume.py
)
_OURS = (FENCE, KEPT_APART, LATEST, RESUMED)  # files that are not sent


class CheckpointFiles(NamedTuple):
    """The files of a folder or store: those of each checkpoint, and the other files."""

    checkpoints: Dict[CheckpointName, List[str]]  # each file begins with the checkpoint's name
    others: List[str]

    @classmethod
    def among(cls, names: Iterable[str]) -> CheckpointFiles:
        checkpoints: Dict[CheckpointName, List[str]] = {}
        others = []
        for name in names:
            top = name.partition("/")[0]
            entry = parse_name(top) if top != name else None
            if entry is not None:
                checkpoints.setdefault(entry, []).append(name)
            elif not top.startswith((SAVING, REMOVING)) and name not in _OURS:
                others.append(name)
        return cls(checkpoints, others)

    def with_manifest(self) -> List[CheckpointName]:
        """The checkpoints with a manifest, the newest first."""
        found = self.checkpoints.items()
        return sorted((e for e, names in found if f"{e.name}/{MANIFEST}" in names), reverse=True)


def run_prefix(env: RuntimeEnv) -> str:
    """The prefix of the checkpoints in a run's store."""
    return child_prefix(env.array_index)


def child_prefix(child: Optional[int]) -> str:
    """The prefix of the checkpoints of one child of an array; of a run that is none with None."""
    return "checkpoints/" if child is None else f"checkpoints/{child}/"


def fetch(env: RuntimeEnv, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Fetch the checkpoints of earlier attempts, before the command starts or is restarted.

    Raises StoreError: starting again from the beginning would be worse than waiting.
    """
    if not is_kept_in_store(env):
        return
    if environ.get("AWS_BATCH_JOB_NUM_NODES", "1") != "1":
        with open(os.path.join(env.checkpoint_dir, KEPT_APART), "w", encoding="ascii") as file:
            file.write("Each node has its own folder here. Only the main node's is kept.\n")
    fetch_newest(open_store(env.store, environ), run_prefix(env), env.checkpoint_dir, say)


def fetch_newest(store: Store, prefix: str, folder: str, say: Callable[[str], None]) -> None:
    """Fetch the newest complete checkpoint, unless the folder has one as new; and all other files.

    Raises StoreError and OSError.
    """
    found = CheckpointFiles.among(key[len(prefix) :] for key in store.keys(prefix))
    names = list_checkpoints(folder)
    local = [name for name in names if looks_whole(f"{folder}/{name.name}", name.step)]
    for entry in found.with_manifest():
        if local and entry <= local[0]:
            break
        why = fetch_checkpoint(store, prefix, folder, entry, found.checkpoints[entry])
        if not why:
            prune(folder, 2, entry.name, set())
            say(f"batchml notice: the checkpoint of step {entry.step} was fetched from the store")
            break
        say(f"batchml notice: the checkpoint {entry.name} in the store is skipped: {why}")
    for name in found.others:
        _fetch_file(store, prefix + name, os.path.join(folder, *name.split("/")))


def fetch_checkpoint(
    store: Store, prefix: str, folder: str, entry: CheckpointName, names: List[str]
) -> str:
    """Fetch a checkpoint into `folder`. Return its damage in words, or an empty text."""
    temporary = f"{SAVING}fetch-{entry.name}"
    path = os.path.join(folder, temporary)
    try:
        for name in names:
            below = name[len(entry.name) + 1 :].split("/")
            _fetch_file(store, prefix + name, os.path.join(path, *below))
        why = find_damage(path, entry.step)
        if not why:
            remove(folder, entry.name)  # an incomplete checkpoint of this name
            os.rename(path, os.path.join(folder, entry.name))
        return why
    finally:
        remove(folder, temporary)


def _fetch_file(store: Store, key: str, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    store.get_file(key, path)


class CheckpointSender:
    """Sends new files of a checkpoint folder to a store: from a thread, and the rest at the end."""

    def __init__(
        self, folder: str, store: Store, prefix: str, term: Optional[FenceTerm] = None
    ) -> None:
        """`term` is this generation: it sends nothing if a later attempt has sent a checkpoint."""
        self._folder, self._store, self._prefix, self._term = folder, store, prefix, term
        self._outputs = OutputSender(folder, store, prefix)
        self._kept: Set[str] = set()  # names of checkpoints that are complete in the store
        self._has_adopted = False  # whether `_adopt` was called
        self._before: Dict[str, FileState] = {}  # the files at the last poll
        self._unchanged = 0  # polls in a row that found nothing new
        self._gone: Set[str] = set()  # files in the store that the folder lacked at the last poll
        self._poller = StorePoller(self.poll, self._on_error)
        self.error = ""  # of the last poll

    def start(self, interval: float = EVERY) -> None:
        self._poller.start(interval)

    def finish(self) -> List[str]:
        """Send the remaining files. Return a line for each file that could not be sent."""
        self._poller.end()
        return self.poll(is_last=True)

    def poll(self, is_last: bool = False) -> List[str]:
        """Send new files; in the last poll also files that have just changed. Return the errors."""
        files = files_of(self._folder)
        self._unchanged = self._unchanged + 1 if files == self._before and not self.error else 0
        if self._unchanged > 1:
            return []  # everything has been sent or removed
        try:
            errors = self._send(files, is_last)
        except OSError as error:
            errors = [error_line(error)]
        self._before = files
        self.error = errors[0] if errors else ""
        return errors

    def _send(self, files: Mapping[str, FileState], is_last: bool) -> List[str]:
        found = CheckpointFiles.among(files)
        if not (found.checkpoints or found.others or self._kept):
            return []
        if self._is_fenced_off():
            return ["a later attempt of this run keeps its checkpoints now"]
        if not self._has_adopted:
            self._adopt(found)
        errors = self._send_checkpoints(found, files)
        others = {name: files[name] for name in found.others}
        unchanged = {n: s for n, s in others.items() if is_last or self._before.get(n) == s}
        errors += _lines(self._outputs.send(unchanged))
        if not errors:
            self._remove_gone(found)
        return errors

    def _adopt(self, found: CheckpointFiles) -> None:
        """Find the checkpoints that were fetched from the store: they need not be sent."""
        for entry in found.with_manifest():
            manifest = f"{entry.name}/{MANIFEST}"
            with open(os.path.join(self._folder, manifest), "rb") as file:
                if self._store.get(self._prefix + manifest) == file.read():
                    self._kept.add(entry.name)
        self._has_adopted = True

    def _send_checkpoints(
        self, found: CheckpointFiles, files: Mapping[str, FileState]
    ) -> List[str]:
        errors: List[str] = []
        for entry in found.with_manifest():
            path = os.path.join(self._folder, entry.name)
            if entry.name in self._kept or not looks_whole(path, entry.step):
                continue
            manifest = f"{entry.name}/{MANIFEST}"
            names = [name for name in found.checkpoints[entry] if name != manifest]
            failed = self._outputs.send({name: files[name] for name in names})
            failed = failed or self._outputs.send({manifest: files[manifest]})
            if failed and os.path.isdir(path):  # else the program removed it meanwhile
                errors += _lines(failed)
            if not failed:
                self._write_latest(path, entry)
                self._kept.add(entry.name)
        return errors

    def _write_latest(self, path: str, entry: CheckpointName) -> None:
        """Record the newest checkpoint, for people, and for earlier attempts that still live."""
        if all(kept < entry for kept in filter(None, map(parse_name, self._kept))):
            latest = {name: value for name, value in read_manifest(path).items() if name != "files"}
            data = json.dumps({**latest, "name": entry.name}).encode()
            self._store.put(self._prefix + LATEST, data)

    def _is_fenced_off(self) -> bool:
        if self._term is None:
            return False
        try:
            latest = json.loads(self._store.get(self._prefix + LATEST) or b"{}")
            attempt = int(latest["attempt"]) if latest.get("run") == self._term.run else 0
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return attempt > self._term.attempt

    def _remove_gone(self, found: CheckpointFiles) -> None:
        """Remove files from the store that the folder no longer has.

        Checkpoints are removed only after a newer one is in the store; other files only if two
        polls in a row have missed them.
        """
        local = {entry.name for entry in found.checkpoints}
        others = set(found.others)
        if not local & self._kept and not others:
            return  # nothing newer is in the store yet
        keys = self._store.keys(self._prefix)
        stored = CheckpointFiles.among(key[len(self._prefix) :] for key in keys)
        gone: List[str] = []
        for entry, names in stored.checkpoints.items():
            if entry.name not in local and local & self._kept:
                gone += sorted(names, key=lambda name: not name.endswith("/" + MANIFEST))
                self._kept.discard(entry.name)
        absent = set(stored.others) - others
        gone += sorted(absent & self._gone)
        self._gone = absent
        self._store.delete(*(self._prefix + name for name in gone))

    def _on_error(self, error: Exception) -> None:
        self.error = error_line(error)


class CheckpointKeeper:
    """An attempt plug-in that keeps checkpoints which would be lost with the attempt.

    In a run of several nodes it keeps those of the main node, which has rank 0.
    """

    def __init__(self, attempt: AttemptHandle) -> None:
        env = attempt.env
        self._attempt = attempt
        self._sender: Optional[CheckpointSender] = None
        self._has_warned = False
        if is_kept_in_store(env) and is_main_node(attempt.environ):
            store = open_store(env.store, attempt.environ)
            term = FenceTerm.read(attempt.environ)
            self._sender = CheckpointSender(env.checkpoint_dir, store, run_prefix(env), term)
            self._sender.start(seconds_of(attempt.environ.get(VARIABLE), least=0.1, default=EVERY))

    def tick(self, now: float) -> None:
        error = self._sender.error if self._sender is not None else ""
        if error and not self._has_warned:
            self._has_warned = True
            self._attempt.say(f"batchml notice: checkpoints are not kept for now: {error}")

    def finish(self) -> None:
        errors = self._sender.finish() if self._sender is not None else []
        if errors:
            files = "1 file" if len(errors) == 1 else f"{len(errors)} files"
            self._attempt.say(f"batchml: {files} of checkpoints could not be kept: {errors[0]}")


def _lines(errors: Mapping[str, str]) -> List[str]:
    return [f"{name}: {why}" for name, why in errors.items()]
