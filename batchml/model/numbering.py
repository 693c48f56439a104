"""Numbers of the children of a partial rerun of an array: ours and those of AWS Batch. Pure.

`rerun --failed` of an array is a smaller array, which AWS Batch numbers from 0. Users see and type
the number that a child had in the first array: every id in a text is a `shown_id`. Ids in JSON, and
folders on disk, keep the number of AWS Batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from batchml.errors import UsageError
from batchml.model.run import Record, Run
from batchml.runtime.protocol.variables import ARRAY_MAP, INDEX, fill_params

# `sh -c MAPPING sh COMMAND...`: child 1 of the new array gets the second of those numbers. A shell
# does that, so that it also works in images without batchml's runtime.
MAPPING = (
    "i=${AWS_BATCH_JOB_ARRAY_INDEX:-0}; for r in $"
    + ARRAY_MAP
    + "; do a=${r%-*}; n=$((${r#*-}-a+1)); "
    'if [ "$i" -lt "$n" ]; then export AWS_BATCH_JOB_ARRAY_INDEX=$((a+i)); break; fi; '
    'i=$((i-n)); done; exec "$@"'
)
_WRAPPER = ("sh", "-c", MAPPING, "sh")


def mapped_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command in a wrapper that sets the numbers of the first array."""
    return (*_WRAPPER, *plain_command(command))


def plain_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command without the wrapper that sets the numbers of the first array."""
    return command[len(_WRAPPER) :] if command[: len(_WRAPPER)] == _WRAPPER else command


def original_numbers(run: Run | None, record: Record | None = None) -> tuple[int, ...]:
    """The numbers that the children of a partial rerun had in the first array, by their indices.

    One number for a single run that is the rerun of a child; () for other runs.
    """
    kept: Any = record.spec.get("env", {}) if record else {}
    mapped = (run.environment.get(ARRAY_MAP, "") if run else "") or str(kept.get(ARRAY_MAP, ""))
    try:
        return tuple(parse_ranges(mapped))
    except UsageError:  # a variable of another program
        return ()


def original_id(job_id: str, first: Sequence[int]) -> str:
    """The id with the number in the first array: `id:4` for `id:1`, if that child was number 4."""
    whole, _, index = job_id.partition(":")
    known = index.isdecimal() and int(index) < len(first)
    return f"{whole}:{first[int(index)]}" if known else job_id


def shown_id(run: Run, record: Record | None = None) -> str:
    """The id of a run as users see and type it."""
    return original_id(run.job_id, original_numbers(run, record))


def rerun_id(job_id: str, first: Sequence[int]) -> str | None:
    """The id in AWS Batch: `id:1` for `id:4`, or `id` if the rerun has one child; None for a child
    that was not run again.
    """
    whole, colon, number = job_id.partition(":")
    if not (first and colon):
        return job_id
    if not number.isdecimal() or int(number) not in first:
        return None
    return whole if len(first) == 1 else f"{whole}:{first.index(int(number))}"


def shown_params(
    params: Mapping[str, Any], run: Run | None, record: Record | None = None
) -> dict[str, Any]:
    """The parameters with the number of the child in place of `{index}`.

    For an array these are all its numbers: `0-3`, or `2,4-5` in a partial rerun.
    """
    if run is None:
        return dict(params)
    first = original_numbers(run, record)
    if run.array_size:
        numbers = format_ranges(first or range(run.array_size)).replace(" ", ",")
    elif run.array_index is not None or first:
        at = run.array_index or 0
        numbers = str(first[at] if at < len(first) else at)
    else:
        return dict(params)
    return dict(fill_params(params, {INDEX: numbers}))


def format_ranges(chosen: Sequence[int]) -> str:
    """`3 17-19 40` for 3, 17, 18, 19 and 40; the numbers are sorted and distinct."""
    found: list[list[int]] = []
    for number in chosen:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def parse_ranges(text: str) -> list[int]:
    """Parse the result of `format_ranges`. Raises UsageError for another text."""
    found: list[int] = []
    for word in text.split():
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise UsageError(f"{ARRAY_MAP} is {text!r}: not a list of numbers.")
        found += range(int(first), min(int(last or first), int(first) + 10_000) + 1)
    return found
