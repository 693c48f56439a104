"""Nouns -> text and JSON."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from batchml.model.names import short_id
from batchml.model.run import OutcomeClass, Run, classify
from batchml.model.status import JobStatus

RULE = "=" * 80


def timestamp(ms: int) -> str:
    """`2026-11-21T19:02:57.076Z`"""
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}Z"


def duration(seconds: float) -> str:
    """`0:42`, `12:03`, `3:05:00`"""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def job_title(run: Run) -> str:
    return f"Job [{run.name} - {run.job_id}]"


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor, change its title or reorder what is read."""
    # A progress bar's carriage returns: what stands last is what a terminal would show.
    text = text.rstrip("\r").rpartition("\r")[2]
    return "".join(char if char == "\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}"
                   for char in text)  # fmt: skip


def run_json(run: Run) -> dict[str, Any]:
    """AWS's names for what AWS names, ours for the rest."""
    found: dict[str, Any] = {
        "jobId": run.job_id,
        "jobName": run.name,
        "jobQueue": run.queue,
        "status": run.status.value,
        "statusReason": run.status_reason or None,
        "createdAt": run.created_at,
        "startedAt": run.started_at,
        "stoppedAt": run.stopped_at,
        "exitCode": run.exit_code,
        "attempts": len(run.attempts),
    }
    if run.status.is_terminal:
        found["class"] = classify(run).outcome.value
    return found


def run_rows(runs: Sequence[Run], now_ms: int) -> list[list[str]]:
    """Table rows of `ls`, with a heading."""
    rows = [["ID", "NAME", "QUEUE", "STATUS", "CLASS", "CODE", "AGE", "RAN"]]
    for run in runs:
        outcome = classify(run) if run.status.is_terminal else None
        end = [outcome.outcome.value, str(outcome.exit_code)] if outcome else ["", ""]
        age = duration((now_ms - run.created_at) / 1000) if run.created_at else ""
        first = [short_id(run.job_id), run.name, run.queue, run.status.value]
        rows.append([*first, *end, age, _ran(run, now_ms)])
    return rows


def _ran(run: Run, now_ms: int) -> str:
    if not run.started_at:
        return ""
    return duration(((run.stopped_at or now_ms) - run.started_at) / 1000)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns wide enough for their longest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def show_text(run: Run, now_ms: int, outputs: str) -> str:
    """What `show` prints: one fact a line."""
    facts: dict[str, str] = {
        "job": f"{run.name}  {run.job_id}",
        "status": run.status.value + (f"  ({verdict(run)})" if run.status.is_terminal else ""),
        "reason": "" if run.status is JobStatus.SUCCEEDED else run.status_reason,
        "children": children(run),
        "queue": run.queue,
        "image": run.image,
        "command": " ".join(run.command),
        "resources": _resources(run),
        "submitted": timestamp(run.created_at) if run.created_at else "",
        "started": timestamp(run.started_at) if run.started_at else "",
        "ran": _ran(run, now_ms),
        "attempts": str(len(run.attempts)),
        "outputs": outputs,
    }
    lines = [f"{name:<10} {printable(value)}" for name, value in facts.items() if value]
    lines += [f"{'log':<10} {attempt.log_stream}" for attempt in run.attempts if attempt.log_stream]
    return "\n".join(lines)


def children(run: Run) -> str:
    """`2 FAILED, 40 SUCCEEDED, 958 RUNNABLE of 1000` for an array; empty for any other run."""
    if not run.children:
        return ""
    known = sorted(run.children.items(), key=lambda item: -JobStatus(item[0]).order)
    listed = ", ".join(f"{count} {status}" for status, count in known)
    return f"{listed} of {sum(run.children.values())}"


def _resources(run: Run) -> str:
    parts = [f"{run.vcpus} vCPU", f"{run.memory_mib} MiB"]
    return ", ".join(parts + ([f"{run.gpus} GPU"] if run.gpus else []))


def verdict(run: Run) -> str:
    """One sentence on what a finished run came to."""
    outcome, code = classify(run)
    if run.children and outcome in (OutcomeClass.SUCCEEDED, OutcomeClass.APP_ERROR):
        return f"{outcome.value}: children {children(run)}"
    tries = len(run.attempts)
    which = f" in attempt {tries}" if tries > 1 else ""
    sentences: Mapping[OutcomeClass, str] = {
        OutcomeClass.SUCCEEDED: f"the program ended with code 0{which}",
        OutcomeClass.APP_ERROR: f"the program ended with code {code}{which}{_signal(code)}",
        OutcomeClass.OUT_OF_MEMORY: f"killed for memory{which}; it had {run.memory_mib} MiB",
        OutcomeClass.TIMED_OUT: "ran past its timeout",
        OutcomeClass.CANCELLED: run.status_reason,
        OutcomeClass.HOST_LOST: f"its host was lost{which}, and no attempt is left",
        OutcomeClass.IMAGE_ERROR: f"could not be started: {run.reason or run.status_reason}",
        OutcomeClass.DEPENDENCY_FAILED: "a run that it depends on failed",
        OutcomeClass.UNSCHEDULABLE: f"could never be placed: {run.status_reason}",
        OutcomeClass.UNKNOWN: run.status_reason or "no reason given",
    }
    return printable(f"{outcome.value}: {sentences[outcome]}")


def _signal(code: int) -> str:
    import signal

    try:
        return f", signal {signal.Signals(code - 128).name}" if code > 128 else ""
    except ValueError:
        return ""
