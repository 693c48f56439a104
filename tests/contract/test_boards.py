"""A board is the same to work on wherever it is: in a folder, and in S3 by either way there."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.aws.s3 import BucketStore
from batchml.aws.session import Access, Session
from batchml.client.sweeping.boards import Board, BoardError
from batchml.model.sweep import TrialState
from batchml.runtime.protocol import messages
from batchml.runtime.protocol.messages import Sender, message_key
from batchml.runtime.storage.store import FolderStore, Store, StoreError, open_store
from batchml.sweep import inbox
from batchml.sweep.events import Noticed, Planned, Told, Wave
from batchml.sweep.lease import Held, Lease, Owner, Refused
from batchml.sweep.ledger import PACK_AFTER, Fenced, Ledger
from batchml.sweep.many import first_keys, get_many
from tests.fakes import FakeClock
from tests.s3 import BUCKET, KEYS, moto_s3


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            patch.setenv(name, value)
        yield address


def made(kind: str, address: str, tmp_path: Path) -> Store:
    if kind == "folder":
        return FolderStore(str(tmp_path / "board"))
    prefix = f"runs/{tmp_path.name}"
    if kind == "runtime":
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": address}
        return open_store(f"s3://{BUCKET}/{prefix}", environ)
    return Board("k", "", BucketStore(Session(Access("eu-west-1")), BUCKET, prefix))


@pytest.mark.parametrize("kind", ["folder", "runtime", "client"])
class TestBoard:
    @pytest.fixture
    def board(self, kind: str, moto: str, tmp_path: Path) -> Store:
        return made(kind, moto, tmp_path)

    def test_values_come_and_go(self, board: Store) -> None:
        assert board.get("a/b c") is None
        board.put("a/b c", b"first")
        board.put("a/b c", b"second\x00")
        board.put("a/ü+%", b"")
        assert board.get("a/b c") == b"second\x00"
        assert board.get("a/ü+%") == b""
        assert board.keys("") == ["a/b c", "a/ü+%"]
        assert board.keys("a/b") == ["a/b c"]
        assert board.keys("none/") == []
        board.delete("a/b c", "a/none", "none/x")
        board.delete()
        assert board.keys("a/") == ["a/ü+%"]

    def test_only_the_first_creates(self, board: Store) -> None:
        assert board.create("log/1", b"one")
        assert not board.create("log/1", b"two")
        assert not board.create("log/1", b"one")
        assert board.get("log/1") == b"one"
        board.delete("log/1")
        assert board.create("log/1", b"again")

    def test_a_part_is_read(self, board: Store) -> None:
        board.put("waves/1", b"0123456789")
        assert board.read("waves/1", 3, 4) == b"3456"
        assert board.read("waves/1", 8, 9) == b"89"
        assert board.read("waves/1", 10, 1) == b""
        assert board.read("waves/1", 0, 0) == b""
        assert board.read("waves/2", 0, 1) is None
        assert board.read("waves/2", 0, 0) is None

    def test_many_are_read_in_the_order_that_was_asked_for(self, board: Store) -> None:
        for number in range(25):
            board.put(f"inbox/{number:02d}", str(number).encode())
        keys = [f"inbox/{number:02d}" for number in (7, 30, *range(24, -1, -1))]
        expected = [b"7", None, *(str(number).encode() for number in range(24, -1, -1))]
        assert get_many(board, keys) == expected
        assert get_many(board, []) == []
        assert first_keys(board, "inbox/", 3) == ["inbox/00", "inbox/01", "inbox/02"]
        assert len(first_keys(board, "inbox/", 99)) == 25

    def test_files_go_and_come(self, board: Store, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(os.urandom(100_000))
        board.put_file("checkpoints/0/model", str(tmp_path / "file"))
        assert board.get_file("checkpoints/0/model", str(tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
        assert not board.get_file("checkpoints/0/none", str(tmp_path / "none"))
        assert not (tmp_path / "none").exists()

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "a\0"])
    def test_what_is_no_key_is_refused(self, board: Store, key: str) -> None:
        for act in (board.get, board.delete, lambda key: board.create(key, b"")):
            with pytest.raises(StoreError):
                act(key)

    def test_a_sweep_keeps_its_books_there(self, board: Store) -> None:
        planned = tuple(Planned(number, {"lr": 0.1}, number) for number in range(2))
        first, second = Ledger(board, "first"), Ledger(board, "second")
        first.take_over()
        first.append([Wave(1, 1.0, "key", planned)])
        for number in range(2):
            said = messages.make(Sender(1, number, 1, number, f"j:{number}", 1.0), 0, "start", 1.0)
            board.put(message_key(1, number, 1, 0), messages.write(said))
        taken = inbox.take(board)
        first.append(Told(each) for each in taken.messages)
        inbox.discard(board, taken.keys)
        assert inbox.take(board) == ([], [])
        state = second.load()
        for number in range(PACK_AFTER):
            first.append([Noticed(str(number), "words", 1.0)])
        assert second.follow(state)
        assert state == Ledger(board).load()
        assert (len(state.notices), state.counts[TrialState.RUNNING]) == (PACK_AFTER, 2)
        second.take_over()
        with pytest.raises(Fenced, match="second"):
            first.append([])

    def test_a_sweep_has_one_controller_there(self, board: Store) -> None:
        clock = FakeClock()
        one, two = Owner("ann", "a", 1), Owner("ben", "b", 2)
        first, second = Lease(board, clock, one), Lease(board, clock, two)
        assert first.take() == Held(1)
        assert second.take() == Refused(one, clock.now() + 90.0)
        clock.sleep(91.0)
        assert second.take() == Held(2)
        with pytest.raises(Fenced, match="of ben"):
            first.renew()
        second.release()
        assert first.take() == Held(3)


def test_a_bucket_that_is_not_there_is_ours_and_the_stores_error_alike(moto: str) -> None:
    store = BucketStore(Session(Access("eu-west-1")), "nobodys-bucket", "runs/k")
    with pytest.raises(BoardError, match="NoSuchBucket") as caught:
        Board("k", "", store).put("a", b"")
    assert (caught.value.exit_code, caught.value.temporary) == (1, False)


def test_a_bucket_that_does_not_answer_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    session = Session(Access("eu-west-1"))
    session._clients[("s3", 5, "")] = session.client("s3", attempts=1)  # no waits between tries
    with pytest.raises(BoardError, match="no answer") as caught:
        Board("k", "", BucketStore(session, BUCKET, "runs/k")).get("a")
    assert (caught.value.exit_code, caught.value.temporary) == (74, True)
