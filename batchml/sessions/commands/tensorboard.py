"""`batchml tensorboard`: curves of runs in TensorBoard, in the browser on this machine."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.aws.naming import WORKSPACE
from batchml.cli.app import app
from batchml.cli.options import Env, Json, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError
from batchml.runs.find import load_runs, select
from batchml.sessions.notebook import open_browser
from batchml.sessions.tensorboard.data import ShownRun, scratch_folder, show_folder
from batchml.sessions.tensorboard.server import (
    PORT,
    TensorBoard,
    prepare_environment,
    run_tensorboard,
)

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.runs.search import FoundRun

UPDATE_EVERY = 2.0  # seconds between two updates on this machine
UPDATE_EVERY_AWS = 30.0  # seconds in AWS, where an update is one call for each run
MAX_RUNS = 50  # each unfinished run is polled separately


@app.command(epilog="Example: batchml tensorboard @last @last~1")
def tensorboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Job ids or names; default: @last."),
    ] = None,
    workspace: Annotated[
        list[Path] | None,
        typer.Option(
            "--workspace",
            metavar="PATH",
            help="Show event files of this folder, too (only `local`).",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "--local-port", metavar="N", help="Use this port of this machine."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show runs in TensorBoard on this machine: their metrics, and event files that they wrote.

    Unfinished runs are followed until Ctrl-C. Nothing has to be installed, neither here nor in the
    runs.
    """
    context = open_context(env, project)
    folders = _workspace_folders(context, workspace or [])
    found = _find_runs(context, runs or ([] if folders else ["@last"]))
    python = prepare_environment(context, say)
    every = UPDATE_EVERY if context.settings.is_local else UPDATE_EVERY_AWS
    with _until_interrupted(), scratch_folder(context) as root:
        shown = [ShownRun(context, each, root, say) for each in found]
        for each in shown:
            each.start()

        def update() -> None:
            for each in shown:
                each.update()
            for folder in folders:
                show_folder(folder, context.home.root / "workspace", root)

        update()
        with run_tensorboard(context, python, root, port, max(1, int(every))) as server:
            _print_url(context, shown, server, open_=open_, json_=json_)
            if port is None and f":{PORT}/" not in server.url:
                say(f"Port {PORT} of this machine is taken: another port is used.")
            report_empty = _EmptyRuns(shown)
            while True:
                context.clock.sleep(every)
                server.check()
                update()
                report_empty()


def _find_runs(context: "Context", words: Sequence[str]) -> "list[FoundRun]":
    job_ids = list(dict.fromkeys(select(context, words)))
    if len(job_ids) > MAX_RUNS:
        raise UsageError(f"{len(job_ids)} runs: at most {MAX_RUNS} can be shown. Name fewer.")
    return list(load_runs(context, job_ids))


def _workspace_folders(context: "Context", paths: Sequence[Path]) -> list[Path]:
    """Resolve folders of the `local` workspace; paths may start with /workspace, as in runs."""
    if paths and not context.settings.is_local:
        raise UsageError(
            "--workspace is for `local` only. In AWS the event files that runs write to "
            "BATCHML_OUTPUT_DIR are shown. For other files: batchml workspace pull, then a "
            "TensorBoard of your own."
        )
    root = (context.home.root / "workspace").resolve()
    found = []
    for path in paths:
        inner = path.relative_to(WORKSPACE) if path.is_relative_to(WORKSPACE) else path
        folder = (root / inner).resolve()
        if not folder.is_relative_to(root) or not folder.is_dir():
            raise UsageError(f"--workspace {path}: the workspace {root} has no such folder.")
        found.append(folder)
    return found


def _print_url(
    context: "Context",
    shown: Sequence[ShownRun],
    server: TensorBoard,
    *,
    open_: bool,
    json_: bool,
) -> None:
    """Print the URL; its token only on a terminal."""
    url, url_with_token = server.url, f"{server.url}?token={server.token}"
    if json_:
        runs = [{"jobId": each.job_id, "name": each.name} for each in shown]
        token_file = str(server.token_file)
        print_json({"url": url, "tokenFile": token_file, "env": context.env, "runs": runs})
        sys.stdout.flush()
    else:
        print_line(url_with_token if sys.stdout.isatty() else url)
    if json_ or not sys.stdout.isatty():
        say(
            f"The token is shown only on a terminal. A program reads it from {server.token_file} "
            "and sends `Authorization: Bearer TOKEN`."
        )
    names = ", ".join(each.name for each in shown)
    say(f"TensorBoard shows {names or 'the workspace'}. Ctrl-C ends it.")
    if open_:
        open_browser(context, url_with_token, "TensorBoard")


class _EmptyRuns:
    """Reports once each run that has ended without metrics and event files."""

    def __init__(self, shown: Sequence[ShownRun]) -> None:
        self._unfinished = list(shown)

    def __call__(self) -> None:
        for run in [each for each in self._unfinished if each.has_ended]:
            self._unfinished.remove(run)
            if run.is_empty:
                say(
                    f"{run.name} has ended and has nothing to show: no metrics, and no event "
                    "files in BATCHML_OUTPUT_DIR."
                )


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """End quietly on Ctrl-C and SIGTERM."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("\nTensorBoard has ended.")
    finally:
        signal.signal(signal.SIGTERM, before)
