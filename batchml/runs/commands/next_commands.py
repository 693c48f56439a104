"""The next commands for a run, as the user types them."""

from typing import TYPE_CHECKING

from batchml.cli.output import say
from batchml.model.names import short_id
from batchml.model.numbering import shown_id
from batchml.model.run import JobStatus, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchml.context import Context
    from batchml.runs.rerun.resubmit import SavedCheckpoints
    from batchml.runs.search import FoundRun


def short_word(context: "Context", job_id: str) -> str:
    """The shortest word that names a run on the command line, with `--env` where necessary."""
    return short_id(job_id) + context.env_option


def needs_explanation(run: Run) -> bool:
    """True for a run that failed, and not because a user cancelled it."""
    return run.status is JobStatus.FAILED and not (run.is_cancelled or run.is_terminated)


def say_explain_command(context: "Context", run: Run) -> None:
    """Print the command that explains the end of a run."""
    say(f"  why:  batchml explain {short_word(context, shown_id(run))}")


def next_commands(context: "Context", found: "FoundRun") -> "Iterator[tuple[str, str]]":
    """Next steps for a run, each with its command."""
    run = found.run
    job_id = found.shown_id
    word = short_word(context, job_id)
    if found.cost is None and not context.settings.is_local:
        yield "cost", f"batchml cost {word}"
    if found.sweep:
        yield "sweep", f"batchml sweeps show {found.sweep}{context.env_option}"
    if run is None:
        if found.record is not None and not found.sweep and not found.is_worker:
            yield "again", f"batchml rerun {word}"
        return
    has_begun = _has_begun(run)
    if has_begun and (context.settings.is_local or describe_outputs(context, run)):
        yield "copy", f"batchml get {word}"
    if run.status.is_terminal:
        is_again = not (found.sweep or found.is_worker)
        yield from _after_the_end(run, word, has_begun, is_again=is_again)
        saved = _find_checkpoints(context, run) if is_again else None
        if saved:
            yield "with files" if saved.is_kept else "go on", f"batchml rerun --resume {word}"
        return
    if has_begun:
        yield "follow", f"batchml logs -f {word}"
    else:
        yield "why", f"batchml explain {word}"
    yield "end", f"batchml cancel {short_word(context, job_id.partition('#')[0])}"


def _after_the_end(
    run: Run, word: str, has_begun: bool, *, is_again: bool
) -> "Iterator[tuple[str, str]]":
    if has_begun:
        yield "printed", f"batchml logs {word}"
    if run.status is JobStatus.FAILED:
        yield "why", f"batchml explain {word}"
    if is_again and run.node_index is None:
        failed = " --failed" if run.children.get("FAILED") else ""
        yield "again", f"batchml rerun {word}{failed}"


def _find_checkpoints(context: "Context", run: Run) -> "SavedCheckpoints | None":
    """What a failed run has saved on this machine; arrays are not checked."""
    if run.status is not JobStatus.FAILED or not context.settings.is_local or run.children:
        return None

    from batchml.runs.rerun.resubmit import find_local_checkpoints

    return find_local_checkpoints(context, run.job_id)


def _has_begun(run: Run) -> bool:
    waiting = {status.value for status in JobStatus if status.order < JobStatus.STARTING.order}
    return bool(run.attempts or run.started_at or run.children.keys() - waiting)


def describe_outputs(context: "Context", run: Run | None, job_id: str = "") -> str:
    """The folder with a run's outputs, or their s3:// URL, which may have no objects; else ""."""
    folder = context.outputs(run.job_id if run else job_id)
    if folder is not None:
        return str(folder) if any(folder.iterdir()) else ""
    store = run.environment.get("BATCHML_STORE", "") if run else ""
    return f"{store}/output" if store.startswith("s3://") else ""
