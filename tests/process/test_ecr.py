"""ECR: every request judged by botocore's model, then by moto, whose ECR neither side wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.ecr import (
    KEEP,
    Ecr,
    PushedImage,
    RegistryLogin,
    create_repository,
    lifecycle_policy,
    repair_requests,
)
from batchml.aws.session import Access, Session
from batchml.errors import AccessError, ServiceError, ServiceUnreachable
from batchml.jobs.images import list_images
from batchml.local.server.protocol import problems, service_model
from tests.support.registry_rig import Refused, Registry, need_registry

KEY = "arn:aws:kms:us-east-1:123456789012:key/00000000-0000-0000-0000-000000000000"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    need_registry()
    made = Registry(tmp_path)
    yield made
    made.close()
    assert made.wrong == []


@pytest.mark.parametrize("key", ["", KEY])
def test_requests_are_what_the_service_model_asks_for(key: str) -> None:
    made = {
        "CreateRepository": create_repository("pytorch", "dev", {"team": "vision"}, key),
        "PutLifecyclePolicy": lifecycle_policy("batchml/pytorch"),
    }
    for operation, request in made.items():
        shape = service_model("ecr").operation_model(operation).input_shape
        assert list(problems(shape, request, strict=True)) == []
    assert made["CreateRepository"]["encryptionConfiguration"].get("kmsKey", "") == key


def test_the_lifecycle_keeps_the_newest() -> None:
    untagged, rest = json.loads(lifecycle_policy("x")["lifecyclePolicyText"])["rules"]
    assert (rest["selection"]["countNumber"], rest["selection"]["tagStatus"]) == (KEEP, "any")
    assert rest["rulePriority"] > untagged["rulePriority"], "ECR wants `any` to come last"


def test_what_is_missing_is_made_and_the_second_time_nothing(registry: Registry) -> None:
    ecr = Ecr(registry.session())
    first, made = ecr.ensure("x", "dev")
    assert made
    calls = len(registry.calls)
    assert ecr.ensure("x", "dev") == (first, False)
    assert {name.partition("P")[0] for name, _ in registry.calls[calls:]} <= {
        "DescribeRepositories", "GetLifecycle",
    }  # fmt: skip


@pytest.mark.parametrize("at", ["DescribeRepositories", "CreateRepository", "PutLifecyclePolicy"])
def test_an_interruption_at_any_call_is_made_good_by_the_next_run(
    registry: Registry, at: str
) -> None:
    ecr = Ecr(registry.session())
    registry.refuse = lambda operation: Refused("ServerException") if operation == at else None
    with pytest.raises(ServiceError):
        ecr.ensure("x", "dev")
    registry.refuse = lambda operation: None
    ecr.ensure("x", "dev")
    assert registry.repositories["batchml/x"]["imageTagMutability"] == "IMMUTABLE"
    assert registry.lifecycles["batchml/x"]


def test_a_repository_that_someone_else_made_is_brought_to_the_rules(registry: Registry) -> None:
    registry.call("CreateRepository", {"repositoryName": "batchml/x"})
    registry.call(
        "PutLifecyclePolicy",
        {"repositoryName": "batchml/x", "lifecyclePolicyText": '{"rules": []}' + " " * 100},
    )
    ecr = Ecr(registry.session())
    _, made = ecr.ensure("x", "dev")
    found = ecr.repository("x")
    assert found is not None
    assert (made, found.is_immutable, found.scans, repair_requests(found)) == (
        False,
        True,
        True,
        [],
    )
    assert registry.lifecycles["batchml/x"].startswith('{"rules": []}'), "theirs stays"


def test_someone_who_makes_the_repository_at_the_same_time_is_no_mistake(
    registry: Registry,
) -> None:
    def faster(operation: str) -> Refused | None:
        if operation != "CreateRepository":
            return None
        registry.refuse = lambda operation: None
        registry.call("CreateRepository", create_repository("x", "other", {}))
        return Refused("RepositoryAlreadyExistsException")

    registry.refuse = faster
    found, _ = Ecr(registry.session()).ensure("x", "dev")
    assert found.name == "batchml/x"


def test_what_is_not_there_is_none(registry: Registry) -> None:
    ecr = Ecr(registry.session())
    assert ecr.find("x", "t") is None
    assert ecr.repository("x") is None
    assert ecr.list_images("x") == []
    ecr.ensure("x", "dev")
    assert ecr.find("x", "t") is None


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("AccessDeniedException", AccessError, '"ecr:CreateRepository"'),
        ("ThrottlingException", ServiceUnreachable, "too busy"),
        ("LimitExceededException", ServiceError, "LimitExceededException"),
    ],
)
def test_a_refusal_of_ecr_is_an_error_of_ours(
    registry: Registry, code: str, kind: type[Exception], words: str
) -> None:
    message = (
        "User: arn:aws:iam::123456789012:user/me is not authorized to perform: "
        "ecr:CreateRepository on resource: arn:aws:ecr:us-east-1:123456789012:repository/batchml/x "
        "because no identity-based policy allows the ecr:CreateRepository action"
    )
    registry.refuse = lambda operation: (
        Refused(code, message) if operation == "CreateRepository" else None
    )
    with pytest.raises(kind) as failed:
        Ecr(registry.session()).ensure("x", "dev")
    assert words in str(failed.value)


def test_a_login_does_not_show_its_password(registry: Registry) -> None:
    login = Ecr(registry.session()).login()
    assert login == RegistryLogin("AWS", registry.token)
    assert registry.token not in repr(login)


class MotoSession(Session):
    def __init__(self, made: Any) -> None:
        super().__init__(Access("us-east-1"))
        self._ecr = made

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any:
        return self._ecr


def test_moto_takes_it_too() -> None:
    import boto3
    from moto import mock_aws

    with mock_aws():
        client = boto3.client(
            "ecr", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="s"
        )
        ecr = Ecr(MotoSession(client))
        repository, made = ecr.ensure("x", "dev", {"team": "vision"})
        assert made
        assert ecr.ensure("x", "dev") == (repository, False)
        assert repository.uri == "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/x"
        tags = client.list_tags_for_resource(resourceArn=repository.arn)["tags"]
        assert {"Key": "batchml:env", "Value": "dev"} in tags
        client.create_repository(repositoryName="theirs")
        assert ecr.list_repositories() == [repository]
        manifest = {
            "schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "x", "size": 1, "digest": f"sha256:{'0' * 64}"}, "layers": [],
        }  # fmt: skip
        client.put_image(
            repositoryName="batchml/x", imageManifest=json.dumps(manifest), imageTag="0123456789ab"
        )
        found = ecr.find("x", "0123456789ab")
        assert isinstance(found, PushedImage)
        assert found.digest.startswith("sha256:")
        assert ecr.find("x", "nothing") is None
        (shown,) = list_images(None, ecr, ())
        assert (shown.name, shown.tag, shown.flavor) == ("x", "0123456789ab", None)
        assert (shown.digest, shown.built, shown.pushed) == (found.digest, False, True)
        assert ecr.login().user == "AWS"
