"""`batchml shell` and `forward`: run commands inside a RUNNING run, and reach its ports."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, OneRun, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.errors import NotRunning, UsageError
from batchml.sessions.exec.backends import capture_output, open_port_forward, run_inside
from batchml.sessions.exec.target import ExecTarget, find_target
from batchml.sessions.forward.listener import has_no_listener

if TYPE_CHECKING:
    from batchml.context import Context

Node = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Enter this node; 0 is the main node."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the run is RUNNING.")]


@app.command(epilog="Example: batchml shell @last -- nvidia-smi")
def shell(
    ctx: typer.Context,
    run: OneRun,
    node: Node = None,
    wait: Wait = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Open a shell inside a RUNNING run, or run the command after -- in it.

    The shell has the run's variables, working folder and limits, and ends with the run. The exit
    code is the command's.
    """
    command = tuple(ctx.obj or ())
    if ctx.obj is not None and not command:
        raise UsageError("Nothing follows the --: give a command, or leave it out for a shell.")
    if json_ and not command:
        raise UsageError("--json needs a command: batchml shell RUN --json -- COMMAND")
    context = open_context(env, project)
    target = wait_for_target(context, run, node, wait)
    if json_:
        result = capture_output(context, target, command, limit=None)
        text = result.out.decode("utf-8", "replace")
        print_json({"jobId": target.run.job_id, "exitCode": result.code, "output": text})
        raise typer.Exit(result.code)
    raise typer.Exit(run_inside(context, target, command))


def wait_for_target(context: "Context", word: str, node: int | None, wait: bool) -> ExecTarget:
    """Find the running attempt; with `wait` wait for it, and print each state meanwhile."""
    last = ""
    while True:
        try:
            return find_target(context, word, node)
        except NotRunning as error:
            if not wait or error.over:
                raise
            state = str(error).partition(":")[0]
            if state != last:
                say(f"{state}: waiting for it.")
                last = state
            context.clock.sleep(context.pace.longest)


# --- Port forwarding ------------------------------------------------------------------------------


@app.command(epilog="Example: batchml forward @last 8888")
def forward(
    run: OneRun,
    port: Annotated[
        int, typer.Argument(metavar="PORT", min=1, max=65535, help="Port inside the run.")
    ],
    local_port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=65535,
            help="Use this port of this machine; default: PORT, or any.",
        ),
    ] = None,
    node: Node = None,
    wait: Wait = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Forward a port of this machine, on 127.0.0.1, to a port inside a run, until Ctrl-C.

    The run's program may open its port later. Forwarding ends with the run.
    """
    context = open_context(env, project)
    target = wait_for_target(context, run, node, wait)
    with open_port_forward(context, target, port, local_port) as opened:
        if json_:
            print_json(
                {"jobId": target.run.job_id, "port": port, "localPort": opened.local_port,
                 "url": opened.url}
            )  # fmt: skip
        else:
            print_line(opened.url)
        if opened.is_direct:
            say(f"Port {port} of the run is a port of this machine: nothing is forwarded.")
        elif opened.local_port != port and local_port is None:
            say(f"Port {port} of this machine is taken: port {opened.local_port} is used instead.")
        if opened.is_direct and has_no_listener(port):
            say(f"Nothing listens on port {port} yet: until then connections are refused.")
        say(f"Connected to port {port} of {target.run.name}. Ctrl-C ends it.")
        reason = opened.wait()
    say(reason)
