"""Any faults between two servers, crossed: what was acknowledged exists once, no program starts
more often than its attempts say, ends agree with exits, and nobody else's process is touched.

The full run crosses all values of all axes. In the suite any two values of two axes meet at least
once, in combinations that a seed chooses.
"""

import asyncio
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.errors import LocalServerError
from batchml.local.batch.state import Job
from batchml.local.home import Home
from batchml.local.logs.check import check_small
from batchml.local.logs.files import StreamIndex
from batchml.local.store import adopt
from batchml.model.logcheck import LogState
from batchml.model.run import CANNOT_START, JobStatus
from batchml.runtime.processes import start_time
from tests.support.fault_world import (
    AXES,
    CODES,
    DONE,
    ENDED,
    PREPARED,
    RUNNING,
    STAGES,
    UNSENT,
    WAITING,
    Faults,
    Server,
    World,
    installed,
)

PARTS = 4
_HOST = "Host EC2 "


def chosen() -> list[Faults]:
    every = [Faults(*values) for values in itertools.product(*AXES)]
    if os.environ.get("BATCHML_TORTURE"):
        return every
    seed = int(os.environ.get("BATCHML_FAULT_SEED", "20261123"))
    random.Random(seed).shuffle(every)
    return cover_pairs(every)


def cover_pairs(every: list[Faults]) -> list[Faults]:
    """Combinations of which each two values of two axes are in one at least, chosen greedily."""
    left = {pair for faults in every for pair in pairs(faults)}
    chosen = []
    while left:
        best = max(every, key=lambda faults: len(left & pairs(faults)))
        left -= pairs(best)
        chosen.append(best)
    return chosen


def pairs(faults: Faults) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(faults), 2))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.run_until_complete(asyncio.sleep(0))
    made.close()


def test_there_are_at_least_two_thousand_combinations() -> None:
    assert len(list(itertools.product(*AXES))) >= 2000


def test_any_two_faults_meet() -> None:
    met = {pair for faults in chosen() for pair in pairs(faults)}
    for (one, these), (other, those) in itertools.combinations(enumerate(AXES), 2):
        for this, that in itertools.product(these, those):
            assert ((one, this), (other, that)) in met


@pytest.mark.parametrize("part", range(PARTS))
def test_no_combination_of_faults_breaks_an_invariant(
    part: int, tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    for number, faults in enumerate(chosen()):
        if number % PARTS == part:
            world = World(tmp_path / str(number), loop)
            try:
                _try(world, faults)
            except BaseException as error:
                raise AssertionError(f"{faults}: {error}") from error
            finally:
                world.close()


def _try(world: World, faults: Faults) -> None:
    home = world.suffer(faults)
    server: Server | None
    with installed(world.folder, faults.installation) as (installation, mend):
        try:
            server = Server(home, loop=world.loop, installation=installation)
        except (LocalServerError, OSError) as error:
            assert str(error)
            _check_untouched(world, faults)
            return
        try:
            if server.read_only:
                _check_untouched(world, faults)
                assert _may_only_be_read(faults), f"{server.read_only}"
            else:
                assert not _must_not_be_served(faults), "it is served as if nothing had been"
                for name in STAGES:
                    world.go(name)
                if faults.installation != "same":
                    _check_held(server, world, faults)
                if faults.installation == "moved":
                    mend()
                if faults.installation in ("same", "moved"):
                    _check_ends(server, world, faults)
        finally:
            server.die()
    if faults.folder == "copied" and server.read_only:
        _check_adopted(world, home, faults)
    _check_bystanders(world)


def _may_only_be_read(faults: Faults) -> bool:
    return faults.folder in ("copied", "another machine") or faults.journal.startswith("earlier")


def _must_not_be_served(faults: Faults) -> bool:
    """An older journal alone cannot be told where no trace is left of what came after it."""
    leaves_traces = faults.processes == "ours" or faults.files in ("now", "no records", "no logs")
    is_older = faults.journal == "earlier" or (faults.journal != "now" and leaves_traces)
    return is_older or faults.folder in ("copied", "another machine", "read-only")


def _check_bystanders(world: World) -> None:
    assert all(process.poll() is None for process in world.bystanders), "a stranger was killed"


def _check_untouched(world: World, faults: Faults) -> None:
    """A folder that is not served: nothing of it was started, ended or killed."""
    _check_bystanders(world)
    assert [len(world.starts(name)) for name in STAGES] == [1, 1, 1, 0, 0, 0]
    if faults.processes == "ours":
        (pid,) = world.starts(RUNNING)
        assert start_time(pid) is not None, "a program was killed"


def _check_held(server: Server, world: World, faults: Faults) -> None:
    """A machine that cannot start programs fails nothing, and says why."""
    for name in (PREPARED, WAITING):
        job = server.job(world.ids[name])
        assert job is None or not job.status.is_terminal, f"{name} has ended: {job.status_reason}"
    if _is_known(server, world, PREPARED):
        if faults.installation == "upgraded":
            server.until(lambda: server.has_upgraded, "the server hears of the upgrade")
        else:
            server.until(lambda: server.executor.held_back, "it says why")
            assert server.executor.held_back.startswith(CANNOT_START)
    assert not world.starts(PREPARED)
    assert not world.starts(WAITING)


def _is_known(server: Server, world: World, name: str) -> bool:
    return server.job(world.ids[name]) is not None


def _check_ends(server: Server, world: World, faults: Faults) -> None:
    known = [name for name in STAGES if _is_known(server, world, name)]
    if faults.journal == "now":
        assert known == list(STAGES), "what was acknowledged is gone"
    server.until(lambda: not server.core.state.jobs, "all jobs end")
    for name in known:
        job = server.job(world.ids[name])
        assert job is not None
        starts, codes = world.starts(name), world.codes(name)
        assert len(starts) <= 1, f"{name} was started {len(starts)} times without a retry rule"
        assert len(job.attempts) == 1, f"{name} has {len(job.attempts)} attempts"
        if job.exit_code is not None:
            assert codes == [job.exit_code], f"{name} ended with {codes}, not {job.exit_code}"
            assert (job.status is JobStatus.SUCCEEDED) == (job.exit_code == 0)
        else:
            assert job.status_reason.startswith(_HOST), f"{name}: {job.status_reason}"
        _check_log(server, world, name, job)
    if faults.journal == "now":
        _check_what_need_not_be_lost(server, world, faults)


def _check_log(server: Server, world: World, name: str, job: Job) -> None:
    """What is called complete holds every line that the program printed; a deleted log is known."""
    task_id = job.attempts[-1]["container"]["taskArn"].rpartition("/")[2]
    path = server.home.attempt(task_id) / "log"
    streams = StreamIndex(server.home.journal)
    end = streams.log_end(task_id)
    streams.close()
    assert end is not None, "each attempt that has ended has a proof, or the reason why it has none"
    check = check_small(str(path), end)
    assert check is not None
    printed = ["one", "two", "three"] if world.codes(name) else []
    if check.state is LogState.COMPLETE:
        held = path.read_text().splitlines() if path.exists() else []
        assert [line.partition(" ")[2] for line in held] == printed
    elif end.proof is not None and end.proof.lines and not path.exists():
        assert check.state is LogState.GONE
    if name in (PREPARED, WAITING):
        assert check.state is LogState.COMPLETE, "its log was written after the faults"


def _check_what_need_not_be_lost(server: Server, world: World, faults: Faults) -> None:
    has_records = faults.files in ("now", "no ends", "no logs")
    whole = [DONE, PREPARED, WAITING]
    whole += [ENDED] if faults.files in ("now", "no records", "no logs") else []
    whole += [UNSENT] if has_records else []
    whole += [RUNNING] if has_records and faults.processes == "ours" else []
    for name in whole:
        job = server.job(world.ids[name])
        assert job is not None
        assert job.exit_code == CODES[name], f"{name} is lost: {job.status_reason}"


def _check_adopted(world: World, home: Home, faults: Faults) -> None:
    """The copy becomes a folder of its own, and touches nothing of the one that it is of."""
    before = {name: len(world.starts(name)) for name in STAGES}
    adopt.adopt(home)
    server = Server(home, world.loop)
    try:
        assert not server.read_only
        for name in STAGES:
            if name != RUNNING:
                world.go(name)
        server.until(lambda: not server.core.state.jobs, "all jobs of the copy end")
        lost = server.job(world.ids[RUNNING])
        if lost is not None:
            assert lost.status_reason.startswith(_HOST)
        assert len(world.starts(RUNNING)) == before[RUNNING]
        if faults.processes == "ours":
            assert start_time(world.starts(RUNNING)[0]) is not None, "the other folder's program"
    finally:
        server.die()
