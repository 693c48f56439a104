"""show: everything about one run, on one screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, OneRun
from batchml.cli.output import print_json, print_line, say
from batchml.cli.relations import (
    failed_children,
    first_run,
    groups,
    groups_json,
    moving,
    needed,
    numbers,
    resumed,
    seat,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchml.client.finding import Measured
    from batchml.client.gang_parts import Part
    from batchml.client.place import Place
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.ops.search import Found
    from batchml.ops.using import Use

LABEL = 11  # characters before a fact
METRICS_SHOWN = 50
PROSE = ("status", "reason", "after", "groups", "children", "asked for")
NARROWEST = 40  # cells of a window in which words are folded


@app.command(epilog="Example: batchml show @last --plot curves.html")
def show(
    run: OneRun,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the metrics into FILE.html or .png."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the metrics as TensorBoard events.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show everything about a run."""
    from batchml.cli.listing import found_json
    from batchml.cli.wiring import open_place
    from batchml.client.finding import Measured, recall, with_start
    from batchml.client.gang_parts import parts_of
    from batchml.client.nodeuse import measure_gang, nodes_of, uses_of
    from batchml.client.restarts import restarts_of
    from batchml.client.runs import select
    from batchml.ops.restarts import restarts_json, restarts_text

    place = open_place(env)
    (found,) = recall(place, select(place, [run]))
    found = with_start(place, found)
    known = found.run
    parts = parts_of(place, found)
    nodes = nodes_of(place, found, parts)
    measured = measure_gang(place, known, nodes, found.record) if known else Measured({}, False)
    uses = uses_of(place, nodes, whole=plot is not None)
    restarts = restarts_of(place, known, nodes)
    if plot is not None:
        _draw(plot, place, found, measured, uses)
    if tensorboard is not None:
        _write_events(tensorboard, found, measured)
    if json_:
        more = _more_json(place, found, measured)
        from batchml.cli.using import nodes_json

        more |= restarts_json(restarts[0])
        print_json(found_json(place, found) | more | groups_json(parts) | nodes_json(uses))
        return
    now, again = int(place.clock.now() * 1000), restarts_text(*restarts)
    print_line("\n".join(_text(place, found, parts, measured, uses, again, now)))


def _draw(
    plot: Path, place: "Place", found: "Found", measured: "Measured", uses: "Sequence[Use]"
) -> None:
    """The metrics, and what the nodes used; of a run that is one container, what that used."""
    from batchml.client.nodeuse import uses_of
    from batchml.ops.plot import write_plot
    from batchml.ops.using import Node, charts

    if not uses and found.run is not None and found.run.attempts:
        uses = uses_of(place, [Node(found.name, found.run)], whole=True)
    write_plot(plot, measured.series, f"{found.name} {found.job_id}", charts(uses))
    say(f"Drawn: {plot}")


def _write_events(folder: Path, found: "Found", measured: "Measured") -> None:
    from batchml.errors import UsageError
    from batchml.ops.tensorboard import write_events

    if not measured.series:
        raise UsageError(f"--tensorboard {folder}: this run has no metrics.")
    written = write_events(folder, measured.series, found.job_id.replace(":", "-"))
    say(f"Written: {written}. To see them: tensorboard --logdir {folder}")


def _more_json(place: "Place", found: "Found", measured: "Measured") -> dict[str, Any]:
    from batchml.cli.ways import outputs_of

    run, record = found.run, found.record
    more: dict[str, Any] = {
        "metrics": measured.last or found.metrics,
        "outputs": outputs_of(place, run, found.job_id) or None,
        "job": (record.job or None) if record else None,
    }
    if run is not None:
        more |= {
            "image": run.image,
            "command": list(found.command),
            "resources": {"vcpus": run.vcpus, "memory": run.memory_mib, "gpus": run.gpus},
            "logStreams": [each.log_stream for each in run.attempts if each.log_stream],
            "attemptDetails": [
                {
                    "startedAt": each.started_at,
                    "stoppedAt": each.stopped_at,
                    "exitCode": each.exit_code,
                    "reason": each.reason or each.status_reason or None,
                    "host": each.host or None,
                    "logStreamName": each.log_stream or None,
                }
                for each in run.attempts
            ],
        }
        if run.children:
            more["children"] = run.children
            more["failedChildren"] = failed_children(place, found, run)
    return more


def _text(
    place: "Place",
    found: "Found",
    parts: "Sequence[Part]",
    measured: "Measured",
    uses: "Sequence[Use]",
    restarted: str,
    now_ms: int,
) -> "Iterator[str]":
    """One fact a line; what is not known or does not matter has none."""
    from batchml.cli.colour import screen
    from batchml.cli.render import printable
    from batchml.cli.using import node_lines
    from batchml.cli.ways import outputs_of, ways_on
    from batchml.client.gang_parts import head_of
    from batchml.model.record import NOT_KNOWN_WORDS

    run = found.run
    facts = {**_identity(found), "workers of": head_of(found), "reruns": first_run(found)}
    facts["resumes"] = resumed(place, found)
    facts |= _state(run) if run else {"status": NOT_KNOWN_WORDS}
    facts |= moving(found)
    facts["notebook"] = seat(place, found)
    facts["after"] = needed(place, run) if run else ""
    facts["groups"] = groups(parts)
    if run is not None:
        facts["failed"] = numbers(failed_children(place, found, run) or [])
    facts |= _asked_for(found)
    facts |= _times(found, now_ms)
    for name, value in facts.items():
        if value:
            line = f"{name:<10} {printable(value)}"
            yield _folded(line, screen().width) if name in PROSE else line
    if run is not None:
        yield from _attempts(run, now_ms)
    if restarted:
        yield _folded(f"{'restarted':<10} {printable(restarted)}", screen().width)
    yield from node_lines(uses, screen().width)
    yield from _curves(found, measured)
    known = [("cost", _cost(found)), ("outputs", outputs_of(place, run, found.job_id))]
    for name, value in (*known, *ways_on(place, found)):
        if value:
            yield f"{name:<10} {printable(value)}"


def _folded(line: str, width: int) -> str:
    """In a window the words below each other; what is there to be copied is never broken."""
    import textwrap

    if width < NARROWEST or len(line) < width:
        return line
    return textwrap.fill(
        line, width - 1, subsequent_indent=" " * LABEL, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def _identity(found: "Found") -> "Mapping[str, str]":
    key = found.record.key if found.record else found.run.key if found.run else ""
    return {"job": f"{found.name}  {found.job_id}", "key": key, "queue": found.queue}


def _state(run: "Run") -> dict[str, str]:
    from batchml.model.outcome import children_text, describe_outcome
    from batchml.model.run import state_text

    ended = run.status.is_terminal
    return {
        "status": f"{run.status}  ({describe_outcome(run)})" if ended else state_text(run),
        "reason": "" if ended else run.status_reason,
        "children": children_text(run),
    }


def _asked_for(found: "Found") -> dict[str, str]:
    from batchml.ops.rerun import plain_command

    run, record = found.run, found.record
    asked: Any = run or record
    many = _many(run)
    parts = [f"{many}{asked.vcpus} vCPU", f"{asked.memory_mib} MiB"]
    if asked.gpus:
        parts.append(f"{asked.gpus} GPU")
    tags = {name: value for name, value in found.tags.items() if not name.startswith("batchml:")}
    dirty = " and changes" if record and record.dirty else ""
    return {
        "image": asked.image,
        "command": " ".join(plain_command(found.command)),
        "folder": record.job if record else "",
        "params": _pairs(found.params),
        "tags": _pairs(tags),
        "commit": found.commit + dirty if found.commit else "",
        "resources": ", ".join(parts) if asked.vcpus else "",
        "asked for": _cut_down(record),
    }


def _cut_down(record: "Record | None") -> str:
    """What the run was to have, and this machine does not: `2 GPU: more than this machine has`."""
    from msgspec import ValidationError, convert

    from batchml.model.job import Resources

    table = record.spec.get("resources") if record else None
    if record is None or record.env != "local" or not table:
        return ""
    try:
        asked = convert(table, Resources, strict=False)
    except ValidationError:  # of another version
        return ""
    cuts = [
        f"{wanted} {unit}"
        for wanted, had, unit in (
            (asked.vcpus, record.vcpus, "vCPU"),
            (asked.memory_mib, record.memory_mib, "MiB"),
            (asked.gpus, record.gpus, "GPU"),
        )
        if had < wanted
    ]
    return f"{', '.join(cuts)}: more than this machine has" if cuts else ""


def _many(run: "Run | None") -> str:
    """What there are several of, each of which has the resources."""
    if run is None or not (run.nodes or run.children):
        return ""
    return f"{run.nodes} nodes of " if run.nodes else f"{run.array_size} children of "


def _pairs(table: "Mapping[str, object]") -> str:
    return " ".join(f"{name}={value}" for name, value in table.items())


def _times(found: "Found", now_ms: int) -> dict[str, str]:
    from batchml.cli.render import duration, timestamp
    from batchml.model.run import has_begun

    run = found.run
    started, stopped = (run.started_at, run.stopped_at) if run else (None, None)
    waited = (started or stopped or now_ms) - found.created_at if run else 0
    # AWS may have forgotten when the first child of an array began.
    is_array = bool(run and has_begun(run) and not started)
    return {
        "submitted": timestamp(found.created_at) if found.created_at else "",
        "started": timestamp(started) if started else "",
        "waited": duration(waited / 1000) if waited >= 1000 and not is_array else "",
        "took": duration(waited / 1000) if is_array and stopped else "",
        "ran": duration(((stopped or now_ms) - started) / 1000) if started else "",
    }


def _attempts(run: "Run", now_ms: int) -> "Iterator[str]":
    """One line each: what became of it, where, how long it ran, and its log stream."""
    from batchml.cli.render import duration, printable
    from batchml.model.outcome import describe_attempt, is_torchrun, on_host
    from batchml.model.run import JobStatus

    for number, attempt in enumerate(run.attempts, 1):
        is_last = number == len(run.attempts)
        if is_last and run.status is JobStatus.SUCCEEDED:
            what = f"ended with code 0{on_host(attempt.host)}"
        elif is_last and not run.status.is_terminal and attempt.stopped_at is None:
            what = f"is running{on_host(attempt.host)}"
        else:
            what = describe_attempt(attempt, is_ours=bool(run.key), is_torchrun=is_torchrun(run))
        ran = ""
        if attempt.started_at:
            end = attempt.stopped_at or run.stopped_at or now_ms
            word = "after" if attempt.stopped_at else "for"
            ran = f" {word} {duration((end - attempt.started_at) / 1000)}"
        # ECS says this of every container that ends by itself.
        why = "" if attempt.reason.startswith("Essential") else attempt.reason
        label = "attempt" if len(run.attempts) == 1 else f"attempt {number}"
        yield f"{label:<10} {printable(what + ran + (f': {why}' if why else ''))}"
        if attempt.log_stream:
            yield f"{'log':<10} {printable(attempt.log_stream)}"


def _curves(found: "Found", measured: "Measured") -> "Iterator[str]":
    """Each metric with its curve; with its last value, where its log is gone."""
    from batchml.cli import render
    from batchml.cli.colour import screen
    from batchml.ops.children import metric_texts

    room = (screen().width or 80) - LABEL
    lines = render.metric_lines(measured.series, room)
    if not measured.series:
        texts = metric_texts(dict(_in_order(found.metrics)))
        lines = [f"{render.printable(name)}  {value}" for name, value in texts[:METRICS_SHOWN]]
        if len(texts) > len(lines):
            lines.append(f"and {len(texts) - len(lines)} more, with --json")
    for place, line in enumerate(lines):
        yield f"{'' if place else 'metrics':<{LABEL}}{line}".rstrip()
    words = _unmatched(found, measured)
    if words:
        yield f"{'' if lines else 'metrics':<{LABEL}}{render.printable(words)}"
    if measured.is_damaged:
        what = "(the log is not what the run wrote: batchml logs shows where it differs)"
        yield f"{'' if lines or words else 'metrics':<{LABEL}}{what}"
    elif measured.series and not measured.is_whole:
        yield f"{'':<{LABEL}}(the log is long: these are of its beginning)"


def _unmatched(found: "Found", measured: "Measured") -> str:
    """Patterns without a value, of a run that has printed all it ever will."""
    from batchml.model.run import JobStatus
    from batchml.ops.metrics import unmatched

    run, record = found.run, found.record
    if run is None or record is None or run.status is not JobStatus.SUCCEEDED:
        return ""
    if record.other or run.children or run.nodes or not measured.is_whole:  # not read here
        return ""
    return unmatched(record.patterns, [*measured.series, *found.metrics])


def _in_order(metrics: "Mapping[str, float]") -> list[tuple[str, float]]:
    """Those of children, such as `loss:3`, in the order of these, behind the run's own."""
    from batchml.ops.children import child_of

    def place(item: tuple[str, float]) -> tuple[str, int]:
        name, child = child_of(item[0])
        return ("", 0) if child is None else (name, child)

    return sorted(metrics.items(), key=place)


def _cost(found: "Found") -> str:
    if found.cost is None:
        return ""
    from decimal import Decimal

    from batchml.model.names import dollars

    return dollars(Decimal(str(found.cost)))
