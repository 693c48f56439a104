"""AWS Batch's calls for jobs, children of arrays and job definitions; the runtime's marks in logs.

Sources: AWS Batch API Reference, ListJobs; CloudWatch Logs API Reference, FilterLogEvents (up to
100 streams a call).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from batchml.aws.batch.responses import to_run, to_summary
from batchml.aws.errors import call, read_entries, read_pages
from batchml.aws.naming import REGISTERED
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError
from batchml.model.environment import LOCAL
from batchml.model.run import JobStatus, OutcomeClass, Run, classify, with_failures

MAX_DESCRIBE = 100  # ids in one DescribeJobs


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
        return str(call(self._session.submitting_client(), "SubmitJob", **request)["jobId"])

    def register(self, request: Mapping[str, Any]) -> None:
        """Send a RegisterJobDefinition request."""
        call(self._client, "RegisterJobDefinition", **request)

    def has_definition(self, name: str) -> bool:
        """Whether the definition has an active revision."""
        request = {"jobDefinitionName": name, "status": "ACTIVE", "maxResults": 1}
        return bool(call(self._client, "DescribeJobDefinitions", **request)["jobDefinitions"])

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        """The runs with these ids that AWS knows, a hundred ids a call."""
        return {detail["jobId"]: to_run(detail) for detail in self.describe_raw(job_ids)}

    def describe_raw(self, job_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The JobDetails in AWS's form."""
        for start in range(0, len(job_ids), MAX_DESCRIBE):
            some = job_ids[start : start + MAX_DESCRIBE]
            yield from call(self._client, "DescribeJobs", jobs=some)["jobs"]

    def queues(self) -> list[str]:
        """The names of the job queues, the highest priority first."""
        queues = read_entries(self._client, "DescribeJobQueues", "jobQueues")
        ordered = sorted(queues, key=lambda each: (-each["priority"], each["jobQueueName"]))
        return [queue["jobQueueName"] for queue in ordered]

    def takes_jobs(self, queue: str) -> bool:
        """Whether a job queue exists, is valid and is enabled."""
        found = call(self._client, "DescribeJobQueues", jobQueues=[queue])["jobQueues"]
        return any(
            each["jobQueueName"] == queue
            and each.get("state", "ENABLED") == "ENABLED"
            and each.get("status", "VALID") in ("VALID", "UPDATING", "CREATING")
            for each in found
        )

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterator[Run]:
        """The runs of a queue in all states, the newest first; `since` in ms since the epoch.

        A call with a filter returns all states. With a call for each state, a job that changes its
        state meanwhile could be missed.
        """
        job_filter = (
            {"name": "JOB_NAME", "values": [name]}
            if name
            else {"name": "AFTER_CREATED_AT", "values": [str(max(0, since))]}
        )
        for summary in self._summaries(self._client, queue, job_filter):
            run = to_summary(summary, queue)
            if (run.created_at or 0) >= since:
                yield run

    def find_by_name(self, queue: str, job_name: str, once: bool = False) -> list[NamedJob]:
        """The jobs of a queue with exactly this name, in any state, the oldest first.

        With `once`, a failed call is not sent again.
        """
        client = self._session.client("batch", 1) if once else self._client
        job_filter = {"name": "JOB_NAME", "values": [job_name]}
        found = [
            NamedJob(entry["jobId"], entry.get("createdAt") or 0, JobStatus(entry["status"]))
            for entry in self._summaries(client, queue, job_filter)
            if entry.get("jobName", "").lower() == job_name.lower()
        ]
        return sorted(found, key=lambda job: (job.created_at, job.job_id))

    @staticmethod
    def _summaries(
        client: Any, queue: str, job_filter: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Every JobSummary of ListJobs for a filter, each job once.

        Pages shift while jobs come and end, so that a job may be on two pages, and a token may
        repeat.
        """
        seen: set[str] = set()
        tokens: set[str] = set()
        more: dict[str, str] = {}
        while True:
            page = call(client, "ListJobs", jobQueue=queue, filters=[job_filter], **more)
            for summary in page["jobSummaryList"]:
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
        call(self._client, "CancelJob", jobId=job_id, reason=reason)

    def terminate(self, job_id: str, reason: str) -> None:
        """Stop a job in any state; a job that has ended stays as it is."""
        call(self._client, "TerminateJob", jobId=job_id, reason=reason)


# --- Children of arrays ---------------------------------------------------------------------------


def list_child_indices(session: Session, array_id: str, status: JobStatus) -> list[int]:
    """The indices of an array's children in a state, in order: one call for each 1,000."""
    summaries = _child_summaries(session, array_id, status)
    return sorted({int(summary["arrayProperties"]["index"]) for summary in summaries})


def list_failed_children(session: Session, array_id: str) -> list[Run]:
    """The children that failed, by index: one call for each 1,000."""
    summaries = _child_summaries(session, array_id, JobStatus.FAILED)
    found = {summary["jobId"]: to_summary(summary, "") for summary in summaries}
    return sorted(found.values(), key=lambda run: run.array_index or 0)


def _child_summaries(session: Session, array_id: str, status: JobStatus) -> Iterator[Any]:
    request = {"arrayJobId": array_id, "jobStatus": status.value}
    return read_entries(session.client("batch"), "ListJobs", "jobSummaryList", **request)


def with_child_failures(session: Session, run: Run) -> Run:
    """Return the run. A failed array gets the failures of its children, from one call.

    It is unchanged if more than 1,000 children failed, or if the call fails.
    """
    if not run.children or run.failures or classify(run).outcome is not OutcomeClass.APP_ERROR:
        return run
    failed = JobStatus.FAILED.value
    try:
        request = {"arrayJobId": run.job_id, "jobStatus": failed}
        page = call(session.client("batch"), "ListJobs", **request)
    except BatchmlError:
        return run
    return with_failures(run, [to_summary(each, run.queue) for each in page["jobSummaryList"]])


# --- Runs that have not ended ---------------------------------------------------------------------


LIVE = tuple(status for status in JobStatus if not status.is_terminal)
_MAX_STREAMS = 100  # in one FilterLogEvents
USAGE, RANKS, IDLE = "usage", "ranks", "idle"  # kinds of marks
_MARK = "::batchml "  # begins the lines of the runtime that are for batchml


class LogMark(NamedTuple):
    """A line in a log, such as a mark of batchml's runtime."""

    stream: str
    at: int  # ms since the epoch
    message: str


class LiveApi:
    """Reads runs that have not ended, and the marks in their logs. `calls` counts the calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls = 0

    def runs(self, queue: str, status: JobStatus) -> list[Run]:
        """Every run of a queue in a state, from ListJobs."""
        found: list[Run] = []
        request = {"jobQueue": queue, "jobStatus": status.value}
        for page in read_pages(self._session.client("batch"), "ListJobs", **request):
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
            request = {
                "logGroupName": group, "logStreamNames": list(some), "startTime": since,
                "filterPattern": pattern,
            }  # fmt: skip
            try:
                for page in read_pages(self._session.client("logs"), "FilterLogEvents", **request):
                    self.calls += 1
                    for event in page["events"]:
                        yield LogMark(event["logStreamName"], event["timestamp"], event["message"])
                    if not goes_on():
                        return
            except ServiceError as error:
                if error.code != "ResourceNotFoundException":  # a stream has no lines yet
                    raise


# --- Job definitions ------------------------------------------------------------------------------


class DefinitionRevision(Struct, frozen=True):
    """An active revision of a job definition."""

    name: str
    revision: int
    arn: str = ""
    job: str = ""  # the job that it was registered for; "" if batchml did not register it
    env: str = LOCAL
    registered: str = ""  # the day in UTC, such as 2026-11-21; "" for unknown
    image: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.revision}"


def to_definition(detail: Mapping[str, Any]) -> DefinitionRevision:
    """Convert a JobDefinition of DescribeJobDefinitions."""
    tags = detail.get("tags", {})
    return DefinitionRevision(
        name=detail["jobDefinitionName"],
        revision=int(detail["revision"]),
        arn=detail["jobDefinitionArn"],
        job=tags.get("batchml", ""),
        env=tags.get("batchml:env", LOCAL),
        registered=tags.get(REGISTERED, ""),
        image=detail.get("containerProperties", {}).get("image", ""),
    )


class DefinitionApi:
    """AWS Batch's calls for job definitions, with our types."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    def active(self, name: str = "") -> list[DefinitionRevision]:
        """The active revisions of one name or of all, by name, the newest revision first."""
        request = {"status": "ACTIVE", **({"jobDefinitionName": name} if name else {})}
        entries = read_entries(self._client, "DescribeJobDefinitions", "jobDefinitions", **request)
        return sorted(map(to_definition, entries), key=lambda each: (each.name, -each.revision))

    def is_used(self, definition: DefinitionRevision, queues: Sequence[str], since: float) -> bool:
        """Whether a run of the definition has not ended, or was submitted after `since`.

        A call with a filter returns all states. With a call for each state, a run that changes its
        state meanwhile could be missed. `since` is in seconds since the epoch. AWS Batch forgets
        runs a week after their end.
        """
        return any(
            not run.status.is_terminal or (run.created_at or 0) > since * 1000
            for queue in queues
            for run in self._runs(definition.arn, queue)
        )

    def _runs(self, arn: str, queue: str) -> Iterator[Run]:
        filters = [{"name": "JOB_DEFINITION", "values": [arn]}]  # a name would match all revisions
        request = {"jobQueue": queue, "filters": filters}
        for summary in read_entries(self._client, "ListJobs", "jobSummaryList", **request):
            yield to_summary(summary, queue)

    def deregister(self, full_name: str) -> None:
        """Make a revision inactive, if it exists. Its runs continue."""
        try:
            call(self._client, "DeregisterJobDefinition", jobDefinition=full_name)
        except ServiceError as error:
            if error.code != "ClientException" or "does not exist" not in error.message:
                raise
