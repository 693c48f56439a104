"""One poller for any number of runs: a hundred ids a call, no faster than the service bears."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from batchml.clock import Clock
from batchml.errors import BatchmlError
from batchml.model.run import Run
from batchml.ops.watch.contact import Contact, Invisible, Outages, unknown
from batchml.ops.watch.happenings import Lost
from batchml.ops.watch.pace import Limiter, Pace, backoff

MAX_DESCRIBE = 100  # ids of one DescribeJobs

Describe = Callable[[Sequence[str]], dict[str, Run]]
Recall = Callable[[str], Run | None]


class Poller:
    """Asks how runs are.

    `recall` is asked for a run that the service does not know: it may be listed, or on record here.
    """

    def __init__(
        self,
        describe: Describe,
        clock: Clock,
        pace: Pace,
        *,
        recall: Recall | None = None,
        renew: Callable[[], None] | None = None,
    ) -> None:
        self._describe = describe
        self._recall = recall
        self._limiter = Limiter(clock, pace.looks)
        self._contact = Contact(clock, pace, renew)
        self._invisible = Invisible(clock, pace)

    def look(self, job_ids: Sequence[str]) -> Iterator[Run | Lost]:
        """Yield each run as it is now, call by call; Lost for what fails or is not there, for now.

        Raises what has failed for too long: ServiceUnreachable, or AccessError.
        """
        for found in self.answers(job_ids):
            if isinstance(found, Lost):
                yield found
                return
            asked, runs = found
            yield from runs.values()
            for job_id in asked:
                if job_id not in runs:
                    yield self.missing(job_id)

    def answers(
        self, job_ids: Sequence[str]
    ) -> Iterator[tuple[Sequence[str], dict[str, Run]] | Lost]:
        """Yield the ids asked and the runs found, call by call; nothing after one that failed.

        A run that is missing is nobody's failure here.
        """
        for start in range(0, len(job_ids), MAX_DESCRIBE):
            asked = job_ids[start : start + MAX_DESCRIBE]
            self._limiter.take()
            try:
                runs = self._describe(asked)
            except BatchmlError as error:
                self._limiter.failed()
                self._contact.lost(error)
                yield Lost(str(error))
                return
            self._limiter.went_well()
            self._contact.made()
            for job_id in runs:
                self._invisible.seen(job_id)
            yield asked, runs

    def missing(self, job_id: str) -> Run | Lost:
        """What to make of a run that an answer has not: patience, then other sources, then the end.

        Raises ServiceUnreachable.
        """
        if not self._invisible.is_over(job_id):
            return Lost(unknown(job_id))
        try:
            found = None if self._recall is None else self._recall(job_id)
        except BatchmlError as error:
            self._contact.lost(error)
            return Lost(str(error))
        if found is None:
            raise self._invisible.given_up(job_id)
        return found


def wait(
    describe: Describe,
    job_ids: Iterable[str],
    *,
    clock: Clock,
    pace: Pace,
    recall: Recall | None = None,
    renew: Callable[[], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Run]:
    """Yield each run once it has ended; a hundred a call for all that have not.

    `tell` is told when contact stays lost, once each time: the user may have to sign in again.

    Raises ServiceUnreachable when there is no contact, or a run is not to be found, for too long;
    AccessError when nobody signs in again.
    """
    poller = Poller(describe, clock, pace, recall=recall, renew=renew)
    left = list(dict.fromkeys(job_ids))
    outages = None if tell is None else Outages(clock, tell)
    delays = backoff(pace)
    while left:
        done: set[str] = set()
        for seen in poller.look(left):
            if isinstance(seen, Lost):
                if outages is not None:
                    outages.lost(seen.error)
            elif seen.status.is_terminal:
                done.add(seen.job_id)
                yield seen
        left = [job_id for job_id in left if job_id not in done]
        if done:
            delays = backoff(pace)
        if left:
            clock.sleep(next(delays))
