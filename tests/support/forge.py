"""Commands of Python programs, each a process of its own, without the time that imports take.

Started with the number of a socket, and the modules that its commands need: `a.b` or, with all that
is below it, `a.b.*`. They are imported here once, and each command is a fork of this: it has its
own id, folder, variables, streams and exit as if `python -m MODULE` had been typed.

What comes through the socket is a connection, after the three files that are the command's standard
streams. On it comes a line of JSON: {"module", "arguments", "folder", "environ", "umask"}. It is
answered with the command's process id at once, and with its exit code at its end.

The servers that commands start are forks of this, too: a command asks for one through a socket that
has a name, with the end of the pipe on which the server says that it is ready as a fourth file.
"""

import gc
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
import time
from importlib import import_module
from typing import Any, BinaryIO

from batchml.local import control


def preload(wanted: list[str]) -> None:
    for name in wanted:
        module = import_module(name.removesuffix(".*"))
        if name.endswith(".*"):
            found = pkgutil.walk_packages(module.__path__, f"{module.__name__}.")
            preload([each.name for each in found if ".commands" not in each.name])
    gc.collect()
    gc.freeze()  # none of this is garbage: no fork looks through it, and so copies it


_FORGE = os.getpid()  # in its forks, too


class Forge:
    def __init__(self, door: socket.socket, imported: dict[str, str]) -> None:
        self._door = door
        self._server_door = socket.socket(socket.AF_UNIX)
        self._server_door.bind(_name_of(os.getpid()))
        self._server_door.listen()
        self._imported = imported  # variables that modules have set
        self._poll = select.poll()
        self._poll.register(door, select.POLLIN)
        self._poll.register(self._server_door, select.POLLIN)
        self._running: dict[int, tuple[int, socket.socket]] = {}  # pidfd: process, who waits

    def run(self) -> str:
        """Serve until the door is closed: then "". In the fork: the module to go on with."""
        while True:
            for number, _ in self._poll.poll():
                if number == self._door.fileno():
                    byte, files, _, _ = socket.recv_fds(self._door, 1, 4)
                    if not byte:
                        return ""
                    module = self._start(socket.socket(fileno=files.pop()), files)
                elif number == self._server_door.fileno():
                    asker, _ = self._server_door.accept()
                    module = self._start(asker, socket.recv_fds(asker, 1, 4)[1])
                else:
                    self._tell_end(number)
                    continue
                if module:
                    return module

    def _start(self, asker: socket.socket, files: list[int]) -> str:
        with asker.makefile() as told:
            asked = json.loads(told.readline())
        pid = os.fork()
        if not pid:
            asker.close()
            self._close()
            become({**asked, "environ": {**self._imported, **asked["environ"]}}, files[:3])
            if "ready" in asked:
                os.setsid()
                os.dup2(files[3], asked["ready"])
                if files[3] != asked["ready"]:
                    os.close(files[3])
            return str(asked["module"])
        for file in files:
            os.close(file)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = pid, asker
        self._poll.register(pidfd, select.POLLIN)
        asker.sendall(b"%d\n" % pid)
        return ""

    def _close(self) -> None:
        """Nothing of ours is open in a command."""
        self._door.close()
        self._server_door.close()
        for pidfd, (_, asker) in self._running.items():
            os.close(pidfd)
            asker.close()

    def _tell_end(self, pidfd: int) -> None:
        pid, asker = self._running.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._poll.unregister(pidfd)
        os.close(pidfd)
        with asker:
            try:
                asker.sendall(b"%d\n" % code)
            except ConnectionError:
                pass  # whoever asked has given up


def _name_of(pid: int) -> str:
    return f"\0batchml-forge-{pid}"  # no file: it ends with the process


def launch(command: list[str], log: BinaryIO, ready: int) -> int:
    """What `control.launch` is in the forks of this: they ask for a fork of it."""
    _, _, module, *arguments = command
    told: dict[str, Any] = {"module": module, "arguments": arguments, "folder": "/"}
    with socket.socket(socket.AF_UNIX) as asker, open(os.devnull) as nothing:
        asker.connect(_name_of(_FORGE))
        files = [nothing.fileno(), log.fileno(), log.fileno(), ready]
        socket.send_fds(asker, [b"+"], files)
        told |= {"environ": dict(os.environ), "umask": "077", "ready": ready}
        asker.sendall(json.dumps(told).encode() + b"\n")
        with asker.makefile() as answers:
            return int(answers.readline())


def become(asked: dict[str, Any], files: list[int]) -> None:
    """Be as a process is that was started afresh."""
    for number, (file, name) in enumerate(zip(files, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(file, number)
        os.close(file)
        was = getattr(sys, name)  # knows of the file that it had here, say that it can seek
        stream = open(  # noqa: SIM115
            number, was.mode, 1 if name == "stderr" else -1, was.encoding, was.errors, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(asked["environ"])
    time.tzset()
    os.umask(int(asked["umask"], 8))
    os.chdir(asked["folder"])
    sys.path[0] = asked["folder"]
    sys.argv = [asked["module"], *asked["arguments"]]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]


def main() -> None:
    control.launch = launch
    before = os.environ.copy()
    preload(sys.argv[2:])
    imported = dict(os.environ.items() - before.items())
    module = Forge(socket.socket(fileno=int(sys.argv[1])), imported).run()
    if module == "batchml.local.server.daemon":  # it has been imported
        sys.exit(sys.modules[module].main())
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
