"""A call that an SDK sends again is done once: docs/behaviours.md B60-B64."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from msgspec.structs import replace

from batchml.local.home import Home, ServerEndpoint
from batchml.local.server.auth import FRESH, ReplayGuard
from batchml.local.server.protocol import HttpRequest, HttpResponse
from tests.support.local_server import define
from tests.support.server_rig import Rig, error_of, furnish, sign

SUBMIT = b'{"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}'
OTHER = b'{"jobName": "m", "jobQueue": "q", "jobDefinition": "d"}'
REGISTER = json.dumps(
    {
        "jobDefinitionName": "d",
        "type": "container",
        "containerProperties": {"image": "i", "vcpus": 1, "memory": 64},
    }
).encode()


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[[], Rig]]:
    """A server on one state folder; asked again, a restarted one."""
    open_: list[Rig] = []

    def start() -> Rig:
        if open_:
            open_[-1].close()
        open_.append(Rig(tmp_path))
        if len(open_) == 1:
            furnish(open_[0].client("batch"))
        return open_[-1]

    yield start
    open_[-1].close()


def call(body: bytes = SUBMIT, invocation: str = "one", path: str = "/v1/submitjob") -> HttpRequest:
    return sign(path, body, headers={"amz-sdk-invocation-id": invocation} if invocation else {})


def job_id(answer: HttpResponse) -> str:
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["jobId"])


def test_the_same_call_sent_again_gets_the_same_answer(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    answers = [rig.handle(call())[0] for _ in range(3)]
    assert len({job_id(answer) for answer in answers}) == 1
    assert len(rig.core.state.jobs) == 1


def test_the_same_call_sent_many_times_at_once_is_done_once(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    answers = rig.handle(*(call() for _ in range(20)))
    assert len({job_id(answer) for answer in answers}) == 1
    assert len(rig.core.state.jobs) == 1


def test_a_restarted_server_knows_the_call(rigs: Callable[[], Rig]) -> None:
    first = job_id(rigs().handle(call())[0])
    rig = rigs()
    assert job_id(rig.handle(call())[0]) == first
    assert list(rig.core.state.jobs) == [first]


def test_a_call_whose_job_has_ended_is_not_done_again(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    first = job_id(rig.handle(call())[0])
    rig.end(first)
    assert job_id(rig.handle(call())[0]) == first
    assert not rig.core.state.jobs


def test_an_id_used_for_another_request_is_refused(rigs: Callable[[], Rig]) -> None:
    """B62."""
    rig = rigs()
    rig.handle(call())
    (answer,) = rig.handle(call(OTHER))
    assert (answer.status, error_of(answer)[0]) == (400, "ClientException")
    together = rig.handle(call(SUBMIT, "two"), call(OTHER, "two"))
    assert sorted(answer.status for answer in together) == [200, 400]
    (answer,) = rigs().handle(call(OTHER))
    assert answer.status == 400


def test_other_calls_make_other_jobs(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    answers = rig.handle(call(), call(invocation="two"), call(invocation=""))
    assert len({job_id(answer) for answer in answers}) == 3


def test_without_an_id_the_signature_tells_calls_apart(rigs: Callable[[], Rig]) -> None:
    """B114: whoever has seen a request and sends it again gets its answer, and nothing more."""
    rig = rigs()
    seen = call(invocation="")
    first = job_id(rig.handle(seen)[0])
    assert [job_id(answer) for answer in rig.handle(seen, seen)] == [first, first]
    rig.end(first)
    rig = rigs()
    assert job_id(rig.handle(seen)[0]) == first
    assert not rig.core.state.jobs
    assert job_id(rig.handle(call(OTHER, ""))[0]) != first


def with_id(request: HttpRequest, invocation: str) -> HttpRequest:
    """With an id that is not signed, as SDKs send it."""
    return replace(request, headers=(*request.headers, ("amz-sdk-invocation-id", invocation)))


def test_the_same_call_made_twice_within_a_second_is_two(rigs: Callable[[], Rig]) -> None:
    """B115: signed alike, told apart by the ids."""
    rig = rigs()
    signed = call(invocation="")
    answers = rig.handle(*(with_id(signed, name) for name in ("a", "b", "a")))
    assert len({job_id(answer) for answer in answers}) == 2


def test_a_recorded_request_with_another_id_is_refused(rigs: Callable[[], Rig]) -> None:
    """B115."""
    rig = rigs()
    signed = call(invocation="")
    first = job_id(rig.handle(with_id(signed, "a"))[0])
    rig.clock.ahead = FRESH + 1
    (answer,) = rig.handle(with_id(signed, "b"))
    assert (answer.status, error_of(answer)[0]) == (429, "TooManyRequestsException")
    assert job_id(rig.handle(with_id(signed, "a"))[0]) == first
    assert list(rig.core.state.jobs) == [first]


def test_what_was_signed_before_the_server_started_is_signed_again(
    rigs: Callable[[], Rig],
) -> None:
    """B115: it cannot know whether the server before it has done it."""
    rigs()
    signed = with_id(call(invocation=""), "a")
    rig = rigs()
    rig.server._replays = ReplayGuard(rig.clock.now() + FRESH + 1)
    rig.clock.ahead = FRESH + 2
    assert rig.handle(signed)[0].status == 429
    assert not rig.core.state.jobs


def test_a_request_that_was_long_on_its_way_is_taken(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    rig.server._replays = ReplayGuard(rig.clock.now() - 3600)
    late = with_id(call(invocation=""), "a")
    rig.clock.ahead = FRESH + 60
    assert job_id(rig.handle(late)[0])


def test_signatures_are_forgotten_once_they_are_of_no_use() -> None:
    """B115."""
    replays = ReplayGuard(0.0)
    for second in range(5000):
        replays.check(f"{second:064x}"[::-1], float(second), float(second))
    assert len(replays._seen) + len(replays._seen_before) <= 1202


def test_a_refused_call_may_be_sent_again_once_its_cause_is_gone(rigs: Callable[[], Rig]) -> None:
    """B63."""
    rig = rigs()
    batch = rig.client("batch")
    batch.update_job_queue(jobQueue="q", state="DISABLED")
    assert rig.handle(call())[0].status == 400
    batch.update_job_queue(jobQueue="q", state="ENABLED")
    assert job_id(rig.handle(call())[0])


def test_a_definition_is_registered_once(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    again = [call(REGISTER, "r", "/v1/registerjobdefinition") for _ in range(2)]
    answers = [json.loads(answer.body)["revision"] for answer in rig.handle(*again)]
    answers.append(json.loads(rig.handle(again[0])[0].body)["revision"])
    assert answers == [2, 2, 2]


def test_an_answer_is_forgotten_only_after_a_day(rigs: Callable[[], Rig]) -> None:
    rig = rigs()
    first = job_id(rig.handle(call())[0])
    rig.store.forget_calls(int(rig.clock.now() * 1000) - 24 * 3600 * 1000)
    assert job_id(rig.handle(call())[0]) == first


# --- stock clients and an answer that never arrives -------------------------------------------


@contextmanager
def dropping(drops: int) -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that loses the first answers; its address, and the invocation ids it saw."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            parts = urlsplit(self.path)
            upstream = http.client.HTTPConnection(parts.netloc, timeout=20)
            upstream.putrequest("POST", parts.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
            upstream.close()
            seen.append(self.headers["amz-sdk-invocation-id"])
            if len(seen) > drops:
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("date", "server", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            self.close_connection = True

        def log_message(self, *_: Any) -> None: ...

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", seen
    finally:
        proxy.shutdown()
        proxy.server_close()


@pytest.mark.parametrize("mode", ["legacy", "standard"])
def test_a_stock_client_whose_answer_is_lost_submits_one_job(
    home: Home, server: ServerEndpoint, batch: Any, mode: Any
) -> None:
    """B60."""
    definition = define(batch, ["true"])
    keys = home.keys()
    with dropping(1) as (proxy, seen):
        client = boto3.client(
            "batch", region_name="us-east-1", endpoint_url=server.url,
            aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
            config=Config(proxies={"http": proxy}, retries={"mode": mode}),
        )  # fmt: skip
        made = client.submit_job(jobName="once", jobQueue="default", jobDefinition=definition)
        assert len(seen) == 2
        assert len(set(seen)) == 1
    named = [{"name": "JOB_NAME", "values": ["once"]}]
    listed = batch.list_jobs(jobQueue="default", filters=named)["jobSummaryList"]
    assert [job["jobId"] for job in listed] == [made["jobId"]]
