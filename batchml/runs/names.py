"""Find the run that a word of a command line names.

A word is a job id, the unique start of a job id, a run's name, its name in AWS, its key, `@last`,
or `@last~2` for the run that was submitted two before the last. `WORD:3` is child 3 of an array,
`WORD#1` node 1 of a multi-node run.
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

MIN_PREFIX = 4  # characters: a shorter start would often belong to several runs
SURE_PREFIX = 8  # characters of a start for which AWS is not asked about other runs

ListRuns = Callable[[], Iterable[tuple[str, str]]]


def select_run(word: str, history: Sequence[RunName], list_runs: ListRuns) -> str:
    """The job id of the run that `word` names.

    `history` has this machine's runs of the environment, newest first. `list_runs` returns (job id,
    name in AWS) of all runs of the environment, newest first; it is called only if the history does
    not have the answer. It also has submissions whose job ids are not in the history: a word can
    name whatever `ls` lists.

    Raises NotFound, or UsageError for a start of ids that is too short or belongs to several runs.
    """
    word = bare_name(word)
    if not word:
        raise UsageError("An empty word names no run: give a job id, a name or @last.")
    part = _CHILD.fullmatch(word)
    if part:
        return _select(part[1], history, list_runs) + part[2]
    return _select(word, history, list_runs)


def _select(word: str, history: Sequence[RunName], list_runs: ListRuns) -> str:
    if _JOB_ID.fullmatch(word.lower()):
        return word.lower()
    submitted = [record for record in history if record.job_id]
    last = _LAST.fullmatch(word)
    if last:
        sent = [each for each in history if not each.gang and (each.job_id or not each.refused)]
        return _job_id_of(word, _nth_last(word, int(last[1] or 0), sent), list_runs)
    named = [record for record in history if word in (record.key, record.job_name, record.name)]
    if named:  # a refused submission has no run: the word names an older run
        record = next((each for each in named if each.job_id or not each.refused), named[0])
        return _job_id_of(word, record, list_runs)
    by_prefix = _ids_with_prefix(word, (record.job_id for record in submitted))
    if len(by_prefix) == 1 and len(word) >= SURE_PREFIX:
        return by_prefix[0]
    found = list(list_runs())
    by_name = [job_id for job_id, name in found if word in (name, *split_key(name))]
    if by_name:  # a name comes before ids that happen to start like it
        return by_name[0]
    return _by_prefix(
        word, [*by_prefix, *_ids_with_prefix(word, (job_id for job_id, _ in found))], found
    )


def bare_id(job_id: str) -> str:
    """The id of the whole run: `ID` for a child `ID:3`, a node `ID#1` and `ID` itself."""
    return re.split("[:#]", job_id)[0]


def _job_id_of(word: str, record: RunName, list_runs: ListRuns) -> str:
    """The job id of a submission, from AWS if the history does not have it."""
    if record.job_id:
        return record.job_id
    found = (job_id for job_id, name in list_runs() if record.job_name and name == record.job_name)
    return next(found, "") or _raise_no_job(word, record)


def _nth_last(word: str, before: int, submitted: list[RunName]) -> RunName:
    if before < len(submitted):
        return submitted[before]
    if not submitted:
        raise NotFound("Run", word, [], "Nothing was submitted from here yet.")
    raise NotFound("Run", word, [], f"Only {len(submitted)} runs were submitted from here.")


def _raise_no_job(word: str, record: RunName) -> NoReturn:
    if record.refused:
        raise NotFound("Run", word, [], f"It was refused: {record.refused}")
    command = f"batchml reconcile {record.key}".rstrip()
    hint = f"It is not known yet whether its submission arrived: {command} finds out."
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
