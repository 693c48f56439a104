"""AWS as moto knows it, in a process of its own: `python -m tests.support.moto_aws`.

moto is written by others, so it is a judge of what batchml asks. `moto_stacks.py` and
`moto_resources.py` mend what moto does otherwise than AWS; `moto_answers.py` has operations that
moto lacks altogether. Each call is kept with its parameters as botocore's model reads them.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[2]
ACCOUNT = "123456789012"
_CONTROL = "/_batchml"

Json = dict[str, Any]


class Call(NamedTuple):
    """A call as it arrived: `operation` and `request` in the words of botocore's model."""

    service: str
    operation: str
    request: Json
    access_key: str
    status: int


# --- the server ---------------------------------------------------------------------------------


def serve(folder: str = "") -> None:
    """Serve until standard input ends; print the address first.

    `folder`: of a real registry, into which images can be pushed; ECR is answered from it.
    """
    os.environ.setdefault("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    os.environ["MOTO_ACCOUNT_ID"] = ACCOUNT
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "moto")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "moto")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler
    from moto.moto_server.werkzeug_app import create_backend_app as create
    from werkzeug.serving import make_server

    from tests.support import moto_answers
    from tests.support.registry_rig import Registry

    registry = Registry(Path(folder)) if folder else None

    class Quiet(MotoRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None: ...

    front = moto_answers.Front(DomainDispatcherApplication(create), registry)
    server = make_server("127.0.0.1", 0, front, threaded=True, request_handler=Quiet)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    if registry is not None:
        registry.close()


# --- its client ---------------------------------------------------------------------------------


class MotoAws:
    """A running server, as tests use it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _control(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.url}{_CONTROL}{path}", data), timeout=90) as answer:
            return json.load(answer)

    def calls(self) -> list[Call]:
        """Every call so far, in order."""
        return [Call(*each) for each in self._control("/calls")]

    def wait_for_call(self, operation: str = "") -> None:
        """Wait for the next call, or for the next one of an operation: "ecr:CreateRepository"."""
        assert self._control("/wait", operation), f"no call {operation}".rstrip()

    def set(self, **rules: Any) -> None:
        """Change how it answers: see `moto_answers.Rules`."""
        self._control("/rules", rules)

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a command whose AWS it is."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAMOTOMOTOMOTOMOTO",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            **more,
        }

    def client(self, service: str, region: str = "us-east-1", **more: Any) -> Any:
        import boto3

        keys = {"aws_access_key_id": "AKIAMOTOMOTOMOTOMOTO", "aws_secret_access_key": "secret"}
        return boto3.client(service, endpoint_url=self.url, region_name=region, **{**keys, **more})


@contextmanager
def moto_aws(registry: Path | None = None) -> Iterator[MotoAws]:
    """A fresh account. With `registry`, an empty folder, images can be pushed to it."""
    folder = [str(registry)] if registry else []
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.moto_aws", *folder], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        yield MotoAws(process.stdout.readline().strip())
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.stdout.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
