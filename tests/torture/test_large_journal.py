"""A journal of a long life: reads stay quick, a start stays short. Fault B23.

BATCHML_TORTURE=20 makes it a million jobs. Times are printed; the limits are loose.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchml.local.batch.events import SaveJob, SaveSpec
from batchml.local.store.journal import JobFilter, Journal
from batchml.model.run import JobStatus
from tests.local.test_journal import MACHINE, RECORDS, job
from tests.support.generate import TORTURE

JOBS = 50_000 * TORTURE
_AT_ONCE = 10_000


@contextmanager
def taking(what: str, most: float) -> Iterator[None]:
    before = time.process_time()
    yield
    took = time.process_time() - before
    print(f"{JOBS} jobs, {what}: {took:.3f} s")
    assert took < most, what


def test_a_long_history_costs_little(tmp_path: Path) -> None:
    store = Journal(tmp_path / "journal.db")
    store.commit(RECORDS)
    for first in range(1, JOBS + 1, _AT_ONCE):
        jobs = [job(n, JobStatus.SUCCEEDED) for n in range(first, first + _AT_ONCE)]
        store.commit(
            [effect for one in jobs for effect in (SaveSpec(one.spec), SaveJob(one, False))]
        )
    store.close()

    with taking("start", 2 + JOBS / 100_000):
        store = Journal(tmp_path / "journal.db")
        assert not store.load(MACHINE).jobs
    chance = random.Random(1)
    with taking("describe a hundred, ten times", 2):
        for _ in range(10):
            ids = [f"job-{number}" for number in chance.sample(range(1, JOBS), 100)]
            assert store.jobs(ids).keys() == set(ids)
    with taking("list the first page and one in the middle", 1):
        for below in (None, JOBS // 2):
            found = store.list_jobs("q", JobFilter("SUCCEEDED"), below, 100)
            assert found[0].sequence == (below - 1 if below else JOBS)
    store.close()
