"""An S3 to talk to: moto's, which neither side of ours wrote, and S3 as a role sees it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

BUCKET = "batchml-lab-123456789012-eu-west-1"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextmanager
def moto_s3() -> Iterator[str]:
    """moto's server with an empty bucket; its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        s3 = client(address)
        s3.create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        yield address
        # All of moto's servers in one process share their state.
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for each in page.get("Contents", ()):
                s3.delete_object(Bucket=BUCKET, Key=each["Key"])
        s3.delete_bucket(Bucket=BUCKET)
    finally:
        server.stop()


def client(address: str) -> Any:
    """boto3's client for it."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=address, region_name="eu-west-1",
        aws_access_key_id="a", aws_secret_access_key="b",
    )  # fmt: skip


class RoleS3:
    """S3 as it answers a role: requests go to `inner`, unless the role lacks a permission.

    `lists`: the role may list the bucket, so that a missing object is answered with 404. Otherwise
    it is 403, with the denied action if `names_action`; a list of keys is then allowed only below
    `listed` prefixes. Objects whose key has `denied` in it may not be read. `requests` are the
    requests, as method and kind: "GET object", "GET list".
    """

    def __init__(self, inner: str) -> None:
        self.inner = inner
        self.lists = True
        self.names_action = True
        self.listed: tuple[str, ...] = ("",)
        self.denied = "?"  # in no key
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def denial(self, action: str) -> bytes:
        named = "User: arn:aws:sts::123456789012:assumed-role/r/s is not authorized to perform: "
        named += (
            f'{action} on resource: "arn:aws:s3:::x" because no identity-based policy allows it'
        )
        message = named if self.names_action else "Access Denied"
        return (
            f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>{escape(message)}"
            "</Message></Error>"
        ).encode()

    def refusal(self, method: str, path: str, query: dict[str, str], status: int) -> bytes:
        """What the role is told instead of the answer; empty if it may have the answer."""
        if method not in ("GET", "HEAD"):
            return b""
        key = path.lstrip("/").partition("/")[2]
        if not key:
            allowed = self.lists or any(
                query.get("prefix", "").startswith(each) for each in self.listed
            )
            return b"" if allowed else self.denial("s3:ListBucket")
        if self.denied in key:
            return self.denial("s3:GetObject")
        return self.denial("s3:ListBucket") if status == 404 and not self.lists else b""


def _handler(account: RoleS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            kind = "object" if url.path.lstrip("/").partition("/")[2] else "list"
            account.requests.append(f"{self.command} {kind}")
            host = urlsplit(account.inner).netloc
            connection = HTTPConnection(host, timeout=60)
            try:
                headers = {**self.headers, "Host": host}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                status, content = answer.status, answer.read()
            finally:
                connection.close()
            query = dict(parse_qsl(url.query))
            refusal = account.refusal(self.command, url.path, query, status)
            if refusal:
                self.send_response(403)
                self.send_header("Content-Type", "application/xml")
                length, content = None, refusal
            else:
                self.send_response(status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    return Handler
