"""An array, explained by a few of its children. Pure."""

from collections.abc import Sequence
from itertools import groupby

from msgspec.structs import replace

from batchml.model.explanation import Explanation
from batchml.model.outcome import children_text
from batchml.model.run import Run, class_of, with_failures
from batchml.ops.explain.words import listed

_LOOKED_AT = 3  # children: each may take a call for its log


def telling(failed: Sequence[Run]) -> list[Run]:
    """Up to three children to look at: first those that ended each in another way."""
    ways: dict[object, Run] = {}
    for child in failed:
        outcome = class_of(
            child.status_reason, child.reason, child.exit_code, is_ours=bool(child.key)
        )
        end = outcome, child.exit_code
        ways.setdefault(end, child)
    first = list(ways.values())
    chosen = [*first, *(child for child in failed if child not in first)][:_LOOKED_AT]
    return sorted(chosen, key=_index)


def of_children(
    array: Run, failed: Sequence[Run], told: Sequence[tuple[Run, Explanation]]
) -> Explanation:
    """The cause that most of those that were looked at have in common; the others are evidence."""
    if len(failed) <= 1:
        return told[0][1]
    by_cause = sorted(told, key=lambda each: (each[1].cause, each[1].verdict, _index(each[0])))
    groups = [list(g) for _, g in groupby(by_cause, key=lambda e: (e[1].cause, e[1].verdict))]
    groups.sort(key=lambda group: (-len(group), _index(group[0][0])))
    found = groups[0][0][1]
    number = array.children.get("FAILED", len(failed))
    seen = "" if len(told) == number else f"; {listed([_index(run) for run, _ in told])} looked at"
    which = "" if len(groups) == 1 else f" {_named(groups[0])}:"
    others = tuple(f"{_named(group)}: {group[0][1].verdict}" for group in groups[1:])
    numbers = listed([_index(child) for child in failed])
    more = f" and {number - len(failed)} more" if number > len(failed) else ""
    return replace(
        found,
        verdict=f"{number} of its {array.array_size} children failed.{which} {found.verdict}",
        evidence=(
            f"failed: {numbers}{more}{seen}",
            f"children: {children_text(array)}",
            *others,
            *found.evidence,
        ),
    )


def with_children(array: Run, failed: Sequence[Run], found: Explanation) -> Explanation:
    """What is said of an array that is at work, with how far it is."""
    how = children_text(with_failures(array, failed))
    numbers = listed([_index(child) for child in failed])
    more = (f"failed so far: {numbers}; `explain {failed[0].job_id}` says why",) if failed else ()
    first, *others = found.evidence or ("",)
    kept = tuple(filter(None, (first, f"children: {how}", *more, *others)))
    return replace(found, evidence=kept)


def _named(group: Sequence[tuple[Run, Explanation]]) -> str:
    return f"{'Child' if len(group) == 1 else 'Children'} {listed([_index(r) for r, _ in group])}"


def _index(run: Run) -> int:
    return run.array_index or 0
