"""compute hosts: what sinfo -N tells."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.compute import compute_app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchml.client.place import Place
    from batchml.ops.top import Snapshot


@compute_app.command("hosts", epilog="Example: batchml compute hosts gpu")
def compute_hosts(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Compute environments; all unless given."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List the hosts with their state, what is taken of them, their price and their runs.

    States are those of sinfo: allocated, mixed, idle, draining, starting, down. CPU and GPU are
    what runs say of themselves; prices are AWS's, of spot hosts those of the dearest zone.
    """
    from batchml.cli.cluster import host_lines, missing_line, total_line
    from batchml.cli.colour import screen
    from batchml.cli.wiring import open_place
    from batchml.client.cluster import HostPrices, poller

    place = open_place(env)
    found = HostPrices(place).put(_of(place, poller(place).look(), names or ()))
    if json_:
        return print_json(_json(found))
    lines = host_lines(found, screen(), len(found.hosts or ()))
    ends = [line for line in (total_line(found), missing_line(found)) if line]
    print_line("\n".join([*lines, *([""] if lines and ends else []), *ends]))


def _of(place: "Place", found: "Snapshot", names: "Sequence[str]") -> "Snapshot":
    """Narrowed to these compute environments. Raises NotFound."""
    from msgspec.structs import replace

    from batchml.cli.single import find_one

    if not names:
        return found
    known: dict[str, dict[str, Any]] = {row.state.name: {} for row in found.computes}
    wanted = {find_one(place, name, "Compute environment", known)[0] for name in names}
    hosts = found.hosts and tuple(row for row in found.hosts if wanted.intersection(row.computes))
    computes = tuple(row for row in found.computes if row.state.name in wanted)
    return replace(found, computes=computes, hosts=hosts)


def _json(found: "Snapshot") -> dict[str, Any]:
    from batchml.cli.cluster import compute_json, host_json, total_json

    return {
        "total": total_json(found),
        "computeEnvironments": [compute_json(row) for row in found.computes],
        "hosts": None if found.hosts is None else [host_json(row) for row in found.hosts],
        "missing": list(found.missing),
    }
