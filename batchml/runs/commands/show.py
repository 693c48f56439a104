"""show: everything about one run, on one screen."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from batchml.aws.batch.jobs import list_child_indices
from batchml.cli import render
from batchml.cli.app import app
from batchml.cli.options import Env, Json, OneRun, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import cut, duration, printable, time_json, timestamp
from batchml.cli.terminal import screen
from batchml.errors import BatchmlError, UsageError
from batchml.jobs.written import note_written
from batchml.model.group import HELD_TAG
from batchml.model.job import Resources
from batchml.model.names import dollars, idle_text, short_id
from batchml.model.numbering import format_ranges, original_id, original_numbers, shown_params
from batchml.model.outcome import (
    describe_attempt,
    describe_children,
    describe_outcome,
    on_host,
    restarts_in_place,
)
from batchml.model.run import (
    NOT_KNOWN,
    NOT_KNOWN_WORDS,
    RESUMES_TAG,
    JobStatus,
    Record,
    Run,
    array_size,
    attempt_end,
    describe_state,
    has_begun,
)
from batchml.runs.commands.list import found_json
from batchml.runs.commands.next_commands import describe_outputs, next_commands
from batchml.runs.commands.usage import node_lines, nodes_json
from batchml.runs.compare.facts import unused_params
from batchml.runs.find import (
    MAX_CHILDREN,
    display_id,
    load_runs,
    select,
    with_first_start,
    with_trials,
)
from batchml.runs.held import describe_notebook
from batchml.runs.metrics.conditions import NO_METRICS, child_of
from batchml.runs.metrics.data_wait import data_wait_json, find_data_wait
from batchml.runs.metrics.reading import RunMetrics, read_children
from batchml.runs.metrics.series import (
    FEW,
    children_texts,
    describe_unmatched,
    metric_lines,
    metric_texts,
)
from batchml.runs.metrics.usage import (
    ResourceUse,
    UsageSample,
    collect_usage,
    describe_use,
    find_nodes,
    idle_seconds,
    own_container,
    read_restarts,
    read_run_metrics,
    read_usage,
    restarts_json,
    restarts_text,
    usage_charts,
    use_json,
    use_of,
)
from batchml.runs.outputs import describe_checkpoints
from batchml.runs.search import FoundRun, code_digest
from batchml.runtime.protocol.launch import ENDED_BY_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchml.context import Context
    from batchml.runs.groups.members import GroupWorkers

# --- Facts about other runs: of the group, the array, the dependencies ----------------------------


FAILED_SHOWN = 50  # children
NAME = 32  # cells of the name of another run


def describe_notebook_of(context: "Context", found: FoundRun) -> str:
    """For a notebook: the command that returns to it, or why it ended."""
    if found.run is None or HELD_TAG not in found.tags:
        return ""

    return describe_notebook(context, found.run)


def describe_moves(found: FoundRun) -> "Mapping[str, str]":
    """For a run with a fallback: the queue to which it may move, or from which it has moved."""
    from batchml.model.fallback import FALLBACK_TAG, MOVED_TAG, describe_fallback, describe_move

    may = found.tags.get(FALLBACK_TAG, "")
    before = found.tags.get(MOVED_TAG, "")
    if before:
        return {"moved": describe_move(may, before)}
    run = found.run
    waits = may and run is not None and not (run.started_at or run.status.is_terminal)
    return {"moves": describe_fallback(may)} if waits else {}


def describe_partial_rerun(found: FoundRun) -> str:
    """For a partial rerun: the numbers of its children in the first array."""
    first = original_numbers(found.run, found.record)
    if not first or ":" in found.job_id:
        return ""
    what = "child" if len(first) == 1 else "children"
    return f"{what} {format_numbers(list(first))} of a larger array, with the numbers of that array"


def describe_resume(context: "Context", found: FoundRun) -> str:
    """The run from whose checkpoint this run has gone on."""
    before = found.tags.get(RESUMES_TAG, "")
    if not before:
        return ""
    shown = display_id(context, before)
    known = context.history.records().get(shown.partition(":")[0])
    name = f"{known.name} " if known else ""
    return f"from the checkpoint of {name}{short_id(shown)}"


def describe_dependencies(context: "Context", run: Run) -> str:
    """The dependencies of a run: `prep 3f2a1b0c RUNNING`; with states while the run waits."""
    if not run.depends_on:
        return ""
    told: dict[str, Run] = {}
    with suppress(BatchmlError):  # states are optional information: the ids are known
        if run.status in (JobStatus.SUBMITTED, JobStatus.PENDING):
            told = context.describe(run.depends_on)
    kept = context.history.records()  # of every environment: a pipeline may have several
    parts = []
    for job_id in run.depends_on:
        known = told.get(job_id) or kept.get(job_id)
        name = f"{cut(known.name, NAME)} " if known else ""
        state = f" {describe_state(told[job_id])}" if job_id in told else ""
        parts.append(f"{name}{short_id(job_id)}{state}")
    return ", ".join(parts)


def describe_groups(parts: "Sequence[GroupWorkers]") -> str:
    """The workers of a group run, by group: `workers 3 RUNNING, 1/4 done (3f2a1b0c)`."""
    said = []
    for part in parts:
        run = part.found.run if part.found else None
        state = _describe_workers(run) if run else NOT_KNOWN if part.job_id else "never submitted"
        known = f" ({short_id(part.job_id)})" if part.job_id else ""
        said.append(f"{part.group} {state}{known}")
    return "; ".join(said)


def _describe_workers(run: Run) -> str:
    """The state of workers: not FAILED, as in AWS Batch, if their head has ended them."""
    if not (run.status.is_terminal and run.is_terminated and run.status_reason == ENDED_BY_HEAD):
        return describe_state(run)
    done = f", {run.children.get('SUCCEEDED', 0)} of {array_size(run)} done" if run.children else ""
    return f"ended with the run{done}"


def groups_json(parts: "Sequence[GroupWorkers]") -> dict[str, Any]:
    """The groups for `--json`; {} without groups."""
    found = []
    for part in parts:
        run = part.found.run if part.found else None
        found.append(
            {
                "name": part.group,
                "jobId": part.job_id or None,
                "status": run.status.value if run else None,
                "size": (run.array_size or 1) if run else part.size or None,
                "children": run.children if run else {},
            }
        )
    return {"groups": found} if found else {}


def failed_children(context: "Context", found: FoundRun, run: Run) -> list[int] | None:
    """The numbers of failed children, in one call; None if AWS Batch does not return them."""
    if not run.children.get("FAILED"):
        return []
    first = original_numbers(run, found.record)
    try:
        known = list_child_indices(context.connect(), run.job_id, JobStatus.FAILED)
        return [first[index] if index < len(first) else index for index in known]
    except BatchmlError:
        return None


def format_numbers(known: list[int]) -> str:
    return format_ranges(known[:FAILED_SHOWN]) + (" ..." if len(known) > FAILED_SHOWN else "")


# --- The command ----------------------------------------------------------------------------------


LABEL = 11  # characters before a fact
METRICS_SHOWN = 50
PROSE = ("status", "reason", "after", "groups", "children", "asked for")  # labels of long texts
NARROWEST = 40  # cells; in a narrower window lines are not folded


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
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show everything about a run."""
    from batchml.runs.groups.members import find_worker_groups

    context = open_context(env, project)
    (found,) = with_trials(context, load_runs(context, select(context, [run])))
    found = with_first_start(context, found)
    known = found.run
    parts = find_worker_groups(context, found)
    nodes = find_nodes(context, found, parts)
    measured = RunMetrics({}, False)
    if known and not known.array_size:
        measured = read_run_metrics(context, known, nodes, found.record)
    elif known and (plot or tensorboard or not found.metrics):
        measured = read_children(context, found)
    found = FoundRun(known, measured.added_to(found.record)) if measured.series else found
    single = own_container(known) if not nodes else []
    if single and measured.is_whole:  # its log has been read already
        uses = collect_usage(single, measured.usage, int(context.clock.now() * 1000))
    else:
        uses = read_usage(context, nodes or single, whole=plot is not None)
    restarts = read_restarts(context, known, nodes)
    if plot is not None:
        from batchml.runs.metrics.plot import children_charts, time_charts, write_plot

        charts = [*children_charts(measured.series), *time_charts(usage_charts(uses))]
        series = {} if known and known.array_size else measured.series
        write_plot(plot, series, f"{found.name} {found.shown_id}", charts)
        note_written(context.home, [plot])
        say(f"Drawn: {plot}")
        if not measured.series:
            say(NO_METRICS)
    if tensorboard is not None:
        _write_events(context, tensorboard, found, measured)
    used = use_of(uses[0]) if single else None
    found = replace(found, idle=idle_seconds(uses))
    waits = find_data_wait(uses)
    waited = waits.describe(len(uses) > 1) if waits else ""
    uses = uses if nodes else []
    if json_:
        more = _more_json(context, found) | {"used": use_json(used)} | restarts_json(restarts[0])
        more |= data_wait_json(waits)
        print_json(found_json(context, found) | more | groups_json(parts) | nodes_json(uses))
        return
    now, again = int(context.clock.now() * 1000), restarts_text(*restarts)
    print_line(
        "\n".join(_fact_lines(context, found, parts, measured, uses, used, waited, again, now))
    )


def _write_events(context: "Context", folder: Path, found: FoundRun, measured: RunMetrics) -> None:
    if not measured.series:
        raise UsageError(f"--tensorboard {folder}: there is nothing to write. {NO_METRICS}")
    from batchml.runs.metrics.event_files import write_events

    written = write_events(folder, measured.series, found.shown_id.replace(":", "-"))
    note_written(context.home, [written])
    say(f"Written: {written}. To see them: tensorboard --logdir {folder}")


def _more_json(context: "Context", found: FoundRun) -> dict[str, Any]:
    run, record = found.run, found.record
    more: dict[str, Any] = {
        "outputs": describe_outputs(context, run, found.job_id) or None,
        "job": (record.job or None) if record else None,
        "code": _code_json(found),
    }
    if run is not None:
        more |= {
            "image": run.image,
            "command": list(found.command),
            "resources": {
                "vcpus": run.vcpus,
                "memory": run.memory_mib,
                "gpus": run.gpus,
                "neurons": run.neurons,
            },
            "logStreams": [each.log_stream for each in run.attempts if each.log_stream],
            "attemptDetails": [
                {
                    "startedAt": time_json(each.started_at),
                    "stoppedAt": time_json(each.stopped_at),
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
            more["failedChildren"] = failed_children(context, found, run)
    return more


def _code_json(found: FoundRun) -> dict[str, Any] | None:
    """The code of a run: `files` and `folder` are null if the history does not have them."""
    record = found.record or Record()
    if not found.code:
        return None
    return {
        "sha256": code_digest(found.code),
        "files": record.files,
        "folder": record.folder or None,
        "uncommitted": record.dirty if found.commit else None,
    }


def _describe_code(found: FoundRun) -> str:
    """`6b0e3f2c, 14 files`; "" without code."""
    record = found.record or Record()
    if not found.code:
        return ""
    parts = [code_digest(found.code)[:8]]
    if record.files is not None:
        parts.append("1 file" if record.files == 1 else f"{record.files:,} files")
    return ", ".join(parts)


def _fact_lines(
    context: "Context",
    found: FoundRun,
    parts: "Sequence[GroupWorkers]",
    measured: RunMetrics,
    uses: "Sequence[UsageSample]",
    used: ResourceUse | None,
    waited: str,
    restarted: str,
    now_ms: int,
) -> "Iterator[str]":
    """The lines of the text: one for each known fact."""
    from batchml.runs.groups.members import head_key

    run = found.run
    facts = {
        **_identity(context, found),
        "workers of": head_key(found),
        "reruns": describe_partial_rerun(found),
    }
    facts["resumes"] = describe_resume(context, found)
    facts |= _state(run) if run else {"status": NOT_KNOWN_WORDS}
    facts["status"] += f", {idle_text(found.idle)}" if found.idle else ""
    facts |= describe_moves(found)
    facts["notebook"] = describe_notebook_of(context, found)
    facts["after"] = describe_dependencies(context, run) if run else ""
    facts["groups"] = describe_groups(parts)
    if run is not None:
        facts["failed"] = format_numbers(failed_children(context, found, run) or [])
    facts |= _asked_for(found)
    facts["used"] = describe_use(used) if used else ""
    facts["data wait"] = waited
    facts |= _times(found, now_ms)
    for name, value in facts.items():
        if value:
            line = f"{name:<10} {printable(value)}"
            yield _fold(line, screen().width) if name in PROSE else line
    if run is not None:
        yield from _attempts(run, now_ms)
    if restarted:
        yield _fold(f"{'restarted':<10} {printable(restarted)}", screen().width)
    yield from node_lines(uses, screen().width)
    yield from _metric_lines(found, measured)
    known = [
        ("cost", _cost(found)),
        ("outputs", describe_outputs(context, run, found.job_id)),
        ("checkpoint", describe_checkpoints(context, found.job_id, found.shown_id)),
    ]
    for name, value in (*known, *next_commands(context, found)):
        if value:
            yield f"{name:<10} {printable(value)}"


def _fold(line: str, width: int) -> str:
    """Fold a long line below its label."""
    import textwrap

    if width < NARROWEST or len(line) < width:
        return line
    return textwrap.fill(
        line, width - 1, subsequent_indent=" " * LABEL, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def _identity(context: "Context", found: FoundRun) -> "Mapping[str, str]":
    is_other = found.project not in ("", context.project)
    return {
        "job": f"{found.name}  {found.shown_id}",
        "key": found.key,
        "project": found.project if is_other else "",
        "queue": context.resource_label(found.queue),
    }


def _state(run: Run) -> dict[str, str]:
    ended = run.status.is_terminal
    return {
        "status": f"{run.status}  ({describe_outcome(run)})" if ended else describe_state(run),
        "reason": "" if ended else run.status_reason,
        "children": describe_children(run),
    }


def _asked_for(found: FoundRun) -> dict[str, str]:
    run, record = found.run, found.record
    asked: Any = run or record
    many = _many(run)
    parts = [f"{many}{asked.vcpus} vCPU", f"{asked.memory_mib} MiB"]
    if asked.gpus:
        parts.append(f"{asked.gpus} GPU")
    if asked.neurons:
        parts.append(f"{asked.neurons} Neuron chips")
    tags = {name: value for name, value in found.tags.items() if not name.startswith("batchml:")}
    dirty = " and changes" if record and record.dirty else ""
    return {
        "image": asked.image,
        "command": found.own_command,
        "folder": (record.job or record.folder) if record else "",
        "code": _describe_code(found),
        "data": found.data_dir,
        "data sets": _pairs(found.data_sets),
        "params": _describe_params(found),
        "tags": _pairs(tags),
        "commit": found.commit + dirty if found.commit else "",
        "resources": ", ".join(parts) if asked.vcpus else "",
        "asked for": _describe_cuts(record),
    }


def _describe_cuts(record: Record | None) -> str:
    """Requested resources that this machine does not have: `2 GPU: more than this machine has`."""
    from msgspec import ValidationError, convert

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
            (asked.gpu_count, record.gpus, "GPU"),
            (asked.neurons, record.neurons, "Neuron chips"),
        )
        if had < wanted
    ]
    return f"{', '.join(cuts)}: more than this machine has" if cuts else ""


def _many(run: Run | None) -> str:
    """The number of parts that each have the resources: `4 nodes of `."""
    if run is None or not (run.nodes or run.children):
        return ""
    return f"{run.nodes} nodes of " if run.nodes else f"{run.array_size} children of "


def _pairs(table: "Mapping[str, object]") -> str:
    return " ".join(f"{name}={value}" for name, value in table.items())


def _describe_params(found: FoundRun) -> str:
    """`lr=0.1 seed=3 (seed: only in BATCHML_PARAMS)`, if no word of the command uses the seed."""
    unused = unused_params(found)
    more = f" ({', '.join(unused)}: only in BATCHML_PARAMS)" if unused else ""
    return f"{_pairs(shown_params(found.params, found.run, found.record))}{more}"


def _times(found: FoundRun, now_ms: int) -> dict[str, str]:
    run, times = found.run, found.times(now_ms)
    # Of an array, AWS Batch may have forgotten when the first child started.
    took = (run.stopped_at or 0) - found.created_at if run and has_begun(run) else 0
    return {
        "submitted": timestamp(found.created_at) if found.created_at else "",
        "started": timestamp(times.started) if times.started else "",
        "waited": duration(times.waited) if times.waited and times.waited >= 1 else "",
        "took": duration(took / 1000) if took > 0 and not times.started else "",
        "ran": duration(times.ran) if times.ran is not None else "",
    }


def _attempts(run: Run, now_ms: int) -> "Iterator[str]":
    """One line for each attempt: its outcome, host, duration and log stream."""
    for number, attempt in enumerate(run.attempts, 1):
        is_last = number == len(run.attempts)
        if is_last and run.status is JobStatus.SUCCEEDED:
            what = f"ended with code 0{on_host(attempt.host)}"
        elif is_last and not run.status.is_terminal and attempt.stopped_at is None:
            what = f"is running{on_host(attempt.host)}"
        else:
            what = describe_attempt(attempt, is_ours=bool(run.key), restarts=restarts_in_place(run))
        ran = ""
        if attempt.started_at:
            word = "after" if attempt.stopped_at else "for"
            seconds = (attempt_end(run, attempt, now_ms) - attempt.started_at) / 1000
            ran = f" {word} {duration(seconds)}"
        # ECS gives this reason for every container that ends by itself.
        why = "" if attempt.reason.startswith("Essential") else attempt.reason
        label = "attempt" if len(run.attempts) == 1 else f"attempt {number}"
        yield f"{label:<10} {printable(what + ran + (f': {why}' if why else ''))}"
        if attempt.log_stream:
            yield f"{'log':<10} {printable(attempt.log_stream)}"


def _metric_lines(found: FoundRun, measured: RunMetrics) -> "Iterator[str]":
    """A line for each metric: its curve, or its last value if its log was deleted."""
    room = (screen().width or 80) - LABEL
    directions = found.record.directions if found.record else {}
    metrics = dict(_sort_by_child(found.metrics))
    texts = children_texts(metrics, found.best_metrics, directions)
    if is_array := bool(texts):  # then each child has a line only if there are few
        few = {child for name in metrics if (child := child_of(name)[1]) is not None}
        metrics = metrics if len(few) <= FEW else {}
    lines = metric_lines(measured.series, room, directions) if metrics else []
    if not measured.series:
        texts += metric_texts(metrics, found.best_metrics)
    lines = [f"{render.printable(name)}  {text}" for name, text in texts[:METRICS_SHOWN]] + lines
    if len(texts) > METRICS_SHOWN:
        lines.append(f"and {len(texts) - METRICS_SHOWN} more, with --json")
    for place, line in enumerate(lines):
        yield f"{'' if place else 'metrics':<{LABEL}}{line}".rstrip()
    words = _unmatched(found, measured)
    if words:
        yield f"{'' if lines else 'metrics':<{LABEL}}{render.printable(words)}"
    if measured.is_damaged:
        what = "(the log is not what the run wrote: batchml logs shows where it differs)"
        yield f"{'' if lines or words else 'metrics':<{LABEL}}{what}"
    elif is_array and measured.series and found.run and found.run.array_size > MAX_CHILDREN:
        first = original_numbers(found.run, found.record)
        next_one = short_id(original_id(f"{found.job_id}:{MAX_CHILDREN}", first))
        yield f"{'':<{LABEL}}(of the first {MAX_CHILDREN} children; next: batchml show {next_one})"
    elif measured.series and not measured.is_whole:
        yield f"{'':<{LABEL}}(the log is long: only its beginning was read)"


def _unmatched(found: FoundRun, measured: RunMetrics) -> str:
    """The message about patterns that matched nothing, for a run that has succeeded."""
    run, record = found.run, found.record
    if run is None or record is None or run.status is not JobStatus.SUCCEEDED:
        return ""
    # Of these, not all logs were read, or the command is another one.
    if record.other or run.children or run.nodes or not measured.is_whole:
        return ""
    return describe_unmatched(record.patterns, [*measured.series, *found.metrics])


def _sort_by_child(metrics: "Mapping[str, float]") -> list[tuple[str, float]]:
    """The metrics of the run, then of children, such as `loss:3`, sorted by child."""

    def place(item: tuple[str, float]) -> tuple[str, int]:
        name, child = child_of(item[0])
        return ("", 0) if child is None else (name, child)

    return sorted(metrics.items(), key=place)


def _cost(found: FoundRun) -> str:
    if found.cost is None:
        return ""
    from decimal import Decimal

    return dollars(Decimal(str(found.cost)))
