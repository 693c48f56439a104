"""An account in AWS over HTTP that counts what it is asked: AWS Batch is the embedded server, which
the calls are passed on to; CloudFormation knows three stacks, and S3 keeps what it is given.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from batchml.local.home import AccessKeys
from tests.support.s3 import BUCKET

STACKS = {
    "batchml-dev-roles": {
        "JobRoleArn": "arn:aws:iam::123456789012:role/batchml-dev-job",
        "ExecutionRoleArn": "arn:aws:iam::123456789012:role/batchml-dev-execution",
        "ControllerRoleArn": "arn:aws:iam::123456789012:role/batchml-dev-controller",
    },
    "batchml-dev-observability": {"LogGroupName": "/aws/batch/job"},
    "batchml-dev-storage": {"BucketName": BUCKET},
}
_SERVICE = re.compile(r"Credential=[^/]+/\d{8}/[a-z0-9-]+/([a-z0-9-]+)/aws4_request")


class Counted:
    """`calls` are the operations since `reset`, by name: `SubmitJob`, `HeadObject`, ...

    `answers`: operations of services in JSON, such as ECR, that are answered, from their request.
    """

    def __init__(self, batch: str, keys: AccessKeys) -> None:
        self.batch = batch  # the embedded server's URL
        self._keys = Credentials(keys.access_key_id, keys.secret_access_key)
        self.calls: Counter[str] = Counter()
        self.objects: dict[str, bytes] = {}
        self.answers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.lock = threading.Lock()

    def reset(self) -> None:
        self.calls.clear()

    def signed(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> dict[str, str]:
        """The headers of a call as it is passed on: a signature covers the host."""
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in ("host", "authorization", "x-amz-date", "content-length")
        }
        request = AWSRequest(method, self.batch + path, kept, body)
        scope = _SERVICE.search(headers["Authorization"])
        assert scope is not None
        SigV4Auth(self._keys, scope[1], "us-east-1").add_auth(request)
        return dict(request.headers.items())

    def note(self, name: str) -> None:
        with self.lock:
            self.calls[name] += 1


class _Handler(BaseHTTPRequestHandler):
    counted: Counted
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        scope = _SERVICE.search(self.headers.get("Authorization", ""))
        match scope[1] if scope else "":
            case "cloudformation":
                self._cloudformation(parse_qs(body.decode()))
            case "s3":
                self._s3(body)
            case "batch" | "logs":
                self._pass_on(body)
            case service:
                name = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
                self.counted.note(name or service)
                if answer := self.counted.answers.get(name):
                    self._answer(200, json.dumps(answer(json.loads(body))).encode())
                    return
                self._answer(403, b"<ErrorResponse><Error><Code>AccessDenied</Code></Error>"
                                  b"</ErrorResponse>")  # fmt: skip

    def _pass_on(self, body: bytes) -> None:
        target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        self.counted.note(target or self.path.rpartition("/")[2])
        connection = HTTPConnection(urlsplit(self.counted.batch).netloc, timeout=30)
        headers = self.counted.signed(self.command, self.path, body, dict(self.headers))
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self._answer(answer.status, answer.read(), dict(answer.getheaders()))
        finally:
            connection.close()

    def _cloudformation(self, values: dict[str, list[str]]) -> None:
        self.counted.note(values["Action"][0])
        name = values["StackName"][0]
        outputs = "".join(
            f"<member><OutputKey>{key}</OutputKey><OutputValue>{escape(value)}</OutputValue>"
            f"</member>"
            for key, value in STACKS[name].items()
        )
        self._answer(
            200,
            f"<DescribeStacksResponse><DescribeStacksResult><Stacks><member>"
            f"<StackName>{name}</StackName><StackStatus>CREATE_COMPLETE</StackStatus>"
            f"<CreationTime>2026-01-01T00:00:00Z</CreationTime><Outputs>{outputs}</Outputs>"
            f"</member></Stacks></DescribeStacksResult></DescribeStacksResponse>".encode(),
        )

    def _s3(self, body: bytes) -> None:
        self.counted.note({"HEAD": "HeadObject", "PUT": "PutObject"}.get(self.command, "GetObject"))
        path, objects = urlsplit(self.path).path, self.counted.objects
        if self.command == "PUT":
            objects[path] = body
            self._answer(200, b"", {"ETag": '"e"'})
        elif path in objects:
            self._answer(200, objects[path] if self.command != "HEAD" else b"")
        else:
            self._answer(404, b"")

    def _answer(self, status: int, data: bytes, headers: dict[str, Any] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def counting(batch: str, keys: AccessKeys) -> Iterator[tuple[Counted, str]]:
    """The account, and the URL at which it answers."""
    counted = Counted(batch, keys)
    handler = type("Handler", (_Handler,), {"counted": counted})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield counted, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
