"""Every exception that botocore can raise becomes one of ours, at the border, with its way out."""

from collections.abc import Callable
from typing import Any

import pytest

from batchml.aws.credentials_help import CREDENTIAL_HELP, AwsCaller, clock_skew, explain_clock_skew
from batchml.aws.errors import (
    ACCESS_CODES,
    call,
    exception_kinds,
    translate,
    translate_credential_errors,
    translate_errors,
)
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable
from tests.support.wire import NOW

RESEARCH = AwsCaller("research", "sso", ("research", "default"))


def client_error(
    code: str, status: int = 400, message: str = "words", operation: str = "SubmitJob", **about: Any
) -> Exception:
    from botocore.exceptions import ClientError

    response: dict[str, Any] = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, **about},
    }
    error: Exception = ClientError(response, operation)
    return error


def all_kinds() -> list[type[Exception]]:
    """Every exception that botocore.exceptions defines; its warnings are never raised."""
    from botocore import exceptions

    found = [kind for kind in vars(exceptions).values() if isinstance(kind, type)]
    return [
        kind
        for kind in found
        if issubclass(kind, Exception)
        and not issubclass(kind, Warning)
        and kind.__module__ == exceptions.__name__
    ]


def make(kind: type[Exception]) -> Exception:
    from botocore.exceptions import ClientError

    if issubclass(kind, ClientError):
        response = {"Error": {"Code": "SomethingException", "Message": "words"}}
        refused: Exception = kind(response, "SubmitJob")
        return refused
    error = kind.__new__(kind)
    Exception.__init__(error, "words")
    return error


def named(name: str, **details: Any) -> Exception:
    from botocore import exceptions

    error: Exception = getattr(exceptions, name)(**details)
    return error


def told(error: Exception, caller: AwsCaller = RESEARCH) -> list[str]:
    """The lines of what is said, without the operation."""
    text = str(translate("SubmitJob", error, caller, NOW))
    return [line.strip() for line in text.removeprefix("SubmitJob: ").splitlines()]


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: str(kind.__name__))
def test_somebody_thought_about_each_exception_of_the_sdk(kind: type[Exception]) -> None:
    assert kind.__name__ in exception_kinds()


def test_the_table_names_nothing_that_is_not() -> None:
    from botocore import exceptions, parsers

    for name in exception_kinds():
        assert hasattr(exceptions, name) or hasattr(parsers, name), name


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: str(kind.__name__))
def test_no_exception_of_the_sdk_gets_through(kind: type[Exception]) -> None:
    with pytest.raises(BatchmlError, match="SubmitJob") as caught, translate_errors("SubmitJob"):
        raise make(kind)
    expected = {
        "answer": ServiceError, "credentials": AccessError, "settings": AccessError,
        "lost": ServiceUnreachable, "request": ServiceError, "sdk": ServiceError,
    }  # fmt: skip
    assert type(caught.value) is expected[exception_kinds()[kind.__name__]]


@pytest.mark.parametrize("name", sorted(CREDENTIAL_HELP))
def test_advice_is_one_line_and_then_what_to_type(name: str) -> None:
    for caller in (AwsCaller(), AwsCaller(known=("a",)), RESEARCH):
        what, *fixes = CREDENTIAL_HELP[name](caller, "it says so.", {}).splitlines()
        assert what
        assert fixes
        assert all(line.startswith("  ") and line.strip() for line in fixes)


def test_a_class_of_a_later_sdk_is_judged_by_its_parent() -> None:
    from botocore import exceptions

    later = type("LaterSSOError", (exceptions.SSOError,), {"__module__": "botocore.exceptions"})
    assert told(make(later))[1:] == ["aws sso login --profile research"]
    unheard = type("Unheard", (exceptions.BotoCoreError,), {"__module__": "botocore.exceptions"})
    assert type(translate("X", make(unheard))) is ServiceError


def test_what_is_not_of_the_sdk_is_left_alone() -> None:
    with pytest.raises(ZeroDivisionError), translate_errors("X"):
        raise ZeroDivisionError
    with pytest.raises(ServiceError), translate_errors("X"):
        raise ServiceError("Y", "Code", "words", 400)
    with pytest.raises(ServiceUnreachable, match="cut off"), translate_errors("X"):
        raise KeyError("jobs")


def test_a_member_that_is_missing_anywhere_in_an_answer_means_that_it_was_cut_off() -> None:
    class Client:
        def describe_jobs(self, jobs: list[str]) -> dict[str, Any]:
            return {"jobs": [{"jobId": jobs[0], "container": {"image": "python"}}]}

    answer = call(Client(), "batch:DescribeJobs", jobs=["one"])
    (job,) = answer["jobs"]
    assert job["container"]["image"] == "python"
    assert job.get("tags", {}) == {}
    reads: list[Callable[[], Any]] = [
        lambda: answer["nextToken"],
        lambda: job["status"],
        lambda: job["container"]["vcpus"],
        lambda: job.get("container")["vcpus"],
    ]
    for read in reads:
        with pytest.raises(ServiceUnreachable, match="DescribeJobs: the answer was cut off: no "):
            read()


@pytest.mark.parametrize("code", ["TooManyRequestsException", "ThrottlingException", "Throttling"])
def test_a_service_that_is_too_busy_is_one_to_ask_again_later(code: str) -> None:
    error = translate("DescribeJobs", client_error(code, 429))
    assert isinstance(error, ServiceUnreachable)
    assert code in str(error)


def test_codes_of_the_service_tell_a_refusal_from_missing_permission() -> None:
    refused = translate("SubmitJob", client_error("ClientException"))
    assert isinstance(refused, ServiceError)
    assert (refused.code, refused.status, refused.exit_code) == ("ClientException", 400, 1)
    for code in ACCESS_CODES:
        denied = translate("SubmitJob", client_error(code, 403))
        assert isinstance(denied, AccessError)
        assert (denied.code, denied.exit_code) == (code, 77)


# --- credentials, each with its fix --------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (named("NoCredentialsError"), "aws configure --profile research"),
        (named("UnauthorizedSSOTokenError"), "aws sso login --profile research"),
        (named("SSOTokenLoadError", error_msg="e"), "aws sso login --profile research"),
        (named("TokenRetrievalError", provider="sso", error_msg="e"),
         "aws sso login --profile research"),
        (named("LoginRefreshRequired"), "aws login --profile research"),
        (named("LoginTokenLoadError", error_msg="e"), "aws login --profile research"),
        (named("RefreshWithMFAUnsupportedError"), "aws sts get-caller-identity --profile research"),
        (named("PartialCredentialsError", provider="shared-credentials-file",
               cred_var="aws_secret_access_key"), "aws configure --profile research"),
        (named("PartialCredentialsError", provider="env", cred_var="aws_secret_access_key"),
         "export AWS_SECRET_ACCESS_KEY=..."),
        (named("ProfileNotFound", profile="resaerch"), "aws configure sso --profile resaerch"),
        (named("NoRegionError"), 'in batchml.toml, below [env.NAME]: region = "us-east-1"'),
        (named("MissingDependencyException", msg="m"), "pip install 'botocore[crt]'   # beside "
         "batchml"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_the_fix_is_a_command_for_the_profile_in_use(error: Exception, fix: str) -> None:
    assert told(error)[1] == fix


def test_without_a_profile_the_command_has_none() -> None:
    assert told(named("UnauthorizedSSOTokenError"), AwsCaller())[1] == "aws sso login"


def test_a_misspelt_profile_is_told_with_those_that_there_are() -> None:
    (what, *_) = told(named("ProfileNotFound", profile="resaerch"))
    assert "AWS_PROFILE names it" in what
    assert "Did you mean 'research'?" in what
    caller = AwsCaller("resaerch", known=("research",))
    assert "batchml.toml names it" in told(named("ProfileNotFound", profile="resaerch"), caller)[0]


def test_without_credentials_a_profile_that_there_is_comes_first() -> None:
    fixes = told(named("NoCredentialsError"), AwsCaller(known=("a", "b")))[1:]
    assert fixes[0].startswith("export AWS_PROFILE=a ")
    assert fixes[-1].startswith("aws configure ")


@pytest.mark.parametrize(
    ("method", "fix"),
    [
        ("sso", "aws sso login --profile research"),
        ("login", "aws login --profile research"),
        ("shared-credentials-file", "aws configure --profile research   # new ones for profile "
         "'research'"),
        ("assume-role", "aws sts get-caller-identity --profile research   # their source: "
         "assume-role"),
    ],
)  # fmt: skip
def test_expired_credentials_are_renewed_where_they_came_from(method: str, fix: str) -> None:
    for code in ("ExpiredToken", "ExpiredTokenException"):
        assert told(client_error(code), AwsCaller("research", method))[1] == fix


def test_keys_in_variables_are_renewed_or_taken_out() -> None:
    lines = told(client_error("InvalidClientTokenId"), AwsCaller(method="env"))
    assert lines[-1] == "unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN"


def test_whoever_asked_is_known_from_the_answer_itself() -> None:
    error = client_error("ExpiredTokenException", Caller=AwsCaller("team", "sso"))
    assert "aws sso login --profile team" in str(translate("DescribeJobs", error, now=NOW))


# --- the clock -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minutes", "said"), [(7, "7 min fast"), (-7, "7 min slow"), (180, "3 h fast")]
)
def test_a_wrong_clock_is_told_in_minutes_and_not_as_wrong_keys(minutes: int, said: str) -> None:
    from email.utils import formatdate

    date: dict[str, Any] = {"HTTPHeaders": {"date": formatdate(NOW, usegmt=True)}}
    for code in ("SignatureDoesNotMatch", "RequestExpired", "AuthFailure", "ExpiredToken"):
        error = client_error(code, **date)
        text = str(translate("SubmitJob", error, RESEARCH, NOW + minutes * 60))
        assert said in text
        assert text.endswith("sudo timedatectl set-ntp true")
    right = str(translate("SubmitJob", client_error("SignatureDoesNotMatch", **date), now=NOW))
    assert "clock" not in right


def test_the_servers_time_is_read_from_the_message_where_no_header_has_it() -> None:
    message = (
        "Signature expired: 20261121T100000Z is now earlier than 20261121T101500Z "
        "(20261121T102000Z - 5 min.)"
    )
    ahead = clock_skew("", message, 1_795_255_200.0)  # 10:00 by our clock
    assert ahead == -1200
    assert "20 min slow" in explain_clock_skew(ahead)
    assert clock_skew("", "nothing", NOW) is None
    assert clock_skew("no date", "nothing", NOW) is None


# --- while credentials are had -------------------------------------------------------------------


def test_what_fails_while_signing_is_told_as_credentials() -> None:
    with pytest.raises(AccessError) as caught, translate_credential_errors(lambda: RESEARCH):
        raise FileNotFoundError(2, "No such file or directory", "/opt/tool")
    assert "'/opt/tool'" in str(caught.value)
    assert "aws sts get-caller-identity --profile research" in str(caught.value)
    with pytest.raises(ServiceUnreachable), translate_credential_errors(lambda: RESEARCH):
        raise named("EndpointConnectionError", endpoint_url="https://portal.sso")
    with pytest.raises(AccessError, match="MFA"), translate_credential_errors(lambda: RESEARCH):
        raise AccessError("MFA")


def test_a_role_that_may_not_be_assumed_says_both_sides_of_it() -> None:
    role, user = "arn:aws:iam::123456789012:role/train", "arn:aws:iam::123456789012:user/me"
    text = f"User: {user} is not authorized to perform: sts:AssumeRole on resource: {role}"
    with pytest.raises(AccessError) as caught, translate_credential_errors(lambda: RESEARCH):
        raise client_error("AccessDenied", 403, text, "AssumeRole")
    first, statement, trust = str(caught.value).splitlines()
    assert "AssumeRole" in first
    assert '"Action": ["sts:AssumeRole"]' in statement and role in statement
    assert user in trust


def test_sso_that_gives_no_such_role_says_where_it_is_named() -> None:
    with (
        pytest.raises(AccessError, match="sso_role_name"),
        translate_credential_errors(lambda: RESEARCH),
    ):
        raise client_error("ForbiddenException", 403, "No access", "GetRoleCredentials")
