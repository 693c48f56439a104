"""A session-manager-plugin that has the container on this machine: for tests, on their PATH.

It is called as AWS's is, and does what ECS's agent does: a command gets a terminal of its own, and
what is typed on ours reaches it. FAKE_ROOT is the process that stands for the container's first.
"""

import base64
import json
import os
import pty
import select
import shlex
import socket
import sys
import threading
from typing import Any

BY_NAME = "AWS_SSM_START_SESSION_RESPONSE"


def order_for(word: str, root: int) -> str:
    """The same order to our program inside, with the container's first process by our number."""
    order = json.loads(base64.urlsafe_b64decode(word))
    return base64.urlsafe_b64encode(json.dumps({**order, "root": root}).encode()).decode()


def run_command(text: str) -> None:
    words = shlex.split(text)
    module = "batchml.runtime.exec.main"
    if module in words:
        if "FAKE_NO_RUNTIME" in os.environ:
            print(f"/usr/bin/python3: No module named {module}\r\n", flush=True)
            return
        words = [sys.executable, *words[1:-1], order_for(words[-1], int(os.environ["FAKE_ROOT"]))]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(words[0], words)
    files = [0, terminal]
    while terminal in files:
        ready, _, _ = select.select(files, [], [])
        if "FAKE_CUT" in os.environ and terminal in ready:
            os._exit(0)
        for file in ready:
            try:
                data = os.read(file, 1024)
            except OSError:
                data = b""
            if not data:
                files.remove(file)
                continue
            os.write(1 if file == terminal else terminal, data)
    os.waitpid(pid, 0)


def forward(parameters: dict[str, Any]) -> None:
    port, local = (int(parameters[name][0]) for name in ("portNumber", "localPortNumber"))
    listener = socket.create_server(("127.0.0.1", local))
    print(f"Port {local} opened for sessionId s-1.\nWaiting for connections...", flush=True)
    while True:
        here, _ = listener.accept()
        if "FAKE_ONE" in os.environ:
            os._exit(0)  # as a session that was idle for too long
        there = socket.create_connection(("127.0.0.1", port))
        for pair in ((here, there), (there, here)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(4096):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(os.environ.get("FAKE_VERSION", "1.2.707.0"))
        return
    session, region, operation, _profile, target, endpoint = sys.argv[1:]
    if session == BY_NAME:
        session = os.environ[BY_NAME]
    assert operation == "StartSession" and region and endpoint.startswith("http")
    told, aim = json.loads(session), json.loads(target)
    assert aim["Target"].startswith("ecs:")
    print(f"\nStarting session with SessionId: {told['SessionId']}\n", flush=True)
    if "Parameters" in aim:
        forward(aim["Parameters"])
    run_command(base64.urlsafe_b64decode(told["StreamUrl"].rpartition("/")[2]).decode())
    print(f"\n\nExiting session with sessionId: {told['SessionId']}.\n", flush=True)


if __name__ == "__main__":
    main()
