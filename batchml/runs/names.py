"""The run that a word of a command line means.

A word is a job id, the unique start of one, a run's name, its name in AWS, its key, `@last`, or
`@last~2` for the run submitted two before the last. `WORD:3` is child 3 of an array.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from batchml.errors import NotFound, UsageError
from batchml.model.names import bare_name, is_key, short_id, split_key
from batchml.model.run import RunName

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LAST = re.compile(r"@last(?:~(\d{1,6}))?")
_CHILD = re.compile(r"(.+?)([:#]\d{1,5})")

MIN_PREFIX = 4  # characters: fewer would soon mean several runs
SURE_PREFIX = 8  # that a run of this machine starts so is no accident

ListRuns = Callable[[], Iterable[tuple[str, str]]]


def select_run(word: str, history: Sequence[RunName], known: ListRuns) -> str:
    """The job id that `word` means.

    `history` has this machine's runs of the environment, newest first. `known` lists (job id, name
    in AWS) of all its runs, newest first; it is asked only when history does not have the answer,
    and so is AWS. It answers also for a submission whose job id the history does not have: whatever
    `ls` lists can be named.

    Raises NotFound, or UsageError for a prefix that is too short or means several.
    """
    word = bare_name(word)
    if not word:
        raise UsageError("An empty word names no run: give a job id, a name or @last.")
    part = _CHILD.fullmatch(word)
    if part:
        return _select(part[1], history, known) + part[2]
    return _select(word, history, known)


def _select(word: str, history: Sequence[RunName], known: ListRuns) -> str:
    if _JOB_ID.fullmatch(word.lower()):
        return word.lower()
    submitted = [record for record in history if record.job_id]
    last = _LAST.fullmatch(word)
    if last:
        sent = [each for each in history if not each.gang and (each.job_id or not each.refused)]
        return _job_id_of(word, _nth_last(word, int(last[1] or 0), sent), known)
    called = [record for record in history if word in (record.key, record.job_name, record.name)]
    if called:  # what was refused left no run: an older one of that name is meant
        record = next((each for each in called if each.job_id or not each.refused), called[0])
        return _job_id_of(word, record, known)
    by_prefix = _ids_with_prefix(word, (record.job_id for record in submitted))
    if len(by_prefix) == 1 and len(word) >= SURE_PREFIX:
        return by_prefix[0]
    found = list(known())
    by_name = [job_id for job_id, name in found if word in (name, *split_key(name))]
    if by_name:  # a name means its run, whatever ids happen to start like it
        return by_name[0]
    return _by_prefix(
        word, [*by_prefix, *_ids_with_prefix(word, (job_id for job_id, _ in found))], found
    )


def bare_id(job_id: str) -> str:
    """The id of the whole array, or of all nodes, for that of a child `ID:3` or a node `ID#1`."""
    return re.split("[:#]", job_id)[0]


def _job_id_of(word: str, record: RunName, known: ListRuns) -> str:
    """The job id of a submission, which the server may know where the history does not."""
    if record.job_id:
        return record.job_id
    found = (job_id for job_id, name in known() if record.job_name and name == record.job_name)
    return next(found, "") or _never_submitted(word, record)


def _nth_last(word: str, before: int, submitted: list[RunName]) -> RunName:
    if before < len(submitted):
        return submitted[before]
    if not submitted:
        raise NotFound("Run", word, [], "Nothing was submitted from here yet.")
    raise NotFound("Run", word, [], f"Only {len(submitted)} runs were submitted from here.")


def _never_submitted(word: str, record: RunName) -> NoReturn:
    if record.refused:
        raise NotFound("Run", word, [], f"It was refused: {record.refused}")
    finder = f"batchml reconcile {record.key}".rstrip()
    hint = f"Nobody knows yet whether its submission arrived: {finder} finds out."
    raise NotFound("Run", word, [], hint)


def _ids_with_prefix(word: str, job_ids: Iterable[str]) -> list[str]:
    return [job_id for job_id in job_ids if job_id.startswith(word.lower())]


def _by_prefix(word: str, ids: list[str], found: list[tuple[str, str]]) -> str:
    by_prefix = sorted(set(ids))
    if by_prefix and len(word) < MIN_PREFIX:
        raise UsageError(f"{word!r} is too short for the start of a job id: give {MIN_PREFIX}.")
    if len(by_prefix) > 1:
        listed = ", ".join(by_prefix[:5])
        raise UsageError(f"{word!r} is the start of {len(by_prefix)} job ids: {listed}. Add more.")
    if by_prefix:
        return by_prefix[0]
    names = {split_key(name)[0] for _, name in found[:50]}
    names |= {short_id(job_id) for job_id, _ in found[:5]}
    hint = "`batchml ls` shows the runs."
    if is_key(word):
        hint = "No submission from here has this key. " + hint
    raise NotFound("Run", word, names, hint)
