"""forward: a port of this machine that leads into a run."""

from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, OneRun
from batchml.cli.output import print_json, print_line, say
from batchml.cli.shell import Node, Wait, find


@app.command(epilog="Example: batchml forward @last 8888")
def forward(
    run: OneRun,
    port: Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535, help="Inside the run.")],
    local_port: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=65535, help="Of this machine; PORT, if it is free."),
    ] = None,
    node: Node = None,
    wait: Wait = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Lead a port of this machine, on 127.0.0.1, to a port inside a run, until Ctrl-C.

    Nothing needs to listen there yet. It ends with the run.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.doors import open_tunnel
    from batchml.client.ports import is_quiet

    place = open_place(env)
    seat = find(place, run, node, wait)
    with open_tunnel(place, seat, port, local_port) as tunnel:
        if json_:
            print_json(
                {"jobId": seat.run.job_id, "port": port, "localPort": tunnel.local_port,
                 "url": tunnel.url}
            )  # fmt: skip
        else:
            print_line(tunnel.url)
        if tunnel.is_direct:
            say(f"The run's port {port} is this machine's own: it is reached as it is.")
        elif tunnel.local_port != port and local_port is None:
            say(f"Port {port} of this machine is taken: {tunnel.local_port} leads there instead.")
        if tunnel.is_direct and is_quiet(port):
            say(f"Nothing listens on port {port} there yet: until then a connection is refused.")
        say(f"Leads to port {port} of {seat.run.name}. Ctrl-C ends it.")
        why = tunnel.wait()
    say(why)
