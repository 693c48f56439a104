"""Start the ranks of programs without a launcher.

A line of standard input is one world, as JSON: {"program": "train.py", "arguments": [...],
"world": 2, "folder": where they run, "environ": {...}}; its answer, one line, is the exit codes of
its ranks, once all have ended. The framework is imported once, and the ranks are forked: they start
in no time. What they print goes to standard error. Like torchrun, this process serves their store:
it takes a free port and keeps it, where a port chosen for rank 0 could be taken before it listens.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what takes longest, and every optimizer imports it
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp

HOST = "127.0.0.1"
# With these torch's rendezvous connects to the store in rank 0 too, instead of serving it there.
SERVED_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def run_rank(rank: int, port: int, asked: dict[str, Any]) -> int:
    program, world = asked["program"], asked["world"]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    place = {"MASTER_ADDR": HOST, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    settings = {**numbers, **place, **SERVED_STORE, **asked["environ"]}
    os.environ.update({name: str(value) for name, value in settings.items()})
    os.chdir(asked["folder"])
    os.dup2(2, 1)
    torch.set_num_threads(1)
    sys.argv = [program, *asked["arguments"]]
    sys.path.insert(0, str(Path(program).parent))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def start_rank(rank: int, port: int, asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = run_rank(rank, port, asked)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        ranks = [start_rank(rank, store.port, asked) for rank in range(asked["world"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
