"""The results of runs that call Python functions: read them when the runs have ended.

A result is unpickled here, so whoever can write the outputs of the run can run code in this
process: nothing is read before the caller asks for a result.
"""

import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import list_child_indices
from batchml.context import Context, backoff
from batchml.errors import NotFound, RunFailed, UsageError
from batchml.model.names import short_id
from batchml.model.numbering import original_id, original_numbers
from batchml.model.outcome import describe_outcome
from batchml.model.run import FUNCTION_TAG, JobStatus, Run, classify, count_ended
from batchml.runs.fallback.watch import QueueMoves
from batchml.runs.names import bare_id
from batchml.runs.outputs import (
    MAX_PARALLEL,
    OutputEntry,
    OutputSource,
    Unreadable,
    open_outputs,
)
from batchml.runs.search import FoundRun
from batchml.runs.watch.events import ContactLost
from batchml.runs.watch.poller import RunPoller, make_recall
from batchml.runs.watch.wait import with_deadline
from batchml.runtime.protocol.function import (
    RAISED,
    RESULT,
    RETURNED,
    ResultHeader,
    python_version,
)

_ENDS = (JobStatus.SUCCEEDED, JobStatus.FAILED)


class ItemResult(Struct, frozen=True):
    """The result for one item of `map`: the value, or the error in its place."""

    index: int
    value: Any = None
    error: Exception | None = None


def check_is_function(found: FoundRun) -> None:
    """Raise UsageError for a run that does not call a function."""
    if FUNCTION_TAG not in found.tags:
        raise UsageError(
            f"{found.name} {short_id(found.job_id)} is a run of a command, which has no result. "
            "To copy its files: run.outputs(FOLDER)"
        )


# --- One run --------------------------------------------------------------------------------------


def read_result(context: Context, found: FoundRun) -> Any:
    """The result of a run, or of one child, that has ended.

    Raises the exception that the function raised, and RunFailed if there is none.
    """
    return _unwrap(_read_files(context, found, {0: found.run})[0])


def _unwrap(item: ItemResult) -> Any:
    if item.error is not None:
        raise item.error
    return item.value


def _read_files(
    context: Context, found: FoundRun, runs: Mapping[int, Run | None]
) -> dict[int, ItemResult]:
    """Read the results of some children, by their indices in AWS Batch. `runs` has the children;
    a run that is no array has the index 0.
    """
    try:
        source = open_outputs(context, found)
    except NotFound:
        why = "its files were deleted."
        return {each: _without_value(found, each, run, why) for each, run in runs.items()}
    first = original_numbers(found.run, found.record)

    def read(index: int) -> ItemResult:
        return _read_item(found, index, runs[index], source, _file_of(found, index, first))

    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        return {each.index: each for each in pool.map(read, runs)}


def _file_of(found: FoundRun, index: int, first: Sequence[int]) -> str:
    """The name of a result below the outputs of a run. A child alone has a folder of its own."""
    if bare_id(found.job_id) != found.job_id:
        return RESULT
    if first:  # children of a rerun are named by their first numbers
        return f"{first[index]}/{RESULT}"
    is_array = bool(found.run and found.run.array_size)
    return f"{index}/{RESULT}" if is_array else RESULT


def _read_item(
    found: FoundRun, index: int, run: Run | None, source: OutputSource, name: str
) -> ItemResult:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        try:
            source.fetch(OutputEntry(name, 0, 0), path)
            with open(path, "rb") as file:
                header = ResultHeader.read(file)
                if run is not None and run.attempts and header.attempt != len(run.attempts):
                    raise ValueError("its last attempt wrote no result")
                return _to_result(found, index, run, header, file.read())
        except Unreadable:
            return _without_value(found, index, run, "")
        except (OSError, ValueError) as error:
            return _without_value(found, index, run, str(error))


def _to_result(
    found: FoundRun, index: int, run: Run | None, header: ResultHeader, data: bytes
) -> ItemResult:
    """The value or the exception of a result. `run` is None if AWS Batch has forgotten it."""
    has_failed = run is not None and run.status is JobStatus.FAILED
    if header.end not in (RETURNED, RAISED) or (header.end == RETURNED and has_failed):
        return _without_value(found, index, run, header.text)
    if header.end == RAISED and not data:
        return _failed(found, index, run, header.text)
    if header.by_value and header.python != python_version():
        why = f"its result has code of Python {header.python}, and this is {python_version()}"
        return _failed(found, index, run, header.text or why)
    try:
        value = pickle.loads(data)
    except Exception as error:
        what = "result" if header.end == RETURNED else "exception"
        why = f"The {what} cannot be loaded here: {type(error).__name__}: {error}"
        return _failed(found, index, run, f"{header.text}{why}")
    if header.end == RETURNED:
        return ItemResult(index, value)
    if not isinstance(value, Exception):  # KeyboardInterrupt would end this program
        return _failed(found, index, run, header.text)
    value.add_note(f"In the run {found.name} {_part_id(found, index)}:\n{header.text}")
    return ItemResult(index, error=value)


def _part_id(found: FoundRun, index: int) -> str:
    is_array = found.run is not None and found.run.array_size
    first = original_numbers(found.run, found.record)
    whole = f"{found.job_id}:{index}" if is_array else found.job_id
    return short_id(original_id(whole, first))


def _failed(found: FoundRun, index: int, run: Run | None, text: str) -> ItemResult:
    """The result of a function that raised, without its exception."""
    code = classify(run).exit_code if run is not None else 1
    message = f"{found.name} {_part_id(found, index)} has no result: {text.strip()}"
    return ItemResult(index, error=RunFailed(message, code or 1))


def _without_value(found: FoundRun, index: int, run: Run | None, why: str) -> ItemResult:
    """The result of a run that ended in another way: killed, cancelled, never started."""
    if run is None or run.status is JobStatus.SUCCEEDED:
        return _failed(found, index, run, why or "the program ended before the function did.")
    part = _part_id(found, index)
    because = f" ({why.strip()})" if why and run.started_at else ""
    message = (
        f"{found.name} {part} has no result: {describe_outcome(run)}{because}. "
        f"Why: batchml explain {part}"
    )
    outcome = classify(run)
    return ItemResult(index, error=RunFailed(message, outcome.exit_code, outcome.outcome.value))


# --- Arrays ---------------------------------------------------------------------------------------


def read_results(
    context: Context, job_id: str, timeout: float | None = None
) -> Iterator[ItemResult]:
    """Yield the results of an array's children when they have ended, soon after each other.

    One call polls the array; the children that have ended cost one call for each 1,000, and those
    that failed one for each 100. Raises TimeoutError after `timeout` seconds.
    """
    done: set[int] = set()
    for run in _poll_array(context, job_id, timeout):
        found = FoundRun(run, context.history.records(context.env).get(bare_id(job_id)))
        check_is_function(found)
        if not run.array_size:
            if run.status.is_terminal:
                yield from _read_files(context, found, {0: run}).values()
            continue
        new = {index: status for index, status in _ended(context, run) if index not in done}
        if run.status.is_terminal:
            # ListJobs may be late; what is left has ended, too.
            left = set(range(run.array_size)) - done - new.keys()
            new |= dict.fromkeys(left, run.status)
        done |= new.keys()
        children = _describe_failed(context, run, new)
        first = original_numbers(run, found.record)
        for item in _read_files(context, found, children).values():
            yield replace(item, index=first[item.index]) if first else item


def _ended(context: Context, run: Run) -> Iterator[tuple[int, JobStatus]]:
    for status in _ENDS:
        if run.children.get(status.value):
            for index in list_child_indices(context.connect(), run.job_id, status):
                yield index, status


def _describe_failed(
    context: Context, run: Run, ended: Mapping[int, JobStatus]
) -> dict[int, Run | None]:
    """The children by index: those that failed as AWS Batch describes them, others as None."""
    failed = [f"{run.job_id}:{each}" for each, it in ended.items() if it is JobStatus.FAILED]
    described = context.describe(failed) if failed else {}
    return {each: described.get(f"{run.job_id}:{each}") for each in sorted(ended)}


def _poll_array(context: Context, job_id: str, timeout: float | None) -> Iterator[Run]:
    """Yield an array each time when more of its children have ended, and at its end."""
    moves = QueueMoves(context, context.describe)
    clock = with_deadline(context.clock, timeout)
    recall = make_recall(lambda: context.batch, context.history, context.env)
    poller = RunPoller(moves, clock, context.pace, recall=recall, renew=context.renew)
    ended, delays = 0, backoff(context.pace)
    while True:
        for run in poller.poll([job_id]):
            if isinstance(run, ContactLost):
                continue
            if count_ended(run) > ended or run.status.is_terminal:
                ended, delays = count_ended(run), backoff(context.pace)
                yield moves.with_own_id(run)
            if run.status.is_terminal:
                return
        clock.sleep(next(delays))


def in_order(items: Iterator[ItemResult]) -> list[Any]:
    """The values in the order of the items, when all have ended. Raises the first error."""
    found = sorted(items, key=lambda item: item.index)
    for item in found:
        if item.error is not None and len(found) > 1:
            item.error.add_note(f"It is the result for item {item.index} of {len(found)}.")
    return [_unwrap(item) for item in found]
