"""The scripted account of `aws_world.py` over HTTP, in AWS's own protocols: for real commands.

moto's parsers and serializers speak query, EC2 and JSON from botocore's models; what is said is the
account's.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from moto.core.model import ServiceModel
from moto.core.parse import PROTOCOL_PARSERS
from moto.core.serialize import get_serializer_class
from moto.core.utils import get_service_model
from werkzeug.datastructures import Headers, MultiDict

from tests.support.aws_world import Account, AwsError

_SERVICES = {"servicequotas": "service-quotas"}  # signing name -> botocore's
_SCOPE = re.compile(r"Credential=[^/]+/\d{8}/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request")


class _Handler(BaseHTTPRequestHandler):
    account: Account
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        scope = _SCOPE.search(self.headers.get("Authorization", ""))
        model = get_service_model(_SERVICES.get(scope[2], scope[2]) if scope else "")
        with self.lock:
            status, headers, text = self._answer(model, body)
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, model: ServiceModel, body: bytes) -> tuple[int, dict[str, str], Any]:
        values = dict(parse_qsl(body.decode(), keep_blank_values=True))
        target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        operation = model.operation_model(target or values["Action"])
        protocol = model.resolved_protocol
        request: Any = {
            "body": body, "headers": Headers(dict(self.headers)), "method": "POST",
            "url_params": {}, "url_path": self.path, "values": MultiDict(values),
        }  # fmt: skip
        params = PROTOCOL_PARSERS[protocol](operation).parse(request)
        name = re.sub(r"(?<!^)([A-Z])", r"_\1", operation.name).lower()
        do = getattr(self.account, name, None)
        result: Any
        try:
            if do is None:
                raise AwsError(
                    "AccessDeniedException", f"not authorized to perform: {operation.name}"
                )
            self.account.calls.append(operation.name)
            result = do(params)
        except AwsError as error:
            result = error
        found = get_serializer_class(model.service_name, protocol)(operation).serialize(result)
        return found["status_code"], dict(found["headers"]), found["body"]

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(account: Account) -> Iterator[str]:
    """The URL at which the account answers."""
    handler = type("Handler", (_Handler,), {"account": account})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
