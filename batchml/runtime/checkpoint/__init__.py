"""Checkpoints that are whole or not there: `save`, `newest`, `save_shards`, `should_stop`.

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

A step counts once it is finished. Nothing here reads what a checkpoint holds, least of all by
unpickling it. Programs that write files of their own into BATCHML_CHECKPOINT_DIR need none of it.
"""

from __future__ import annotations

import operator
import os
import sys
from typing import Callable, List, Optional, Set

from batchml.runtime.checkpoint.fence import Term, take
from batchml.runtime.checkpoint.layout import (
    MANIFEST,
    REMOVING,
    SAVING,
    Checkpoint,
    commit,
    entries,
    manifest,
    prune,
    remove,
    trouble,
    written,
)
from batchml.runtime.entry.stopping import should_stop

__all__ = ["Checkpoint", "newest", "newest_step", "save", "save_shards", "should_stop"]

KEEP = 2  # checkpoints
LIMIT = 600.0  # seconds that ranks wait for each other
_APART = "its ranks are on several nodes, whose folders are not shared. Name a workspace"
Writer = Callable[[str], object]

# What a program got wrong, and no disk: it is raised, for it would fail each time.
_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, TypeError, ValueError,
)  # fmt: skip
_damaged: Set[str] = set()  # paths of those that `newest` found to have changed
LIVE: Set[str] = set()  # names of what this process is saving now
_failing: Set[str] = set()  # folders to which the last save failed
_calls = 0  # of save_shards: as many in all ranks


def save(writer: Writer, step: int, *, folder: str = "", keep: int = KEEP) -> bool:
    """Save the checkpoint of `step` finished steps; whether it is there now.

    `writer(path)` writes its files into the empty folder `path`. They are made durable, described
    with their SHA-256 in MANIFEST.json, and appear under their name at once or, when this process
    is killed before, never. Older checkpoints go but for the newest `keep`.

    A full disk, or a file system that fails, is told of once on stderr; the old checkpoint stands,
    and training goes on. A writer's own mistake (TypeError and the like) is raised.

    In a run whose ranks share BATCHML_CHECKPOINT_DIR, rank 0 saves, and in the others this does
    nothing, unless a `folder` is given.
    """
    if not folder and os.environ.get("RANK", "0") != "0":
        return True
    where, term, step = own_folder(folder), Term.read(os.environ), operator.index(step)
    return attempt_save(where, step, lambda: _save(writer, step, where, keep, term))


def _save(writer: Writer, step: int, folder: str, keep: int, term: Term) -> str:
    """Why it may not; empty once it is saved."""
    os.makedirs(folder, exist_ok=True)
    refusal = take(folder, term)
    if refusal:
        return refusal
    clear(folder, term)
    name = f"{SAVING}{step}-{term.attempt}.{term.generation}-{os.getpid()}-{os.urandom(4).hex()}"
    temporary = os.path.join(folder, name)
    LIVE.add(name)
    try:
        os.mkdir(temporary)
        writer(temporary)
        return finish(folder, temporary, step, keep, term)
    finally:
        remove(folder, name)  # nothing, once it was renamed
        LIVE.discard(name)


def finish(folder: str, temporary: str, step: int, keep: int, term: Term) -> str:
    """Make a checkpoint of what was written, unless a later generation came."""
    files = written(temporary)
    if not files:
        raise ValueError(f"the writer of step {step} wrote no file into the folder it was given")
    refusal = take(folder, term)
    if not refusal:
        told = manifest(term, step, world(), os.path.basename(temporary), files)
        tidy(folder, keep, commit(folder, temporary, told))
    return refusal


def tidy(folder: str, keep: int, new: str) -> None:
    """Remove old checkpoints. That a new one was saved does not depend on it."""
    damaged = {os.path.basename(path) for path in _damaged if os.path.dirname(path) == folder}
    try:
        prune(folder, keep, new, damaged - {new})
    except OSError:
        pass  # it goes with the next save


def attempt_save(folder: str, step: int, run: Callable[[], str]) -> bool:
    """What `run` makes of it: True, or False with the reason told once."""
    try:
        why = run()
    except _MISTAKES:
        raise
    except Exception as error:
        if type(error).__name__ == "PicklingError":
            raise
        why = " ".join(str(error).split())[:300] or type(error).__name__
    except BaseException as error:
        if type(error).__name__ != "CheckpointException":  # of torch.distributed.checkpoint
            raise
        why = " ".join(str(error).split())[:300]
    if not why:
        if folder in _failing:
            _failing.discard(folder)
            say(f"checkpoints are saved again, with step {step}")
        return True
    if folder not in _failing:
        _failing.add(folder)
        old = newest_step(folder)
        stands = f"that of step {old} stands" if old is not None else "there is none yet"
        if old == step:  # it has its name, and the disk failed after that
            stands = "it is there, but may not outlive a power cut"
        say(f"the checkpoint of step {step} was not saved: {why}. The training goes on; {stands}.")
    return False


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
    """Save one checkpoint of which each of `world` ranks writes its part; whether it is there now.

    All ranks call it at the same step, with one folder that they share. `write_mine(path)` is
    called in each, with the same path, and may itself wait for the others, as
    `torch.distributed.checkpoint.save` does. The checkpoint appears once every part is there; when
    a rank fails, or is not heard of for `limit` seconds, no rank's is saved, as with `save`.
    """
    from batchml.runtime.checkpoint.sharded import Shards, are_apart, launch_of

    global _calls
    _calls += 1
    where, term = own_folder(folder), Term.read(os.environ)
    if are_apart(where, world, os.environ):
        return attempt_save(where, step, lambda: _APART)
    launch = launch_of(os.environ, _calls)
    shards = Shards(where, term, operator.index(step), rank, world, limit, launch)
    return attempt_save(where, step, lambda: shards.save(write_mine, keep))


def newest(folder: str = "") -> Optional[Checkpoint]:
    """The checkpoint to go on from: the newest whose files are all there and unchanged.

    Those that are not are passed over, with a line on stderr. All files are read. None where there
    is none. Where ranks must agree, let one look and tell the others its step.

    Raises OSError where the folder cannot be read: to begin anew would be worse.
    """
    where = own_folder(folder)
    if where == own_folder(""):
        _claim(where)
    for each in entries(where):
        path = os.path.join(where, each.name)
        try:
            why = trouble(path, each.step)
            if why:
                _damaged.add(path)
        except OSError as error:
            why = f"it cannot be read: {error.strerror or error}"
        if not why:
            return Checkpoint(path, each.step)
        say(f"the checkpoint {path} is passed over: {why}")
    return None


def newest_step(folder: str) -> Optional[int]:
    """The step of the newest that is complete, without reading its files: microseconds."""
    try:
        found = entries(folder)
    except OSError:
        return None
    for each in found:
        if os.path.exists(os.path.join(folder, each.name, MANIFEST)):
            return each.step
    return None


def _claim(folder: str) -> None:
    """From here on an earlier generation of this run, if one still lives, saves no more."""
    try:
        if os.path.isdir(folder):
            take(folder, Term.read(os.environ))
    except OSError:
        pass  # a save will say more


def own_folder(folder: str) -> str:
    """The one given, the run's, or outside a run `checkpoints` in the working directory."""
    return os.path.abspath(folder or os.environ.get("BATCHML_CHECKPOINT_DIR") or "checkpoints")


def world() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def clear(folder: str, term: Term) -> None:
    """Remove what saves that were killed left behind."""
    ours = f"{term.attempt}.{term.generation}"
    for name in _leftovers(folder):
        if name.startswith(REMOVING):
            remove(folder, name)
            continue
        saver, pid = [*name.split("-"), "", "", ""][2:4]
        if name not in LIVE and (saver != ours or not os.path.exists(f"/proc/{pid}")):
            remove(folder, name)


def _leftovers(folder: str) -> List[str]:
    return [name for name in os.listdir(folder) if name.startswith((SAVING, REMOVING))]


def say(words: str) -> None:
    print(f"batchml: {words}", file=sys.stderr, flush=True)
