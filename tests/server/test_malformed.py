"""Thousands of malformed requests to every operation that AWS has, by chance but repeatably.

None may end in a 5xx, a traceback or a hang; each answer is an error in AWS's shape, or a 200 that
fits the operation's output shape strictly. docs/behaviours.md B90-B94, B113.

A failure names its request: `malformed(number, Target())` makes it again. BATCHML_TORTURE=20 makes
the suite twenty times as long, with other requests.
"""

import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home, ServerEndpoint
from batchml.local.server.protocol import (
    MAX_HEADERS,
    HttpRequest,
    HttpResponse,
    problems,
    service_model,
)
from tests.support.generate import OPERATIONS, TORTURE, Made, Target, malformed
from tests.support.server_rig import Rig, error_of, furnish

IN_PROCESS = 5000
OVER_HTTP = 400
_PART = 500  # requests to one server: what was accepted makes those after it slower


def check(made: Made, answer: HttpResponse) -> None:
    assert 200 <= answer.status < 500, f"{made.what}: {answer.status} {answer.body[:300]!r}"
    assert b"Traceback" not in answer.body, made.what
    if answer.status != 200:
        error_of(answer, made.service)
    elif made.operation and made.service != "sts":
        shape = service_model(made.service).operation_model(made.operation).output_shape
        # A request of Batch is not held to the model's maxima, and may come back in an answer.
        checked = {"strict": True, "maxima": made.service != "batch"}
        wrong = list(problems(shape, json.loads(answer.body), **checked)) if shape else []
        assert not wrong, f"{made.what}: {wrong}"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    furnish(made.client("batch"))
    yield made
    made.close()


def move_on(rig: Rig, chance: random.Random) -> None:
    """Something happens to a job, so that the requests meet jobs in every state."""
    at_work = [job.id for job in rig.core.state.jobs.values() if job.attempt is not None]
    if at_work:
        job_id = chance.choice(at_work)
        if chance.random() < 0.5:
            rig.start(job_id)
        else:
            rig.end(job_id, chance.choice([0, 1, 137]))


@pytest.mark.parametrize("part", range(IN_PROCESS * TORTURE // _PART))
def test_a_malformed_request_is_refused_in_aws_s_shape(
    rig: Rig, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    """B90."""
    chance = random.Random(part)
    asked = set()
    accepted = 0
    for number in range(part * _PART, (part + 1) * _PART):
        made = malformed(number, Target())
        (answer,) = rig.handle(made.request)
        check(made, answer)
        asked.add((made.service, made.operation))
        accepted += answer.status == 200
        if number % 10 == 0:
            move_on(rig, chance)
    assert len(asked) > 0.4 * len(OPERATIONS)
    assert accepted > 10, "all are refused: they do not reach what is behind the checks"
    assert not [record for record in caplog.records if record.exc_info]


def over_http(connection: http.client.HTTPConnection, request: HttpRequest) -> HttpResponse:
    path = request.path + (f"?{request.query}" if request.query else "")
    connection.putrequest(request.method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers:
        connection.putheader(name, value.encode("latin-1", "replace"))
    connection.putheader("content-length", str(len(request.body)))
    connection.endheaders(request.body)
    answer = connection.getresponse()
    body = answer.read()
    headers = tuple((name.lower(), value) for name, value in answer.getheaders())
    return HttpResponse(answer.status, headers, body)


def test_a_malformed_request_is_refused_over_http_as_well(
    home: Home, server: ServerEndpoint, batch: Any
) -> None:
    furnish(batch, lambda name: name)
    # Nothing is to run: what the requests ask for is nobody's wish.
    for name in ("ce", "this-machine"):
        batch.update_compute_environment(computeEnvironment=name, state="DISABLED")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    target = Target(home.keys(), server.url)
    for number in range(OVER_HTTP * TORTURE):
        made = malformed(1_000_000 + number, target)
        if made.request.method == "HEAD":  # has no body to look at
            continue
        try:
            check(made, over_http(connection, made.request))
        except (ConnectionError, http.client.RemoteDisconnected):
            # Cut off while it was still sending headers without end.
            assert sum(len(value) for _, value in made.request.headers) > MAX_HEADERS, made.what
            connection.close()
    connection.close()
    assert batch.describe_job_queues()["jobQueues"]
    assert "Traceback" not in home.log.read_text()
