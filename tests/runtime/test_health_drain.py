"""A bad host is taken out of service by ECS, whose own model and signature judge what is sent."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.validate import ParamValidator

from batchml.runtime.health.drain import drain, max_drains
from batchml.runtime.health.gate import VARIABLE, check_host
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.folder import FolderStore

NOW = 1_800_000_000.0
CLUSTER = "arn:aws:ecs:eu-west-1:123456789012:cluster/AWSBatch-batchml-dev-gpu-0"
TASK = "arn:aws:ecs:eu-west-1:123456789012:task/AWSBatch-batchml-dev-gpu-0/0123456789abcdef"
INSTANCE = "arn:aws:ecs:eu-west-1:123456789012:container-instance/AWSBatch-batchml-dev-gpu-0/fedc"
MODEL = botocore.session.get_session().get_service_model("ecs")


class Ecs(ThreadingHTTPServer):
    """ECS, as far as a bad host needs it. What its model does not know is noted as a mistake."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hosts = 10
        self.refuses: set[str] = set()
        self.failures: list[dict[str, str]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.mistakes: list[str] = []

    def answer(self, action: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append((action, asked))
        shape = MODEL.operation_model(action).input_shape
        report = ParamValidator().validate(asked, shape)
        if report.has_errors():
            self.mistakes.append(report.generate_report())
        if action in self.refuses:
            return 400, {"__type": "com.amazon#AccessDeniedException", "message": "not allowed"}
        answers: dict[str, dict[str, Any]] = {
            "DescribeTasks": {"tasks": [{"containerInstanceArn": INSTANCE}]},
            "DescribeClusters": {"clusters": [{"registeredContainerInstancesCount": self.hosts}]},
            "UpdateContainerInstancesState": {"failures": self.failures},
        }
        return 200, answers[action]

    @property
    def drained(self) -> list[dict[str, Any]]:
        return [asked for action, asked in self.calls if action == "UpdateContainerInstancesState"]


class _Handler(BaseHTTPRequestHandler):
    server: Ecs

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        signed = {
            name: self.headers[name]
            for name in self.headers["Authorization"].split("SignedHeaders=")[1]
            .split(",")[0].split(";")
        }  # fmt: skip
        theirs = AWSRequest("POST", f"http://{self.headers['Host']}{self.path}", signed, body)
        theirs.context["timestamp"] = self.headers["X-Amz-Date"]
        auth = SigV4Auth(Credentials("AKIDEXAMPLE", "secret"), "ecs", "eu-west-1")
        text = auth.string_to_sign(theirs, auth.canonical_request(theirs))
        if not self.headers["Authorization"].endswith(auth.signature(text, theirs)):
            self.server.mistakes.append("the signature is not botocore's")
        version, _, action = self.headers["X-Amz-Target"].partition(".")
        assert version == MODEL.metadata["targetPrefix"]
        version = MODEL.metadata["jsonVersion"]
        assert self.headers["Content-Type"] == f"application/x-amz-json-{version}"
        status, found = self.server.answer(action, json.loads(body))
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def ecs() -> Iterator[Ecs]:
    with Ecs() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        assert server.mistakes == []


def agent(has_agent: bool = True) -> Callable[[str, str, dict[str, str], float], bytes]:
    """What answers on a host: the task's metadata, and the agent where it can be reached."""

    def ask(method: str, url: str, headers: dict[str, str], timeout: float) -> bytes:
        if url == "http://169.254.170.2/v4/x/task":
            return json.dumps({"Cluster": CLUSTER, "TaskARN": TASK}).encode()
        if url == "http://127.0.0.1:51678/v1/metadata" and has_agent:
            return json.dumps({"Cluster": CLUSTER, "ContainerInstanceArn": INSTANCE}).encode()
        raise OSError("connection refused")

    return ask


class Lab:
    def __init__(self, ecs: Ecs, root: Path) -> None:
        self.store = FolderStore(str(root / "runs"))
        self.environ = {
            "ECS_CONTAINER_METADATA_URI_V4": "http://169.254.170.2/v4/x",
            "AWS_ENDPOINT_URL_ECS": f"http://127.0.0.1:{ecs.server_port}",
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret",
            "BATCHML_STORE": str(root / "runs" / "key"), "AWS_BATCH_JOB_ID": "j",
        }  # fmt: skip

    def drain(self, host: str = "i-1", now: float = NOW, has_agent: bool = True) -> str:
        env = RuntimeEnv.read(self.environ)
        return drain(env, self.environ, host, now, agent(has_agent))


@pytest.fixture
def lab(ecs: Ecs, tmp_path: Path) -> Lab:
    return Lab(ecs, tmp_path)


@pytest.mark.parametrize("has_agent", [True, False])
def test_the_hosts_own_container_instance_is_drained(lab: Lab, ecs: Ecs, has_agent: bool) -> None:
    told = lab.drain(has_agent=has_agent)
    assert told == "i-1 is taken out of service: AWS Batch starts nothing more on it"
    assert ecs.drained == [
        {"cluster": CLUSTER, "containerInstances": [INSTANCE], "status": "DRAINING"}
    ]
    # A node of a multi-node job has a network of its own and cannot ask the agent.
    assert ("DescribeTasks" in [action for action, _ in ecs.calls]) == (not has_agent)


@pytest.mark.parametrize(
    ("hosts", "most"), [(0, 1), (1, 1), (5, 1), (9, 1), (10, 2), (14, 2), (100, 20)]
)
def test_a_fifth_of_the_hosts_in_an_hour_and_one_in_any_case(hosts: int, most: int) -> None:
    assert max_drains(hosts) == most


def test_no_more_hosts_than_that_go_in_an_hour(lab: Lab, ecs: Ecs) -> None:
    assert [lab.drain(f"i-{number}") for number in range(4)][2:] == [
        f"i-{number} is not taken out of service: 2 of 10 hosts were taken out in the last hour, "
        "which is the limit"
        for number in (2, 3)
    ]
    assert len(ecs.drained) == 2
    # The hour is that before now, not that of the clock.
    assert "is not taken out" in lab.drain("i-4", NOW + 3500)
    assert "is taken out" in lab.drain("i-5", NOW + 3700)
    assert len(ecs.drained) == 3


def test_of_many_hosts_at_once_so_many_go(lab: Lab, ecs: Ecs) -> None:
    told: list[str] = []
    threads = [
        threading.Thread(target=lambda name=f"i-{number}": told.append(lab.drain(name)))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("is taken out" in line for line in told) == len(ecs.drained) == 2


def test_where_hosts_may_not_be_counted_one_goes(lab: Lab, ecs: Ecs) -> None:
    ecs.refuses = {"DescribeClusters"}
    assert "is taken out" in lab.drain("i-1")
    assert lab.drain("i-2") == (
        "i-2 is not taken out of service: 1 were taken out in the last hour, which is the limit"
    )


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("UpdateContainerInstancesState", "ecs:UpdateContainerInstancesState: "
         "AccessDeniedException: not allowed"),
        ("DescribeTasks", "ecs:DescribeTasks: AccessDeniedException: not allowed"),
    ],
)  # fmt: skip
def test_what_ecs_refuses_is_told(lab: Lab, ecs: Ecs, refused: str, words: str) -> None:
    ecs.refuses = {refused}
    assert lab.drain(has_agent=False) == (
        f"i-1 is not taken out of service, but the run still leaves it: {words}"
    )


def test_what_ecs_fails_to_do_is_told(lab: Lab, ecs: Ecs) -> None:
    ecs.failures = [{"arn": INSTANCE, "reason": "MISSING"}]
    assert lab.drain().endswith("still leaves it: ECS: MISSING")


def test_without_ecs_an_endpoint_keys_or_a_store_it_is_told(lab: Lab, ecs: Ecs) -> None:
    lab.environ["AWS_ENDPOINT_URL_ECS"] = "http://127.0.0.1:9"
    assert "refused" in lab.drain()
    lab.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    del lab.environ["AWS_ACCESS_KEY_ID"]
    assert "no AWS credentials" in lab.drain()
    lab.environ["BATCHML_STORE"] = ""
    assert "cannot be counted" in lab.drain()
    del lab.environ["ECS_CONTAINER_METADATA_URI_V4"]
    assert lab.drain() == "i-1 is not taken out of service: it is not a host of ECS"
    assert ecs.calls == []


def test_the_gate_asks_for_it_only_where_the_job_does(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("XID 79")
    del lab.environ["ECS_CONTAINER_METADATA_URI_V4"]
    said: list[str] = []
    environ = {**lab.environ, "BATCHML_FAULT_FILE": str(tmp_path / "fault")}
    environ["BATCHML_HOST_ID"] = "i-1"
    asking = {**environ, VARIABLE: '{"quarantine": true}'}
    assert check_host(RuntimeEnv.read(environ), environ, said.append) is not None
    assert said == []
    (tmp_path / "fault").write_text("retry: a full disk is not the host's fault")
    assert check_host(RuntimeEnv.read(asking), asking, said.append) is not None
    assert said == []
    (tmp_path / "fault").write_text("XID 79")
    assert check_host(RuntimeEnv.read(asking), asking, said.append) is not None
    assert said == ["batchml notice: i-1 is not taken out of service: it is not a host of ECS"]
