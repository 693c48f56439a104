"""AWS Batch over HTTP in this process, as far as a submission needs it, as late as it may be.

Unlike the embedded server it knows nothing of a call that is sent again: like AWS, it makes another
job of it.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from batchml.clock import Clock


class Refused(Exception):
    """An error answer: HTTP status and AWS's code."""


class BatchAccount:
    """Jobs by name. They are listed `lag` seconds after they were made, two a page, and pages
    shift: the last of each comes again on the next. `room` calls are taken, the rest throttled."""

    def __init__(self, clock: Clock, lag: float = 0) -> None:
        self.clock = clock
        self.lag = lag
        self.jobs: list[dict[str, Any]] = []
        self.definitions: set[str] = set()
        self.calls: list[str] = []
        self.throttle = 0  # so many SubmitJob calls are refused first
        self.port = 0
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused."""
        with self._lock:
            operation = path.rpartition("/")[2]
            self.calls.append(operation)
            answered: dict[str, Any] = getattr(self, f"_{operation}")(body)
            return answered

    @property
    def live(self) -> list[str]:
        return [job["jobId"] for job in self.jobs if job["status"] != "FAILED"]

    def _submitjob(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.throttle:
            self.throttle -= 1
            raise Refused(429, "TooManyRequestsException")
        if body["jobDefinition"] not in self.definitions:
            raise Refused(400, "ClientException")
        made = {
            "jobId": f"00000000-0000-4000-8000-{len(self.jobs):012d}",
            "jobName": body["jobName"],
            "createdAt": int(self.clock.now() * 1000),
            "status": "RUNNABLE",
        }
        self.jobs.append(made)
        return {"jobId": made["jobId"], "jobName": made["jobName"]}

    def _listjobs(self, body: dict[str, Any]) -> dict[str, Any]:
        ((filter_,),) = [body["filters"]]
        assert filter_["name"] == "JOB_NAME"
        now = self.clock.now()
        name = filter_["values"][0].lower()  # the filter does not tell cases apart
        found = [
            job
            for job in self.jobs
            if job["jobName"].lower() == name and now >= job["createdAt"] / 1000 + self.lag
        ]
        start = int(body.get("nextToken", 0))
        more = {"nextToken": str(start + 1)} if start + 2 < len(found) else {}
        return {"jobSummaryList": found[start : start + 2], **more}

    def _terminatejob(self, body: dict[str, Any]) -> dict[str, Any]:
        job = next(job for job in self.jobs if job["jobId"] == body["jobId"])
        job["status"] = "FAILED"
        return {}

    def _describejobdefinitions(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"jobDefinitions": []}

    def _registerjobdefinition(self, body: dict[str, Any]) -> dict[str, Any]:
        self.definitions.add(body["jobDefinitionName"])
        return {"jobDefinitionName": body["jobDefinitionName"], "revision": 1}


class _Handler(BaseHTTPRequestHandler):
    account: BatchAccount
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, code, answer = 200, "", {}
        try:
            answer = self.account.answer(self.path, body)
        except Refused as refused:
            status, code = refused.args
            answer = {"message": "words"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        if code:
            self.send_header("x-amzn-ErrorType", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(account: BatchAccount) -> Iterator[BatchAccount]:
    """The account answers on `account.port` of this machine."""
    handler = type("Handler", (_Handler,), {"account": account})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    account.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield account
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
