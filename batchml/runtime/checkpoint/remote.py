"""Checkpoints of a run without a workspace: in its store while it goes on, and back from there.

Whole checkpoints (checkpoint.py) go as soon as they are there, their manifest last, so that in the
store, too, one is whole or none. Other files of the folder go once they have rested. What the
program removes goes from the store as well. A sweep's board keeps its trials' in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from batchml.runtime.checkpoint.fence import FENCE, Term
from batchml.runtime.checkpoint.layout import (
    MANIFEST,
    REMOVING,
    SAVING,
    Entry,
    entries,
    entry_of,
    looks_whole,
    prune,
    read_manifest,
    remove,
    trouble,
)
from batchml.runtime.checkpoint.sharded import KEPT_APART
from batchml.runtime.entry.attempt import Attempt
from batchml.runtime.entry.folders import is_kept
from batchml.runtime.entry.outputs import Looks, Outputs, files_of
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import Store, open_store
from batchml.runtime.telemetry.budget import is_main_node

LATEST = "LATEST.json"  # for people, and a fence: who wrote the newest
EVERY = 5.0  # seconds between two looks
VARIABLE = "BATCHML_KEEP_EVERY"  # other seconds
_State = Tuple[int, int]  # of a file: size, time of the last change
RESUMED = ".batchml-resumed.json"  # the run went on from another's, which was copied (resuming.py)
_OURS = (FENCE, KEPT_APART, LATEST, RESUMED)  # beside the checkpoints, and not kept


class Found(NamedTuple):
    """What a folder or a store has: files by checkpoint, and other files."""

    checkpoints: Dict[Entry, List[str]]  # names begin with that of the checkpoint
    others: List[str]

    @classmethod
    def among(cls, names: Iterable[str]) -> Found:
        checkpoints: Dict[Entry, List[str]] = {}
        others = []
        for name in names:
            top = name.partition("/")[0]
            entry = entry_of(top) if top != name else None
            if entry is not None:
                checkpoints.setdefault(entry, []).append(name)
            elif not top.startswith((SAVING, REMOVING)) and name not in _OURS:
                others.append(name)
        return cls(checkpoints, others)

    def whole(self) -> List[Entry]:
        """Those with a manifest, the newest first."""
        found = self.checkpoints.items()
        return sorted((e for e, names in found if f"{e.name}/{MANIFEST}" in names), reverse=True)


def prefix_of(env: RuntimeEnv) -> str:
    """Where in a run's store its checkpoints are."""
    return prefix_for(env.array_index)


def prefix_for(child: Optional[int]) -> str:
    return "checkpoints/" if child is None else f"checkpoints/{child}/"


def fetch(env: RuntimeEnv, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Bring what earlier attempts kept, before the command starts, or starts again on its node.

    Raises StoreError where the store cannot be had: to begin anew would be worse than to wait.
    """
    if not is_kept(env):
        return
    if environ.get("AWS_BATCH_JOB_NUM_NODES", "1") != "1":
        with open(os.path.join(env.checkpoint_dir, KEPT_APART), "w", encoding="ascii") as file:
            file.write("Each node has a folder of its own here; the main node's is kept.\n")
    bring(open_store(env.store, environ), prefix_of(env), env.checkpoint_dir, say)


def bring(store: Store, prefix: str, folder: str, say: Callable[[str], None]) -> None:
    """Fetch the newest checkpoint that is whole, unless the folder has one as new, and all other
    files. Raises StoreError and OSError.
    """
    found = Found.among(key[len(prefix) :] for key in store.keys(prefix))
    here = [each for each in entries(folder) if looks_whole(f"{folder}/{each.name}", each.step)]
    for entry in found.whole():
        if here and entry <= here[0]:
            break
        why = bring_checkpoint(store, prefix, folder, entry, found.checkpoints[entry])
        if not why:
            prune(folder, 2, entry.name, set())
            say(f"batchml notice: the checkpoint of step {entry.step} was brought from the store")
            break
        say(f"batchml notice: the kept checkpoint {entry.name} is passed over: {why}")
    for name in found.others:
        _bring_file(store, prefix + name, os.path.join(folder, *name.split("/")))


def bring_checkpoint(store: Store, prefix: str, folder: str, entry: Entry, names: List[str]) -> str:
    """What is wrong with it; empty once it is there."""
    temporary = f"{SAVING}fetch-{entry.name}"
    path = os.path.join(folder, temporary)
    try:
        for name in names:
            below = name[len(entry.name) + 1 :].split("/")
            _bring_file(store, prefix + name, os.path.join(path, *below))
        why = trouble(path, entry.step)
        if not why:
            remove(folder, entry.name)  # one that does not look whole
            os.rename(path, os.path.join(folder, entry.name))
        return why
    finally:
        remove(folder, temporary)


def _bring_file(store: Store, key: str, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    store.get_file(key, path)


class Kept:
    """Sends what is new in a folder to a store, from a thread, and at the end what is left."""

    def __init__(self, folder: str, store: Store, prefix: str, term: Optional[Term] = None) -> None:
        """`term`: this generation; where a later one has kept a checkpoint, nothing is sent."""
        self._folder, self._store, self._prefix, self._term = folder, store, prefix, term
        self._outputs = Outputs(folder, store, prefix)
        self._kept: Set[str] = set()  # names of checkpoints that are whole in the store
        self._has_adopted = False
        self._seen: Dict[str, _State] = {}  # at the last look
        self._calm = 0  # looks in a row that found nothing new
        self._gone: Set[str] = set()  # sent, and not in the folder at the last look
        self._looks = Looks(self.look, self._failed)
        self.trouble = ""  # what went wrong at the last look

    def start(self, every: float = EVERY) -> None:
        self._looks.start(every)

    def finish(self) -> List[str]:
        """Send the rest; what could not be sent, a line each."""
        self._looks.end()
        return self.look(at_rest=True)

    def look(self, at_rest: bool = False) -> List[str]:
        """Send what is new; with `at_rest` also what has just changed. What went wrong."""
        files = files_of(self._folder)
        self._calm = self._calm + 1 if files == self._seen and not self.trouble else 0
        if self._calm > 1:
            return []  # all was sent, and what is gone was removed
        try:
            told = self._send(files, at_rest)
        except OSError as error:
            told = [" ".join(str(error).split())]
        self._seen = files
        self.trouble = told[0] if told else ""
        return told

    def _send(self, files: Mapping[str, _State], at_rest: bool) -> List[str]:
        found = Found.among(files)
        if not (found.checkpoints or found.others or self._kept):
            return []
        if self._is_fenced_off():
            return ["a later attempt of this run keeps its own by now"]
        if not self._has_adopted:
            self._adopt(found)
        told = self._keep(found, files)
        others = {name: files[name] for name in found.others}
        rested = {n: s for n, s in others.items() if at_rest or self._seen.get(n) == s}
        told += _lines(self._outputs.send(rested))
        if not told:
            self._tidy(found)
        return told

    def _adopt(self, found: Found) -> None:
        """What was brought from the store is there already."""
        for entry in found.whole():
            manifest = f"{entry.name}/{MANIFEST}"
            with open(os.path.join(self._folder, manifest), "rb") as file:
                if self._store.get(self._prefix + manifest) == file.read():
                    self._kept.add(entry.name)
        self._has_adopted = True

    def _keep(self, found: Found, files: Mapping[str, _State]) -> List[str]:
        told: List[str] = []
        for entry in found.whole():
            path = os.path.join(self._folder, entry.name)
            if entry.name in self._kept or not looks_whole(path, entry.step):
                continue
            manifest = f"{entry.name}/{MANIFEST}"
            names = [name for name in found.checkpoints[entry] if name != manifest]
            wrong = self._outputs.send({name: files[name] for name in names})
            wrong = wrong or self._outputs.send({manifest: files[manifest]})
            if wrong and os.path.isdir(path):  # else the program removed it meanwhile
                told += _lines(wrong)
            if not wrong:
                self._point(path, entry)
                self._kept.add(entry.name)
        return told

    def _point(self, path: str, entry: Entry) -> None:
        """Say which one is the newest, for people and for attempts that should have ended."""
        if all(name < entry.name for name in self._kept):
            told = {each: value for each, value in read_manifest(path).items() if each != "files"}
            data = json.dumps({**told, "name": entry.name}).encode()
            self._store.put(self._prefix + LATEST, data)

    def _is_fenced_off(self) -> bool:
        if self._term is None:
            return False
        try:
            told = json.loads(self._store.get(self._prefix + LATEST) or b"{}")
            attempt = int(told["attempt"]) if told.get("run") == self._term.run else 0
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return attempt > self._term.attempt

    def _tidy(self, found: Found) -> None:
        """Remove from the store what the folder no longer has, once something newer is there."""
        here = {entry.name for entry in found.checkpoints}
        others = set(found.others)
        if not here & self._kept and not others:
            return  # nothing was kept yet that could stand for the rest
        there = Found.among(key[len(self._prefix) :] for key in self._store.keys(self._prefix))
        gone: List[str] = []
        for entry, names in there.checkpoints.items():
            if entry.name not in here and here & self._kept:
                gone += sorted(names, key=lambda name: not name.endswith("/" + MANIFEST))
                self._kept.discard(entry.name)
        absent = {name for name in there.others if name not in others}
        gone += sorted(absent & self._gone)
        self._gone = absent
        self._store.delete(*(self._prefix + name for name in gone))

    def _failed(self, error: Exception) -> None:
        self.trouble = " ".join(str(error).split()) or type(error).__name__


class Keeper:
    """A companion: keeps the checkpoints of a run where they would go with the attempt.

    Of several nodes that of the main one, which has rank 0.
    """

    def __init__(self, attempt: Attempt) -> None:
        env = attempt.env
        self._attempt = attempt
        self._kept: Optional[Kept] = None
        self._told = ""
        if is_kept(env) and is_main_node(attempt.environ):
            store = open_store(env.store, attempt.environ)
            term = Term.read(attempt.environ)
            self._kept = Kept(env.checkpoint_dir, store, prefix_of(env), term)
            self._kept.start(_seconds(attempt.environ.get(VARIABLE, "")))

    def tick(self, now: float) -> None:
        trouble = self._kept.trouble if self._kept is not None else ""
        if trouble and not self._told:
            self._told = trouble
            self._attempt.say(f"batchml notice: checkpoints are not kept for now: {trouble}")

    def finish(self) -> None:
        told = self._kept.finish() if self._kept is not None else []
        if told:
            self._attempt.say(f"batchml: {len(told)} checkpoints could not be kept: {told[0]}")


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        return EVERY
    return found if 0.1 <= found < 1e6 else EVERY


def _lines(wrong: Mapping[str, str]) -> List[str]:
    return [f"{name}: {why}" for name, why in wrong.items()]
