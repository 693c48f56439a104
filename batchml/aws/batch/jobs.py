"""AWS Batch's calls for jobs: submit, describe, list, end; children of arrays; marks in logs.

Sources: AWS Batch API Reference, ListJobs; CloudWatch Logs API Reference, FilterLogEvents (up to
100 streams a call).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from batchml.aws.batch.responses import to_run, to_summary
from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError
from batchml.model.run import JobStatus, OutcomeClass, Run, classify, with_failures

MAX_DESCRIBE = 100  # ids of one DescribeJobs


class NamedJob(Struct, frozen=True):
    """A job that was found by its name."""

    job_id: str
    created_at: int  # ms since the epoch
    status: JobStatus


class JobApi:
    """AWS Batch's calls for jobs, with our types and errors."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    @property
    def is_local(self) -> bool:
        """Whether the embedded server answers."""
        return self._session.is_local

    def submit(self, request: Mapping[str, Any]) -> str:
        """Send a SubmitJob request. Return the job's id."""
        with translate_errors("SubmitJob"):
            return str(self._session.submitting_client().submit_job(**request)["jobId"])

    def register(self, request: Mapping[str, Any]) -> None:
        with translate_errors("RegisterJobDefinition"):
            self._client.register_job_definition(**request)

    def has_definition(self, name: str) -> bool:
        """Whether the definition has an active revision."""
        with translate_errors("DescribeJobDefinitions"):
            found = self._client.describe_job_definitions(
                jobDefinitionName=name, status="ACTIVE", maxResults=1
            )
            return bool(found["jobDefinitions"])

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        """The runs with these ids that AWS knows, a hundred ids a call."""
        return {detail["jobId"]: to_run(detail) for detail in self.describe_raw(job_ids)}

    def describe_raw(self, job_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The JobDetails in AWS's form."""
        for start in range(0, len(job_ids), MAX_DESCRIBE):
            with translate_errors("DescribeJobs"):
                asked = job_ids[start : start + MAX_DESCRIBE]
                found = self._client.describe_jobs(jobs=asked)["jobs"]
            yield from found

    def queues(self) -> list[str]:
        """The names of the job queues, the highest priority first."""
        with translate_errors("DescribeJobQueues"):
            pages = self._client.get_paginator("describe_job_queues").paginate()
            found = [queue for page in pages for queue in page["jobQueues"]]
        found.sort(key=lambda queue: (-queue["priority"], queue["jobQueueName"]))
        return [queue["jobQueueName"] for queue in found]

    def takes_jobs(self, queue: str) -> bool:
        """Whether a job queue exists, is valid and is enabled."""
        with translate_errors("DescribeJobQueues"):
            found = self._client.describe_job_queues(jobQueues=[queue])["jobQueues"]
        return any(
            each["jobQueueName"] == queue
            and each.get("state", "ENABLED") == "ENABLED"
            and each.get("status", "VALID") in ("VALID", "UPDATING", "CREATING")
            for each in found
        )

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterator[Run]:
        """The runs of a queue in all states, newest first; `since` in ms since the epoch.

        With a filter, ListJobs answers for all states at once: with a call for each state, a job
        that changes its state meanwhile could be missed.
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

    def find_by_name(self, queue: str, job_name: str, once: bool = False) -> list[NamedJob]:
        """The jobs of a queue with exactly this name, in any state, the oldest first.

        With `once`, a failed call is not repeated.
        """
        client = self._session.client("batch", 1) if once else self._client
        chosen = {"name": "JOB_NAME", "values": [job_name]}
        found = [
            NamedJob(entry["jobId"], entry.get("createdAt") or 0, JobStatus(entry["status"]))
            for entry in self._listed(client, queue, chosen)
            if entry.get("jobName", "").lower() == job_name.lower()
        ]
        return sorted(found, key=lambda job: (job.created_at, job.job_id))

    @staticmethod
    def _listed(client: Any, queue: str, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Every JobSummary that ListJobs gives for a filter, each job once.

        Pages shift while jobs come and end: a job may be on two pages, and a token may repeat.
        """
        seen: set[str] = set()
        tokens: set[str] = set()
        more: dict[str, str] = {}
        while True:
            with translate_errors("ListJobs"):
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
        """End a job that has not started; a started job continues."""
        with translate_errors("CancelJob"):
            self._client.cancel_job(jobId=job_id, reason=reason)

    def terminate(self, job_id: str, reason: str) -> None:
        """Stop a job in any state; a job that has ended stays as it is."""
        with translate_errors("TerminateJob"):
            self._client.terminate_job(jobId=job_id, reason=reason)


# --- Children of arrays ---------------------------------------------------------------------------


def list_child_indices(session: Session, array_id: str, status: JobStatus) -> list[int]:
    """The indices of an array's children in a state, in order; a thousand a call."""
    found: set[int] = set()
    with translate_errors("ListJobs"):
        pages = session.client("batch").get_paginator("list_jobs")
        for page in pages.paginate(arrayJobId=array_id, jobStatus=status.value):
            for summary in page["jobSummaryList"]:
                found.add(int(summary["arrayProperties"]["index"]))
    return sorted(found)


def list_failed_children(session: Session, array_id: str) -> list[Run]:
    """The children that failed, by index; a thousand a call."""
    found: dict[str, Run] = {}
    with translate_errors("ListJobs"):
        pages = session.client("batch").get_paginator("list_jobs")
        for page in pages.paginate(arrayJobId=array_id, jobStatus=JobStatus.FAILED.value):
            for summary in page["jobSummaryList"]:
                found[summary["jobId"]] = to_summary(summary, "")
    return sorted(found.values(), key=lambda run: run.array_index or 0)


def with_child_failures(session: Session, run: Run) -> Run:
    """The run, with the failures of its children if it is an array that failed (one call).

    It stays as it was if more than 1,000 children failed, or if the call fails.
    """
    if not run.children or run.failures or classify(run).outcome is not OutcomeClass.APP_ERROR:
        return run
    failed = JobStatus.FAILED.value
    try:
        with translate_errors("ListJobs"):
            page = session.client("batch").list_jobs(arrayJobId=run.job_id, jobStatus=failed)
    except BatchmlError:
        return run
    return with_failures(run, [to_summary(each, run.queue) for each in page["jobSummaryList"]])


# --- Runs that have not ended ---------------------------------------------------------------------


LIVE = tuple(status for status in JobStatus if not status.is_terminal)
_MAX_STREAMS = 100  # of one FilterLogEvents
USAGE, RANKS = "usage", "ranks"  # kinds of marks
_MARK = "::batchml "  # the beginning of a line of our runtime that its clients read


class LogMark(NamedTuple):
    """A line of our runtime in a log."""

    stream: str
    at: int  # ms since the epoch
    message: str


class LiveApi:
    """Reads runs that have not ended, and the marks in their logs. `calls` counts the calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls = 0

    def runs(self, queue: str, status: JobStatus) -> list[Run]:
        """Every run of a queue in a state, from ListJobs; a thousand a call."""
        found: list[Run] = []
        with translate_errors("ListJobs"):
            pages = self._session.client("batch").get_paginator("list_jobs")
            for page in pages.paginate(jobQueue=queue, jobStatus=status.value):
                self.calls += 1
                found += [to_summary(summary, queue) for summary in page["jobSummaryList"]]
        return found

    def read_marks(
        self, group: str, streams: Sequence[str], since: int, kinds: Sequence[str] = (USAGE,)
    ) -> Iterator[LogMark]:
        """The marks of some kinds since a time (ms since the epoch), in order of time."""
        any_of = "?" if len(kinds) > 1 else ""
        pattern = " ".join(f'{any_of}"{_MARK}{kind}"' for kind in kinds)
        return self.filter_lines(group, streams, since, pattern)

    def filter_lines(
        self,
        group: str,
        streams: Sequence[str],
        since: int,
        pattern: str,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[LogMark]:
        """The lines that match a filter pattern of CloudWatch Logs, until `goes_on` returns False.

        In a long log, many pages are empty.
        """
        for start in range(0, len(streams), _MAX_STREAMS):
            some = streams[start : start + _MAX_STREAMS]
            try:
                yield from self._filter(group, some, since, pattern, goes_on)
            except ServiceError as error:
                if error.code != "ResourceNotFoundException":  # a stream has no lines yet
                    raise

    def _filter(
        self,
        group: str,
        streams: Sequence[str],
        since: int,
        pattern: str,
        goes_on: Callable[[], bool],
    ) -> Iterator[LogMark]:
        with translate_errors("FilterLogEvents"):
            pages = self._session.client("logs").get_paginator("filter_log_events")
            for page in pages.paginate(
                logGroupName=group,
                logStreamNames=list(streams),
                startTime=since,
                filterPattern=pattern,
            ):
                self.calls += 1
                for event in page["events"]:
                    yield LogMark(event["logStreamName"], event["timestamp"], event["message"])
                if not goes_on():
                    return
