"""Job definitions of AWS Batch: those that batchml registered, who uses one, deregister one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.batch.requests import REGISTERED
from batchml.aws.batch.responses import to_summary
from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError
from batchml.model.environment import LOCAL
from batchml.model.run import Run


class Definition(Struct, frozen=True):
    """An active revision. `job` is the job it was made for, empty for another's definition.

    `registered` is the day in UTC, `2026-11-21`; empty when whoever registered it left no date.
    """

    name: str
    revision: int
    arn: str = ""
    job: str = ""
    env: str = LOCAL
    registered: str = ""
    image: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.revision}"


def to_definition(detail: Mapping[str, Any]) -> Definition:
    """A Definition from what DescribeJobDefinitions says of one."""
    tags = detail.get("tags", {})
    return Definition(
        name=detail["jobDefinitionName"],
        revision=int(detail["revision"]),
        arn=detail["jobDefinitionArn"],
        job=tags.get("batchml", ""),
        env=tags.get("batchml:env", LOCAL),
        registered=tags.get(REGISTERED, ""),
        image=detail.get("containerProperties", {}).get("image", ""),
    )


class Definitions:
    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    def active(self, name: str = "") -> list[Definition]:
        """The active revisions, of one name or of all, by name and falling revision."""
        chosen = {"jobDefinitionName": name} if name else {}
        with translated("DescribeJobDefinitions"):
            pages = self._client.get_paginator("describe_job_definitions").paginate(
                status="ACTIVE", **chosen
            )
            found = [to_definition(detail) for page in pages for detail in page["jobDefinitions"]]
        return sorted(found, key=lambda each: (each.name, -each.revision))

    def is_used(self, definition: Definition, queues: Sequence[str], since: float) -> bool:
        """True when a run of a definition is unfinished, or was submitted after `since`.

        All states are asked for at once: a sweep over them can miss a run that moves meanwhile.
        `since` in seconds since the epoch. AWS Batch forgets runs a week after their end.
        """
        return any(
            not run.status.is_terminal or (run.created_at or 0) > since * 1000
            for queue in queues
            for run in self._runs(definition.arn, queue)
        )

    def _runs(self, arn: str, queue: str) -> Iterator[Run]:
        # By ARN: a name means all of its revisions here.
        chosen = [{"name": "JOB_DEFINITION", "values": [arn]}]
        with translated("ListJobs"):
            pages = self._client.get_paginator("list_jobs").paginate(jobQueue=queue, filters=chosen)
            for page in pages:
                for summary in page["jobSummaryList"]:
                    yield to_summary(summary, queue)

    def deregister(self, full_name: str) -> None:
        """Make a revision inactive; its runs are not touched. One that is gone stays so."""
        try:
            with translated("DeregisterJobDefinition"):
                self._client.deregister_job_definition(jobDefinition=full_name)
        except ServiceError as error:
            if error.code != "ClientException" or "does not exist" not in error.message:
                raise
