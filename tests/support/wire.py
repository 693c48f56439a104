"""AWS on the wire, in this process: real clients sign, write and parse; the test gives answers.

Answers are written in each service's own protocol (query, ec2, json, rest-json), by botocore's
output shapes, so that parsing and errors are botocore's own. Every request must satisfy its input
shape, strictly.
"""

import json
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from botocore.awsrequest import AWSResponse, HeadersDict
from msgspec import Struct

from batchml.aws.session import Access, Session
from tests.support.models import faults

NOW = 1_795_000_000.0  # seconds; a day in November 2026


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials in variables, and nothing of the user's own."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class Refusal(Struct, frozen=True):
    """An error of the service."""

    code: str
    message: str = "words"
    status: int = 403


Answer = Mapping[str, Any] | Refusal | Exception
Script = Mapping[str, "Answer | Callable[[dict[str, Any]], Answer]"]


class Wire:
    """What a scripted account has been asked, and how it answers: `server_time` goes into the Date
    header of each answer. An operation that the script does not have fails the test."""

    def __init__(self, script: Script, server_time: float = NOW) -> None:
        self.script = dict(script)
        self.server_time = server_time
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.wrong: list[str] = []

    @property
    def operations(self) -> list[str]:
        return [operation for operation, _ in self.calls]

    def session(self, region: str = "us-east-1", profile: str = "") -> "WiredSession":
        return WiredSession(self, Access(region, profile))

    def watch(self, client: Any) -> Any:
        events = client.meta.events
        events.register("before-parameter-build", self._note)
        events.register("before-send", self._send)
        return client

    def _note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append((model.name, dict(params)))
        self.wrong += faults(model.service_model.service_name, model.name, dict(params))
        self._model = model

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        operation, params = self.calls[-1]
        answer = self.script[operation]
        if callable(answer):
            answer = answer(params)
        if isinstance(answer, Exception):
            raise answer
        status, kind, body = written(self._model, answer)
        headers = HeadersDict(
            {"content-type": kind, "date": formatdate(self.server_time, usegmt=True)}
        )
        return AWSResponse(request.url, status, headers, _Raw(body.encode()))


class WiredSession(Session):
    def __init__(self, wire: Wire, access: Access) -> None:
        super().__init__(access)
        self._wire = wire
        self._watched: set[int] = set()

    def client(self, service: str, attempts: int = 1, region: str = "") -> Any:
        made = super().client(service, 1, region)
        if id(made) not in self._watched:
            self._watched.add(id(made))
            self._wire.watch(made)
        return made


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> list[bytes]:
        return [self._body]


def written(model: Any, answer: Answer) -> tuple[int, str, str]:
    """Status, content type and body of an answer, as the service would write it."""
    protocol = model.service_model.protocol
    status = answer.status if isinstance(answer, Refusal) else 200
    if protocol in ("query", "ec2"):
        return status, "text/xml", _xml(model, protocol, answer)
    if isinstance(answer, Refusal):
        body: Any = {"__type": answer.code, "message": answer.message}
    else:
        body = answer
    return status, "application/x-amz-json-1.1", json.dumps(body)


def _xml(model: Any, protocol: str, answer: Any) -> str:
    if isinstance(answer, Refusal):
        error = f"<Code>{answer.code}</Code><Message>{escape(answer.message)}</Message>"
        if protocol == "ec2":
            return f"<Response><Errors><Error>{error}</Error></Errors></Response>"
        return f"<ErrorResponse><Error>{error}</Error><RequestId>r</RequestId></ErrorResponse>"
    inner = "".join(
        _element(shape, shape.serialization.get("name", name), answer[name])
        for name, shape in model.output_shape.members.items()
        if name in answer
    )
    name = model.name
    if protocol == "ec2":
        return f"<{name}Response><requestId>r</requestId>{inner}</{name}Response>"
    result = model.output_shape.serialization.get("resultWrapper", f"{name}Result")
    return f"<{name}Response><{result}>{inner}</{result}></{name}Response>"


def _element(shape: Any, name: str, value: Any) -> str:
    if shape.type_name == "structure":
        inner = "".join(
            _element(member, member.serialization.get("name", key), value[key])
            for key, member in shape.members.items()
            if key in value
        )
    elif shape.type_name == "list":
        entry = shape.member.serialization.get("name", "member")
        inner = "".join(_element(shape.member, entry, each) for each in value)
    elif shape.type_name == "boolean":
        inner = str(value).lower()
    else:
        inner = escape(str(value))
    return f"<{name}>{inner}</{name}>"
