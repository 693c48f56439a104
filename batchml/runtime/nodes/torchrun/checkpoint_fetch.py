"""What rank 0 has saved, for a node whose checkpoint folder is its own: before a later generation.

`python -m batchml.runtime.nodes.torchrun.checkpoint_fetch FILE`

The supervisor starts it before the ranks. FILE says what the main node has (`Looker.told`), and in
the end why that was not to be had: then the code is not 0.
The main node's keeper sends it to the run's store meanwhile (`checkpoint/remote.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Callable, Dict

from batchml.runtime.checkpoint.remote import fetch
from batchml.runtime.entry.folders import is_kept
from batchml.runtime.nodes.torchrun.link import Message
from batchml.runtime.nodes.torchrun.restarts import Looker
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import StoreError

_PAUSES = (0.5, 15.0)  # seconds between two looks, at first and at most


def brings(environ: Mapping[str, str], node: int) -> bool:
    """Whether what rank 0 saves has to be brought to this node."""
    return bool(node) and is_kept(RuntimeEnv.read(environ))


def is_here(folder: str, wanted: Message) -> bool:
    looker = Looker(folder)
    found = looker.newest()
    if wanted["step"] >= 0:
        return found.step >= int(wanted["step"])
    looker.look_at_files()
    return {tuple(file) for file in wanted["files"]} <= set(looker.files)


def bring(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    wanted: Message,
    limit: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Fetch until it is here; why it is not after `limit` seconds, else empty."""
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
    why = bring(
        RuntimeEnv.read(environ), environ, dict(given), float(str(given["limit"])),
        lambda line: print(line, flush=True),
    )  # fmt: skip
    if why:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(why)
        sys.exit(TRY_ELSEWHERE)


if __name__ == "__main__":
    main()
