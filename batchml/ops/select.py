"""Which run a user means: a job id, a run's name, a unique prefix of an id, or `@last`."""

import re
from collections.abc import Callable, Iterable

from batchml.errors import NotFound, UsageError
from batchml.model.names import bare_name, short_id
from batchml.ops.history import Remembered

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}([:#]\d+)?")

MIN_PREFIX = 4  # characters: fewer would soon mean several runs

Known = Callable[[], Iterable[tuple[str, str]]]


def select_run(word: str, history: Iterable[Remembered], known: Known) -> str:
    """The job id that `word` means.

    `history` says what `@last` is. `known` lists (job id, name) of the environment's runs, newest
    first; it is asked for names and prefixes only.

    Raises NotFound, or UsageError for a prefix that is too short or means several.
    """
    word = bare_name(word)
    if _JOB_ID.fullmatch(word):
        return word
    remembered = list(history)
    if word == "@last":
        if not remembered:
            raise NotFound("Run", word, [], "Nothing was submitted from here yet.")
        return remembered[0].job_id
    found = list(known())
    by_name = [job_id for job_id, name in found if name == word]
    if by_name:  # a name means its run, whatever ids happen to start like it
        return by_name[0]
    by_prefix = [job_id for job_id, _ in found if job_id.startswith(word.lower())]
    if by_prefix and len(word) < MIN_PREFIX:
        raise UsageError(f"{word!r} is too short for the start of a job id: give {MIN_PREFIX}.")
    if len(by_prefix) > 1:
        listed = ", ".join(sorted(by_prefix)[:5])
        raise UsageError(f"{word!r} is the start of {len(by_prefix)} job ids: {listed}. Add more.")
    if by_prefix:
        return by_prefix[0]
    names = {name for _, name in found[:50]} | {short_id(job_id) for job_id, _ in found[:5]}
    raise NotFound("Run", word, names, "`batchml ls` shows the runs.")
