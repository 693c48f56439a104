"""Checkpoints that are complete or do not exist: `save`, `newest`, `save_shards`, `should_stop`.

    from batchml.runtime import checkpoint

    found = checkpoint.newest()
    if found:
        load(found.path + "/model.pt")
    for step in range(found.step if found else 0, steps):
        train(step)
        stops = checkpoint.should_stop()
        if stops or (step + 1) % 100 == 0:
            checkpoint.save(lambda folder: dump(folder + "/model.pt"), step + 1)
        if stops:
            break

Steps are counted when they are finished. This module never unpickles or parses a program's files.
Programs that write files into BATCHML_CHECKPOINT_DIR in their own way need none of this.
"""

from __future__ import annotations

import operator
import os
from typing import Optional

from batchml.runtime.checkpoint.layout import (
    SAVING,
    Checkpoint,
    FenceTerm,
    claim_folder,
    find_damage,
    list_checkpoints,
    remove,
)
from batchml.runtime.checkpoint.saving import (
    Writer,
    active_saves,
    damaged_paths,
    finish_save,
    newest_step,
    remove_leftovers,
    resolve_folder,
    run_save,
    say,
)
from batchml.runtime.checkpoint.sharded import ShardedSave, are_apart, launch_of
from batchml.runtime.entry.stopping import should_stop

__all__ = ["Checkpoint", "newest", "newest_step", "save", "save_shards", "should_stop"]

KEEP = 2  # checkpoints that stay
LIMIT = 600.0  # seconds that ranks wait for each other
_APART = "its ranks are on several nodes, which do not share the checkpoint folder. Use a workspace"
_calls = 0  # calls of `save_shards`: the same number in all ranks


def save(writer: Writer, step: int, *, folder: str = "", keep: int = KEEP) -> bool:
    """Save a checkpoint after `step` finished steps. Return True if it is saved.

    `writer(path)` writes its files into the empty folder `path`. The files are made durable,
    described with their SHA-256 in MANIFEST.json, and the folder gets its final name: a checkpoint
    appears at once, or not at all if this process is killed before. Then older checkpoints are
    removed, except the newest `keep`.

    A full disk, or a file system that fails, is reported once on stderr: the old checkpoint is
    kept, and training goes on. An error of the writer's code (TypeError and the like) is raised.

    In a run whose ranks share BATCHML_CHECKPOINT_DIR, only rank 0 saves, and this does nothing in
    the others, unless a `folder` is given.
    """
    if not folder and os.environ.get("RANK", "0") != "0":
        return True
    path, term, step = resolve_folder(folder), FenceTerm.read(os.environ), operator.index(step)
    return run_save(path, step, lambda: _save(writer, step, path, keep, term))


def _save(writer: Writer, step: int, folder: str, keep: int, term: FenceTerm) -> str:
    """Save, and return an empty text; or return why this generation may not save."""
    os.makedirs(folder, exist_ok=True)
    refusal = claim_folder(folder, term)
    if refusal:
        return refusal
    remove_leftovers(folder, term)
    name = f"{SAVING}{step}-{term.attempt}.{term.generation}-{os.getpid()}-{os.urandom(4).hex()}"
    temporary = os.path.join(folder, name)
    active_saves.add(name)
    try:
        os.mkdir(temporary)
        writer(temporary)
        return finish_save(folder, temporary, step, keep, term)
    finally:
        remove(folder, name)  # does nothing after the rename
        active_saves.discard(name)


def save_shards(
    write_mine: Writer,
    step: int,
    rank: int,
    world: int,
    *,
    folder: str = "",
    keep: int = KEEP,
    limit: float = LIMIT,
) -> bool:
    """Save a checkpoint to which each of `world` ranks contributes files. True if it is saved.

    All ranks call this function at the same step, with one folder that they share.
    `write_mine(path)` is called in each rank with the same path, and may itself wait for the other
    ranks, as `torch.distributed.checkpoint.save` does. The checkpoint appears once all ranks have
    written. If a rank fails, or shows no sign of life for `limit` seconds, nothing is saved, and
    the failure is reported as in `save`.
    """
    global _calls
    _calls += 1
    path, term = resolve_folder(folder), FenceTerm.read(os.environ)
    if are_apart(path, world, os.environ):
        return run_save(path, step, lambda: _APART)
    launch = launch_of(os.environ, _calls)
    shards = ShardedSave(path, term, operator.index(step), rank, world, limit, launch)
    return run_save(path, step, lambda: shards.save(write_mine, keep))


def newest(folder: str = "") -> Optional[Checkpoint]:
    """The checkpoint to continue from: the newest whose files are complete and unchanged.

    This reads all files. Damaged checkpoints are skipped, with a line on stderr. None without a
    checkpoint. If ranks must agree, call this in one rank, and send the step to the others.

    Raises OSError if the folder cannot be read, because starting again from the beginning would be
    worse.
    """
    path = resolve_folder(folder)
    if path == resolve_folder(""):
        _claim(path)
    for entry in list_checkpoints(path):
        found = os.path.join(path, entry.name)
        try:
            why = find_damage(found, entry.step)
            if why:
                damaged_paths.add(found)
        except OSError as error:
            why = f"it cannot be read: {error.strerror or error}"
        if not why:
            return Checkpoint(found, entry.step)
        say(f"the checkpoint {found} is skipped: {why}")
    return None


def _claim(folder: str) -> None:
    """Forbid an earlier generation of this run, if one still lives, to save from now on."""
    try:
        if os.path.isdir(folder):
            claim_folder(folder, FenceTerm.read(os.environ))
    except OSError:
        pass  # the next save reports it
