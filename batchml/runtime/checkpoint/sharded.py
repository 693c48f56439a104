"""A checkpoint of which every rank writes a part, committed by rank 0 once all are there.

The ranks speak by small files in the folder that is being written, for they may be on several
machines with nothing but that folder between them. Each tells which files it sees once its own are
durable; rank 0 makes one list of them; each rank reads and describes every world-th of the list, so
that hashing takes as long as one rank's share; rank 0 puts that together and renames the folder.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from typing import Any, Callable, List, Set

from batchml.runtime import checkpoint
from batchml.runtime.checkpoint.fence import Term, take
from batchml.runtime.checkpoint.layout import (
    SAVING,
    Files,
    all_files,
    commit,
    entries,
    manifest,
    read_manifest,
    written,
)
from batchml.runtime.storage.files import write_atomically

KEPT_APART = ".batchml-kept"  # in a folder that the nodes do not share: remote.py
_SIGN = ".rank-"
_HERE, _FAILED, _WROTE, _LIST, _TOLD = "here", "failed", "wrote", "list", "told"
# An NFS client believes what it knows of a folder for up to a minute, unless it writes there.
_REFRESH = 1.0  # seconds
_LONGEST = 0.25  # seconds between two looks


class Failed(Exception):
    """This save comes to nothing; the text says why."""


class Shards:
    """One save, as one rank sees it. `launch` is the same in all ranks, and in no other save."""

    def __init__(
        self,
        folder: str,
        term: Term,
        step: int,
        rank: int,
        world: int,
        limit: float,
        launch: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._term, self._step = folder, term, step
        self._rank, self._world, self._limit = rank, world, limit
        self._name = f"{SAVING}{step}-{term.attempt}.{term.generation}-shared-{launch}"
        self._path = os.path.join(folder, self._name)
        self._clock, self._sleep = clock, sleep

    def save(self, write_mine: checkpoint.Writer, keep: int) -> str:
        """Why nothing was saved; empty once it is there. Raises what the writer does."""
        try:
            self._begin()
            write_mine(self._path)
            self._tell(_WROTE, self._own())
            self._describe()
            if self._rank == 0:
                self._commit(keep)
            else:
                self._await_commit()
        except BaseException as error:
            other = self._failed()  # which removes files, so that this rank fails, too
            self._give_up(is_first=other < 0)
            if other >= 0 and isinstance(error, (Failed, OSError)):
                return f"rank {other} could not write its part"
            if isinstance(error, Failed):
                return str(error)
            raise
        checkpoint.LIVE.discard(self._name)  # else its signs stay, for ranks that come late
        return ""

    # --- the steps ------------------------------------------------------------------------------

    def _begin(self) -> None:
        checkpoint.LIVE.add(self._name)
        os.makedirs(self._folder, exist_ok=True)
        if self._rank == 0:
            self._check_fence()
            checkpoint.clear(self._folder, self._term)
        os.makedirs(self._path, exist_ok=True)
        # Made now, for on a full disk nothing but a rename would do to say so.
        os.close(os.open(self._sign(_HERE), os.O_WRONLY | os.O_CREAT, 0o644))

    def _own(self) -> List[str]:
        """What lies there now, durable as far as it was written on this machine."""
        names = []
        for name in self._files():
            try:
                descriptor = os.open(os.path.join(self._path, name), os.O_RDONLY)
            except FileNotFoundError:
                continue  # another rank's, which writes beside and renames
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            names.append(name)
        return names

    def _describe(self) -> None:
        """Read a share of the files, whoever wrote them: it proves that they have arrived."""
        if self._rank == 0:
            self._await({(_WROTE, rank) for rank in range(self._world)})
            seen: Set[str] = set()
            for rank in range(self._world):
                seen.update(self._heard(_WROTE, rank))
            if not seen:
                raise ValueError(f"no rank wrote a file of step {self._step} into the folder given")
            self._tell(_LIST, sorted(seen))
        self._await({(_LIST, 0)})
        names = self._heard(_LIST, 0)[self._rank :: self._world]
        # All writers have ended, so that what is gone was another rank's temporary file.
        share = [name for name in names if os.path.exists(os.path.join(self._path, name))]
        self._tell(_TOLD, written(self._path, share))

    def _commit(self, keep: int) -> None:
        self._await({(_TOLD, rank) for rank in range(self._world)})
        files: Files = {}
        for rank in range(self._world):
            told = self._heard(_TOLD, rank)
            files.update({name: (each[0], each[1]) for name, each in told.items()})
        self._check_fence()
        for name in os.listdir(self._path):
            if name.startswith(_SIGN):
                os.unlink(os.path.join(self._path, name))
        told = manifest(self._term, self._step, self._world, self._name, files)
        checkpoint.tidy(self._folder, keep, commit(self._folder, self._path, told))

    def _await_commit(self) -> None:
        """The folder goes when it gets its name."""

        def is_over() -> bool:
            if self._failed() >= 0:
                raise Failed("rank 0 gave up")
            return not os.path.isdir(self._path)

        self._wait(is_over, lambda: "rank 0 did not put it together")
        for _ in range(3):
            if self._is_committed():
                return
            self._refresh(self._folder)
            self._sleep(_LONGEST)
        raise Failed("rank 0 gave it up")

    def _is_committed(self) -> bool:
        for each in entries(self._folder):
            try:
                told = read_manifest(os.path.join(self._folder, each.name))
            except (OSError, ValueError):
                continue
            if each.step == self._step and told.get("save") == self._name:
                return True
        return False

    def _check_fence(self) -> None:
        refusal = take(self._folder, self._term)
        if refusal:
            raise Failed(refusal)

    def _give_up(self, is_first: bool) -> None:
        """Say so to the others, and free the space."""
        try:
            if is_first:
                os.rename(self._sign(_HERE), self._sign(_FAILED))
        except OSError:
            pass  # they wait for `limit`, then
        try:
            names = self._files()
        except OSError:
            names = []
        for name in names:
            try:
                os.unlink(os.path.join(self._path, name))
            except OSError:
                pass  # another rank was faster

    # --- signs ----------------------------------------------------------------------------------

    def _failed(self) -> int:
        """The first of the other ranks to have said so; -1 for none."""
        try:
            names = [name for name in os.listdir(self._path) if name.endswith("." + _FAILED)]
        except OSError:
            return -1
        ranks = [int(name[len(_SIGN) :].partition(".")[0]) for name in names]
        return min((rank for rank in ranks if rank != self._rank), default=-1)

    def _files(self) -> List[str]:
        return [name for name in all_files(self._path) if not name.startswith(_SIGN)]

    def _sign(self, what: str, rank: int = -1) -> str:
        return os.path.join(self._path, f"{_SIGN}{self._rank if rank < 0 else rank}.{what}")

    def _tell(self, what: str, value: Any) -> None:
        write_atomically(self._sign(what), json.dumps(value).encode(), 0o644)

    def _heard(self, what: str, rank: int) -> Any:
        with open(self._sign(what, rank), "rb") as file:
            return json.loads(file.read())

    def _await(self, wanted: Set[Any]) -> None:
        signs = {os.path.basename(self._sign(what, rank)): rank for what, rank in wanted}

        def is_there() -> bool:
            names = set(os.listdir(self._path))
            if any(name.endswith("." + _FAILED) for name in names):
                raise Failed("another rank gave up")
            for name in names & set(signs):
                del signs[name]
            return not signs

        self._wait(is_there, lambda: f"nothing was heard of rank {_ranks(signs.values())}")

    def _wait(self, is_over: Callable[[], bool], missing: Callable[[], str]) -> None:
        began = refreshed = self._clock()
        pause = 0.005
        while not is_over():
            now = self._clock()
            if now - began > self._limit:
                raise Failed(f"{missing()} for {self._limit:.0f} seconds")
            if now - refreshed > _REFRESH:
                refreshed = now
                self._refresh(self._path)
            self._sleep(pause)
            pause = min(_LONGEST, pause * 1.5)

    def _refresh(self, folder: str) -> None:
        path = os.path.join(folder, f"{_SIGN}{self._rank}.look")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
            os.unlink(path)
        except OSError:
            pass


def are_apart(folder: str, world: int, environ: Mapping[str, str]) -> bool:
    """Whether the ranks are on several nodes that each have a folder of their own."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    return local.isdigit() and int(local) < world and os.path.exists(f"{folder}/{KEPT_APART}")


def launch_of(environ: Mapping[str, str], calls: int) -> str:
    """What all ranks of one launch have alike, and the number of the save among its saves."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    told = "|".join(environ.get(name, "") for name in names)
    return f"{zlib.crc32(told.encode('utf-8', 'replace')):08x}.{calls}"


def _ranks(ranks: Any) -> str:
    told = sorted(ranks)
    more = f" and {len(told) - 5} others" if len(told) > 5 else ""
    return ", ".join(map(str, told[:5])) + more
