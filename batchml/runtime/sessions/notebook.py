"""The program of a notebook run: it starts JupyterLab, and ends it when it is idle.

    python -m batchml.runtime.sessions.notebook
    python -m batchml.runtime.sessions.notebook where [SECONDS]

`where`, called inside the run, prints `{"port": N, "token": "..."}` for the client, and waits up to
SECONDS for JupyterLab. This program makes the token, and writes it into a folder that only the
run's user can read. No argument or variable contains it, so neither a list of processes nor a cell
that prints the environment shows it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from typing import IO, Any, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.exec import presence
from batchml.runtime.nodes.link.address import LOOPBACK, free_port
from batchml.runtime.processes import shell_code
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, STOPPED
from batchml.runtime.sessions.alloc import (
    IdleTimer,
    Lifetime,
    describe_cost,
    describe_idle_end,
    format_seconds,
    read_limit,
)
from batchml.runtime.storage.files import read_json, write_atomically

# --- Activity -------------------------------------------------------------------------------------
# A computing kernel counts as use, and so do an executed cell, output of a terminal, a saved file
# and a `batchml shell`. An open browser tab and its requests do not count. Source: jupyter_server's
# `/api/kernels` (`execution_state`; `last_activity` changes when a user sends something to a
# kernel) and `/api/terminals` (`last_activity` changes with output).


_TIMEOUT = 10.0  # seconds for a response
_NOT_BUSY = ("idle", "dead", "unknown", "starting")  # states of a kernel that computes nothing


class JupyterState(NamedTuple):
    """The state that JupyterLab reports at one moment."""

    busy: int  # kernels that compute
    # time of the last activity of each kernel and terminal, in JupyterLab's notation
    activity: Tuple[str, ...]
    saved: float  # when a file was saved last, in seconds since the epoch


class Jupyter:
    """A client of JupyterLab's API."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"token {token}"}

    def read_state(self, saved: float) -> Optional[JupyterState]:
        """Return the state; None if no Jupyter server answers. `saved`: see `JupyterState`."""
        try:
            kernels, terminals = self._get("kernels"), self._get("terminals")
            return JupyterState(
                sum(kernel.get("execution_state") not in _NOT_BUSY for kernel in kernels),
                tuple(str(part.get("last_activity")) for part in [*kernels, *terminals]),
                saved,
            )
        except (OSError, HTTPException, ValueError, AttributeError):
            return None

    def _get(self, kind: str) -> List[Any]:
        connection = HTTPConnection(LOOPBACK, self._port, timeout=_TIMEOUT)
        try:
            connection.request("GET", f"/api/{kind}", headers=self._headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status == 404 and kind == "terminals":
            return []  # this image's JupyterLab has no terminals
        parts = json.loads(content)
        if response.status != 200 or not isinstance(parts, list):
            raise ValueError(f"{response.status} for {kind}")
        return parts


class NotebookActivity:
    """Notices use of the notebook by comparing states."""

    def __init__(self) -> None:
        self._before: Optional[JupyterState] = None

    def is_used(self, state: Optional[JupyterState], environ: Mapping[str, str]) -> bool:
        """Say whether the notebook was used since the last call, or a shell is open now."""
        was_used = False
        if state is not None:
            was_used = shows_use(state, self._before)
            self._before = state
        return was_used or presence.count(environ) > 0


def shows_use(state: JupyterState, before: Optional[JupyterState]) -> bool:
    """Say whether a state shows use since the state before it; None: the first state. Pure.

    A kernel that is gone shows use, too: a user has ended it.
    """
    return before is None or state.busy > 0 or state[1:] != before[1:]


# --- The program ----------------------------------------------------------------------------------


STARTUP_LIMIT = 300.0  # seconds for JupyterLab to answer
CHECK_EVERY = 10.0  # seconds between two checks of its activity
_TICK = 0.5  # seconds between two checks whether it has to end
_SHUTDOWN_LIMIT = 10.0  # seconds for JupyterLab to shut its kernels down
_FOLDER = ".batchml-notebook"
_ADDRESS = "door.json"  # the file with port and token
_SAVED = "saved"  # its modification time is the time of the last save
NOT_READY = 75  # exit code of `where`

PORT = 8888  # JupyterLab's own
DEFAULTS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}
}
NO_JUPYTER = (
    "this image has no JupyterLab. Add the lines `jupyterlab` and `ipykernel` to its "
    "requirements.txt, or leave --image out: the image `notebook` has them."
)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    if list(arguments[:1]) == ["where"]:
        return print_address(environ, float(arguments[1]) if len(arguments) > 1 else 0.0)
    if find_spec("jupyterlab") is None:
        log(NO_JUPYTER)
        return CONFIGURATION_ERROR
    return NotebookServer(environ).run()


def log(text: str) -> None:
    print(f"batchml: {text}", flush=True)


# --- Port and token -------------------------------------------------------------------------------


def folder_of(environ: Mapping[str, str]) -> str:
    """Return the folder of the notebook's own files, beside the attempt's stop file."""
    above = os.path.dirname(environ.get("BATCHML_STOP_FILE", "")) or os.getcwd()
    return os.path.join(above, _FOLDER)


def print_address(environ: Mapping[str, str], limit: float) -> int:
    """Print port and token when JupyterLab answers; wait `limit` seconds for that."""
    until, pause = time.monotonic() + limit, threading.Event()
    path = os.path.join(folder_of(environ), _ADDRESS)
    while True:
        address = read_json(path)
        if address is not None:
            print(json.dumps(address), flush=True)
            return 0
        if time.monotonic() >= until:
            return NOT_READY
        pause.wait(_TICK)


# --- JupyterLab's settings ------------------------------------------------------------------------


def choose_root(environ: Mapping[str, str]) -> str:
    """Return the folder that JupyterLab shows: the workspace if it is writable, or the outputs."""
    for name in ("BATCHML_WORKSPACE", "BATCHML_OUTPUT_DIR"):
        folder = environ.get(name, "")
        if folder and os.path.isdir(folder) and os.access(folder, os.W_OK):
            return folder
    return os.getcwd()


def jupyter_settings(root: str, port: int, token: str) -> Dict[str, Dict[str, Any]]:
    """Return JupyterLab's settings. It fetches no news and checks for no newer version."""
    return {
        "ServerApp": {
            "ip": LOOPBACK,
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


def render_settings(settings: Mapping[str, Mapping[str, Any]], saved: str) -> str:
    """Return the text of a settings file of Jupyter, which is a Python program.

    Its hook rewrites the file `saved` whenever the user saves a file.
    """
    lines = [
        "import warnings",
        "warnings.filterwarnings('ignore', 'Overriding existing')",  # about the hook
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


def write_defaults(folder: str) -> str:
    """Write the default settings of JupyterLab's page; return the folder for JUPYTER_CONFIG_PATH.

    Without these settings the page asks the user whether to fetch news.
    """
    inner = os.path.join(folder, "config", "labconfig")
    os.makedirs(inner, mode=0o700, exist_ok=True)
    path = os.path.join(inner, "default_setting_overrides.json")
    write_atomically(path, json.dumps(DEFAULTS).encode())
    return os.path.dirname(inner)


class NotebookServer:
    """Runs JupyterLab as a child process, until it ends, is idle, or has to stop."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._folder = folder_of(environ)
        self._stop_file = environ.get("BATCHML_STOP_FILE", "")
        self._token = secrets.token_urlsafe(32)
        self._root = choose_root(environ)
        self._limit = read_limit(environ)
        self._idle = IdleTimer(self._limit)
        self._activity = NotebookActivity()
        self._lifetime = Lifetime()
        self._is_terminated = False

    def run(self) -> int:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        signal.signal(signal.SIGTERM, self._on_term)
        with self._start() as process:
            copier = threading.Thread(target=self._copy_output, args=(process.stdout,), daemon=True)
            copier.start()
            try:
                code, reason = self._watch(process)
            finally:
                _end(process)
                copier.join(1.0)
        log(reason)  # after JupyterLab's own output
        return code

    def _on_term(self, _number: int, _frame: object) -> None:
        self._is_terminated = True

    def _start(self) -> subprocess.Popen[str]:
        settings = jupyter_settings(self._root, free_port(LOOPBACK, PORT), self._token)
        path = os.path.join(self._folder, "settings.py")
        text = render_settings(settings, os.path.join(self._folder, _SAVED))
        write_atomically(path, text.encode())
        folders = [write_defaults(self._folder), self._environ.get("JUPYTER_CONFIG_PATH", "")]
        environ = {
            **self._environ,
            "JUPYTER_RUNTIME_DIR": self._folder,
            "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, folders)),
        }
        # Not in the workspace, where a file could shadow a module that JupyterLab imports.
        return subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", f"--config={path}"],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip

    def _copy_output(self, lines: IO[str]) -> None:
        """Copy JupyterLab's output to the log, without the token."""
        for line in lines:
            sys.stdout.write(line.replace(self._token, "[token]"))
            sys.stdout.flush()

    def _watch(self, process: subprocess.Popen[str]) -> Tuple[int, str]:
        """Wait until JupyterLab has ended or has to end; return the exit code and the reason."""
        jupyter: Optional[Jupyter] = None
        give_up, next_check = time.monotonic() + STARTUP_LIMIT, 0.0
        every = min(CHECK_EVERY, max(_TICK, self._limit / 10))
        while True:
            code = _wait(process, _TICK)
            if code is not None:
                return _describe_end(code)
            if self._is_terminated:
                return STOPPED, f"it was stopped. {self._cost()}"
            if self._stop_file and os.path.exists(self._stop_file):
                return 0, f"it was ended by its user. {self._cost()}"
            now = time.monotonic()
            if jupyter is None:
                jupyter = self._connect(process.pid)
                if jupyter is None and now > give_up:
                    return 1, f"JupyterLab does not answer after {format_seconds(STARTUP_LIMIT)}."
            elif now >= next_check:
                next_check = now + every
                state = jupyter.read_state(self._saved())
                is_used = self._activity.is_used(state, self._environ)
                if self._idle.seconds_left(is_used, time.monotonic()) <= 0:
                    ran = self._lifetime.seconds()
                    return 0, describe_idle_end("this notebook", self._limit, ran, self._environ)

    def _cost(self) -> str:
        return describe_cost(self._lifetime.seconds(), self._environ)

    def _connect(self, pid: int) -> Optional[Jupyter]:
        """Once JupyterLab answers, log that, write port and token, and return a client."""
        server = read_json(os.path.join(self._folder, f"jpserver-{pid}.json"))
        if not isinstance(server, dict):
            return None
        port = int(server["port"])
        jupyter = Jupyter(port, self._token)
        if jupyter.read_state(0.0) is None:
            return None
        address = {"port": port, "token": self._token, "root": self._root}
        write_atomically(os.path.join(self._folder, _ADDRESS), json.dumps(address).encode())
        end = ""
        if self._limit < math.inf:
            end = f" It ends when idle for {format_seconds(self._limit)}."
        log(f"JupyterLab answers on port {port} and shows {self._root}.{end}")
        if self._root != self._environ.get("BATCHML_WORKSPACE"):
            log("there is no workspace: files are saved as outputs of the run, for batchml get.")
        return jupyter

    def _saved(self) -> float:
        """When a file was saved last, in seconds since the epoch; 0: none was."""
        try:
            return os.stat(os.path.join(self._folder, _SAVED)).st_mtime
        except OSError:
            return 0.0


def _wait(process: subprocess.Popen[str], seconds: float) -> Optional[int]:
    """Wait for so long; return the exit code, or None if the process still runs."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _describe_end(code: int) -> Tuple[int, str]:
    """Return the run's exit code and the reason after JupyterLab has ended by itself."""
    if code == 0:
        return 0, "JupyterLab was shut down from its own menu."
    by = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return shell_code(code), f"JupyterLab ended {by}; its last output is above."


def _end(process: subprocess.Popen[str]) -> None:
    """End JupyterLab if it still runs."""
    if process.poll() is not None:
        return
    process.terminate()  # JupyterLab then ends its kernels first
    if _wait(process, _SHUTDOWN_LIMIT) is None:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
