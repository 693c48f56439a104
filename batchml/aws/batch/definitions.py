"""Job definitions of AWS Batch: list, check for use, deregister."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.batch.requests import REGISTERED
from batchml.aws.batch.responses import to_summary
from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import ServiceError
from batchml.model.environment import LOCAL
from batchml.model.run import Run


class DefinitionRevision(Struct, frozen=True):
    """An active revision of a job definition."""

    name: str
    revision: int
    arn: str = ""
    job: str = ""  # the job it was registered for; "" for a definition of others
    env: str = LOCAL
    registered: str = ""  # the day in UTC, such as 2026-11-21; "" for unknown
    image: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.revision}"


def to_definition(detail: Mapping[str, Any]) -> DefinitionRevision:
    """From a JobDefinition of DescribeJobDefinitions."""
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
        chosen = {"jobDefinitionName": name} if name else {}
        with translate_errors("DescribeJobDefinitions"):
            pages = self._client.get_paginator("describe_job_definitions").paginate(
                status="ACTIVE", **chosen
            )
            found = [to_definition(detail) for page in pages for detail in page["jobDefinitions"]]
        return sorted(found, key=lambda each: (each.name, -each.revision))

    def is_used(self, definition: DefinitionRevision, queues: Sequence[str], since: float) -> bool:
        """Whether a run of the definition has not ended, or was submitted after `since`.

        All states are read in one call: with a call for each state, a run that changes its state
        meanwhile could be missed. `since` is in seconds since the epoch. AWS Batch forgets runs a
        week after their end.
        """
        return any(
            not run.status.is_terminal or (run.created_at or 0) > since * 1000
            for queue in queues
            for run in self._runs(definition.arn, queue)
        )

    def _runs(self, arn: str, queue: str) -> Iterator[Run]:
        # By ARN: a name would match all revisions.
        chosen = [{"name": "JOB_DEFINITION", "values": [arn]}]
        with translate_errors("ListJobs"):
            pages = self._client.get_paginator("list_jobs").paginate(jobQueue=queue, filters=chosen)
            for page in pages:
                for summary in page["jobSummaryList"]:
                    yield to_summary(summary, queue)

    def deregister(self, full_name: str) -> None:
        """Make a revision inactive. Its runs continue. A missing revision is no error."""
        try:
            with translate_errors("DeregisterJobDefinition"):
                self._client.deregister_job_definition(jobDefinition=full_name)
        except ServiceError as error:
            if error.code != "ClientException" or "does not exist" not in error.message:
                raise
