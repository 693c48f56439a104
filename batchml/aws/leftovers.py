"""Resources that a teardown leaves, or that prevent it: backups, repositories, attached policies.

Sources: IAM API Reference, ListEntitiesForPolicy, DeletePolicy; IAM Identity Center User Guide,
"Custom permissions" (roles `AWSReservedSSO_NAME_ID`); AWS Backup API Reference,
ListRecoveryPointsByResource; Amazon EFS User Guide, "Backing up file systems" (automatic backups).
"""

import re
from typing import Literal

from msgspec import Struct

from batchml.aws.errors import call, read_entries, read_pages
from batchml.aws.session import Session
from batchml.errors import ServiceError

_RESERVED = re.compile(r"AWSReservedSSO_(.+)_[0-9a-f]+")
_PREFIX = "batchml/"  # of our repositories in ECR


class Attachment(Struct, frozen=True, order=True):
    """A user, group or role that has a policy."""

    kind: Literal["group", "role", "user"]
    name: str

    @property
    def permission_set(self) -> str:
        """The permission set of IAM Identity Center that made the role, or ""."""
        found = _RESERVED.fullmatch(self.name) if self.kind == "role" else None
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"permission set {self.permission_set}" if self.permission_set else (
            f"{self.kind} {self.name}"
        )  # fmt: skip


class RecoveryPoint(Struct, frozen=True):
    """A backup of a file system."""

    arn: str
    vault: str
    size: int  # bytes; 0 if AWS does not say


class PolicyApi:
    """Who has a managed policy. The methods raise what `call` does."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def attachments(self, policy: str) -> tuple[Attachment, ...]:
        """The entities to which a policy is attached, sorted; none if it does not exist."""
        found: list[Attachment] = []
        try:
            for page in read_pages(
                self._session.client("iam"), "iam:ListEntitiesForPolicy", PolicyArn=policy
            ):
                found += [Attachment("user", each["UserName"]) for each in page["PolicyUsers"]]
                found += [Attachment("group", each["GroupName"]) for each in page["PolicyGroups"]]
                found += [Attachment("role", each["RoleName"]) for each in page["PolicyRoles"]]
        except ServiceError as error:
            if error.code != "NoSuchEntity":
                raise
        return tuple(sorted(found))

    def detach(self, policy: str, one: Attachment) -> None:
        """Take a policy from an entity, if it has it."""
        operation, member = {
            "user": ("iam:DetachUserPolicy", "UserName"),
            "group": ("iam:DetachGroupPolicy", "GroupName"),
            "role": ("iam:DetachRolePolicy", "RoleName"),
        }[one.kind]
        try:
            call(self._session.client("iam"), operation, PolicyArn=policy, **{member: one.name})
        except ServiceError as error:
            if error.code != "NoSuchEntity":
                raise


def fetch_recovery_points(session: Session, resource: str) -> list[RecoveryPoint]:
    """The backups of a resource, which may not exist any more. It raises what `call` does."""
    entries = read_entries(
        session.client("backup"), "backup:ListRecoveryPointsByResource", "RecoveryPoints",
        ResourceArn=resource,
    )  # fmt: skip
    return [
        RecoveryPoint(
            each["RecoveryPointArn"], each["BackupVaultName"], each.get("BackupSizeBytes", 0)
        )
        for each in entries
        if each.get("Status") != "DELETING"
    ]


def fetch_repositories(session: Session) -> list[str]:
    """The names of batchml's repositories in ECR, sorted. It raises what `call` does."""
    entries = read_entries(session.client("ecr"), "ecr:DescribeRepositories", "repositories")
    names = (each["repositoryName"] for each in entries)
    return sorted(name for name in names if name.startswith(_PREFIX))
