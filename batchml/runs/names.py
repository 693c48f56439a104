"""Find the run that a word of a command line names.

A word is a job id, the unique start of a job id, a run's name, its name in AWS, its key, `@last`,
or `@last~2` for the run that was submitted two before the last. `WORD:3` is child 3 of an array,
`WORD#1` node 1 of a multi-node run.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, NoReturn, Protocol

from batchml.config.project import project_name, short_project
from batchml.errors import NotFound, UsageError
from batchml.model.group import is_listed
from batchml.model.names import bare_name, is_key, short_id, split_key
from batchml.model.run import SWEEP_TAG, RunName

_JOB_ID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_LAST = r"@last(?:~(\d{1,6}))?"
_CHILD = r"(.+?)([:#]\d{1,5})"

MIN_PREFIX = 4  # characters: a shorter start would often belong to several runs
SURE_PREFIX = 8  # characters of a start for which AWS is not asked about other runs

ListRuns = Callable[[], Iterable[tuple[str, str]]]
FindProjects = Callable[[Sequence[str]], Mapping[str, str]]


class KnownRuns(Protocol):
    """The runs that this machine submitted to an environment; HistoryNames implements it."""

    def __iter__(self) -> Iterator[RunName]:
        """All runs, the newest first."""

    def named(self, word: str, project: str = "") -> Sequence[RunName]:
        """The runs that have this key or name, or a job id that begins so, the newest first.

        Of a name the newest of the project and of no project, and one of other projects.
        """

    def newest(self, project: str, count: int) -> Sequence[RunName]:
        """The newest `count` runs of a project, "" for all, that `ls` lists and that were sent."""


_MAX_ASKED = 100  # runs of one name whose projects are asked for: one call
_MAX_KNOWN = 10  # names that an error lists


class ProjectScope(NamedTuple):
    """The project whose runs a word names, "" for all runs.

    `find_projects` returns the projects of runs in AWS by job id; it is called only for runs that
    are not in the history.
    """

    project: str = ""
    find_projects: FindProjects = lambda job_ids: {}

    def narrow(self, history: Iterable[RunName]) -> list[RunName]:
        """The runs of the project; without any, the runs of no project. The order is kept."""
        runs = list(history)
        own = [each for each in runs if each.project == self.project or not self.project]
        return own or [each for each in runs if not each.project]

    def narrow_ids(self, job_ids: Sequence[str], projects: Mapping[str, str]) -> list[str]:
        """The same for job ids; `projects` has the projects that are known without a call."""
        if not self.project:
            return list(job_ids)
        asked = [each for each in job_ids if each not in projects][:_MAX_ASKED]
        known = {**projects, **(self.find_projects(asked) if asked else {})}
        own = [each for each in job_ids if known.get(each) == self.project]
        return own or [each for each in job_ids if known.get(each) == ""]


ALL_PROJECTS = ProjectScope()


def select_run(
    word: str,
    history: KnownRuns,
    list_runs: ListRuns,
    scope: ProjectScope = ALL_PROJECTS,
) -> str:
    """The job id of the run that `word` names.

    `history` has this machine's runs of the environment. `list_runs` returns (job id,
    name in AWS) of all runs of the environment, newest first; it is called only if the history does
    not have the answer. It also has submissions whose job ids are not in the history: a word can
    name whatever `ls` lists.

    An id, eight characters of its start, and a key name any run. `@last` names only runs of the
    project that `ls` lists; a name or a shorter start also runs that have no project, but never
    runs of others.

    Raises NotFound, or UsageError for a start of ids that is too short or belongs to several runs.
    """
    word = bare_name(word)
    if not word:
        raise UsageError("An empty word names no run: give a job id, a name or @last.")
    part = re.fullmatch(_CHILD, word)
    if part:
        return _select(part[1], history, list_runs, scope) + part[2]
    return _select(word, history, list_runs, scope)


def _select(word: str, history: KnownRuns, list_runs: ListRuns, scope: ProjectScope) -> str:
    if re.fullmatch(_JOB_ID, word.lower()):
        return word.lower()
    last = re.fullmatch(_LAST, word)
    if last:
        before = int(last[1] or 0)
        own = history.newest(scope.project, before + 1)
        others = 0
        if before >= len(own):
            sent = (each for each in history if each.job_id or not each.refused)
            others = sum(map(is_listed, sent)) - len(own)
        if not own and any(
            SWEEP_TAG in each.tags and scope.project in ("", each.project) for each in history
        ):
            hint = "Only sweeps were submitted: `batchml sweeps show @last` shows the last."
            raise NotFound("Run", word, [], hint)
        record = _nth_last(word, before, own, others, scope.project)
        return _job_id_of(word, record, list_runs)
    alike = history.named(word, scope.project)
    keyed = [each for each in alike if each.key and word in (each.key, each.job_name)]
    named = keyed or [each for each in alike if word in (each.job_name, each.name)]
    chosen = keyed or scope.narrow(named)
    if chosen:  # a refused submission has no run: the word names an older run
        record = next((each for each in chosen if each.job_id or not each.refused), chosen[0])
        return _job_id_of(word, record, list_runs)
    projects = {each.job_id: each.project for each in alike if each.job_id}
    by_prefix = _ids_with_prefix(word, projects)
    if len(by_prefix) == 1 and len(word) >= SURE_PREFIX:
        return by_prefix[0]
    found = list(list_runs())
    by_key = [job_id for job_id, name in found if word in (name, split_key(name)[1])]
    by_name = [job_id for job_id, name in found if word == split_key(name)[0]]
    projects |= _find_known(history, by_name)
    own_ids = by_key or scope.narrow_ids(by_name, projects)
    if own_ids:  # a name comes before ids that happen to start like it
        return own_ids[0]
    by_prefix = [*by_prefix, *_ids_with_prefix(word, (job_id for job_id, _ in found))]
    by_prefix = list(dict.fromkeys(by_prefix))
    own_ids = by_prefix
    if len(word) < SURE_PREFIX:
        own_ids = scope.narrow_ids(by_prefix, projects)
    elsewhere = [*(each.job_id for each in named if each.job_id), *by_name, *by_prefix]
    if elsewhere and not own_ids:
        projects = {each.job_id: each.project for each in history if each.job_id}
        raise _run_elsewhere(word, elsewhere[0], projects, scope)
    if not own_ids:
        projects = {each.job_id: each.project for each in history if each.job_id}
        known = _known_words([*filter(is_listed, history)], found, scope, projects)
        raise _not_found(word, known)
    return _by_prefix(word, own_ids)


def _find_known(history: KnownRuns, job_ids: Iterable[str]) -> dict[str, str]:
    """The projects of those of the jobs that were submitted from here, by job id."""
    asked = islice(job_ids, _MAX_ASKED)
    return {each.job_id: each.project for job_id in asked for each in history.named(job_id)}


def _known_words(
    history: Sequence[RunName],
    found: Sequence[tuple[str, str]],
    scope: ProjectScope,
    projects: Mapping[str, str],
) -> list[str]:
    """Words for an error: names of the project's runs, newest first, then the newest short ids."""
    runs = [(each.job_id, each.name) for each in scope.narrow(history) if each.job_id]
    if not runs:  # the history has no run of the project: perhaps others have submitted some
        others = {job_id: name for job_id, name in found[:_MAX_ASKED] if job_id not in projects}
        runs = [(each, split_key(others[each])[0]) for each in scope.narrow_ids([*others], {})]
    return [*(name for _, name in runs), *(short_id(job_id) for job_id, _ in runs[:5])]


def _run_elsewhere(
    word: str, job_id: str, projects: Mapping[str, str], scope: ProjectScope
) -> NotFound:
    """The error for a word that only names runs of other projects."""
    project = projects.get(job_id) or scope.find_projects([job_id]).get(job_id, "")
    other = short_project(project, [*projects.values(), scope.project])
    return NotFound(
        "Run", word, [],
        f"The project {other} has it: give its id, {short_id(job_id)}, or add --project {other}.",
        where=f"in the project {project_name(scope.project)}",
    )  # fmt: skip


def bare_id(job_id: str) -> str:
    """The id of the whole run: `ID` for a child `ID:3`, a node `ID#1` and `ID` itself."""
    return re.split("[:#]", job_id)[0]


def _job_id_of(word: str, record: RunName, list_runs: ListRuns) -> str:
    """The job id of a submission, from AWS if the history does not have it."""
    if record.job_id:
        return record.job_id
    found = (job_id for job_id, name in list_runs() if record.job_name and name == record.job_name)
    return next(found, "") or _raise_no_job(word, record)


def _nth_last(
    word: str, before: int, submitted: Sequence[RunName], others: int, project: str
) -> RunName:
    """The run `before` runs before the last; `others` is the number of runs of other projects."""
    if before < len(submitted):
        return submitted[before]
    few = "Only 1 run was" if len(submitted) == 1 else f"Only {len(submitted)} runs were"
    count = few if submitted else "Nothing was"
    place = f"in the project {project_name(project)}" if project else "from here"
    yet = "" if submitted else " yet"
    more = "; `batchml ls --all` shows the runs of other projects" if others else ""
    raise NotFound("Run", word, [], f"{count} submitted {place}{yet}{more}.")


def _raise_no_job(word: str, record: RunName) -> NoReturn:
    if record.refused:
        raise NotFound("Run", word, [], f"It was refused: {record.refused}")
    command = f"batchml reconcile {record.key}".rstrip()
    hint = f"It is not known yet whether its submission arrived: {command} finds out."
    raise NotFound("Run", word, [], hint)


def _ids_with_prefix(word: str, job_ids: Iterable[str]) -> list[str]:
    return [job_id for job_id in job_ids if job_id.startswith(word.lower())]


def _by_prefix(word: str, ids: list[str]) -> str:
    by_prefix = sorted(set(ids))
    if len(word) < MIN_PREFIX:
        raise UsageError(f"{word!r} is too short for the start of a job id: give {MIN_PREFIX}.")
    if len(by_prefix) > 1:
        listed = ", ".join(by_prefix[:5])
        raise UsageError(f"{word!r} is the start of {len(by_prefix)} job ids: {listed}. Add more.")
    return by_prefix[0]


def _not_found(word: str, known: Sequence[str]) -> NotFound:
    hint = "`batchml ls` shows the runs."
    if is_key(word):
        hint = "No submission from here has this key. " + hint
    return NotFound("Run", word, known, hint, most=_MAX_KNOWN)
