"""compare: show the results of runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, Project, Runs, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.cli.terminal import screen
from batchml.jobs.code import list_names
from batchml.jobs.written import note_written
from batchml.runs.compare.facts import describe_unused, unused_params
from batchml.runs.compare.render import fact_rows, figure_rows, tables, to_json, write_page
from batchml.runs.compare.service import changed_files, compare_results
from batchml.runs.find import select
from batchml.runs.metrics.conditions import NO_METRICS
from batchml.runs.metrics.plot import check_plot_path


@app.command(epilog="Example: batchml compare @last~1 @last --plot compared.html")
def compare(
    runs: Runs,
    full: Annotated[
        bool, typer.Option("--full", help="Also show equal values, and first values of metrics.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw table and curves into FILE.html or FILE.png."),
    ] = None,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show the results of runs side by side.

    Shows metrics, speed, resource use, cost and what of the requests differs. Runs that differ only
    in a seed are one column, with mean and standard deviation; so are the children of an array.
    """
    if plot is not None:
        check_plot_path(plot)
    context = open_context(env, project)
    found = compare_results(context, select(context, runs))
    groups, conclusions = found.groups, found.conclusions
    facts = fact_rows(groups)
    rows = [row for row in facts if full or row.matters] + figure_rows(groups, full=full)
    if plot is not None:
        write_page(plot, groups, rows, conclusions)
        note_written(context.home, [plot])
        say(f"Drawn: {plot}")
    if json_:
        print_json(to_json(groups, conclusions))
        return
    print_line("\n\n".join(tables(groups, rows, screen())))
    shown = [row.name.removeprefix("params.") for row in rows if row.name.startswith("params.")]
    unused = [name for group in groups for name in unused_params(group.first) if name in shown]
    if unused:
        say(printable(describe_unused(unused)))
    for place, each in enumerate(conclusions):
        print_line(f"{'' if place else chr(10)}{printable(each.text)}")
    codes = {group.facts.get("code"): group for group in groups}
    if len(codes) > 1:
        one, other, *_ = codes.values()
        names = list_names(changed_files(context, one, other), 3)
        command = f"batchml diff {one.short_id} {other.short_id}{context.env_option}"
        say(f"The code differs{f' in {printable(names)}' if names else ''}: {command}")
    if not any(each.series for group in groups for each in group.runs):
        say(NO_METRICS)
    for message in found.notices:
        say(printable(message))
