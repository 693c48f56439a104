"""Start the ranks of programs without a launcher.

A line of standard input is one world, as JSON: {"program": "train.py", "arguments": [...],
"world": 2, "folder": where they run, "environ": {...}}; its answer, one line, is the exit codes of
its ranks, once all have ended. The framework is imported once, and the ranks are forked: they start
in no time. What they print goes to standard error.
"""

import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what takes longest, and every optimizer imports it
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_rank(rank: int, port: int, asked: dict[str, Any]) -> int:
    program, world = asked["program"], asked["world"]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    settings = {**numbers, **place, **asked["environ"]}
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
        port = free_port()
        ranks = [start_rank(rank, port, asked) for rank in range(asked["world"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
