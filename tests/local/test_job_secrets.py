"""[secrets] of a job.toml: where values are stored, what AWS gets, and that no text has a value."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.batch.requests import SubmissionContext, definition_request, make_submission
from batchml.aws.naming import Platform
from batchml.errors import ConfigError
from batchml.local.secrets import (
    SecretError,
    SecretReference,
    SecretsManagerSecret,
    SsmParameter,
    parse,
    resolve,
)
from batchml.local.server.protocol import problems, service_model
from batchml.model.job import JobSpec, read_job
from batchml.model.secrets import SecretSource, find_secret_arn, parse_secret

HERE = "us-east-1:123456789012"
SSM = f"arn:aws:ssm:{HERE}:parameter"
MANAGER = f"arn:aws:secretsmanager:{HERE}:secret"
ROLE = "arn:aws:iam::123456789012:role/batchml-dev-execution"
DEV = Platform(
    env="dev", region="us-east-1", execution_role=ROLE,
    secrets=(f"{SSM}/team/*", f"{MANAGER}:db-AbCdEf", f"{MANAGER}:team/*"),
)  # fmt: skip
SMALLEST = {"image": "python", "command": ["true"], "name": "j"}


def job(**secrets: Any) -> JobSpec:
    return read_job({**SMALLEST, "secrets": secrets}, "job.toml")


def told(spec: JobSpec, platform: Platform = DEV) -> dict[str, str]:
    container = definition_request(spec, "i", platform)["containerProperties"]
    return {each["name"]: each["valueFrom"] for each in container["secrets"]}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ssm:/team/wandb", SecretSource("ssm", "/team/wandb")),
        ("ssm:wandb", SecretSource("ssm", "wandb")),
        ("secretsmanager:db", SecretSource("secretsmanager", "db")),
        ("secretsmanager:team/db#password", SecretSource("secretsmanager", "team/db", "password")),
        (f"{SSM}/team/wandb", SecretSource("ssm", "team/wandb", "", f"arn:aws:ssm:{HERE}", ":")),
        (f"{MANAGER}:db-AbCdEf:k::v1",
         SecretSource("secretsmanager", "db-AbCdEf", "k", f"arn:aws:secretsmanager:{HERE}", ":v1")),
        (f"{MANAGER}:db-AbCdEf#k",
         SecretSource("secretsmanager", "db-AbCdEf", "k", f"arn:aws:secretsmanager:{HERE}", ":")),
        ("ssm:", None),
        ("ssm:/a#b", None),
        ("secretsmanager:db#", None),
        ("sk-live-0123456789", None),
        (f"arn:aws:ssm:{HERE}:secret:x", None),
        (f"{SSM}/x:k::", None),
    ],
)  # fmt: skip
def test_a_text_says_where_a_value_is_kept(text: str, kept: SecretSource | None) -> None:
    assert parse_secret(text) == kept


@pytest.mark.parametrize(
    ("text", "value_from"),
    [
        ("ssm:/team/wandb", f"{SSM}/team/wandb"),
        ("ssm:team/wandb", f"{SSM}/team/wandb"),
        (f"{SSM}/team/wandb", f"{SSM}/team/wandb"),
        ("secretsmanager:db", f"{MANAGER}:db-AbCdEf"),
        ("secretsmanager:db#password", f"{MANAGER}:db-AbCdEf:password::"),
        (f"{MANAGER}:db-AbCdEf:k:AWSPREVIOUS:", f"{MANAGER}:db-AbCdEf:k:AWSPREVIOUS:"),
        (f"{MANAGER}:db-AbCdEf", f"{MANAGER}:db-AbCdEf"),
        # What a pattern allows: AWS understands an ARN without the six characters.
        ("secretsmanager:team/db#k", f"{MANAGER}:team/db:k::"),
    ],
)
def test_aws_gets_the_arn_that_the_environment_lists(text: str, value_from: str) -> None:
    assert told(job(A=text)) == {"A": value_from}


def test_the_embedded_server_gets_what_the_file_says() -> None:
    texts = {"A": "ssm:/team/wandb", "B": "secretsmanager:db#k", "C": f"{MANAGER}:db-AbCdEf#k"}
    found = told(job(**texts), Platform())
    assert found == {**texts, "C": f"{MANAGER}:db-AbCdEf:k::"}
    assert [parse(each) for each in found.values()] == [
        SsmParameter("/team/wandb"),
        SecretsManagerSecret("db", "", "k"),
        SecretsManagerSecret(f"{MANAGER}:db-AbCdEf", "us-east-1", "k"),
    ]


def test_the_users_own_file_may_say_it_in_full_or_by_the_name(tmp_path: Path) -> None:
    file = tmp_path / "secrets.toml"
    file.write_text(
        '"/a" = "by name"\n"ssm:/b" = "in full"\n"secretsmanager:c#k" = "the member"\n'
        """"secretsmanager:d" = '{"k": "of the object"}'\n"""
    )
    file.chmod(0o600)
    texts = ("ssm:/a", "ssm:/b", "secretsmanager:c#k", "secretsmanager:d#k")
    asked = [{"name": f"S{place}", "valueFrom": text} for place, text in enumerate(texts)]
    found = resolve(asked, tmp_path, fetch=lambda source: str(source))
    assert list(found.values()) == ["by name", "in full", "the member", "of the object"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("secretsmanager:d#none", "the secret has no key 'none'"),
        ("secretsmanager:dd", "not in the secrets file (did you mean secretsmanager:d?), and from "
                              "Secrets Manager: denied"),
        ("ssm:/none", "not in the secrets file, and from SSM: denied"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_says_where_it_was_looked_for(
    tmp_path: Path, text: str, says: str
) -> None:
    def fetch(source: SecretReference) -> str:
        raise SecretError("denied")

    file = tmp_path / "secrets.toml"
    file.write_text(f"""\"secretsmanager:d" = '{{"k": "{VALUE}"}}'\n""")
    file.chmod(0o600)
    with pytest.raises(SecretError) as caught:
        resolve([{"name": "A", "valueFrom": text}], tmp_path, fetch)
    assert str(caught.value) == f"A: {text}: {says}"


def test_what_is_not_listed_is_refused_all_at_once_with_the_line_to_add() -> None:
    spec = job(A="ssm:/other/a", B="secretsmanager:none", C="ssm:/team/fine")
    with pytest.raises(ConfigError) as caught:
        definition_request(spec, "i", DEV)
    first, second = caught.value.mistakes
    assert first == f"secrets.A: {SSM}/other/a is not among the secrets that jobs of dev may use."
    assert second.startswith(f"secrets.B: {MANAGER}:none-?????? is not among")
    assert f'secrets = ["{SSM}/team/*", ' in second
    assert f'"{SSM}/other/a", "{MANAGER}:none-??????"], then: batchml setup --env dev' in second


def test_the_line_to_add_is_one_that_lets_it_in() -> None:
    for text in ("ssm:/other/a", "secretsmanager:none", "secretsmanager:none#k"):
        with pytest.raises(ConfigError) as caught:
            definition_request(job(A=text), "i", DEV)
        arn = caught.value.mistakes[0].split()[1]
        kept = parse_secret(text)
        assert kept is not None
        assert find_secret_arn(kept, [arn])


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("ssm:/team/wandb", f"{SSM}/team"),
        ("ssm:/team/wandb", f"{MANAGER}:/team/wandb"),
        ("secretsmanager:db", f"{MANAGER}:db"),  # matches no secret of that name, as a policy
        ("secretsmanager:db", f"{MANAGER}:db2-AbCdEf"),
        ("secretsmanager:my-secret", f"{MANAGER}:my-secret"),
        (f"{SSM}/a", "arn:aws:ssm:us-east-1:999999999999:parameter/a"),
    ],
)
def test_what_the_role_could_not_read_is_not_taken_for_listed(text: str, allowed: str) -> None:
    kept = parse_secret(text)
    assert kept is not None
    assert find_secret_arn(kept, [allowed]) is None


NAMES = st.from_regex(r"[a-z][a-z0-9/_.-]{0,12}", fullmatch=True)


@given(NAMES, NAMES)
def test_a_name_is_let_in_by_its_own_arn_and_by_no_other(name: str, other: str) -> None:
    assert find_secret_arn(SecretSource("ssm", name), [f"{SSM}/{name}"]) == f"{SSM}/{name}"
    assert (find_secret_arn(SecretSource("ssm", name), [f"{SSM}/{other}"]) is None) == (
        name != other
    )
    full = f"{MANAGER}:{name}-a1B2c3"
    assert find_secret_arn(SecretSource("secretsmanager", name), [full]) == full


# --- what a job.toml may say --------------------------------------------------------------------

VALUE = "sk-live-0123456789-abcdef"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"A": VALUE}, "secrets.A: does not name a secret (its text is not shown here)"),
        ({"A B": "ssm:/a"}, "secrets.A B: is not a name for an environment variable"),
        ({"BATCHML_KEY": "ssm:/a"}, "reserved for AWS Batch and batchml"),
        ({"AWS_BATCH_X": "ssm:/a"}, "reserved for AWS Batch and batchml"),
        ({"TOLD": "ssm:/a"}, "secrets.TOLD: is also under [env]"),
        ({"A": {"key": VALUE}}, "secrets.A: expected texts such as"),
        ({"A": 4711}, "secrets.A: expected texts such as"),
        (VALUE, "secrets: expected texts such as"),
    ],
)
def test_a_mistake_never_says_what_may_be_the_value(table: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_job({**SMALLEST, "env": {"TOLD": "x"}, "secrets": table}, "job.toml")
    assert says in str(caught.value)
    for secret in (VALUE, "4711"):
        assert secret not in str(caught.value)


def test_secrets_are_part_of_what_names_the_definition() -> None:
    names = {
        definition_request(spec, "i", DEV)["jobDefinitionName"]
        for spec in (job(), job(A="ssm:/team/a"), job(A="ssm:/team/b"), job(B="ssm:/team/a"))
    }
    assert len(names) == 4


@pytest.mark.parametrize("more", [{}, {"nodes": 2}])
def test_batch_takes_the_request_of_each_kind_of_run(more: dict[str, int]) -> None:
    spec = read_job({**SMALLEST, **more, "secrets": {"A": "ssm:/team/wandb"}}, "job.toml")
    made = make_submission(
        spec, image="i", queue="q", submission=SubmissionContext(key="k"), platform=DEV
    )
    model = service_model("batch")
    for operation, request in (
        ("RegisterJobDefinition", made.register),
        ("SubmitJob", made.submit),
    ):
        shape = model.operation_model(operation).input_shape
        assert list(problems(shape, request, strict=True)) == []
    assert str(made.register).count(f"{SSM}/team/wandb") == 1
    assert "secrets" not in str(made.submit), "SubmitJob cannot say them"
