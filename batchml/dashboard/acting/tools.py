"""TensorBoard and notebooks, opened from a page: the commands of the terminal, as processes.

Each runs until it ends by itself, or the dashboard ends. What the pages get is the command's own
`--json` document and the token with which the browser enters.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.dashboard.act import ActionField, PageAction, done, read_text, read_texts, shell
from batchml.dashboard.acting.submit import option_fields, read_image
from batchml.dashboard.app import PageQuery
from batchml.errors import BatchmlError, UsageError
from batchml.model.group import HELD_TAG, NOTEBOOK
from batchml.model.names import short_id
from batchml.model.run import JobStatus
from batchml.runs.options import option_rows
from batchml.runs.search import FoundRun
from batchml.runtime.processes import die_with_parent
from batchml.sessions.notebook import PROGRAM, parse_address

PATIENCE = 600.0  # seconds until a command has to print its document
_GRACE = 5.0  # seconds to end
_NOTEBOOK_OPTIONS = ("gpus", "vcpus", "memory", "queue", "image", "name", "max_cost")
_NOTEBOOK_TIMES = {
    "idle": ("End without use after", 'Such as "30m", or "never"; by default 1h.'),
    "time": ("End at the latest after", 'Such as "12h".'),
}


class _OpenTool(Struct):
    process: "subprocess.Popen[str]"
    document: dict[str, Any]


class Tools:
    """The processes of one dashboard, by their command lines."""

    def __init__(
        self, folder: Path, options: Sequence[str] = (), *,
        program: Sequence[str] = (sys.executable, "-m", "batchml"), patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        """`folder`: where they run; `options`: of each command, such as `--env dev`."""
        self._folder, self._options, self._patience = folder, tuple(options), patience
        self._program = tuple(program)
        self._open: dict[tuple[str, ...], _OpenTool] = {}
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._is_closed = False

    def open(self, *words: str) -> dict[str, Any]:
        """Start a command that stays, or find the one that runs; the document that it prints.

        Raises BatchmlError with the command's message if it ends without a document.
        """
        # A second tab that asks meanwhile gets the same process; another command does not wait.
        with self._locks.setdefault(words, threading.Lock()):
            known = self._open.get(words)
            if known is not None and known.process.poll() is None:
                return known.document
            process, document = self._start(words)
            self._open[words] = _OpenTool(process, document)
            if self._is_closed:
                self._end(process)
            return document

    def ask(self, *words: str) -> str:
        """Run a command to its end; what it prints on stdout. Raises BatchmlError."""
        try:
            found = subprocess.run(
                [*self._program, *words], cwd=self._folder, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=self._patience,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise BatchmlError(f"`batchml {words[0]}` has not answered.") from error
        if found.returncode:
            raise BatchmlError(_message(found.stdout, words) or found.stderr.strip())
        return found.stdout

    def with_options(self, *words: str) -> tuple[str, ...]:
        """The words with the options of all commands: `--env dev`, `--json`."""
        return (*words, *self._options, "--json")

    @property
    def options(self) -> tuple[str, ...]:
        return self._options

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for each in list(self._open.values()):
            self._end(each.process)

    def _start(self, words: tuple[str, ...]) -> "tuple[subprocess.Popen[str], dict[str, Any]]":
        # In the group of the dashboard: Ctrl-C and a closed terminal reach it, too. The kernel ends
        # it with the dashboard, as it would with this thread, which asyncio keeps.
        process = subprocess.Popen(
            [*self._program, *words], cwd=self._folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            preexec_fn=die_with_parent(os.getpid()),
        )  # fmt: skip
        timer = threading.Timer(self._patience, process.terminate)
        timer.start()
        text = ""
        assert process.stdout is not None
        try:
            for line in process.stdout:
                text += line
                if line == "}\n":
                    break
        finally:
            timer.cancel()
        document = _read_document(text)
        if document is None or "error" in document:
            self._end(process)
            raise BatchmlError(_message(text, words) or f"`batchml {words[0]}` did not start.")
        return process, document

    @staticmethod
    def _end(process: "subprocess.Popen[str]") -> None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _read_document(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _message(text: str, words: Sequence[str]) -> str:
    """The error of a command's `--json` document; "" without one."""
    return str((_read_document(text) or {}).get("error", ""))


# --- The buttons ----------------------------------------------------------------------------------


def tool_actions(found: FoundRun, env_option: str) -> list[PageAction]:
    """TensorBoard for a run that has begun, JupyterLab for a notebook that runs."""
    run, word = found.run, short_id(found.shown_id)
    actions = []
    if run is not None and found.tags.get(HELD_TAG) == NOTEBOOK:
        if run.status is JobStatus.RUNNING:
            actions.append(PageAction(
                label="Open JupyterLab", question=f"Open {found.name} {word} in JupyterLab?",
                path="/act/open-notebook", body={"run": found.job_id},
                command=shell("batchml", "notebook", word, "--open") + env_option,
                confirm="Open", cost=f"/run/{found.job_id}/cost",
                notes=("It stays open until the dashboard ends; the notebook then goes on.",),
            ))  # fmt: skip
    elif run is not None and (run.attempts or run.children):
        actions.append(PageAction(
            label="TensorBoard", question=f"Open {found.name} {word} in TensorBoard?",
            path="/act/tensorboard", body={"run": found.job_id},
            command=shell("batchml", "tensorboard", word, "--open") + env_option, confirm="Open",
            notes=("It runs on this machine, which costs nothing, until the dashboard ends. The "
                   "first time its environment is made, which takes minutes.",),
        ))  # fmt: skip
    return actions


def notebook_action(env_option: str) -> PageAction:
    """A new notebook."""
    times = (
        ActionField(name=name, label=label, hint=hint, flag=f"--{name}", under="options")
        for name, (label, hint) in _NOTEBOOK_TIMES.items()
    )
    options = option_fields(_NOTEBOOK_OPTIONS, {})
    return PageAction(
        label="Start a notebook", question="Start a notebook?", path="/act/notebook",
        command=shell("batchml", "notebook", "--new") + env_option, confirm="Start",
        fields=(*times, *options),
        notes=("JupyterLab is a run: it costs what its host costs until it ends. Its page opens "
               "it, once it runs.",),
    )  # fmt: skip


def open_tensorboard(tools: Tools, job_id: str) -> dict[str, Any]:
    """The route /act/tensorboard. `job_id`: of a run that the client has found."""
    opened = tools.open(*tools.with_options("tensorboard", job_id))
    try:
        token = Path(opened["tokenFile"]).read_text("ascii")
    except OSError as error:
        raise BatchmlError("TensorBoard has ended meanwhile. Open it again.") from error
    return done("TensorBoard runs.", link=("Open TensorBoard", f"{opened['url']}?token={token}"))


def open_notebook(tools: Tools, job_id: str) -> dict[str, Any]:
    """The route /act/open-notebook. The token comes from inside the run, as in the terminal."""
    opened = tools.open(*tools.with_options("notebook", job_id))
    said = tools.ask("shell", job_id, *tools.options, "--", *PROGRAM, "where")
    token = parse_address(said.encode()).token
    return done("JupyterLab answers.", link=("Open JupyterLab", f"{opened['url']}?token={token}"))


def start_notebook(tools: Tools, query: PageQuery) -> dict[str, Any]:
    """The route /act/notebook: `options`."""
    words = []
    for name, text in read_texts(query.body, "options").items():
        if name not in (*_NOTEBOOK_OPTIONS, *_NOTEBOOK_TIMES):
            raise UsageError(f"{name}: cannot be set here.")
        flag = option_rows()[name].flag if name in option_rows() else f"--{name}"
        if text.strip():
            words.append(f"{flag}={read_image(text) if name == 'image' else text.strip()}")
    started = json.loads(tools.ask(*tools.with_options("notebook", "--new", "--detach", *words)))
    return done("The notebook was submitted.", f"/run/{read_text(started, 'jobId')}")
