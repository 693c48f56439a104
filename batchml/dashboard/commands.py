"""`batchml dashboard`: pages about runs, sweeps, hosts and costs in the browser."""

import os
import sys
from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Project, open_context
from batchml.cli.output import print_line, say
from batchml.client import Client
from batchml.clock import SystemClock
from batchml.dashboard.access import ENTER, make_secrets
from batchml.dashboard.acting.tools import Tools
from batchml.dashboard.service import listen, serve

_LOOPBACK = "127.0.0.1"


@app.command("dashboard", epilog="Example: batchml dashboard --env dev")
def dashboard(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Use this port; 0: any free one.")
    ] = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the link only; do not open a browser.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse to cancel, rerun and submit.")
    ] = False,
    env: Env = None,
    project: Project = None,
) -> None:
    """Show runs, sweeps, hosts and costs in the browser, from this machine.

    The page needs the link that is printed: it contains a token that works once. Ctrl-C ends the
    server, as does the end of the terminal, or an hour without a page.
    """
    context = open_context(env, project)
    client = Client(context.env, context.folder, environ=os.environ, project=project, tell=say)
    listener = listen(_LOOPBACK, port)
    known = make_secrets(listener.getsockname()[1], read_only=read_only)

    def begin() -> None:
        print_line(f"http://{known.name}:{known.port}{ENTER}#{known.token}")
        print_line(f"http://{_LOOPBACK}:{known.port}{ENTER}?token={known.token}")
        say("The first link is for a browser, the second one for a browser without scripts, or "
            "that does not find the first. A link works once. Ctrl-C ends it.")  # fmt: skip
        sys.stdout.flush()
        if not no_open:
            _open(f"http://{known.name}:{known.port}{ENTER}#{known.token}")

    own_project = ("--project", project) if project else ()
    serve(
        client, known, listener, SystemClock(), is_local=context.settings.is_local,
        exchanges=2 if no_open else 1, begin=begin,
        opened=Tools(client.folder, ("--env", client.env, *own_project)),
    )  # fmt: skip


def _open(url: str) -> None:
    import webbrowser

    webbrowser.open(url)
