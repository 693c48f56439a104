"""A sweep works on every store: in a folder, and in S3 by the standard library and by boto3."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.aws.s3 import BucketStore
from batchml.aws.session import Access, Session
from batchml.errors import ControllerReplaced, SweepStoreError
from batchml.model.sweep import TrialState
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import MessageSender, message_key
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store
from batchml.sweeps.control import inbox
from batchml.sweeps.control.events import MessageReceived, NoticeGiven, PlannedTrial, TrialBatch
from batchml.sweeps.control.lease import Lease, LeaseHeld, LeaseOwner, LeaseTaken
from batchml.sweeps.control.ledger import PACK_AFTER, SweepLedger
from batchml.sweeps.stores import SweepStore
from tests.support.fakes import FakeClock
from tests.support.s3 import BUCKET, KEYS, moto_s3


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            patch.setenv(name, value)
        yield address


def made(kind: str, address: str, tmp_path: Path) -> Store:
    if kind == "folder":
        return FolderStore(str(tmp_path / "store"))
    prefix = f"runs/{tmp_path.name}"
    if kind == "runtime":
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": address}
        return open_store(f"s3://{BUCKET}/{prefix}", environ)
    return SweepStore("k", "", BucketStore(Session(Access("eu-west-1")), BUCKET, prefix))


@pytest.mark.parametrize("kind", ["folder", "runtime", "client"])
class TestSweepOnStore:
    @pytest.fixture
    def store(self, kind: str, moto: str, tmp_path: Path) -> Store:
        return made(kind, moto, tmp_path)

    def test_a_sweep_keeps_its_ledger_there(self, store: Store) -> None:
        planned = tuple(PlannedTrial(number, {"lr": 0.1}, number) for number in range(2))
        first, second = SweepLedger(store, "first"), SweepLedger(store, "second")
        first.take_over()
        first.append([TrialBatch(1, 1.0, "key", planned)])
        for number in range(2):
            said = messages.make_message(
                MessageSender(1, number, 1, number, f"j:{number}", 1.0), 0, "start", 1.0
            )
            store.put(message_key(1, number, 1, 0), messages.encode_message(said))
        taken = inbox.read_inbox(store)
        first.append(MessageReceived(each) for each in taken.messages)
        store.delete(*taken.keys)
        assert inbox.read_inbox(store) == ([], [])
        state = second.load()
        for number in range(PACK_AFTER):
            first.append([NoticeGiven(str(number), "words", 1.0)])
        assert second.follow(state)
        assert state == SweepLedger(store).load()
        assert (len(state.notices), state.counts[TrialState.RUNNING]) == (PACK_AFTER, 2)
        second.take_over()
        with pytest.raises(ControllerReplaced, match="second"):
            first.append([])

    def test_a_sweep_has_one_controller_there(self, store: Store) -> None:
        clock = FakeClock()
        one, two = LeaseOwner("ann", "a", 1), LeaseOwner("ben", "b", 2)
        first, second = Lease(store, clock, one), Lease(store, clock, two)
        assert first.take() == LeaseTaken(1)
        assert second.take() == LeaseHeld(one, clock.now() + 90.0)
        clock.sleep(91.0)
        assert second.take() == LeaseTaken(2)
        with pytest.raises(ControllerReplaced, match="of ben"):
            first.renew()
        second.release()
        assert first.take() == LeaseTaken(3)


def test_a_bucket_that_is_not_there_is_ours_and_the_stores_error_alike(moto: str) -> None:
    store = BucketStore(Session(Access("eu-west-1")), "nobodys-bucket", "runs/k")
    with pytest.raises(SweepStoreError, match="NoSuchBucket") as caught:
        SweepStore("k", "", store).put("a", b"")
    assert (caught.value.exit_code, caught.value.temporary) == (1, False)


def test_a_bucket_that_does_not_answer_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    session = Session(Access("eu-west-1"))
    session._clients[("s3", 5, "")] = session.client("s3", attempts=1)  # no waits between tries
    with pytest.raises(SweepStoreError, match="no answer") as caught:
        SweepStore("k", "", BucketStore(session, BUCKET, "runs/k")).get("a")
    assert (caught.value.exit_code, caught.value.temporary) == (74, True)
