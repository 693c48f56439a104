"""Stores in folders and in S3, beyond the contract of all stores (test_store_contract.py)."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batchml.runtime.storage import s3
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.s3 import S3Client, S3Store, region_of
from batchml.runtime.storage.store import PATIENT, StoreError
from tests.support.s3 import BUCKET, KEYS, moto_s3


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


def test_of_many_at_once_one_creates(tmp_path: Path) -> None:
    """In a folder. S3 promises it; moto looks and then writes, with other requests between."""
    store = open_store(str(tmp_path / "store"), {})
    won: list[int] = []

    def attempt(number: int) -> None:
        if store.create("claim", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [store.get("claim")]


def test_a_large_file_goes_in_parts(
    moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MAX_WHOLE", 10 << 20)  # parts of 5 MiB: S3 takes none smaller
    content = os.urandom((11 << 20) + 7)
    (tmp_path / "file").write_bytes(content)
    store = open_store(f"s3://{BUCKET}/parts", {**KEYS, "AWS_ENDPOINT_URL": moto})
    store.put_file("model", str(tmp_path / "file"))
    assert store.get("model") == content


def test_many_keys_take_more_than_one_page(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PAGE", 3)
    store = open_store(f"s3://{BUCKET}/many", {**KEYS, "AWS_ENDPOINT_URL": moto})
    names = sorted(f"{number:x} &" for number in range(10))
    for name in names:
        store.put(name, b"")
    assert store.keys("") == names


def test_a_bucket_that_is_not_there_is_an_error_that_no_other_try_mends(moto: str) -> None:
    store = open_store("s3://nobodys-bucket/runs", {**KEYS, "AWS_ENDPOINT_URL": moto})
    with pytest.raises(StoreError, match="bucket") as caught:
        store.get("x")
    assert not caught.value.temporary


def test_an_address_that_is_none_is_refused() -> None:
    for url in ("", "http://x/y", "s3:///prefix"):
        with pytest.raises(StoreError):
            open_store(url, {})


def test_links_that_a_program_puts_into_a_folder_lead_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("of the host")
    store = open_store(str(root), {})
    store.put("inbox/in/a", b"message")
    (key,) = store.keys("inbox/")
    (root / "inbox" / "in").rename(root / "inbox" / "was")
    (root / "inbox" / "in").symlink_to(outside)
    (root / "inbox" / "file").symlink_to(outside / "a")
    os.mkfifo(root / "inbox" / "pipe")
    store.delete(key)
    assert [store.get(f"inbox/{name}") for name in ("in/a", "file", "pipe")] == [None] * 3
    assert store.read("inbox/file", 0, 3) is None
    assert not store.get_file("inbox/file", str(tmp_path / "copy"))
    for write in (store.put, store.create):
        with pytest.raises(StoreError):
            write("inbox/in/new", b"x")
    store.put("inbox/file", b"mine")
    assert store.get("inbox/file") == b"mine"
    assert os.listdir(outside) == ["a"] and (outside / "a").read_text() == "of the host"


def test_an_unwritable_folder_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = FolderStore(str(tmp_path / "file"))
    assert store.get("a") is None
    with pytest.raises(StoreError, match="cannot create 'a'"):
        store.create("a", b"")


# --- a wire that breaks -------------------------------------------------------------------------


Reply = tuple[int, dict[str, str], bytes]
Script = list[Reply | str]


class Scripted(ThreadingHTTPServer):
    """Answers by a script, once each; the requests it saw."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do(self) -> None:
        server = self.server
        assert isinstance(server, Scripted)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.seen.append((self.command, self.path, dict(self.headers)))
        step = server.script.pop(0)
        if isinstance(step, str):
            if step == "cut":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
            return  # without a word
        status, headers, body = step
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do

    def log_message(self, *_: object) -> None:
        pass


def fault(code: str, **more: str) -> bytes:
    fields = "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
    return f"<Error><Code>{code}</Code><Message>no.</Message>{fields}</Error>".encode()


OK: Reply = (200, {}, b"value")


@pytest.fixture
def scripted() -> Iterator[Callable[..., tuple[Scripted, S3Store]]]:
    servers: list[Scripted] = []

    def make(*script: Reply | str) -> tuple[Scripted, S3Store]:
        server = Scripted(list(script))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        environ = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}
        wire = S3Client("bucket", environ, clock=lambda: 1.8e9, sleep=lambda _: None)
        return server, S3Store(wire, "runs/")

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "bad",
    [
        (500, {}, b""), (503, {}, fault("SlowDown")), (429, {}, b""), "silence", "cut",
        (400, {}, fault("RequestTimeout")), (409, {}, fault("OperationAborted")),
    ],
    ids=str,
)  # fmt: skip
def test_what_may_pass_is_asked_again(
    scripted: Callable[..., tuple[Scripted, S3Store]], bad: object
) -> None:
    server, store = scripted(bad, bad, OK)
    assert store.get("key") == b"value"
    assert len(server.seen) == 3


def test_a_store_that_stays_away_is_a_temporary_error(
    scripted: Callable[..., tuple[Scripted, S3Store]],
) -> None:
    server, store = scripted(*["silence"] * 20)
    with pytest.raises(StoreError, match=r"GET s3://bucket/runs/key") as caught:
        store.get("key")
    assert caught.value.temporary
    assert len(server.seen) == PATIENT.tries


def test_a_refusal_is_final_and_says_why(
    scripted: Callable[..., tuple[Scripted, S3Store]],
) -> None:
    server, store = scripted((403, {}, fault("AccessDenied")))
    with pytest.raises(StoreError, match=r"PUT s3://bucket/runs/key: 403 AccessDenied: no\."):
        store.put("key", b"")
    assert len(server.seen) == 1


def listed(*keys: str) -> Reply:
    found = "".join(f"<Contents><Key>runs/{key}</Key></Contents>" for key in keys)
    return (200, {}, f"<ListBucketResult>{found}</ListBucketResult>".encode())


def test_what_is_not_there_is_told_from_what_may_not_be_read_by_listing(
    scripted: Callable[..., tuple[Scripted, S3Store]],
) -> None:
    denied: Reply = (403, {}, fault("AccessDenied"))
    server, store = scripted(denied, listed("key2"))
    assert store.get("key") is None
    assert "prefix=runs%2Fkey" in server.seen[1][1]
    _, store = scripted(denied, listed("key"))
    with pytest.raises(StoreError, match="403 AccessDenied"):
        store.get("key")
    _, store = scripted(denied, denied)
    with pytest.raises(StoreError, match="403 AccessDenied"):
        store.get("key")


@pytest.mark.parametrize(
    "answer",
    [
        (301, {"x-amz-bucket-region": "eu-north-1"}, fault("PermanentRedirect")),
        (400, {}, fault("AuthorizationHeaderMalformed", Region="eu-north-1")),
    ],
    ids=["redirect", "malformed"],
)
def test_a_bucket_of_another_region_is_found_by_what_s3_says(
    scripted: Callable[..., tuple[Scripted, S3Store]], answer: object
) -> None:
    server, store = scripted(answer, OK)
    assert store.get("key") == b"value"
    assert ["/eu-north-1/s3/" in seen[2]["Authorization"] for seen in server.seen] == [False, True]


def test_a_clock_that_is_wrong_is_set_by_s3s(
    scripted: Callable[..., tuple[Scripted, S3Store]],
) -> None:
    date = {"Date": "Fri, 15 Jan 2027 09:00:00 GMT"}
    server, store = scripted((403, date, fault("RequestTimeTooSkewed")), OK)
    assert store.get("key") == b"value"
    assert server.seen[1][2]["X-Amz-Date"] == "20270115T090000Z"


def test_a_create_whose_answer_was_lost_is_this_calls_when_the_value_is(
    scripted: Callable[..., tuple[Scripted, S3Store]],
) -> None:
    taken: Reply = (412, {}, fault("PreconditionFailed"))
    _, store = scripted("silence", taken, (200, {}, b"job-1"))
    assert store.create("claim", b"job-1")
    _, store = scripted("silence", taken, (200, {}, b"job-2"))
    assert not store.create("claim", b"job-1")


def test_s3_may_begin_a_success_and_then_fail(
    scripted: Callable[..., tuple[Scripted, S3Store]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "MAX_WHOLE", 8)
    (tmp_path / "file").write_bytes(b"0123456789")
    begun: Reply = (200, {}, b"<R><UploadId>u</UploadId></R>")
    part: Reply = (200, {"ETag": '"t"'}, b"")
    server, store = scripted(begun, part, part, part, (200, {}, fault("InternalError")), OK)
    with pytest.raises(StoreError, match="InternalError"):
        store.put_file("model", str(tmp_path / "file"))
    assert server.seen[-1][0] == "DELETE"


@pytest.mark.parametrize(
    ("bucket", "environ", "region"),
    [
        (BUCKET, {"AWS_REGION": "us-west-2"}, "eu-west-1"),
        ("batchml-a-123456789012-us-gov-east-1", {}, "us-gov-east-1"),
        ("mine", {"AWS_REGION": "us-west-2"}, "us-west-2"),
        ("mine", {"AWS_DEFAULT_REGION": "us-west-1"}, "us-west-1"),
        ("mine", {}, "us-east-1"),
    ],
)
def test_the_region_is_the_buckets(bucket: str, environ: dict[str, str], region: str) -> None:
    assert region_of(bucket, environ) == region
