"""Fetch the checkpoints of rank 0 to a node with a checkpoint folder of its own.

`python -m batchml.runtime.nodes.supervisor.checkpoint_fetch FILE`

The supervisor starts this program before the ranks of a later generation. FILE names what the main
node has (`CheckpointWatch.to_message`); after a failure it holds the reason, and the exit code is
not 0. The main node sends its checkpoints to the run's store meanwhile (`checkpoint/remote.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Callable, Dict

from batchml.runtime.checkpoint.remote import fetch
from batchml.runtime.entry.folders import is_kept_in_store
from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.supervisor.restarts import CheckpointWatch
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import StoreError

_PAUSES = (0.5, 15.0)  # seconds between two tries, at first and at most


def needs_fetch(environ: Mapping[str, str], node: int) -> bool:
    """Whether this node has to fetch the checkpoints of rank 0."""
    return bool(node) and is_kept_in_store(RuntimeEnv.read(environ))


def is_here(folder: str, wanted: Message) -> bool:
    """Whether the folder has the wanted checkpoint, or a newer one."""
    watch = CheckpointWatch(folder)
    found = watch.newest()
    if wanted["step"] >= 0:
        return found.step >= int(wanted["step"])
    watch.sample_files()
    return {tuple(file) for file in wanted["files"]} <= set(watch.files)


def fetch_until_here(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    wanted: Message,
    limit: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Fetch until the checkpoint is here. Return why it is not after `limit` seconds, or ""."""
    until, pause, why = clock() + limit, _PAUSES[0], "the main node has not sent it"
    while not is_here(env.checkpoint_dir, wanted):
        try:
            fetch(env, environ, say)
        except (StoreError, OSError) as error:
            why = " ".join(str(error).split())
        if is_here(env.checkpoint_dir, wanted):
            break
        if clock() >= until:
            what = f"step {wanted['step']}" if wanted["step"] >= 0 else "what rank 0 saved"
            return f"{what} is not in the run's store within {limit:g} s: {why}"
        sleep(pause)
        pause = min(_PAUSES[1], pause * 2)
    return ""


def main() -> None:
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    with open(sys.argv[1], encoding="utf-8") as file:
        given: Dict[str, object] = json.load(file)
    environ = os.environ
    why = fetch_until_here(
        RuntimeEnv.read(environ), environ, dict(given), float(str(given["limit"])),
        lambda line: print(line, flush=True),
    )  # fmt: skip
    if why:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(why)
        sys.exit(TRY_ELSEWHERE)


if __name__ == "__main__":
    main()
