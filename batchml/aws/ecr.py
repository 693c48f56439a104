"""Amazon ECR: one repository `batchml/NAME` for each image, and what is in it.

Requests are pure values. Source: Amazon ECR API reference; Amazon ECR User Guide, "Lifecycle
policies", "Image tag mutability", "Private registry authentication".
"""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchml.aws.denials import explain_denial, in_one_line, parse_denial, statement
from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import AccessError, NotFound, ServiceError

KEEP = 50  # images of a repository; definitions that are in use name them by digest
_PREFIX = "batchml/"

# What pushing needs on a repository: ECR User Guide, "Required permissions for pushing an image".
PUSH_ACTIONS = (
    "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload",
    "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",
)  # fmt: skip


class Repository(Struct, frozen=True):
    name: str  # with its prefix
    uri: str  # REGISTRY/batchml/NAME
    arn: str
    is_immutable: bool
    scans: bool


class Pushed(Struct, frozen=True):
    """An image in a repository. `size` in bytes, as it is pulled; `pushed_at` in s since 1970."""

    repository: str
    tag: str
    digest: str
    size: int
    pushed_at: float = 0.0


class Login(Struct, frozen=True):
    """What the Docker engine is given with a push, and nothing keeps."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.user!r}, ...)"


# --- requests, pure -----------------------------------------------------------------------------


def repository_name(image: str) -> str:
    return _PREFIX + image


def create_repository(
    image: str, env: str, tags: Mapping[str, str], kms_key: str = ""
) -> dict[str, Any]:
    """CreateRepository. Without `kms_key` (an ARN) the key is AWS's own for ECR.

    Encryption cannot be changed later.
    """
    all_tags = {**tags, "batchml:env": env, "batchml:name": image}
    key = {"kmsKey": kms_key} if kms_key else {}
    return {
        "repositoryName": repository_name(image),
        "imageTagMutability": "IMMUTABLE",
        "imageScanningConfiguration": {"scanOnPush": True},
        "encryptionConfiguration": {"encryptionType": "KMS", **key},
        "tags": [{"Key": name, "Value": value} for name, value in sorted(all_tags.items())],
    }


def lifecycle_policy(repository: str, keep: int = KEEP) -> dict[str, Any]:
    """PutLifecyclePolicy: the newest `keep` images stay, what a broken push left goes in a day."""
    policy = {"rules": [
        _rule(1, "What has no tag", "untagged",
              countType="sinceImagePushed", countUnit="days", countNumber=1),
        _rule(2, f"All but the newest {keep}", "any",
              countType="imageCountMoreThan", countNumber=keep),
    ]}  # fmt: skip
    return {"repositoryName": repository, "lifecyclePolicyText": json.dumps(policy)}


def _rule(priority: int, text: str, status: str, **selection: str | int) -> dict[str, Any]:
    return {
        "rulePriority": priority,
        "description": text,
        "selection": {"tagStatus": status, **selection},
        "action": {"type": "expire"},
    }


def repairs(repository: Repository) -> list[tuple[str, dict[str, Any]]]:
    """The operations that bring a repository that someone else made to what ours are."""
    found: list[tuple[str, dict[str, Any]]] = []
    name = {"repositoryName": repository.name}
    if not repository.is_immutable:
        found.append(("PutImageTagMutability", {**name, "imageTagMutability": "IMMUTABLE"}))
    if not repository.scans:
        scan = {"imageScanningConfiguration": {"scanOnPush": True}}
        found.append(("PutImageScanningConfiguration", {**name, **scan}))
    return found


def denied(text: str, arn: str) -> AccessError:
    """What to say when a push to the repository `arn` is refused: the statement that allows it.

    All that a push needs, not only what it lacked first.
    """
    denial = parse_denial(text)
    if denial is not None and denial.explicit:
        return AccessError(explain_denial("Push", denial), code="AccessDenied")
    allowed = statement(PUSH_ACTIONS, [arn])
    whose = "a policy of yours"
    if denial is not None and denial.policy.startswith("resource-based"):
        del allowed["Resource"]
        allowed["Principal"] = {"AWS": denial.who or "*"}
        whose = f"the policy of the repository {arn}"
    return AccessError(
        f"{text}\nAdd this statement to {whose}: {in_one_line(allowed)}", code="AccessDenied"
    )


# --- the service --------------------------------------------------------------------------------


class Ecr:
    def __init__(self, session: Session) -> None:
        self._session = session

    def ensure(
        self, image: str, env: str, tags: Mapping[str, str] | None = None, kms_key: str = ""
    ) -> tuple[Repository, bool]:
        """The image's repository, and whether it was made now. Each step may have been done before.

        Raises AccessError, ServiceError, ServiceUnreachable.
        """
        name = repository_name(image)
        found = self.repository(image)
        made = found is None
        if found is None:
            try:
                self._call("CreateRepository", create_repository(image, env, tags or {}, kms_key))
            except ServiceError as error:
                if error.code != "RepositoryAlreadyExistsException":  # someone was faster
                    raise
            found = self.repository(image)
            if found is None:
                raise ServiceError("CreateRepository", "RepositoryNotFound", f"{name} is gone", 0)
        for operation, request in repairs(found):
            self._call(operation, request)
        if not self._has_lifecycle(name):
            self._call("PutLifecyclePolicy", lifecycle_policy(name))
        return found, made

    def repository(self, image: str) -> Repository | None:
        name = repository_name(image)
        try:
            answer = self._call("DescribeRepositories", {"repositoryNames": [name]})
        except ServiceError as error:
            if error.code == "RepositoryNotFoundException":
                return None
            raise
        with translated("DescribeRepositories"):
            return _to_repository(answer["repositories"][0])

    def find(self, image: str, tag: str) -> Pushed | None:
        """The image of this tag, or None."""
        name = repository_name(image)
        request = {"repositoryName": name, "imageIds": [{"imageTag": tag}]}
        try:
            answer = self._call("DescribeImages", request)
        except ServiceError as error:
            if error.code in ("ImageNotFoundException", "RepositoryNotFoundException"):
                return None
            raise
        with translated("DescribeImages"):
            return next((_to_pushed(detail, tag) for detail in answer["imageDetails"]), None)

    def pushed(self, image: str) -> list[Pushed]:
        """The images of a repository that have tags, newest first."""
        name = repository_name(image)
        request = {"repositoryName": name, "filter": {"tagStatus": "TAGGED"}}
        found: list[Pushed] = []
        try:
            with translated("DescribeImages"):
                pages = self._client.get_paginator("describe_images").paginate(**request)
                for page in pages:
                    for detail in page["imageDetails"]:
                        found += [_to_pushed(detail, tag) for tag in detail["imageTags"]]
        except ServiceError as error:
            if error.code != "RepositoryNotFoundException":
                raise
        return sorted(found, key=lambda one: (-one.pushed_at, one.tag))

    def repositories(self) -> list[Repository]:
        """All of ours in this account and region."""
        with translated("DescribeRepositories"):
            pages = self._client.get_paginator("describe_repositories").paginate()
            every = [_to_repository(one) for page in pages for one in page["repositories"]]
        return [one for one in every if one.name.startswith(_PREFIX)]

    def login(self) -> Login:
        """A password for 12 hours; it is kept nowhere."""
        answer = self._call("GetAuthorizationToken", {})
        with translated("GetAuthorizationToken"):
            token = answer["authorizationData"][0]["authorizationToken"]
        user, _, password = base64.b64decode(token).decode().partition(":")
        return Login(user, password)

    def _has_lifecycle(self, name: str) -> bool:
        try:
            self._call("GetLifecyclePolicy", {"repositoryName": name})
        except ServiceError as error:
            if error.code == "LifecyclePolicyNotFoundException":
                return False
            raise
        return True

    @property
    def _client(self) -> Any:
        return self._session.client("ecr")

    def _call(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        method = re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()
        with translated(operation):
            answer: dict[str, Any] = getattr(self._client, method)(**request)
            return answer


def not_pushed(reference: str, command: str) -> NotFound:
    return NotFound("Image", reference, (), f"It is not in ECR. Put it there: {command}")


def _to_repository(found: Mapping[str, Any]) -> Repository:
    scanning = found.get("imageScanningConfiguration") or {}
    return Repository(
        name=found["repositoryName"],
        uri=found["repositoryUri"],
        arn=found["repositoryArn"],
        is_immutable=found.get("imageTagMutability") == "IMMUTABLE",
        scans=bool(scanning.get("scanOnPush")),
    )


def _to_pushed(detail: Mapping[str, Any], tag: str) -> Pushed:
    at = detail.get("imagePushedAt")
    return Pushed(
        repository=detail["repositoryName"],
        tag=tag,
        digest=detail["imageDigest"],
        size=int(detail.get("imageSizeInBytes", 0)),
        pushed_at=at.timestamp() if at is not None else 0.0,
    )
