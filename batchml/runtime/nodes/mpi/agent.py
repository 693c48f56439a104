"""The program that mpirun runs in place of ssh: `agent [-x] HOST COMMAND ...`.

It runs the command on the node with the address HOST, through the supervisor of the main node. It
prints the output of the command, and ends with its exit code. It needs no sshd and no keys.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import List

from batchml.runtime.nodes.link.remote_start import ControlAddress, RemoteCommand

CONTROL = "control.json"  # file with the address of the main node's supervisor
HOSTS = "hosts.json"  # file with the number of each node, by its address
_FAILED = 255  # the exit code of ssh when it cannot connect
_POLL_EVERY = 0.2  # seconds; a signal waits at most so long
_NOT_STARTED = (126, 127)  # the exit codes of a shell that cannot start a program


def run(folder: str, words: Sequence[str]) -> int:
    """Run a command on another node; return its exit code.

    `folder` contains the files that `write_files` in `main.py` writes. Raises OSError, of which
    LinkClosed is a kind, and ValueError.
    """
    host, line = read_words(words)
    with open(os.path.join(folder, HOSTS), encoding="utf-8") as file:
        node = json.load(file).get(host)
    if node is None:
        raise ValueError(f"{host} is not the address of a node of this run")
    control = ControlAddress.read(os.path.join(folder, CONTROL))
    command = RemoteCommand(control, node, {"line": line, "folder": folder})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: command.signal(received))
    while True:
        codes = command.poll()
        if codes is not None:
            code = max(codes)
            if code in _NOT_STARTED:  # MPICH's mpirun would wait for the daemon forever
                os.kill(os.getppid(), signal.SIGTERM)
            return code
        select.select([command.socket], [], [], _POLL_EVERY)


def read_words(words: Sequence[str]) -> "tuple[str, str]":
    """The host, and the command line for its shell. Options of ssh before the host are ignored."""
    left: List[str] = list(words)
    while left and left[0].startswith("-"):
        left.pop(0)
    if not left[1:]:
        raise ValueError("a host and a command are needed")
    return left[0], " ".join(left[1:])


def main(folder: str, words: Sequence[str]) -> int:
    try:
        return run(folder, words)
    except (OSError, ValueError) as error:
        print(f"batchml: a node cannot be reached: {error}", file=sys.stderr, flush=True)
        return _FAILED
