"""Where values of secrets come from, and that nothing stores them. docs/behaviours.md B220-B224."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.local.secrets import (
    SecretError,
    SecretReference,
    SecretsManagerSecret,
    SsmParameter,
    member,
    parse,
    read_secrets_file,
    resolve,
)

ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:team/db-AbCdEf"


@pytest.mark.parametrize(
    ("value_from", "source"),
    [
        (ARN, SecretsManagerSecret(ARN, "eu-west-1")),
        (f"{ARN}:user::", SecretsManagerSecret(ARN, "eu-west-1", "user")),
        (f"{ARN}::AWSPREVIOUS:", SecretsManagerSecret(ARN, "eu-west-1", stage="AWSPREVIOUS")),
        (f"{ARN}:::9d4c", SecretsManagerSecret(ARN, "eu-west-1", version="9d4c")),
        (
            f"{ARN}:user:AWSPREVIOUS:9d4c",
            SecretsManagerSecret(ARN, "eu-west-1", "user", "AWSPREVIOUS", "9d4c"),
        ),
        ("wandb", SsmParameter("wandb")),
        ("/team/wandb", SsmParameter("/team/wandb")),
        (
            "arn:aws-cn:ssm:cn-north-1:123456789012:parameter/team/wandb",
            SsmParameter(
                "arn:aws-cn:ssm:cn-north-1:123456789012:parameter/team/wandb", "cn-north-1"
            ),
        ),
    ],
)
def test_a_value_from_is_read_as_ecs_reads_it(value_from: str, source: SecretReference) -> None:
    assert parse(value_from) == source


@pytest.mark.parametrize(
    "value_from",
    [
        f"{ARN}:user",
        f"{ARN}:user:AWSPREVIOUS",
        f"{ARN}:a:b:c:d",
        "arn:aws:secretsmanager:eu-west-1:123456789012:secret:",
        "arn:aws:secretsmanager:eu-west-1:123456789012:other:name",
        "arn:aws:ssm:eu-west-1:123456789012:document/name",
        "arn:aws:s3:::bucket/key",
        "arn:",
    ],
)
def test_what_is_neither_a_secret_nor_a_parameter_is_refused(value_from: str) -> None:
    with pytest.raises(SecretError):
        parse(value_from)


@given(st.text())
def test_any_text_is_read_or_refused(value_from: str) -> None:
    try:
        parse(value_from)
    except SecretError:
        pass


def test_one_member_of_a_json_object_is_text_or_json() -> None:
    text = json.dumps({"user": "u", "port": 5432, "tls": True, "hosts": ["a"]})
    assert member(text, "") == text
    assert [member(text, key) for key in ("user", "port", "tls", "hosts")] == [
        "u",
        "5432",
        "true",
        '["a"]',
    ]
    for wrong in ("hunter2", '["hunter2"]', '{"hunter2": 1}'):
        with pytest.raises(SecretError) as told:
            member(wrong, "user")
        assert "hunter2" not in str(told.value)


def keep(root: Path, name: str, text: str, mode: int = 0o600) -> Path:
    path = root / name
    path.write_text(text)
    path.chmod(mode)
    return path


def entries(**secrets: str) -> list[dict[str, str]]:
    return [{"name": name, "valueFrom": source} for name, source in secrets.items()]


def test_the_users_own_file_comes_first_and_toml_before_json(tmp_path: Path) -> None:
    keep(tmp_path, "secrets.json", json.dumps({"a": "json", "b": "json"}))
    keep(tmp_path, "secrets.toml", f'a = "toml"\n"{ARN}" = "mine"')
    asked: list[SecretReference] = []

    def fetch(source: SecretReference) -> str:
        asked.append(source)
        return "aws"

    found = resolve(entries(A="a", B="b", C=ARN, D="c"), tmp_path, fetch)
    assert found == {"A": "toml", "B": "json", "C": "mine", "D": "aws"}
    assert asked == [SsmParameter("c")]


def test_without_a_file_there_is_nothing_of_the_users(tmp_path: Path) -> None:
    assert read_secrets_file(tmp_path) == {}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o777])
def test_a_file_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = keep(tmp_path, "secrets.toml", 'a = "hunter2"', mode)
    with pytest.raises(SecretError, match=f"chmod 600 {path}"):
        read_secrets_file(tmp_path)


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    other = keep(tmp_path, "elsewhere.toml", 'a = "hunter2"')
    os.symlink(other, tmp_path / "secrets.toml")
    with pytest.raises(SecretError, match="cannot be read"):
        read_secrets_file(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("secrets.toml", 'a = "hunter2'),
        ("secrets.toml", "hunter2"),
        ("secrets.toml", 'hunter2 = "x"\nhunter2 = "y"'),
        ("secrets.json", '{"a": "hunter2"'),
        ("secrets.json", '["hunter2"]'),
    ],
)
def test_a_file_that_cannot_be_read_is_not_quoted(name: str, text: str, tmp_path: Path) -> None:
    keep(tmp_path, name, text)
    with pytest.raises(SecretError) as told:
        read_secrets_file(tmp_path)
    assert "hunter2" not in str(told.value) and name in str(told.value)


@pytest.mark.parametrize("value", ["hunter2\0", "hunter2\ud800"])
def test_what_no_variable_can_hold_is_refused_and_not_quoted(value: str, tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="A: a: no variable can hold it") as told:
        resolve(entries(A="a"), tmp_path, lambda source: value)
    assert "hunter2" not in str(told.value)
    assert told.value.__cause__ is None
