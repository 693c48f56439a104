"""`rerun --resume`: what a run has saved, and what the new one is told of it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import NotFound, UsageError
from batchml.model.record import RESUMES_TAG
from batchml.ops.rerun import Again, first_id, first_numbers, ranges
from batchml.ops.select import bare_id
from batchml.runtime.checkpoint.layout import entries, looks_whole
from batchml.runtime.checkpoint.remote import Found as Saved
from batchml.runtime.checkpoint.remote import prefix_for
from batchml.runtime.checkpoint.resume import VARIABLE, Told, folder_of

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.ops.search import Found

_FOLDER = "BATCHML_CHECKPOINT_DIR"
_STORE = re.compile(r"s3://([^/]+)/(.+)")
_SHOWN = 20  # numbers of children


class Looked(Struct, frozen=True):
    """What a run, or a child of it, has saved; nothing where both are at their defaults."""

    step: int | None = None
    files: int = 0  # of a program that saves in a way of its own

    def __bool__(self) -> bool:
        return self.step is not None or self.files > 0


def resuming(
    place: "Place", found: "Found", whole: "Found", wanted: Again, children: Sequence[int] | None
) -> Again:
    """`wanted`, told to go on from what `found` has saved, and a notice that says from where.

    `whole` is the array that `found` is a child of, else the same; `children` those that are run
    again, by their indices in it, None for all. Raises UsageError for what cannot go on, and
    NotFound where nothing was saved, as far as that can be seen from here.
    """
    _check(found, wanted, children is not None)
    is_array = wanted.array is not None
    told = Told(
        job=bare_id(whole.job_id),
        name=whole.name,
        key=_key(whole),
        store=_store(place, whole),
        folder=str(place.home.runs / bare_id(whole.job_id)) if place.settings.is_local else "",
        children=ranges(children or ()),
        is_array=is_array,
    )
    numbers: list[int | None] = [None]
    if children is not None or is_array:
        numbers = list(range(wanted.array or 0)) if children is None else list(children)
    seen = _look(place, told, numbers)
    first = first_numbers(whole.run, whole.record)
    who = f"{found.name} {first_id(found.job_id, first)}"
    if seen is None:
        words = _unseen(who)
    elif not any(seen.values()):
        raise _nothing(place, found, who)
    else:
        words = _seen(who, seen, first)
    spec = replace(wanted.spec, env={**wanted.spec.env, VARIABLE: told.to_json()})
    return replace(
        wanted,
        spec=spec,
        own_tags={RESUMES_TAG: found.job_id},
        notices=(*wanted.notices, words),
    )


def _check(found: "Found", wanted: Again, some: bool) -> None:
    run = found.run
    if run is not None and not run.status.is_terminal and not (some and run.children):
        raise UsageError(
            f"--resume: {found.name} {found.job_id} is {run.status}: it goes on by itself. To end "
            f"it first: batchml cancel {found.job_id}"
        )
    if _FOLDER in wanted.spec.env:
        raise UsageError(
            f"--resume: the job names a {_FOLDER} of its own, which every run of it finds: rerun "
            "it without --resume, and it goes on there."
        )


def _key(found: "Found") -> str:
    known = found.run.key if found.run else ""
    return known or (found.record.key if found.record else "")


def _store(place: "Place", found: "Found") -> str:
    """Where in a bucket a run in AWS kept what outlives it; empty where nothing did."""
    if place.settings.is_local:
        return ""
    told = found.run.environment.get("BATCHML_STORE", "") if found.run else ""
    if told:
        return told
    from batchml.client.known import open_known

    bucket = open_known(place).outputs().get("BucketName", "")
    return f"s3://{bucket}/runs/{_key(found)}" if bucket and _key(found) else ""


# --- what is there --------------------------------------------------------------------------------


def _look(
    place: "Place", told: Told, numbers: Sequence[int | None]
) -> Mapping[int | None, Looked] | None:
    """What each child has saved; None where that cannot be seen from here. In AWS one call for each
    1,000 files."""
    if told.folder:
        return {each: _here(Path(folder_of(told.folder, each))) for each in numbers}
    if _has_workspace(place):
        return None
    stored = _STORE.fullmatch(told.store)
    if stored is None:
        return {}
    from batchml.aws.s3 import Bucket

    top = f"{stored[2]}/{prefix_for(numbers[0] if len(numbers) == 1 else None)}"
    names = [each.key for each in Bucket(place.connect(), stored[1]).list(top)]
    return dict(_sorted(names, f"{stored[2]}/", numbers))


def saved_here(place: "Place", job_id: str) -> Looked:
    """What a run of this machine, or a child, has saved."""
    whole, _, child = job_id.partition(":")
    return _here(Path(folder_of(str(place.home.runs / whole), int(child) if child else None)))


def _here(folder: Path) -> Looked:
    """By names and sizes: the runtime reads them all before the command starts."""
    found = entries(str(folder))
    whole = (each.step for each in found if looks_whole(str(folder / each.name), each.step))
    step = next(whole, None)
    if step is not None:
        return Looked(step)
    files = (path for path in folder.rglob("*") if path.is_file())
    return Looked(files=sum(not _is_ours(str(path.relative_to(folder))) for path in files))


def _sorted(
    names: Iterable[str], above: str, numbers: Sequence[int | None]
) -> Iterator[tuple[int | None, Looked]]:
    below: dict[str, list[str]] = {}
    prefixes = {prefix_for(each): each for each in numbers}
    for name in names:
        key = name.removeprefix(above)
        parts = key.split("/")
        for prefix in ("checkpoints/", "/".join([*parts[:2], ""])):
            if prefix in prefixes:
                below.setdefault(prefix, []).append(key.removeprefix(prefix))
    for prefix, number in prefixes.items():
        saved = Saved.among(below.get(prefix, ()))
        whole = saved.whole()
        others = [name for name in saved.others if not _is_ours(name)]
        yield number, Looked(whole[0].step) if whole else Looked(files=len(others))


def _is_ours(name: str) -> bool:
    return name.startswith((".batchml", ".saving-", ".removing-"))


def _has_workspace(place: "Place") -> bool:
    from batchml.aws.naming import make_platform
    from batchml.client.known import open_known

    outputs = open_known(place).outputs()
    return bool(make_platform(place.env, place.settings.environment, outputs).workspace)


# --- what is said ---------------------------------------------------------------------------------


def _seen(who: str, seen: Mapping[int | None, Looked], first: Sequence[int]) -> str:
    steps = sorted({each.step for each in seen.values() if each.step is not None})
    if steps:
        last = f" to {steps[-1]}" if len(steps) > 1 else ""
        words = f"It resumes from step{'s' if last else ''} {steps[0]}{last} of {who}."
    else:
        words = f"It resumes from what {who} has saved."
    without = [number for number, each in seen.items() if number is not None and not each]
    if without:
        named = [first[number] if number < len(first) else number for number in without]
        shown = ranges(named[:_SHOWN]) + (" ..." if len(without) > _SHOWN else "")
        words += f" {len(without)} of {len(seen)} children saved nothing and begin anew: {shown}."
    return words


def _unseen(who: str) -> str:
    return (
        f"It resumes from what {who} has saved in the workspace, which is not seen from here: "
        "without a checkpoint there it ends with 78 before its command."
    )


def _nothing(place: "Place", found: "Found", who: str) -> NotFound:
    from batchml.client.numbering import typed

    before = found.tags.get(RESUMES_TAG, "")
    hint = f"From the beginning: batchml rerun {typed(place, found.job_id)}{place.option}"
    if before:
        again = f"batchml rerun --resume {typed(place, before)}{place.option}"
        hint = f"It was to go on from another: {again}"
    return NotFound("Checkpoints of run", who, [], hint)
