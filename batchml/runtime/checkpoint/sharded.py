"""A checkpoint to which every rank contributes files. Rank 0 commits it once all have written.

The ranks communicate by small marker files in the temporary folder, because machines may share
nothing but that folder. After its own files are durable, each rank lists the files that it finds;
rank 0 merges the lists; each of the N ranks hashes every N-th file of the merged list, so that all
ranks share the work; rank 0 writes the manifest and renames the folder.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from typing import Any, Callable, List, Set

from batchml.runtime.checkpoint.layout import (
    SAVING,
    FenceTerm,
    Files,
    all_files,
    claim_folder,
    commit,
    describe_files,
    list_checkpoints,
    make_manifest,
    read_manifest,
)
from batchml.runtime.checkpoint.saving import Writer, active_saves, remove_leftovers, remove_old
from batchml.runtime.storage.files import sync_path, write_atomically

KEPT_APART = ".batchml-kept"  # a file in checkpoint folders that the nodes do not share: remote.py
_MARKER = ".rank-"  # begins the names of marker files: `.rank-3.wrote`
# The kinds of marker files: the rank saves, has failed, has written its files (their list), the
# merged list, and the sizes and SHA-256 of the rank's share.
_STARTED, _FAILED, _WROTE, _LIST, _HASHED = "here", "failed", "wrote", "list", "told"
# An NFS client caches a folder's content for up to a minute, unless it writes into the folder.
_REFRESH = 1.0  # seconds between two writes
_MAX_PAUSE = 0.25  # seconds between two polls


class SaveFailed(Exception):
    """This save failed; the text is the reason."""


class ShardedSave:
    """One save in one rank. `launch` is the same in all ranks, and differs from other saves."""

    def __init__(
        self,
        folder: str,
        term: FenceTerm,
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

    def save(self, write_mine: Writer, keep: int) -> str:
        """Save. Return an empty text, or why the save failed. Raises the writer's exceptions."""
        try:
            self._begin()
            write_mine(self._path)
            self._write_marker(_WROTE, self._sync_files())
            self._hash_share()
            if self._rank == 0:
                self._commit(keep)
            else:
                self._await_commit()
        except BaseException as error:
            # A rank that fails removes files, so that all other ranks fail as well.
            other = self._failed_rank()
            self._give_up(is_first=other < 0)
            if other >= 0 and isinstance(error, (SaveFailed, OSError)):
                return f"rank {other} could not write its part"
            if isinstance(error, SaveFailed):
                return str(error)
            raise
        active_saves.discard(self._name)  # not after a failure: late ranks need the marker files
        return ""

    # --- Steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        active_saves.add(self._name)
        os.makedirs(self._folder, exist_ok=True)
        if self._rank == 0:
            self._check_fence()
            remove_leftovers(self._folder, self._term)
        os.makedirs(self._path, exist_ok=True)
        # Made before writing: a rank on a full disk can report its failure only by renaming it.
        os.close(os.open(self._marker(_STARTED), os.O_WRONLY | os.O_CREAT, 0o644))

    def _sync_files(self) -> List[str]:
        """Make the files that this machine has written durable. Return all files in the folder."""
        names = []
        for name in self._files():
            try:
                sync_path(os.path.join(self._path, name))
            except FileNotFoundError:
                continue  # a temporary file of another rank
            names.append(name)
        return names

    def _hash_share(self) -> None:
        """Hash a share of the files, whichever rank wrote them: this proves that they arrived."""
        if self._rank == 0:
            self._await(_WROTE, *range(self._world))
            merged: Set[str] = set()
            for rank in range(self._world):
                merged.update(self._read_marker(_WROTE, rank))
            if not merged:
                raise ValueError(f"no rank wrote a file of step {self._step} into the folder given")
            self._write_marker(_LIST, sorted(merged))
        self._await(_LIST, 0)
        names = self._read_marker(_LIST, 0)[self._rank :: self._world]
        # All writers have ended, so a missing file was a temporary file of another rank.
        share = [name for name in names if os.path.exists(os.path.join(self._path, name))]
        self._write_marker(_HASHED, describe_files(self._path, share))

    def _commit(self, keep: int) -> None:
        self._await(_HASHED, *range(self._world))
        files: Files = {}
        for rank in range(self._world):
            share = self._read_marker(_HASHED, rank)
            files.update({name: (each[0], each[1]) for name, each in share.items()})
        self._check_fence()
        for name in os.listdir(self._path):
            if name.startswith(_MARKER):
                os.unlink(os.path.join(self._path, name))
        manifest = make_manifest(self._term, self._step, self._world, self._name, files)
        remove_old(self._folder, keep, commit(self._folder, self._path, manifest))

    def _await_commit(self) -> None:
        """Wait until rank 0 has renamed the folder."""

        def is_over() -> bool:
            if self._failed_rank() >= 0:
                raise SaveFailed("rank 0 gave up")
            return not os.path.isdir(self._path)

        self._wait(is_over, lambda: "rank 0 did not commit it")
        for _ in range(3):
            if self._is_committed():
                return
            self._refresh(self._folder)
            self._sleep(_MAX_PAUSE)
        raise SaveFailed("rank 0 gave up")

    def _is_committed(self) -> bool:
        for each in list_checkpoints(self._folder):
            try:
                manifest = read_manifest(os.path.join(self._folder, each.name))
            except (OSError, ValueError):
                continue
            if each.step == self._step and manifest.get("save") == self._name:
                return True
        return False

    def _check_fence(self) -> None:
        refusal = claim_folder(self._folder, self._term)
        if refusal:
            raise SaveFailed(refusal)

    def _give_up(self, is_first: bool) -> None:
        """Report the failure to the other ranks, and free the space."""
        try:
            if is_first:
                os.rename(self._marker(_STARTED), self._marker(_FAILED))
        except OSError:
            pass  # the other ranks then wait until `limit`
        try:
            names = self._files()
        except OSError:
            names = []
        for name in names:
            try:
                os.unlink(os.path.join(self._path, name))
            except OSError:
                pass  # another rank has removed it

    # --- Marker files -----------------------------------------------------------------------------

    def _failed_rank(self) -> int:
        """The lowest of the other ranks that have failed; -1 for none."""
        try:
            names = [name for name in os.listdir(self._path) if name.endswith("." + _FAILED)]
        except OSError:
            return -1
        ranks = [int(name[len(_MARKER) :].partition(".")[0]) for name in names]
        return min((rank for rank in ranks if rank != self._rank), default=-1)

    def _files(self) -> List[str]:
        return [name for name in all_files(self._path) if not name.startswith(_MARKER)]

    def _marker(self, kind: str, rank: int = -1) -> str:
        return os.path.join(self._path, f"{_MARKER}{self._rank if rank < 0 else rank}.{kind}")

    def _write_marker(self, kind: str, value: Any) -> None:
        write_atomically(self._marker(kind), json.dumps(value).encode(), 0o644)

    def _read_marker(self, kind: str, rank: int) -> Any:
        with open(self._marker(kind, rank), "rb") as file:
            return json.loads(file.read())

    def _await(self, kind: str, *ranks: int) -> None:
        """Wait until these ranks have written their markers of a kind."""
        missing = {os.path.basename(self._marker(kind, rank)): rank for rank in ranks}

        def are_written() -> bool:
            names = set(os.listdir(self._path))
            if any(name.endswith("." + _FAILED) for name in names):
                raise SaveFailed("another rank gave up")
            for name in names & set(missing):
                del missing[name]
            return not missing

        self._wait(are_written, lambda: f"no sign of rank {_list_ranks(missing.values())}")

    def _wait(self, is_over: Callable[[], bool], missing: Callable[[], str]) -> None:
        began = refreshed = self._clock()
        pause = 0.005
        while not is_over():
            now = self._clock()
            if now - began > self._limit:
                raise SaveFailed(f"{missing()} for {self._limit:.0f} seconds")
            if now - refreshed > _REFRESH:
                refreshed = now
                self._refresh(self._path)
            self._sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)

    def _refresh(self, folder: str) -> None:
        """Write into a folder, so that an NFS client reads it anew."""
        path = os.path.join(folder, f"{_MARKER}{self._rank}.look")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
            os.unlink(path)
        except OSError:
            pass


def are_apart(folder: str, world: int, environ: Mapping[str, str]) -> bool:
    """Whether the ranks are on several nodes, and each node has its own checkpoint folder."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    return local.isdigit() and int(local) < world and os.path.exists(f"{folder}/{KEPT_APART}")


def launch_of(environ: Mapping[str, str], calls: int) -> str:
    """An id that all ranks of one launch share, with the number of this call of `save_shards`."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    text = "|".join(environ.get(name, "") for name in names)
    return f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}.{calls}"


def _list_ranks(ranks: Any) -> str:
    found = sorted(ranks)
    more = f" and {len(found) - 5} others" if len(found) > 5 else ""
    return ", ".join(map(str, found[:5])) + more
