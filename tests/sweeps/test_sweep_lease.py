"""The lease: one controller at a time, and the next one soon after the last has gone."""

import os
import subprocess
import sys

import pytest

from batchml.errors import ControllerReplaced
from batchml.runtime.storage.store import StoreError
from batchml.sweeps.control.lease import (
    Lease,
    LeaseHeld,
    LeaseOwner,
    LeaseTaken,
    has_ended,
    this_process,
)
from tests.support.fakes import FakeClock
from tests.support.sweep_stores import MemoryStore

ONE = LeaseOwner("ann", "laptop", 11, "100")
TWO = LeaseOwner("ben", "desk", 22, "200")


def lease(store: MemoryStore, clock: FakeClock, owner: LeaseOwner, **more: float) -> Lease:
    return Lease(store, clock, owner, is_gone=lambda other, ours: False, **more)


def test_the_second_is_refused_and_told_who_has_it() -> None:
    store, clock = MemoryStore(), FakeClock()
    first, second = lease(store, clock, ONE), lease(store, clock, TWO)
    assert first.take() == LeaseTaken(1)
    found = second.take()
    assert found == LeaseHeld(ONE, clock.now() + 90.0)
    assert found.holder.description == "process 11 on laptop, of ann"
    assert second.holder() == found


def test_one_that_is_renewed_lasts_and_one_that_is_not_ends() -> None:
    store, clock = MemoryStore(), FakeClock()
    first, second = lease(store, clock, ONE), lease(store, clock, TWO)
    first.take()
    for _ in range(20):
        clock.sleep(20.0)
        first.renew()
        assert isinstance(second.take(), LeaseHeld)
    clock.sleep(89.0)
    assert isinstance(second.take(), LeaseHeld)
    clock.sleep(21.0)
    assert second.take() == LeaseTaken(2)
    with pytest.raises(ControllerReplaced, match="process 22 on desk, of ben"):
        first.renew()
    assert isinstance(first.take(), LeaseHeld)


def test_renewing_costs_a_write_each_third_of_its_life() -> None:
    store, clock = MemoryStore(), FakeClock()
    first = lease(store, clock, ONE, life=15.0)
    first.take()
    before = store.writes
    for _ in range(1000):
        clock.sleep(0.3)
        first.renew()
    assert store.writes - before == 1000 * 0.3 // 5.1


def test_one_that_is_given_back_is_free_at_once() -> None:
    store, clock = MemoryStore(), FakeClock()
    first, second = lease(store, clock, ONE), lease(store, clock, TWO)
    first.take()
    first.release()
    assert second.holder() is None
    assert second.take() == LeaseTaken(2)
    first.release()  # it has none: the second's stays
    assert isinstance(first.take(), LeaseHeld)
    assert store.keys("lease/") == ["lease/000002.json"]


def test_giving_back_one_that_was_lost_leaves_the_new_owner_alone() -> None:
    store, clock = MemoryStore(), FakeClock()
    first, second = lease(store, clock, ONE), lease(store, clock, TWO)
    first.take()
    clock.sleep(91.0)
    second.take()
    first.release()
    assert second.holder() == LeaseHeld(TWO, clock.now() + 90.0)


def test_of_two_who_take_it_at_once_one_has_it() -> None:
    clock = FakeClock()

    class Racing(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            if not self.raced:
                self.raced = True
                assert other.take() == LeaseTaken(1)
            return super().create(key, data)

        raced = False

    store = Racing()
    other = lease(store, clock, TWO)
    assert lease(store, clock, ONE).take() == LeaseHeld(TWO, clock.now() + 90.0)


def test_a_lost_answer_does_not_keep_one_from_its_own_lease() -> None:
    class Lossy(MemoryStore):
        lost = False

        def create(self, key: str, data: bytes) -> bool:
            done = super().create(key, data)
            if not self.lost:
                self.lost = True
                raise StoreError("the answer was lost", temporary=True)
            return done

    store, clock = Lossy(), FakeClock()
    first = Lease(store, clock, ONE, is_gone=lambda other, ours: False)
    with pytest.raises(StoreError):
        first.take()
    clock.sleep(1.0)
    assert isinstance(first.take(), LeaseTaken)


@pytest.mark.parametrize("content", [b"", b"{", b'{"owner": 3}'])
def test_one_that_nobody_can_read_holds_nothing_up(content: bytes) -> None:
    store = MemoryStore()
    store.values["lease/000004.json"] = content
    assert lease(store, FakeClock(), ONE).take() == LeaseTaken(5)


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for() -> None:
    store, clock = MemoryStore(), FakeClock()
    code = (
        "import msgspec; from batchml.sweeps.control.lease import this_process;"
        "print(msgspec.json.encode(this_process('ann')).decode())"
    )
    import msgspec

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    dead = msgspec.json.decode(said.stdout, type=LeaseOwner)
    ours = this_process("ann")
    assert dead.pid != ours.pid == os.getpid()
    assert Lease(store, clock, dead).take() == LeaseTaken(1)
    assert Lease(store, clock, ours).take() == LeaseTaken(2)
    assert isinstance(Lease(store, clock, ours).take(), LeaseHeld)  # this one lives


def test_who_is_sure_to_have_ended() -> None:
    ours = this_process()
    assert not has_ended(ours, ours)
    assert not has_ended(LeaseOwner("", "elsewhere", 1, "1"), ours)
    reused = LeaseOwner("", ours.host, ours.pid, "1")
    assert has_ended(reused, ours) == bool(ours.began)
    # A run's attempts come one after the other; of another run nobody here knows.
    assert has_ended(LeaseOwner(host="a", job="id-1"), LeaseOwner(host="b", job="id-1"))
    assert not has_ended(LeaseOwner(host=ours.host, pid=99999999, began="1", job="id-2"), ours)
    assert LeaseOwner(job="id-1").description == "the run id-1"
