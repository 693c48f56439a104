"""A real registry with passwords, and Amazon ECR before it: both on one loopback port.

`/v2/...` is passed on to Debian's docker-registry, unless `fault` says otherwise; other requests
are ECR's, answered from what the registry has. Each of those is judged by botocore's model, and
each answer too. Docker trusts a registry on 127.0.0.0/8 without TLS.
"""

import base64
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import boto3
from botocore.config import Config

from batchml.aws.session import Access, Session
from batchml.local.server.protocol import problems, service_model
from tests.support.local_server import wait_for
from tests.support.needs import unavailable

TOKEN = "a-token-of-ecr"
_HTPASSWD = "AWS:$2b$04$WphfSDY2R6PzOlMjZbGIGeA6oss/C.MRbkTVsVlT75alSfjgJJVxa\n"  # of TOKEN
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
_ACCOUNT = "123456789012"
_PROGRAM = shutil.which("docker-registry", path=f"{os.environ['PATH']}:/usr/bin")


class Answer(NamedTuple):
    """What a registry says instead of its own answer. Status 0: the connection ends."""

    status: int
    code: str = ""
    message: str = ""
    after: bool = False  # the request was carried out


def need_registry() -> None:
    if _PROGRAM is None:
        unavailable("Debian's package docker-registry is not installed")


class Refused(Exception):
    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message)
        self.code = code


class Registry:
    """`requests` are those that reached `/v2/`, `calls` those of ECR, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.wrong: list[str] = []
        self.repositories: dict[str, dict[str, Any]] = {}
        self.lifecycles: dict[str, str] = {}
        self.tags: dict[str, list[dict[str, str]]] = {}  # of repositories
        self.token = TOKEN
        self.fault: Callable[[str, str], Answer | None] = lambda method, path: None
        self.refuse: Callable[[str], Refused | None] = lambda operation: None
        self._model = service_model("ecr")
        self._inner = _free_port()
        self._start()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _start(self) -> None:
        assert _PROGRAM is not None
        (self.folder / "htpasswd").write_text(_HTPASSWD)
        config = self.folder / "config.json"
        config.write_text(json.dumps({
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self.folder / "data")}},
            "http": {"addr": f"127.0.0.1:{self._inner}"},
            "auth": {"htpasswd": {"realm": "ECR", "path": str(self.folder / "htpasswd")}},
        }))  # fmt: skip
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [_PROGRAM, "serve", str(config)], stdout=log, stderr=log
            )
        wait_for(lambda: _listens(self._inner), "docker-registry listens")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._process.kill()
        self._process.wait()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def session(self) -> Session:
        """One whose client of ECR talks to this."""
        client = boto3.client(
            "ecr", region_name="us-east-1", endpoint_url=self.url, aws_access_key_id="AKIDTEST",
            aws_secret_access_key="s",
            config=Config(retries={"total_max_attempts": 1, "mode": "standard"}, proxies={}),
        )  # fmt: skip

        class WithEcr(Session):
            def client(self, service: str, attempts: int = 5, region: str = "") -> Any:
                assert service == "ecr"
                return client

        return WithEcr(Access("us-east-1"))

    def writes(self) -> list[str]:
        """What changed the registry."""
        return [method for method, _ in self.requests if method not in ("GET", "HEAD")]

    def manifest(self, repository: str, reference: str) -> tuple[str, int] | None:
        """The digest and the size of an image, as the registry itself says."""
        answer, body = self._ask("GET", f"/v2/{repository}/manifests/{reference}", _headers(), b"")
        if answer.status != 200:
            return None
        parts = json.loads(body)
        if parts["mediaType"] == _INDEX:
            return str(answer.headers["Docker-Content-Digest"]), len(body)
        size = parts["config"]["size"] + sum(layer["size"] for layer in parts["layers"])
        return str(answer.headers["Docker-Content-Digest"]), size

    def configuration(self, repository: str, tag: str) -> dict[str, Any]:
        """The configuration of an image, as the registry has it."""
        _, body = self._ask("GET", f"/v2/{repository}/manifests/{tag}", _headers(), b"")
        digest = json.loads(body)["config"]["digest"]
        _, body = self._ask("GET", f"/v2/{repository}/blobs/{digest}", _headers(), b"")
        return dict(json.loads(body))

    def put_copy(self, repository: str, tag: str, new: str, processors: Sequence[str] = ()) -> None:
        """Give an image another tag, as a client other than batchml would; with processors, as an
        image index that says so of them.
        """
        answer, body = self._ask("GET", f"/v2/{repository}/manifests/{tag}", _headers(), b"")
        kind = _MANIFEST
        if processors:
            kind = _INDEX
            entries = [
                {
                    "mediaType": _MANIFEST,
                    "size": len(body),
                    "digest": answer.headers["Docker-Content-Digest"],
                    "platform": {"architecture": each, "os": "linux"},
                }
                for each in processors
            ]
            index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": entries}
            body = json.dumps(index).encode()
        headers = {**_headers(), "Content-Type": kind}
        answer, body = self._ask("PUT", f"/v2/{repository}/manifests/{new}", headers, body)
        assert answer.status == 201, body

    def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._inner, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    # --- ECR --------------------------------------------------------------------------------

    def call(self, operation: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        model = self._model.operation_model(operation)
        self.wrong += [
            f"{operation}: {p}" for p in problems(model.input_shape, request, strict=True)
        ]
        self.calls.append((operation, request))
        try:
            refused = self.refuse(operation)
            if refused is not None:
                raise refused
            answer: dict[str, Any] = getattr(self, f"_{operation}")(**request)
        except Refused as error:
            return 400, {"__type": error.code, "message": str(error)}
        found = problems(model.output_shape, answer, strict=True)
        self.wrong += [f"answer of {operation}: {p}" for p in found]
        return 200, answer

    def _GetAuthorizationToken(self) -> dict[str, Any]:
        token = base64.b64encode(f"AWS:{self.token}".encode()).decode()
        return {"authorizationData": [{"authorizationToken": token, "proxyEndpoint": self.url}]}

    def _CreateRepository(self, **request: Any) -> dict[str, Any]:
        name = request["repositoryName"]
        if name in self.repositories:
            raise Refused("RepositoryAlreadyExistsException")
        kept = {k: v for k, v in request.items() if k not in ("tags", "repositoryName")}
        self.repositories[name] = {
            "repositoryName": name,
            "repositoryArn": f"arn:aws:ecr:us-east-1:{_ACCOUNT}:repository/{name}",
            "repositoryUri": f"{self.host}/{name}",
            **kept,
        }
        self.tags[name] = request.get("tags", [])
        return {"repository": self.repositories[name]}

    def _of(self, name: str) -> dict[str, Any]:
        if name not in self.repositories:
            raise Refused("RepositoryNotFoundException")
        return self.repositories[name]

    def _DescribeRepositories(self, repositoryNames: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"repositories": [self._of(name) for name in repositoryNames or self.repositories]}

    def _ListTagsForResource(self, resourceArn: str) -> dict[str, Any]:
        name = resourceArn.partition("repository/")[2]
        return {"tags": self._of(name) and self.tags[name]}

    def _DeleteRepository(self, repositoryName: str, force: bool = False) -> dict[str, Any]:
        found = self._of(repositoryName)
        if self._tags(repositoryName) and not force:
            raise Refused("RepositoryNotEmptyException")
        shutil.rmtree(self._folder_of(repositoryName), ignore_errors=True)
        del self.repositories[repositoryName]
        self.lifecycles.pop(repositoryName, None)
        return {"repository": found}

    def _PutImageTagMutability(
        self, repositoryName: str, imageTagMutability: str
    ) -> dict[str, Any]:
        self._of(repositoryName)["imageTagMutability"] = imageTagMutability
        return {"repositoryName": repositoryName}

    def _PutImageScanningConfiguration(self, repositoryName: str, **scan: Any) -> dict[str, Any]:
        self._of(repositoryName).update(scan)
        return {"repositoryName": repositoryName}

    def _PutLifecyclePolicy(self, repositoryName: str, lifecyclePolicyText: str) -> dict[str, Any]:
        self._of(repositoryName)
        self.lifecycles[repositoryName] = lifecyclePolicyText
        return {"repositoryName": repositoryName}

    def _GetLifecyclePolicy(self, repositoryName: str) -> dict[str, Any]:
        if repositoryName not in self.lifecycles:
            raise Refused("LifecyclePolicyNotFoundException")
        return {"lifecyclePolicyText": self.lifecycles[repositoryName]}

    def _DescribeImages(
        self, repositoryName: str, imageIds: list[dict[str, str]] | None = None, filter: Any = None
    ) -> dict[str, Any]:
        self._of(repositoryName)
        tags = [one["imageTag"] for one in imageIds] if imageIds else self._tags(repositoryName)
        found = []
        for tag in tags:
            there = self.manifest(repositoryName, tag)
            if there is None:
                raise Refused("ImageNotFoundException")
            found.append({
                "repositoryName": repositoryName, "imageDigest": there[0], "imageTags": [tag],
                "imageSizeInBytes": there[1], "imagePushedAt": 1_790_000_000.5,
            })  # fmt: skip
        return {"imageDetails": found}

    def _folder_of(self, repository: str) -> Path:
        return self.folder / "data/docker/registry/v2/repositories" / repository

    def _tags(self, repository: str) -> list[str]:
        folder = self._folder_of(repository) / "_manifests" / "tags"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _handler(rig: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def _handle(self) -> None:
            body = self._body()
            target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
            if target:
                status, told = rig.call(target, json.loads(body or b"{}"))
                self._send(status, {}, json.dumps(told).encode())
                return
            path = self.path.partition("?")[0]
            rig.requests.append((self.command, path))
            fault = rig.fault(self.command, path)
            if fault is None or fault.after:
                headers = {k: v for k, v in self.headers.items() if k != "Transfer-Encoding"}
                answer, content = rig._ask(self.command, self.path, headers, body)
                if fault is None:
                    self._send(answer.status, dict(answer.headers), content)
                    return
            if not fault.status:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            error = {"errors": [{"code": fault.code, "message": fault.message}]}
            self._send(
                fault.status, {"Content-Type": "application/json"}, json.dumps(error).encode()
            )

        do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _handle

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            headers = {k.lower(): v for k, v in headers.items()}
            if self.command != "HEAD":
                headers["content-length"] = str(len(content))
            for name in set(headers) - {"transfer-encoding", "connection", "date", "server"}:
                self.send_header(name, headers[name])
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _headers() -> dict[str, str]:
    login = base64.b64encode(f"AWS:{TOKEN}".encode()).decode()
    return {"Accept": f"{_MANIFEST}, {_INDEX}", "Authorization": f"Basic {login}"}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False
