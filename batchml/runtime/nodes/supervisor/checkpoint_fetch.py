"""Fetch the checkpoints of rank 0 to a node that shares no checkpoint folder with the main node.

`python -m batchml.runtime.nodes.supervisor.checkpoint_fetch FILE`

The supervisor starts this program before the ranks of a later generation. Meanwhile the main node
sends its checkpoints to the run's store (`checkpoint/remote.py`). FILE describes the checkpoint of
the main node (`CheckpointWatch.to_message`). If it cannot be fetched, FILE contains the reason, and
the exit code is TRY_ELSEWHERE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Callable

from batchml.runtime.checkpoint.remote import fetch
from batchml.runtime.entry.folders import is_kept_in_store
from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.supervisor.restarts import CheckpointWatch
from batchml.runtime.package import drop_working_folder
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import StoreError

_PAUSES = (0.5, 15.0)  # seconds between two tries, at first and at most


def needs_fetch(environ: Mapping[str, str], node: int) -> bool:
    """Whether this node has to fetch the checkpoints of rank 0."""
    return bool(node) and is_kept_in_store(RuntimeEnv.read(environ))


def has_checkpoint(folder: str, wanted: Message) -> bool:
    """Whether the folder has the wanted checkpoint, or a newer one."""
    watch = CheckpointWatch(folder)
    newest = watch.newest()
    if wanted["step"] >= 0:
        return newest.step >= int(wanted["step"])
    watch.sample_files()
    return {tuple(file) for file in wanted["files"]} <= set(watch.files)


def fetch_until_complete(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    wanted: Message,
    limit: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Fetch until this node has the checkpoint, for at most `limit` seconds.

    Return "", or why it does not have the checkpoint then.
    """
    until, pause, why = clock() + limit, _PAUSES[0], "the main node has not sent it"
    while not has_checkpoint(env.checkpoint_dir, wanted):
        try:
            fetch(env, environ, say)
        except (StoreError, OSError) as error:
            why = " ".join(str(error).split())
        if has_checkpoint(env.checkpoint_dir, wanted):
            break
        if clock() >= until:
            step = wanted["step"]
            name = f"the checkpoint of step {step}" if step >= 0 else "the checkpoint of rank 0"
            return f"{name} could not be fetched from the run's store within {limit:g} s: {why}"
        sleep(pause)
        pause = min(_PAUSES[1], pause * 2)
    return ""


def main() -> None:
    drop_working_folder()
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted: Message = json.load(file)
    why = fetch_until_complete(
        RuntimeEnv.read(os.environ), os.environ, wanted, wanted["limit"],
        lambda line: print(line, flush=True),
    )  # fmt: skip
    if why:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(why)
        sys.exit(TRY_ELSEWHERE)


if __name__ == "__main__":
    main()
