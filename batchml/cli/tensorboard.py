"""tensorboard: the curves of runs, in the browser here."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchml.client.place import Place
    from batchml.client.tensorboard import Shown
    from batchml.client.tensorboard_server import TensorBoard
    from batchml.ops.search import Found

EVERY = 2.0  # seconds between two looks on this machine,
EVERY_AWS = 30.0  # and where each is a call
MOST = 50  # runs: each that goes on is asked about by itself


@app.command(epilog="Example: batchml tensorboard @last @last~1")
def tensorboard(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Job ids, names; else @last.")
    ] = None,
    workspace: Annotated[
        list[Path] | None,
        typer.Option("--workspace", metavar="PATH", help="Event files below it, on `local`."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "--local-port", metavar="N", help="Of this machine.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """See runs in TensorBoard, on this machine: their metrics, and event files that they wrote.

    Runs that go on are followed, until Ctrl-C. Nothing has to be installed for it, neither here
    nor in the runs.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.tensorboard import Shown, scratch, show_folder
    from batchml.client.tensorboard_server import PORT, environment, running

    place = open_place(env)
    folders = _workspaces(place, workspace or [])
    found = _found(place, runs or ([] if folders else ["@last"]))
    python = environment(place, say)
    every = EVERY if place.settings.is_local else EVERY_AWS
    with _until_interrupted(), scratch(place) as root:
        shown = [Shown(place, each, root, say) for each in found]
        for each in shown:
            each.start()

        def look() -> None:
            for one in shown:
                one.look()
            for folder in folders:
                show_folder(folder, place.home.root / "workspace", root)

        look()
        with running(place, python, root, port, max(1, int(every))) as server:
            _tell(place, shown, server, open_=open_, json_=json_)
            if port is None and f":{PORT}/" not in server.url:
                say(f"Port {PORT} is taken: it is another instead.")
            say_empty = _Empty(shown)
            while True:
                place.clock.sleep(every)
                server.check()
                look()
                say_empty()


def _found(place: "Place", words: "Sequence[str]") -> "list[Found]":
    from batchml.client.finding import recall
    from batchml.client.runs import select

    job_ids = list(dict.fromkeys(select(place, words)))
    if len(job_ids) > MOST:
        raise UsageError(f"{len(job_ids)} runs: TensorBoard is shown {MOST} at most. Name fewer.")
    return list(recall(place, job_ids))


def _workspaces(place: "Place", given: "Sequence[Path]") -> list[Path]:
    """Folders of the workspace of this machine, by their path in it or as runs see it."""
    from batchml.aws.naming import WORKSPACE

    if given and not place.settings.is_local:
        raise UsageError(
            "--workspace: of `local` alone. In AWS the event files that runs leave in "
            "BATCHML_OUTPUT_DIR are shown; others: batchml workspace pull, and then TensorBoard."
        )
    root = (place.home.root / "workspace").resolve()
    found = []
    for path in given:
        inner = path.relative_to(WORKSPACE) if path.is_relative_to(WORKSPACE) else path
        folder = (root / inner).resolve()
        if not folder.is_relative_to(root) or not folder.is_dir():
            raise UsageError(f"--workspace {path}: no such folder in the workspace, {root}.")
        found.append(folder)
    return found


def _tell(
    place: "Place", shown: "Sequence[Shown]", server: "TensorBoard", *, open_: bool, json_: bool
) -> None:
    """The URL has its token on a terminal alone."""
    url, address = server.url, f"{server.url}?token={server.token}"
    if json_:
        runs = [{"jobId": each.job_id, "name": each.name} for each in shown]
        token_file = str(server.token_file)
        print_json({"url": url, "tokenFile": token_file, "env": place.env, "runs": runs})
        sys.stdout.flush()
    else:
        print_line(address if sys.stdout.isatty() else url)
    if json_ or not sys.stdout.isatty():
        say(f"The token of the URL is shown on a terminal alone. A program reads it from "
            f"{server.token_file} and sends `Authorization: Bearer TOKEN`.")  # fmt: skip
    names = ", ".join(each.name for each in shown)
    say(f"TensorBoard shows {names or 'the workspace'}. Ctrl-C ends it.")
    if open_:
        from batchml.cli.opening import open_browser

        open_browser(place, address, "TensorBoard")


class _Empty:
    """Says once of each run that has ended that there is nothing of it to see."""

    def __init__(self, shown: "Sequence[Shown]") -> None:
        self._left = list(shown)

    def __call__(self) -> None:
        for each in [one for one in self._left if one.has_ended]:
            self._left.remove(each)
            if each.is_empty:
                say(
                    f"{each.name} has ended and left nothing to see: no metrics, and no event "
                    "files in BATCHML_OUTPUT_DIR."
                )


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Ctrl-C is how it ends; SIGTERM is taken for it."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("\nTensorBoard is ended.")
    finally:
        signal.signal(signal.SIGTERM, before)
