"""A server that does not answer is named, with the state of its process and the way on."""

import os
import signal
from collections.abc import Iterator

import pytest

from batchml.aws.batch.jobs import JobApi
from batchml.aws.errors import ErrorClass, classify_error
from batchml.aws.session import Access, Session
from batchml.clock import SystemClock
from batchml.errors import ServiceUnreachable
from batchml.local import control
from batchml.local.control import describe_process, describe_silence, is_answering
from batchml.local.home import Home, ServerEndpoint
from tests.support.cli import Cli
from tests.support.local_server import wait_for


@pytest.fixture
def stopped(home: Home, server: ServerEndpoint) -> Iterator[ServerEndpoint]:
    """A server whose process is stopped: the kernel still accepts connections for it."""
    os.kill(server.pid, signal.SIGSTOP)
    wait_for(lambda: "(state T)" in describe_silence(home), "it is stopped")
    yield server
    if control.find_server(home) == server:
        os.kill(server.pid, signal.SIGCONT)


def test_a_call_to_a_stopped_server_is_reported_and_then_fails_with_the_facts(
    home: Home, stopped: ServerEndpoint
) -> None:
    told: list[str] = []
    keys = home.keys()
    access = Access(
        "us-east-1", "", stopped.url, keys.access_key_id, keys.secret_access_key,
        restart=lambda: stopped.url, describe_silence=lambda: describe_silence(home),
        tell=told.append, notice=0.05, limit=1.0,
    )  # fmt: skip
    api = JobApi(Session(access))
    facts = (
        f"The embedded AWS Batch (process {stopped.pid}) does not answer; it is stopped "
        f"(state T). To let it go on: kill -CONT {stopped.pid}"
    )
    with pytest.raises(ServiceUnreachable) as caught:
        api.queues()
    assert str(caught.value) == f"DescribeJobQueues: no answer within 1 s. {facts}"
    assert caught.value.exit_code == 74
    assert (
        classify_error(caught.value) is ErrorClass.UNKNOWN
    )  # a submission is then looked up, not sent again
    assert told == [facts]
    os.kill(stopped.pid, signal.SIGCONT)
    assert api.queues() == ["default"]
    assert told == [facts, "The embedded AWS Batch answers again."]


def test_status_says_that_a_stopped_server_does_not_answer(
    cli: Cli, stopped: ServerEndpoint
) -> None:
    assert not is_answering(stopped)
    done = cli("local", "status")
    assert done.code == 1
    assert done.out.startswith(f"Does not answer (stopped) on {stopped.url}")
    assert f"kill -CONT {stopped.pid}" in done.out
    shown = cli("local", "status", "--json").json
    assert (shown["state"], shown["processState"]) == ("not answering", "T")
    os.kill(stopped.pid, signal.SIGCONT)
    assert is_answering(stopped, 30)


def test_a_stopped_server_can_be_told_to_stop(home: Home, stopped: ServerEndpoint) -> None:
    assert control.stop_server(home, SystemClock())
    assert control.find_server(home) is None


@pytest.mark.parametrize(
    ("letter", "words"),
    [
        ("t", "it is stopped by a debugger (state t). It goes on when the debugger lets it."),
        ("D", "it is waiting for a disk or a file system (state D). It goes on when the disk"),
        ("S", "it is running (state S). It may be busy. Its log: LOG. If this lasts, kill -9 7:"),
        ("Z", "it is ended, but not collected by its parent (state Z)."),
        ("", "The embedded AWS Batch (process 7) has ended. Its log: LOG"),
    ],
)
def test_each_state_of_a_silent_process_has_its_words(letter: str, words: str) -> None:
    assert words in describe_process(7, letter, "LOG")
