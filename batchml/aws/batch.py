"""AWS Batch: our types in, our types out; errors are ours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.failures import translated
from batchml.aws.responses import to_run, to_summary
from batchml.aws.session import Session
from batchml.model.run import Run
from batchml.model.status import JobStatus

MAX_DESCRIBE = 100  # ids of one DescribeJobs


class Found(Struct, frozen=True):
    """A job of some name, as ListJobs tells of it. `created_at` in ms since the epoch."""

    job_id: str
    created_at: int
    status: JobStatus


class BatchApi:
    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    @property
    def is_local(self) -> bool:
        """True for the embedded server."""
        return self._session.is_local

    def submit(self, request: Mapping[str, Any]) -> str:
        """Send a SubmitJob request; the job's id."""
        with translated("SubmitJob"):
            return str(self._session.submitting_client().submit_job(**request)["jobId"])

    def register(self, request: Mapping[str, Any]) -> None:
        with translated("RegisterJobDefinition"):
            self._client.register_job_definition(**request)

    def has_definition(self, name: str) -> bool:
        """True when an active revision of the definition exists."""
        with translated("DescribeJobDefinitions"):
            found = self._client.describe_job_definitions(
                jobDefinitionName=name, status="ACTIVE", maxResults=1
            )
            return bool(found["jobDefinitions"])

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        """The runs of these ids that AWS knows, a hundred ids a call."""
        return {detail["jobId"]: to_run(detail) for detail in self.describe_raw(job_ids)}

    def describe_raw(self, job_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The JobDetails as AWS gives them."""
        for start in range(0, len(job_ids), MAX_DESCRIBE):
            with translated("DescribeJobs"):
                asked = job_ids[start : start + MAX_DESCRIBE]
                found = self._client.describe_jobs(jobs=asked)["jobs"]
            yield from found

    def queues(self) -> list[str]:
        """The names of the job queues, by falling priority."""
        with translated("DescribeJobQueues"):
            pages = self._client.get_paginator("describe_job_queues").paginate()
            found = [queue for page in pages for queue in page["jobQueues"]]
        found.sort(key=lambda queue: (-queue["priority"], queue["jobQueueName"]))
        return [queue["jobQueueName"] for queue in found]

    def takes_jobs(self, queue: str) -> bool:
        """True for a job queue that is there, valid and enabled. `queue` is its name."""
        with translated("DescribeJobQueues"):
            found = self._client.describe_job_queues(jobQueues=[queue])["jobQueues"]
        return any(
            each["jobQueueName"] == queue
            and each.get("state", "ENABLED") == "ENABLED"
            and each.get("status", "VALID") in ("VALID", "UPDATING", "CREATING")
            for each in found
        )

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterator[Run]:
        """Runs of a queue in all states, newest first; `since` in ms since the epoch.

        A filter makes ListJobs answer for all states at once; a sweep over states, one call each,
        can miss a job that moves meanwhile.
        """
        chosen = (
            {"name": "JOB_NAME", "values": [name]}
            if name
            else {"name": "AFTER_CREATED_AT", "values": [str(max(0, since))]}
        )
        for summary in self._listed(self._client, queue, chosen):
            run = to_summary(summary, queue)
            if (run.created_at or 0) >= since:
                yield run

    def called(self, queue: str, job_name: str, hurry: bool = False) -> list[Found]:
        """The jobs of a queue with exactly this name, whatever state they are in, the oldest first.

        With `hurry` each call is sent once.
        """
        client = self._session.client("batch", 1) if hurry else self._client
        chosen = {"name": "JOB_NAME", "values": [job_name]}
        found = [
            Found(entry["jobId"], entry.get("createdAt") or 0, JobStatus(entry["status"]))
            for entry in self._listed(client, queue, chosen)
            if entry.get("jobName", "").lower() == job_name.lower()
        ]
        return sorted(found, key=lambda job: (job.created_at, job.job_id))

    @staticmethod
    def _listed(client: Any, queue: str, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Every JobSummary that ListJobs gives for a filter, each job once.

        Pages shift while jobs come and end: a job may be on two of them, and a token may come back.
        """
        seen: set[str] = set()
        tokens: set[str] = set()
        more: dict[str, str] = {}
        while True:
            with translated("ListJobs"):
                page = client.list_jobs(jobQueue=queue, filters=[chosen], **more)
                summaries = page["jobSummaryList"]
            for summary in summaries:
                if summary["jobId"] not in seen:
                    seen.add(summary["jobId"])
                    yield summary
            token = page.get("nextToken")
            if not token or token in tokens:
                return
            tokens.add(token)
            more = {"nextToken": token}

    def cancel(self, job_id: str, reason: str) -> None:
        """End a job that has not started; has no effect on one that has."""
        with translated("CancelJob"):
            self._client.cancel_job(jobId=job_id, reason=reason)

    def terminate(self, job_id: str, reason: str) -> None:
        """Stop a job in whatever state it is; has no effect on one that has ended."""
        with translated("TerminateJob"):
            self._client.terminate_job(jobId=job_id, reason=reason)
