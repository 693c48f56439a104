"""What people should know about a sweep that runs, each said once. Pure.

What its file alone tells is said before it starts: `model/sweepjob.py`.
"""

from collections.abc import Iterator

from batchml.model.sweep import Trial, TrialState
from batchml.sweep import budgets
from batchml.sweep.book import Book
from batchml.sweep.events import Noticed
from batchml.sweep.plan import unconfirmed
from batchml.sweep.state import CONFIRM, WAITING

NEVER_PRINTED = "never printed"  # in the reason of a trial that ended without its metric
_LINES = 20  # of the output of a trial that failed
_MANY = 3  # trials of one kind before it is worth a word

_Found = tuple[str, str, int | None]  # kind, words, the trial that they are about


def due(book: Book, now: float, patience: float, is_starting: bool = False) -> list[Noticed]:
    """What has to be said now and was not said yet. `patience`: seconds for a trial to begin in,
    unless `is_starting`: its container is being made, which may take as long as its image is large.
    """
    found = (*_of_trials(book), *(() if is_starting else _of_waiting(book, now, patience)))
    return [
        Noticed(kind, words, now, trial)
        for kind, words, trial in found
        if kind not in book.state.notices
    ]


def _of_trials(book: Book) -> Iterator[_Found]:
    state, failed = book.state, book.tally.first_failure
    if failed is not None and NEVER_PRINTED in failed.why:
        yield "metric", f"Trial {failed.number}: {failed.why}", failed.number
    if state.counts[TrialState.LOST] and "lost" not in state.notices:
        lost = next(each for each in state.trials.values() if each.state is TrialState.LOST)
        yield "lost", f"Trial {lost.number} was lost: {lost.why}", lost.number
    bad, over = state.counts[TrialState.DIVERGED], budgets.ended(state)
    if bad >= _MANY and bad * 2 > over:
        yield (
            "diverged",
            f"{bad} of the first {over} trials diverged: {book.spec.goal.metric} was not a finite "
            "number. The space may reach too far.",
            None,
        )


def _of_waiting(book: Book, now: float, patience: float) -> Iterator[_Found]:
    state, begun = book.state, budgets.began_at(book.state)
    nothing = not book.tally.has_begun and state.counts[TrialState.WAITING] > 0
    if begun is not None and nothing and now - begun >= patience and state.jobs:
        job = state.jobs[min(state.jobs)]
        yield (
            WAITING,
            f"No trial has begun for {patience:.0f} seconds. Why: batchml explain {job}",
            None,
        )


def of_confirming(book: Book, now: float) -> list[Noticed]:
    """The winners are not run again: no money is left, or it was stopped. Asked when it ends."""
    confirm = book.spec.confirm
    if confirm is None or CONFIRM in book.state.notices:
        return []
    if len(book.state.trials) > book.tally.planned or not unconfirmed(book, 1, 1):
        return []
    return [
        Noticed(CONFIRM, "The best were not run again: its limits, or a stop, came first.", now)
    ]


def last_lines(trial: Trial) -> str:
    """Why a trial failed, and the last lines of its output."""
    code, why = f"exit code {trial.exit_code}", trial.why or "it did not say why"
    # What never printed its metric may have ended with 0 itself.
    known = trial.exit_code is None or code in why or NEVER_PRINTED in why
    head = f"Trial {trial.number} failed: {why}" + ("" if known else f" ({code})")
    tail = trial.tail[-_LINES:]
    return "\n".join(
        [f"{head}. Its last lines:" if tail else head, *(f"  {each}" for each in tail)]
    )
