"""The calls of AWS Batch that the nodes of a Ray cluster make, with the standard library alone.

The cluster also works if its jobs may not call AWS Batch: running workers notice the end of their
head anyway, and workers that still wait in the queue notice it when they start.
Source: AWS Batch API Reference; Signature Version 4 as for S3 (`storage/credentials.py`).
"""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Dict, List, Optional
from urllib.parse import urlsplit

from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.storage.credentials import CredentialsProvider, domain_of, sign
from batchml.runtime.storage.s3 import region_of
from batchml.runtime.storage.store import StoreError

ATTEMPTS = "BATCHML_GANG_ATTEMPTS"  # the number of attempts that the head's job may make
HEAD_JOB = "BATCHML_GANG_HEAD"  # QUEUE/NAME of the head's job

_ENDED = ("SUCCEEDED", "FAILED")
_TIMEOUT = 5.0  # seconds of one call
_PAGE = 100
_EXITED = "Essential container in task exited"  # AWS Batch's status reason if the host was not lost

# URL, headers, body, seconds -> body of the response
Post = Callable[[str, Dict[str, str], bytes, float], bytes]


def post(url: str, headers: Dict[str, str], body: bytes, timeout: float) -> bytes:
    """Send a POST request; return the body of the response. Raises OSError."""
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return bytes(response.read())


class BatchApi:
    """Three operations of AWS Batch. Every method raises StoreError when the call fails."""

    def __init__(
        self, environ: Mapping[str, str], clock: Callable[[], float] = time.time, post: Post = post
    ) -> None:
        environ = _batch_environment(environ)
        bucket = urlsplit(environ.get("BATCHML_GANG") or environ.get("BATCHML_STORE", "")).netloc
        self._region = region_of(bucket, environ)
        endpoint = environ.get("AWS_ENDPOINT_URL_BATCH") or environ.get("AWS_ENDPOINT_URL")
        default = f"https://batch.{self._region}.{domain_of(self._region)}"
        self._endpoint = (endpoint or default).rstrip("/")
        self._credentials = CredentialsProvider(environ, clock)
        self._clock = clock
        self._post = post

    def describe(self, job_id: str) -> Optional[Dict[str, Any]]:
        """A job as DescribeJobs returns it; None if AWS Batch does not know the job."""
        found = self._call("describejobs", {"jobs": [job_id]}).get("jobs") or []
        return found[0] if found else None

    def list_by_name(self, queue: str, job_name: str) -> List[Dict[str, Any]]:
        """The jobs of a queue with this name, whatever their state, as ListJobs returns them."""
        request = {
            "jobQueue": queue,
            "filters": [{"name": "JOB_NAME", "values": [job_name]}],
            "maxResults": _PAGE,
        }
        return list(self._call("listjobs", request).get("jobSummaryList") or [])

    def terminate(self, job_id: str, reason: str) -> None:
        self._call("terminatejob", {"jobId": job_id, "reason": reason})

    def _call(self, operation: str, request: Dict[str, Any]) -> Dict[str, Any]:
        body = json.dumps(request).encode()
        parts = urlsplit(self._endpoint)
        path = f"{parts.path}/v1/{operation}"
        headers = sign(
            self._credentials.get(), self._region, "POST", parts.netloc, path, "",
            {"content-type": "application/json"}, hashlib.sha256(body).hexdigest(), self._clock(),
            service="batch",
        )  # fmt: skip
        url = f"{parts.scheme}://{parts.netloc}{path}"
        try:
            found = json.loads(self._post(url, headers, body, _TIMEOUT) or b"{}")
        except (OSError, ValueError) as error:
            raise StoreError(f"AWS Batch, {operation}: {_describe(error)}") from error
        return found if isinstance(found, dict) else {}


def _batch_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """`environ` with the endpoint and the keys of the embedded server, if the job runs there.

    Such a job may also have keys of an AWS account, which it uses for other things.
    """
    found = dict(environ)
    if "BATCHML_ENDPOINT_URL" in environ:
        found["AWS_ENDPOINT_URL_BATCH"] = environ["BATCHML_ENDPOINT_URL"]
        found["AWS_ACCESS_KEY_ID"] = environ.get("BATCHML_ACCESS_KEY_ID", "")
        found["AWS_SECRET_ACCESS_KEY"] = environ.get("BATCHML_SECRET_ACCESS_KEY", "")
        found.pop("AWS_SESSION_TOKEN", None)
    return found


def _describe(error: Exception) -> str:
    text = ""
    if isinstance(error, urllib.error.HTTPError):
        try:
            text = str(json.loads(error.read()).get("message") or "")
        except (OSError, ValueError, AttributeError):
            pass
    return text or " ".join(str(getattr(error, "reason", error)).split())


def attempts_of(environ: Mapping[str, str]) -> int:
    """The number of attempts that the head's job may make; 0 if that is unknown."""
    attempts = environ.get(ATTEMPTS, "")
    return int(attempts) if attempts.isascii() and attempts.isdigit() else 0


def is_head_over(batch: BatchApi, environ: Mapping[str, str], run: str) -> bool:
    """Whether the job of the head has ended for good. Raises StoreError.

    `run` is the id of the job, or empty if the head never wrote it: then the job is found by name.
    """
    queue, _, name = environ.get(HEAD_JOB, "").rpartition("/")
    if run:
        job = batch.describe(run)
        jobs = [job] if job else []
    else:
        jobs = batch.list_by_name(queue, name) if queue else []
    return bool(jobs) and not unfinished(jobs)


def is_last(
    job: Optional[Mapping[str, Any]], attempt: int, code: Optional[int], attempts: int = 0
) -> bool:
    """Whether AWS Batch makes no other attempt after this one ends with `code`.

    `code` is None if the attempt was stopped: by a user, which is final, or because its host is
    lost. `job` is None if AWS Batch could not be asked. Without `job`, another attempt may follow
    only a stop or the code for another host, and `attempts` is the most it may make, 0 if unknown.

    The first matching rule of evaluateOnExit decides. A job that no rule matches is tried again.
    Source: AWS Batch User Guide, "Automated job retries".
    """
    if code == 0:
        return True
    if job is None:
        return 0 < attempts <= attempt or code not in (TRY_ELSEWHERE, None)
    if job.get("isTerminated") or job.get("isCancelled"):
        return True
    strategy = job.get("retryStrategy") or {}
    if attempt >= int(strategy.get("attempts") or 1):
        return True
    if code is None:
        return False
    ending = {"onExitCode": str(code), "onStatusReason": _EXITED, "onReason": ""}
    for rule in strategy.get("evaluateOnExit") or ():
        if all(_matches(rule.get(name, "*"), value) for name, value in ending.items()):
            return str(rule.get("action", "")).upper() == "EXIT"
    return False


def _matches(pattern: str, value: str) -> bool:
    if pattern.endswith("*"):
        return value.lower().startswith(pattern[:-1].lower())
    return value.lower() == pattern.lower()


def unfinished(jobs: Iterable[Mapping[str, Any]]) -> List[str]:
    """The ids of the jobs that have not ended."""
    return [str(job["jobId"]) for job in jobs if job.get("status") not in _ENDED]
