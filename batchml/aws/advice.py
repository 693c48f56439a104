"""What is wrong with credentials, and the exact way out, by how they came about.

Sources: botocore's credential providers (their METHOD words); AWS CLI User Guide, "Authentication
and access credentials"; IAM User Guide, "Troubleshoot signature errors".
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from batchml.errors import did_you_mean

MAX_SKEW = 240.0  # seconds; AWS refuses from 300 on
_SERVER_TIME = re.compile(r"\((?P<time>\d{8}T\d{6}Z) [+-] \d+ min")
_KEY_VARIABLES = "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN"


class Caller(Struct, frozen=True):
    """Who signs requests: the profile that batchml.toml names, if any, and botocore's word for
    where the credentials came from ("env", "sso", "login", "assume-role", ...)."""

    profile: str = ""
    method: str = ""
    known: tuple[str, ...] = ()  # the profiles that there are

    @property
    def flag(self) -> str:
        """What makes the AWS CLI be the same caller. AWS_PROFILE it reads by itself."""
        return f" --profile {self.profile}" if self.profile else ""

    @property
    def place(self) -> str:
        return f"profile {self.profile!r}" if self.profile else "the default profile"


Details = Mapping[str, Any]
Advice = Callable[[Caller, str, Details], str]


def _lines(what: str, *fixes: str) -> str:
    """One line that says what is wrong, and below it what to type, a line each."""
    return "\n  ".join((" ".join(what.split()), *fixes))


def _sso(caller: Caller, text: str, details: Details) -> str:
    return _lines("you are not signed in to SSO, or no longer.", f"aws sso login{caller.flag}")


def _login(caller: Caller, text: str, details: Details) -> str:
    return _lines("the `aws login` session is missing or over.", f"aws login{caller.flag}")


def _login_denied(caller: Caller, text: str, details: Details) -> str:
    return _lines(
        "you may not take credentials by `aws login`: AWS's policy SignInLocalDevelopmentAccess, "
        "or this statement, is missing.",
        '{"Effect": "Allow", "Action": ["signin:AuthorizeOAuth2Access", '
        '"signin:CreateOAuth2Token"], "Resource": '
        '["arn:aws:signin:*:*:oauth2/public-client/localhost"]}',
        f"aws login{caller.flag}",
    )


def _none(caller: Caller, text: str, details: Details) -> str:
    if caller.profile:
        what = f"{caller.place} has no credentials."
        return _lines(what, f"aws configure{caller.flag}", f"aws configure sso{caller.flag}")
    there = [f"export AWS_PROFILE={name}   # a profile that there is" for name in caller.known[:3]]
    return _lines(
        "no AWS credentials were found.",
        *there,
        "aws configure sso   # a company's IAM Identity Center",
        "aws login           # the console's password",
        "aws configure       # access keys",
    )


def _partial(caller: Caller, text: str, details: Details) -> str:
    missing = str(details.get("cred_var", "a part"))
    if details.get("provider") == "env":
        name = missing.upper()
        return _lines(
            f"the credentials in environment variables are incomplete: {name} is missing.",
            f"export {name}=...",
            f"unset {_KEY_VARIABLES}   # to use none of them",
        )
    what = f"the credentials of {caller.place} are incomplete: {missing} is missing."
    return _lines(what, f"aws configure{caller.flag}")


def _no_profile(caller: Caller, text: str, details: Details) -> str:
    name = str(details.get("profile", caller.profile))
    source = "batchml.toml names it" if caller.profile == name else "AWS_PROFILE names it"
    known = f" Profiles there: {', '.join(caller.known)}." if caller.known else ""
    return _lines(
        f"the profile {name!r} is not in ~/.aws/config ({source})."
        f"{did_you_mean(name, caller.known)}{known}",
        f"aws configure sso --profile {name}",
        f"aws configure --profile {name}   # for access keys",
    )


def _retrieval(caller: Caller, text: str, details: Details) -> str:
    provider, said = details.get("provider", ""), str(details.get("error_msg", text))
    if provider == "custom-process":
        return _lines(
            f"the credential_process of {caller.place} failed: {said}",
            "run the command that ~/.aws/config gives there by hand, until it prints credentials",
        )
    if provider == "sso":
        return _sso(caller, text, details)
    if provider == "login":
        return _login(caller, text, details)
    what = f"credentials could not be had from {provider or 'their source'}: {said}"
    return _lines(what, f"aws sts get-caller-identity{caller.flag}   # what does the AWS CLI say?")


def _metadata(caller: Caller, text: str, details: Details) -> str:
    return _lines(
        f"the instance metadata service gave no credentials: {text}",
        "attach an instance profile to the instance; where this is none, sign in:",
        "aws configure sso, aws login or aws configure",
    )


def _config(caller: Caller, text: str, details: Details) -> str:
    return _lines(
        f"the AWS configuration is wrong: {text}",
        f"${{EDITOR:-vi}} ~/.aws/config   # {caller.place}; AWS_CONFIG_FILE says otherwise",
    )


def _no_region(caller: Caller, text: str, details: Details) -> str:
    return _lines("no region is set.", 'in batchml.toml, below [env.NAME]: region = "us-east-1"')


def _bad_region(caller: Caller, text: str, details: Details) -> str:
    return _lines(
        f"{text} It is in batchml.toml.",
        f"aws ec2 describe-regions --all-regions --region us-east-1{caller.flag}",
    )


def mfa_advice(caller: Caller) -> str:
    """For a profile that asks for an MFA code where nobody can type one."""
    return _lines(
        f"{caller.place} needs an MFA code, and there is no terminal to ask for it, or the "
        "session that it opened is over. In a terminal, type the command below: the session that "
        "it opens is kept in ~/.aws/cli/cache, and used here until it ends.",
        f"aws sts get-caller-identity{caller.flag}",
    )


def unreadable(caller: Caller, text: str) -> str:
    """For a credential_process that is not there, a file that is no JSON and the like."""
    return _lines(
        f"the credentials of {caller.place} could not be read: {text}",
        f"aws sts get-caller-identity{caller.flag}   # what does the AWS CLI say?",
    )


def _mfa(caller: Caller, text: str, details: Details) -> str:
    return mfa_advice(caller)


def _crt(caller: Caller, text: str, details: Details) -> str:
    return _lines(text, "pip install 'botocore[crt]'   # beside batchml")


ADVICE: Mapping[str, Advice] = {
    "NoCredentialsError": _none,
    "PartialCredentialsError": _partial,
    "ProfileNotFound": _no_profile,
    "CredentialRetrievalError": _retrieval,
    "MetadataRetrievalError": _metadata,
    "InvalidIMDSEndpointError": _metadata,
    "InvalidIMDSEndpointModeError": _metadata,
    "RefreshWithMFAUnsupportedError": _mfa,
    "SSOError": _sso,
    "SSOTokenLoadError": _sso,
    "UnauthorizedSSOTokenError": _sso,
    "TokenRetrievalError": _sso,
    "NoAuthTokenError": _sso,
    "UnknownTokenProviderError": _sso,
    "LoginError": _login,
    "LoginRefreshRequired": _login,
    "LoginTokenLoadError": _login,
    "LoginAuthorizationCodeError": _login,
    "LoginInsufficientPermissions": _login_denied,
    "MissingDependencyException": _crt,
    "UnknownCredentialError": _config,
    "InvalidConfigError": _config,
    "InfiniteLoopConfigError": _config,
    "ConfigParseError": _config,
    "ConfigNotFound": _config,
    "NoRegionError": _no_region,
    "InvalidRegionError": _bad_region,
    "UnknownRegionError": _bad_region,
}

# --- what the service says of a signature ------------------------------------------------------


def expired(caller: Caller) -> str:
    """Session credentials that are over."""
    return _lines("the credentials have expired.", *_renew(caller))


def wrong_keys(caller: Caller) -> str:
    return _lines(
        "AWS does not know these credentials, or they are turned off. (It says the same in a "
        "region that the account has not enabled: batchml doctor tells them apart.)",
        *_renew(caller),
    )


def wrong_signature(caller: Caller, message: str) -> str:
    what = f"the secret key does not belong to the access key. AWS says: {message}"
    return _lines(what, *_renew(caller))


def not_subscribed(message: str) -> str:
    return _lines(
        f"the account is not subscribed to the service, or its sign-up is not done: {message}",
        "finish it: https://console.aws.amazon.com/billing/signup",
    )


def no_such_role(caller: Caller, message: str) -> str:
    """SSO knows who you are, and does not let you be what the profile says."""
    return _lines(
        f"SSO does not give you the role of {caller.place} ({message}): sso_account_id and "
        "sso_role_name in ~/.aws/config name it.",
        f"aws configure sso{caller.flag}   # to choose among those that you have",
    )


def _renew(caller: Caller) -> tuple[str, ...]:
    flag = caller.flag
    match caller.method:
        case "env":
            return (
                "export new ones where these came from (they are in environment variables), or:",
                f"unset {_KEY_VARIABLES}",
            )
        case "sso":
            return (f"aws sso login{flag}",)
        case "login":
            return (f"aws login{flag}",)
        case "shared-credentials-file" | "config-file":
            return (f"aws configure{flag}   # new ones for {caller.place}",)
        case "iam-role" | "container-role":
            return ("they are this machine's own role's: check that the role still exists",)
        case "":
            return (f"aws sso login{flag}, aws login{flag}, or aws configure{flag}",)
    return (f"aws sts get-caller-identity{flag}   # they came by {caller.method}",)


def skew(date: str, message: str, now: float) -> float | None:
    """Seconds that this machine's clock is ahead of the server's; None when neither the answer's
    Date header nor its message tells the server's time. `now` is in seconds since 1970."""
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    try:
        return now - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        pass
    told = _SERVER_TIME.search(message)
    if told is None:
        return None
    server = datetime.strptime(told["time"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return now - server.timestamp()


def clock_is_off(seconds: float) -> str:
    """By how much, and how to set it. `seconds` is what this machine is ahead."""
    minutes = max(1, round(abs(seconds) / 60))
    long = f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"
    way = "fast" if seconds > 0 else "slow"
    return _lines(
        f"this machine's clock is {long} {way}, and AWS takes signatures of up to 5 min.",
        "sudo timedatectl set-ntp true",
    )
