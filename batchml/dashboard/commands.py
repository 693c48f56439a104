"""`batchml dashboard`: pages about runs, sweeps, hosts and costs in the browser."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Project, open_context
from batchml.cli.output import print_line, say
from batchml.client import Client
from batchml.clock import SystemClock
from batchml.dashboard.access import ENTER, make_secrets
from batchml.dashboard.acting.tools import Tools
from batchml.dashboard.export.folder import export_folder
from batchml.dashboard.export.site import DEFAULT_LIMIT, SiteWriter
from batchml.dashboard.server.opening import (
    LOOPBACK,
    BrowserOpening,
    ListenAddress,
    listen,
    read_address,
)
from batchml.dashboard.service import serve
from batchml.errors import UsageError
from batchml.runtime.entry.folders import size_text


@app.command("dashboard", epilog="Example: batchml dashboard --env dev")
def dashboard(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Use this port; 0: any free one.")
    ] = 0,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Let other machines in by this address of this machine, without encryption; "
            "0.0.0.0: by any.",
        ),
    ] = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the links only; do not open a browser.")
    ] = False,
    open_link: Annotated[
        bool,
        typer.Option(
            "--open-link",
            help="Give the browser the link itself, which other users of this machine can see, "
            "and not a private file.",
        ),
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse to cancel, rerun and submit.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="DIR", help="Write the pages into a folder, and end."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help=f"With --export: give the newest N runs a page; default {DEFAULT_LIMIT}.",
        ),
    ] = None,
    env: Env = None,
    project: Project = None,
) -> None:
    """Show runs, sweeps, hosts and costs in the browser, from this machine.

    The page needs a link that is printed: it contains a token that works once. Ctrl-C ends the
    server, as does the end of the terminal, or an hour without a page.
    """
    address = read_address(host) if host is not None else ListenAddress()
    context = open_context(env, project)
    if limit is not None and export is None:
        raise UsageError("--limit is of --export DIR only.")
    if export is not None and (port or host or no_open or open_link or read_only):
        raise UsageError("--export starts no server: --limit, --env and --project go with it only.")
    client = Client(context.env, context.folder, environ=os.environ, project=project, tell=say)
    if export is not None:
        _export(client, export, DEFAULT_LIMIT if limit is None else limit)
        return
    listeners = listen(port, address)
    known = make_secrets(
        listeners[0].getsockname()[1], address.allowed, links=3 if address.bind else 2,
        any_address=address.is_any, read_only=read_only,
    )  # fmt: skip
    link = f"http://{known.name}:{known.port}{ENTER}#{known.tokens[0]}"
    opening = BrowserOpening(link, say, by_file=not open_link)

    def begin() -> None:
        print_line(link)
        print_line(f"http://{LOOPBACK}:{known.port}{ENTER}?token={known.tokens[1]}")
        words = ("The first link is for a browser, the second one for a browser without scripts, "
                 "or that does not find the first.")  # fmt: skip
        if address.bind:
            print_line(f"http://{address.name}:{known.port}{ENTER}#{known.tokens[2]}")
            words += " The third is for other machines."
        if address.is_open:
            say(f"Warning: other machines reach this page at http://{address.name}:{known.port}/. "
                "The connection is not encrypted: who can read it can act as you. "
                f"`ssh -L {known.port}:localhost:{known.port}` is safer.")  # fmt: skip
        say(f"{words} Each works once. Ctrl-C ends it.")
        sys.stdout.flush()
        if not no_open:
            opening.start()

    own_project = ("--project", project) if project else ()
    try:
        serve(
            client, known, listeners, SystemClock(), is_local=context.settings.is_local,
            begin=begin, entered=opening.close,
            opened=Tools(client.folder, ("--env", client.env, *own_project)),
        )  # fmt: skip
    finally:
        opening.close()


def _export(client: Client, target: Path, limit: int) -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing behind
    with export_folder(target) as folder:
        made = SiteWriter(client, SystemClock(), folder, limit=limit, tell=say).write()
    print_line(str(target / "index.html"))
    say(f"Runs: {made.runs:,}, with a page: {made.pages:,}. Sweeps: {made.sweeps}. "
        f"Comparisons: {made.comparisons}. {size_text(made.size)}.")  # fmt: skip
    if made.missing:
        path, why = next(iter(made.missing.items()))
        say(f"{len(made.missing)} parts could not be read, and say so; the first, {path}: {why}")
