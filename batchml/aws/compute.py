"""Compute environments, queues and scheduling policies of AWS Batch: read, make, change, delete.

All of these calls are answered before they are carried out; the caller reads again until a status
has settled. The requests are made in `resources.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError
from batchml.model.status import JobStatus

Detail = dict[str, Any]  # as AWS gives it

_UNFINISHED = tuple(status.value for status in JobStatus if not status.is_terminal)
_MAX_ARNS = 100  # of one DescribeSchedulingPolicies


class ComputeApi:
    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    # --- reading: by name -------------------------------------------------------------------

    def environments(self) -> dict[str, Detail]:
        return self._all(
            "describe_compute_environments", "computeEnvironments", "computeEnvironmentName"
        )

    def environment(self, name: str) -> Detail | None:
        with translated("DescribeComputeEnvironments"):
            found = self._client.describe_compute_environments(computeEnvironments=[name])
            return _living(found["computeEnvironments"])

    def queues(self) -> dict[str, Detail]:
        return self._all("describe_job_queues", "jobQueues", "jobQueueName")

    def queue(self, name: str) -> Detail | None:
        with translated("DescribeJobQueues"):
            return _living(self._client.describe_job_queues(jobQueues=[name])["jobQueues"])

    def unfinished(self, queue: str) -> int:
        """How many jobs of a queue have not ended: at least so many, for it reads one page each."""
        count = 0
        for status in _UNFINISHED:
            with translated("ListJobs"):
                found = self._client.list_jobs(jobQueue=queue, jobStatus=status)
                count += len(found["jobSummaryList"])
        return count

    def policies(self) -> dict[str, Detail]:
        with translated("ListSchedulingPolicies"):
            pages = self._client.get_paginator("list_scheduling_policies").paginate()
            arns = [found["arn"] for page in pages for found in page["schedulingPolicies"]]
        return {detail["name"]: detail for detail in self._described(arns)}

    def _described(self, arns: list[str]) -> Iterable[Detail]:
        for start in range(0, len(arns), _MAX_ARNS):
            with translated("DescribeSchedulingPolicies"):
                asked = arns[start : start + _MAX_ARNS]
                yield from self._client.describe_scheduling_policies(arns=asked)[
                    "schedulingPolicies"
                ]

    def _all(self, operation: str, member: str, key: str) -> dict[str, Detail]:
        name = "".join(word.capitalize() for word in operation.split("_"))
        with translated(name):
            pages = self._client.get_paginator(operation).paginate()
            found = [detail for page in pages for detail in page[member]]
        return {detail[key]: detail for detail in found if detail.get("status") != "DELETED"}

    # --- changing ---------------------------------------------------------------------------

    def create_environment(self, request: Mapping[str, Any]) -> None:
        with translated("CreateComputeEnvironment"):
            self._client.create_compute_environment(**request)

    def update_environment(self, request: Mapping[str, Any]) -> None:
        with translated("UpdateComputeEnvironment"):
            self._client.update_compute_environment(**request)

    def delete_environment(self, name: str) -> None:
        with translated("DeleteComputeEnvironment"):
            self._client.delete_compute_environment(computeEnvironment=name)

    def create_queue(self, request: Mapping[str, Any]) -> None:
        with translated("CreateJobQueue"):
            self._client.create_job_queue(**request)

    def update_queue(self, request: Mapping[str, Any]) -> None:
        with translated("UpdateJobQueue"):
            self._client.update_job_queue(**request)

    def delete_queue(self, name: str) -> None:
        with translated("DeleteJobQueue"):
            self._client.delete_job_queue(jobQueue=name)

    def create_policy(self, request: Mapping[str, Any]) -> None:
        with translated("CreateSchedulingPolicy"):
            self._client.create_scheduling_policy(**request)

    def update_policy(self, arn: str, fairshare: Mapping[str, Any]) -> None:
        with translated("UpdateSchedulingPolicy"):
            self._client.update_scheduling_policy(arn=arn, fairsharePolicy=dict(fairshare))

    def delete_policy(self, arn: str) -> None:
        with translated("DeleteSchedulingPolicy"):
            self._client.delete_scheduling_policy(arn=arn)

    def tag(self, arn: str, tags: Mapping[str, str]) -> None:
        with translated("TagResource"):
            self._client.tag_resource(resourceArn=arn, tags=dict(tags))

    def is_still_related(self, error: ServiceError) -> bool:
        """True when AWS refused a deletion because what came before it has not settled yet."""
        return error.code == "ClientException" and any(
            text in error.message for text in ("existing JobQueue relationship", "being modified")
        )


def _living(details: list[Detail]) -> Detail | None:
    return details[0] if details and details[0].get("status") != "DELETED" else None
