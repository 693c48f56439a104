"""Which runs words mean, and what they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchml.errors import BatchmlError, NotFound
from batchml.model.fallback import MOVED_MARK

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.record import Name
    from batchml.model.run import Run


def select(place: "Place", words: Sequence[str]) -> list[str]:
    """The job ids that the words mean, in their order; the runs are listed once at most.

    Raises NotFound, UsageError.
    """
    if not words:
        return []
    from functools import cache

    from batchml.ops.select import select_run

    @cache
    def known() -> list[tuple[str, str]]:
        runs = [run for queue in place.batch.queues() for run in place.batch.list_recent(queue)]
        runs.sort(key=lambda run: run.created_at or 0, reverse=True)
        return [(run.job_id, run.job_name or run.name) for run in runs]

    history = place.history.names(place.env)
    found = []
    for word in words:
        try:
            job_id = _own(place, word, select_run(word, history, known))
            found.append(_now(place, history, job_id))
        except NotFound as error:
            raise sweep_instead(place, word) or error from None
    return found


def _now(place: "Place", names: "Sequence[Name]", job_id: str) -> str:
    """The job that a run is now; for runs that may move nowhere that is their own."""
    if not any(name.fallback for name in names):
        return job_id
    from batchml.client.fallback import now_of

    return now_of(place, names, job_id)


def current(place: "Place", job_id: str) -> str:
    """The job that the run of a job id is now: another, where it has moved to another queue."""
    return _now(place, place.history.names(place.env), job_id)


def sweep_instead(place: "Place", word: str) -> NotFound | None:
    """What to say where it is a sweep that is meant; looked for on this machine only."""
    if not place.settings.is_local or not (place.home.root / "sweeps").is_dir():
        return None
    from batchml.client.sweeping.boards import choose, list_boards

    try:
        key = choose(word, [] if word.startswith("@") else list_boards(place)).key
    except BatchmlError:
        return None
    return NotFound("Run", word, [], f"It is a sweep: batchml sweeps show {key}")


def _own(place: "Place", word: str, job_id: str) -> str:
    """AWS Batch's id of a child: in what was run again in part, it is called by its first number.

    At most one call. Raises NotFound for a child that was not run again.
    """
    whole, colon, _ = job_id.partition(":")
    if not colon:
        return job_id
    from batchml.ops.rerun import first_numbers, own_id, ranges

    record = place.history.remembered(place.env).get(whole)
    run = None if record else place.describe([whole]).get(whole)
    first = first_numbers(run, record)
    own = own_id(job_id, first)
    if own is None:
        hint = f"Of the first array, it runs again: {ranges(first[:200])}."
        raise NotFound("Child", word, [], hint)
    return own


def described(place: "Place", job_ids: Sequence[str]) -> "dict[str, Run]":
    """The runs of these ids, in their order, a hundred a call.

    Raises NotFound for the first that the environment does not know.
    """
    asked = list(dict.fromkeys(job_ids))
    found = place.describe(asked)
    if any(run.status_reason.startswith(MOVED_MARK) for run in found.values()):
        from batchml.client.fallback import with_moves

        found = with_moves(place, found)
    for job_id in asked:
        if job_id not in found:
            from batchml.client.finding import unknown

            raise unknown(place, job_id)
    return {job_id: found[job_id] for job_id in asked}
