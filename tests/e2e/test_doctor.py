"""`doctor` and `init` as they are typed: real botocore sessions, real files of the user."""

import json
import os
import pty
import re
import subprocess
from datetime import UTC, datetime, timedelta
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli, Shown, write_job

START = "https://corp.awsapps.com/start"
AWS_CONFIG = f"""
[profile session]
sso_session = corp
sso_account_id = 123456789012
sso_role_name = Dev
[sso-session corp]
sso_start_url = {START}
sso_region = us-east-1
[profile legacy]
sso_start_url = {START}
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = Dev
[profile keys]
aws_access_key_id = AKIAIOSFODNN7EXAMPLE
aws_secret_access_key = secret
[profile mfa]
role_arn = arn:aws:iam::123456789012:role/train
source_profile = keys
mfa_serial = arn:aws:iam::123456789012:mfa/me
[profile partial]
aws_access_key_id = AKIAIOSFODNN7EXAMPLE
[profile lost-tool]
credential_process = /nonexistent/tool
[profile failing-tool]
credential_process = sh -c "echo no such vault >&2; exit 3"
[profile babbling-tool]
credential_process = echo hello
[profile circle]
role_arn = arn:aws:iam::123456789012:role/a
source_profile = circle-b
[profile circle-b]
role_arn = arn:aws:iam::123456789012:role/b
source_profile = circle
[profile half-sso]
sso_account_id = 123456789012
sso_role_name = Dev
"""


class User:
    """A person's HOME with AWS files, and a batchml.toml in the working folder."""

    def __init__(self, cli: Cli, home: Path) -> None:
        self.cli, self.home = cli, home
        (home / ".aws" / "sso" / "cache").mkdir(parents=True)
        (home / ".aws" / "config").write_text(AWS_CONFIG)
        self.environ = {
            "HOME": str(home),
            "AWS_EC2_METADATA_DISABLED": "true",
            # Whatever gets as far as the net ends there.
            "HTTPS_PROXY": "http://127.0.0.1:9",
        }

    def configure(self, profile: str, more: str = "") -> None:
        text = f'[env.dev]\nregion = "us-east-1"\nprofile = "{profile}"\n{more}'
        (self.cli.folder / "batchml.toml").write_text(text)

    def doctor(self, profile: str = "", **environ: str) -> Shown:
        self.configure(profile)
        return self.cli("doctor", "--env", "dev", "--json", timeout=60, **self.environ | environ)

    def token(self, key: str, expires: datetime) -> None:
        """What `aws sso login` left behind."""
        token = {
            "startUrl": START, "region": "us-east-1", "accessToken": "t",
            "expiresAt": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip
        name = sha1(key.encode()).hexdigest()
        (self.home / ".aws" / "sso" / "cache" / f"{name}.json").write_text(json.dumps(token))


@pytest.fixture
def user(cli: Cli, tmp_path: Path) -> User:
    return User(cli, tmp_path / "person")


def credentials(shown: Shown) -> dict[str, Any]:
    assert shown.code == 77, shown.err
    (found,) = (each for each in shown.json["findings"] if each["check"] == "credentials")
    assert found["mark"] == "problem"
    assert not shown.json["ok"]
    return dict(found)


@pytest.mark.parametrize(
    ("profile", "words", "fix"),
    [
        ("session", "not signed in to SSO", "aws sso login --profile session"),
        ("legacy", "not signed in to SSO", "aws sso login --profile legacy"),
        ("mfa", "needs an MFA code", "aws sts get-caller-identity --profile mfa"),
        ("partial", "aws_secret_access_key is missing", "aws configure --profile partial"),
        ("lost-tool", "/nonexistent/tool", "aws sts get-caller-identity --profile lost-tool"),
        ("failing-tool", "no such vault", "run the command of credential_process in ~/.aws/config"),
        ("babbling-tool", "could not be read", "aws sts get-caller-identity"),
        ("circle", "Infinite loop", "~/.aws/config"),
        ("half-sso", "missing required configuration", "~/.aws/config"),
        ("sesion", "Did you mean 'session'?", "aws configure sso --profile sesion"),
        ("", "no AWS credentials were found", "export AWS_PROFILE=session"),
    ],
)
def test_each_kind_of_credentials_has_its_fix(
    user: User, profile: str, words: str, fix: str
) -> None:
    found = credentials(user.doctor(profile))
    assert words in found["text"]
    assert fix in found["fix"][0]
    assert len(found["text"].splitlines()) == 1


@pytest.mark.parametrize(("profile", "key"), [("session", "corp"), ("legacy", START)])
def test_an_sso_session_that_is_over_is_told_as_one(user: User, profile: str, key: str) -> None:
    user.token(key, datetime.now(UTC) - timedelta(hours=1))
    assert credentials(user.doctor(profile))["fix"] == [f"aws sso login --profile {profile}"]


def test_an_sso_session_that_lasts_is_not_complained_about(user: User) -> None:
    """It goes on to the net, which is not there."""
    user.token("corp", datetime.now(UTC) + timedelta(hours=1))
    shown = user.doctor("session")
    assert shown.code == 74
    (found,) = (each for each in shown.json["findings"] if each["check"] == "credentials")
    assert "no answer from the service" in found["text"]


def test_a_damaged_aws_file_is_named(user: User) -> None:
    (user.home / ".aws" / "config").write_text("[profile x\nno")
    assert "~/.aws/config" in credentials(user.doctor("x"))["fix"][0]


def test_half_of_the_keys_in_variables_is_told(user: User) -> None:
    found = credentials(user.doctor(AWS_ACCESS_KEY_ID="AKIAIOSFODNN7EXAMPLE"))
    assert "AWS_SECRET_ACCESS_KEY is missing" in found["text"]


def test_a_profile_of_the_environment_is_the_one_complained_about(user: User) -> None:
    found = credentials(user.doctor(AWS_PROFILE="nope"))
    assert "'nope'" in found["text"] and "AWS_PROFILE names it" in found["text"]


def test_every_command_tells_the_same(user: User) -> None:
    user.configure("session")
    shown = user.cli("ls", "--env", "dev", timeout=60, **user.environ)
    assert shown.code == 77
    assert "aws sso login --profile session" in shown.err


def test_on_a_terminal_the_mfa_code_is_asked_for(user: User) -> None:
    user.configure("mfa")
    screen, terminal = pty.openpty()
    running = subprocess.Popen(
        user.cli.command("doctor", "--env", "dev"), cwd=user.cli.folder,
        env={**user.cli.environ, **user.environ}, stdin=terminal, stdout=subprocess.PIPE,
        stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    while b"Enter MFA code for" not in seen:
        seen += os.read(screen, 1000)
    os.write(screen, b"123456\n")
    out, _ = running.communicate(timeout=60)
    os.close(screen)
    assert "no answer from the service" in out.decode()  # AssumeRole has gone to the net
    assert running.returncode == 74


def test_a_session_that_the_aws_cli_opened_with_mfa_is_used(user: User) -> None:
    """The command that the fix names leaves it in ~/.aws/cli/cache, by the arguments' hash."""
    asked = {
        "RoleArn": "arn:aws:iam::123456789012:role/train",
        "SerialNumber": "arn:aws:iam::123456789012:mfa/me",
    }
    name = sha1(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    until = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    opened = {
        "AccessKeyId": "ASIA", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": until,
    }  # fmt: skip
    cache = user.home / ".aws" / "cli" / "cache"
    cache.mkdir(parents=True)
    (cache / f"{name}.json").write_text(json.dumps({"Credentials": opened}))
    shown = user.doctor("mfa")
    (found,) = (each for each in shown.json["findings"] if each["check"] == "credentials")
    assert "no answer from the service" in found["text"]


# --- the rest of doctor --------------------------------------------------------------------------


def test_on_local_no_account_is_needed(user: User) -> None:
    shown = user.cli("doctor", "--json", timeout=60, **user.environ)
    assert shown.code == 0
    checks = {each["check"] for each in shown.json["findings"]}
    assert checks == {"config", "state", "disk", "docker", "python", "uv"}
    assert shown.json["env"] == "local"


def test_a_line_says_its_mark_and_the_fix_stands_below(user: User) -> None:
    user.configure("session")
    shown = user.cli("doctor", "--env", "dev", timeout=60, **user.environ)
    assert shown.code == 77
    lines = shown.out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("problem   "))
    assert lines[place + 1] == " " * 10 + "aws sso login --profile session"
    assert lines[0].startswith("ok        ")
    assert shown.err == ""


@pytest.mark.journey
def test_every_mistake_of_batchml_toml_is_a_line_and_the_machine_is_still_checked(
    user: User,
) -> None:
    user.configure("x", "regoin = 1\ncolour = 2\n")
    shown = user.cli("doctor", "--env", "dev", timeout=60, **user.environ)
    assert shown.code == 1
    assert re.search(r"^problem   .*batchml\.toml: 2 mistakes$", shown.out, re.MULTILINE)
    assert "Did you mean 'region'?" in shown.out
    assert "Python 3." in shown.out


def test_an_environment_that_is_not_described_is_a_problem(user: User) -> None:
    user.configure("x")
    shown = user.cli("doctor", "--env", "dve", "--json", timeout=60, **user.environ)
    assert shown.code == 1
    (found,) = (each for each in shown.json["findings"] if each["mark"] == "problem")
    assert "Did you mean 'dev'?" in found["fix"][0]


def test_a_state_folder_that_others_can_write_is_found(user: User) -> None:
    root = user.cli.home.root
    (root / "mine").write_text("")
    root.chmod(0o777)
    shown = user.cli("doctor", "--json", timeout=60, **user.environ)
    root.chmod(0o700)
    (found,) = (each for each in shown.json["findings"] if each["check"] == "state")
    assert found["mark"] == "problem"
    assert "chmod 700" in found["text"]
    assert shown.code == 1


# --- init ----------------------------------------------------------------------------------------


@pytest.mark.journey
def test_init_and_then_the_first_job_for_real(cli: Cli) -> None:
    shown = cli("init", "--region", "eu-west-1")
    assert shown.code == 0
    assert "batchml submit --wait hello" in shown.out
    assert "batchml setup --env dev --plan" in shown.out
    assert 'region = "eu-west-1"' in (cli.folder / "batchml.toml").read_text()
    done = cli("submit", "--wait", "--json", "hello")
    assert done.code == 0, done.err
    assert done.json["env"] == "local"
    assert 0 < done.json["metrics"]["loss"] < 0.02
    line = json.loads((Path(done.json["outputs"]) / "line.json").read_text())
    assert line["slope"] == pytest.approx(3, abs=0.1)
    slow = cli("submit", "--wait", "--json", "hello", "-p", "steps=1")
    assert slow.json["metrics"]["loss"] > 1


def test_init_replaces_nothing_unless_it_is_told_to(cli: Cli) -> None:
    write_job(cli.folder, "hello", "mine")
    shown = cli("init")
    assert shown.code == 2
    assert "jobs/hello/job.toml exists" in shown.err
    assert not (cli.folder / "batchml.toml").exists()
    assert (cli.folder / "jobs" / "hello" / "job.toml").read_text() == "mine"
    forced = cli("init", "--force", "--json", AWS_REGION="ap-northeast-1")
    assert forced.json == {
        "files": ["batchml.toml", "jobs/hello/job.toml", "jobs/hello/train.py"],
        "next": ["batchml submit --wait hello", "batchml setup --env dev --plan"],
    }
    assert 'region = "ap-northeast-1"' in (cli.folder / "batchml.toml").read_text()


def test_init_says_what_is_wrong_with_a_name(cli: Cli) -> None:
    shown = cli("init", "--env", "Dev!")
    assert shown.code == 2
    assert "lower-case" in shown.err or "letters" in shown.err
    assert list(cli.folder.iterdir()) == []


def test_policies_for_an_administrator_are_printed_without_credentials(cli: Cli) -> None:
    (cli.folder / "batchml.toml").write_text('[env.dev]\nregion = "eu-west-1"\n')
    lines = cli("doctor", "--env", "dev", "--policy", "setup", "--policy", "image").out.splitlines()
    assert 1 < len(lines) <= 3
    for line in lines:
        assert len(line) <= 6144, "IAM's limit of a managed policy"
        assert json.loads(line)["Version"] == "2012-10-17"
    assert "ec2:CreateVpc" in "".join(lines) and "ecr:PutImage" in "".join(lines)
    assert "arn:aws:iam::*:role/batchml-dev-*" in "".join(lines)
    (only,) = cli("doctor", "--env", "dev", "--policy", "submit", "--json").json
    assert "ec2:CreateVpc" not in str(only)
    proofs = cli("doctor", "--env", "dev", "--policy", "prove").out
    assert max(map(len, proofs.splitlines())) <= 6144
    assert "role/batchml-dev-*" in proofs and "role/batchml-prove-*-*" in proofs
    for words, text in (
        (("--env", "dev", "--policy", "stup"), "Did you mean 'setup'?"),
        (("--env", "dev", "--policy", "env use"), "no permissions in AWS are needed"),
        (("--policy", "setup"), "local needs no permissions"),
    ):
        shown = cli("doctor", *words)
        assert shown.code == 2 and text in shown.err
