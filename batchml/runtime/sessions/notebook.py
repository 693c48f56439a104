"""The program of a notebook's run: JupyterLab, for as long as somebody works in it.

`python -m batchml.runtime.sessions.notebook` starts it and looks after it; `... where` inside the
run prints `{"port": N, "token": "..."}`, by which the client finds it. The token is made here and
lies in a folder that only the run's user reads. It is in no argument and no variable, so that
neither a process list nor a cell that prints the environment shows it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from typing import IO, Any, Dict, List, NamedTuple, Optional

from batchml.runtime.exec import prompt as seats
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, STOPPED
from batchml.runtime.sessions.alloc import Idle, Life, cost_words, last_words, limit_of, spelled
from batchml.runtime.storage.files import read_json, write_atomically

# --- use of a notebook ----------------------------------------------------------------------------
# Whether somebody works in a JupyterLab, by what its own API says.
#
# A kernel that computes is use, for however long, and so is a terminal that prints, a cell that was
# run, a file that was saved, a `batchml shell`. An open browser tab is not: what it asks for by
# itself counts for nothing. Source: jupyter_server's `/api/kernels` (`execution_state`,
# `last_activity`, which moves with what a user sends to a kernel) and `/api/terminals`
# (`last_activity`, which moves with output).


_PATIENCE = 10.0  # seconds for an answer
_DEAD = ("idle", "dead", "unknown", "starting")  # states of a kernel that computes nothing


class Look(NamedTuple):
    """What JupyterLab says at one moment. Moments as it writes them: they are only compared."""

    busy: int  # kernels that compute
    moments: "tuple[str, ...]"  # of the last use of each kernel and terminal
    saved: float  # when a file was saved last


class Jupyter:
    """One server, asked over HTTP."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"token {token}"}

    def look(self, saved: float) -> Optional[Look]:
        """None where it does not answer, or not as a Jupyter server does."""
        try:
            kernels, terminals = self._get("kernels"), self._get("terminals")
            return Look(
                sum(each.get("execution_state") not in _DEAD for each in kernels),
                tuple(str(each.get("last_activity")) for each in [*kernels, *terminals]),
                saved,
            )
        except (OSError, HTTPException, ValueError, AttributeError):
            return None

    def _get(self, what: str) -> List[Any]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE)
        try:
            connection.request("GET", f"/api/{what}", headers=self._headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 404 and what == "terminals":
            return []  # an image without them
        found = json.loads(content)
        if answer.status != 200 or not isinstance(found, list):
            raise ValueError(f"{answer.status} for {what}")
        return found


class Use:
    """Tells use from its absence by what has changed since the look before."""

    def __init__(self) -> None:
        self._before: Optional[Look] = None

    def see(self, look: Optional[Look], environ: Mapping[str, str]) -> bool:
        """Whether there was use since the last look. A server that does not answer is not used."""
        if look is None:
            return seats.count(environ) > 0
        before, self._before = self._before, look
        return is_used(look, before) or seats.count(environ) > 0


def is_used(look: Look, before: Optional[Look]) -> bool:
    """Pure. Something ended, such as a kernel that is shut down, is use, too: somebody did it."""
    return before is None or look.busy > 0 or look[1:] != before[1:]


# --- notebook -------------------------------------------------------------------------------------


STARTING = 300.0  # seconds that JupyterLab has to answer
LOOK_EVERY = 10.0  # seconds between two looks at its use
_TICK = 0.5
_ENDING = 10.0  # seconds that it has to shut its kernels down
_FOLDER = ".batchml-notebook"
_DOOR = "door.json"
_SAVED = "saved"  # its time is that of the last save
NOT_READY = 75

PORT = 8888  # JupyterLab's own
DEFAULTS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}
}
NO_JUPYTER = (
    "there is no JupyterLab in this image. Add the lines `jupyterlab` and `ipykernel` to its "
    "requirements.txt, or leave --image out: the image `notebook` has them."
)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    if list(arguments[:1]) == ["where"]:
        return where(environ, float(arguments[1]) if len(arguments) > 1 else 0.0)
    if find_spec("jupyterlab") is None:
        say(NO_JUPYTER)
        return CONFIGURATION_ERROR
    return Program(environ).run()


def say(text: str) -> None:
    print(f"batchml: {text}", flush=True)


# --- how it is found ------------------------------------------------------------------------------


def folder_of(environ: Mapping[str, str]) -> str:
    """The folder of the notebook's own files, beside the attempt's stop file."""
    above = os.path.dirname(environ.get("BATCHML_STOP_FILE", "")) or os.getcwd()
    return os.path.join(above, _FOLDER)


def where(environ: Mapping[str, str], patience: float) -> int:
    """Print port and token once JupyterLab answers, waiting `patience` seconds for it."""
    until, pause = time.monotonic() + patience, threading.Event()
    path = os.path.join(folder_of(environ), _DOOR)
    while True:
        door = read_json(path)
        if door is not None:
            print(json.dumps(door), flush=True)
            return 0
        if time.monotonic() >= until:
            return NOT_READY
        pause.wait(_TICK)


# --- how it is started ----------------------------------------------------------------------------


def root_of(environ: Mapping[str, str]) -> str:
    """What JupyterLab shows: the workspace; where none can be written to, the run's outputs."""
    for name in ("BATCHML_WORKSPACE", "BATCHML_OUTPUT_DIR"):
        folder = environ.get(name, "")
        if folder and os.path.isdir(folder) and os.access(folder, os.W_OK):
            return folder
    return os.getcwd()


def settings_of(root: str, port: int, token: str) -> Dict[str, Dict[str, Any]]:
    """JupyterLab's settings. It asks nobody outside for news or newer versions of itself."""
    return {
        "ServerApp": {
            "ip": "127.0.0.1",
            "port": port,
            "root_dir": root,
            "open_browser": False,
            "allow_root": True,  # a process of this machine may be root's
        },
        "Application": {"log_level": "WARN"},  # no requests, no addresses
        "IdentityProvider": {"token": token},
        "LabApp": {
            "news_url": None,
            "check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate",
        },
    }


def program_text(settings: Mapping[str, Mapping[str, Any]], saved: str) -> str:
    """A settings file of Jupyter's, which is Python: the hook says when something was saved."""
    lines = [
        "import warnings",
        "warnings.filterwarnings('ignore', 'Overriding existing')",  # the hook, by itself
        "c = get_config()",
    ]
    for section, values in settings.items():
        lines += [f"c.{section}.{name} = {value!r}" for name, value in values.items()]
    lines += [
        "def _saved(**_):",
        f"    open({saved!r}, 'w').close()",
        "c.ContentsManager.pre_save_hook = _saved",
    ]
    return "\n".join(lines) + "\n"


def free_port(*wanted: int) -> int:
    """The first of these ports that nobody has now, else any. JupyterLab takes another where it is
    taken meanwhile."""
    for port in (*wanted, 0):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(found.getsockname()[1])
    raise OSError("no port of this machine is free")


def write_defaults(folder: str) -> str:
    """What JupyterLab's page is set to unless its user says otherwise; where JUPYTER_CONFIG_PATH
    leads for it. Undecided, the page asks whether to fetch news from outside."""
    inner = os.path.join(folder, "config", "labconfig")
    os.makedirs(inner, mode=0o700, exist_ok=True)
    path = os.path.join(inner, "default_setting_overrides.json")
    write_atomically(path, json.dumps(DEFAULTS).encode())
    return os.path.dirname(inner)


class Program:
    """JupyterLab as a child, watched until it ends, is left idle, or is to stop."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._folder = folder_of(environ)
        self._stop_file = environ.get("BATCHML_STOP_FILE", "")
        self._token = secrets.token_urlsafe(32)
        self._root = root_of(environ)
        self._limit = limit_of(environ)
        self._idle = Idle(self._limit)
        self._use = Use()
        self._life = Life()
        self._is_terminated = False

    def run(self) -> int:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        signal.signal(signal.SIGTERM, self._note)
        with self._start() as process:
            copier = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
            copier.start()
            try:
                code, words = self._watch(process)
            finally:
                _end(process)
                copier.join(1.0)
        say(words)  # after all that JupyterLab said
        return code

    def _note(self, _number: int, _frame: object) -> None:
        self._is_terminated = True

    def _start(self) -> "subprocess.Popen[str]":
        settings = settings_of(self._root, free_port(PORT), self._token)
        path = os.path.join(self._folder, "settings.py")
        text = program_text(settings, os.path.join(self._folder, _SAVED))
        write_atomically(path, text.encode())
        ways = [write_defaults(self._folder), self._environ.get("JUPYTER_CONFIG_PATH", "")]
        environ = {
            **self._environ,
            "JUPYTER_RUNTIME_DIR": self._folder,
            "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, ways)),
        }
        # Not in the workspace: Python would import what lies there by the name of a module.
        return subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", f"--config={path}"],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip

    def _copy(self, lines: "IO[str]") -> None:
        for line in lines:
            sys.stdout.write(line.replace(self._token, "[token]"))
            sys.stdout.flush()

    # --- while it runs ------------------------------------------------------------------------

    def _watch(self, process: "subprocess.Popen[str]") -> "tuple[int, str]":
        """Until it is to end: the exit code, and why."""
        jupyter: Optional[Jupyter] = None
        give_up, next_look = time.monotonic() + STARTING, 0.0
        every = min(LOOK_EVERY, max(_TICK, self._limit / 10))
        while True:
            code = _waited(process, _TICK)
            if code is not None:
                return _ended(code)
            if self._is_terminated:
                return STOPPED, f"it was told to stop. {self._cost()}"
            if self._stop_file and os.path.exists(self._stop_file):
                return 0, f"it is ended. {self._cost()}"
            now = time.monotonic()
            if jupyter is None:
                jupyter = self._found(process.pid)
                if jupyter is None and now > give_up:
                    return 1, f"JupyterLab does not answer after {spelled(STARTING)}."
            elif now >= next_look:
                next_look = now + every
                active = self._use.see(jupyter.look(self._saved()), self._environ)
                if self._idle.seen(active, time.monotonic()) <= 0:
                    ran = self._life.seconds()
                    return 0, last_words("this notebook", self._limit, ran, self._environ)

    def _cost(self) -> str:
        return cost_words(self._life.seconds(), self._environ)

    def _found(self, pid: int) -> Optional[Jupyter]:
        """JupyterLab once it answers, which is told, and written down for `where`."""
        told = read_json(os.path.join(self._folder, f"jpserver-{pid}.json"))
        if not isinstance(told, dict):
            return None
        port = int(told["port"])
        jupyter = Jupyter(port, self._token)
        if jupyter.look(0.0) is None:
            return None
        door = {"port": port, "token": self._token, "root": self._root}
        write_atomically(os.path.join(self._folder, _DOOR), json.dumps(door).encode())
        rest = f"It ends when idle for {spelled(self._limit)}." if self._limit < math.inf else ""
        say(f"JupyterLab answers on port {port}; its files are {self._root}. {rest}".rstrip())
        if self._root != self._environ.get("BATCHML_WORKSPACE"):
            say("there is no workspace here: what is saved are the run's outputs, for batchml get.")
        return jupyter

    def _saved(self) -> float:
        try:
            return os.stat(os.path.join(self._folder, _SAVED)).st_mtime
        except OSError:
            return 0.0


def _waited(process: "subprocess.Popen[str]", seconds: float) -> Optional[int]:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _ended(code: int) -> "tuple[int, str]":
    """JupyterLab ended by itself: its lines stand in the log, its code is the run's."""
    if code == 0:
        return 0, "JupyterLab was shut down from its own menu."
    by = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    words = f"JupyterLab ended {by}; what it said last stands above."
    return (128 - code if code < 0 else code), words


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is not None:
        return
    process.terminate()  # it ends its kernels first
    if _waited(process, _ENDING) is None:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
