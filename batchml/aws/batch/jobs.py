"""AWS Batch: our types in, our types out; errors are ours."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from batchml.aws.batch.responses import to_run, to_summary
from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError
from batchml.model.run import JobStatus, OutcomeClass, Run, classify, with_failures

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


# --- children -------------------------------------------------------------------------------------
# Children of an array, by their state.


def indices(session: Session, array_id: str, status: JobStatus) -> list[int]:
    """The numbers of the children that are in a state, rising; a thousand a call.

    Source: AWS Batch API Reference, ListJobs (`arrayJobId` with `jobStatus`).
    """
    found: set[int] = set()
    with translated("ListJobs"):
        pages = session.client("batch").get_paginator("list_jobs")
        for page in pages.paginate(arrayJobId=array_id, jobStatus=status.value):
            for summary in page["jobSummaryList"]:
                found.add(int(summary["arrayProperties"]["index"]))
    return sorted(found)


def failed(session: Session, array_id: str) -> list[Run]:
    """The children that FAILED, as ListJobs tells of them, by rising number; a thousand a call."""
    found: dict[str, Run] = {}
    with translated("ListJobs"):
        pages = session.client("batch").get_paginator("list_jobs")
        for page in pages.paginate(arrayJobId=array_id, jobStatus=JobStatus.FAILED.value):
            for summary in page["jobSummaryList"]:
                found[summary["jobId"]] = to_summary(summary, "")
    return sorted(found.values(), key=lambda run: run.array_index or 0)


def judged(session: Session, run: Run) -> Run:
    """A run; an array that failed knows afterwards how its children did. One call, for that alone.

    It stays as it was where they are more than a page of 1,000, or where AWS does not tell.
    """
    if not run.children or run.failures or classify(run).outcome is not OutcomeClass.APP_ERROR:
        return run
    failed = JobStatus.FAILED.value
    try:
        with translated("ListJobs"):
            page = session.client("batch").list_jobs(arrayJobId=run.job_id, jobStatus=failed)
    except BatchmlError:
        return run
    return with_failures(run, [to_summary(each, run.queue) for each in page["jobSummaryList"]])


# --- live states ----------------------------------------------------------------------------------
# What goes on in queues now, in few calls: runs that have not ended, and what they use.
#
# Sources: AWS Batch API Reference, ListJobs (`jobQueue` with `jobStatus`); CloudWatch Logs API
# Reference, FilterLogEvents (up to 100 streams a call).


LIVE = tuple(status for status in JobStatus if not status.is_terminal)
_MAX_STREAMS = 100  # of one FilterLogEvents
USAGE, RANKS = "usage", "ranks"  # kinds of marks
_MARK = "::batchml "  # how our runtime begins a line that is for its clients


class Mark(NamedTuple):
    """A line of our runtime's in a log; `at` in ms since the epoch."""

    stream: str
    at: int
    message: str


class LiveApi:
    """`calls` counts what was asked of AWS."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls = 0

    def runs(self, queue: str, status: JobStatus) -> list[Run]:
        """Every run of a queue in a state, as far as ListJobs tells; a thousand a call."""
        found: list[Run] = []
        with translated("ListJobs"):
            pages = self._session.client("batch").get_paginator("list_jobs")
            for page in pages.paginate(jobQueue=queue, jobStatus=status.value):
                self.calls += 1
                found += [to_summary(summary, queue) for summary in page["jobSummaryList"]]
        return found

    def marked(
        self, group: str, streams: Sequence[str], since: int, kinds: Sequence[str] = (USAGE,)
    ) -> Iterator[Mark]:
        """What our runtime said of some kinds since a time, in ms; by time."""
        any_of = "?" if len(kinds) > 1 else ""
        pattern = " ".join(f'{any_of}"{_MARK}{kind}"' for kind in kinds)
        return self.matching(group, streams, since, pattern)

    def matching(
        self,
        group: str,
        streams: Sequence[str],
        since: int,
        pattern: str,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[Mark]:
        """Lines by a filter pattern of CloudWatch Logs, for as long as `goes_on`.

        Of a long log many answers are empty.
        """
        for start in range(0, len(streams), _MAX_STREAMS):
            some = streams[start : start + _MAX_STREAMS]
            try:
                yield from self._matching(group, some, since, pattern, goes_on)
            except ServiceError as error:
                if error.code != "ResourceNotFoundException":  # a stream that nobody wrote to yet
                    raise

    def _matching(
        self,
        group: str,
        streams: Sequence[str],
        since: int,
        pattern: str,
        goes_on: Callable[[], bool],
    ) -> Iterator[Mark]:
        with translated("FilterLogEvents"):
            pages = self._session.client("logs").get_paginator("filter_log_events")
            for page in pages.paginate(
                logGroupName=group,
                logStreamNames=list(streams),
                startTime=since,
                filterPattern=pattern,
            ):
                self.calls += 1
                for event in page["events"]:
                    yield Mark(event["logStreamName"], event["timestamp"], event["message"])
                if not goes_on():
                    return
