"""Explain failures of credentials and missing permissions, with the command that fixes each.

An explanation is one line about the problem, and below it lines to type. It depends on the source
of the credentials: environment variables, SSO, `aws login`, files or a role.

Sources: botocore's credential providers (their METHOD words); AWS CLI User Guide, "Authentication
and access credentials"; IAM User Guide, "Troubleshoot signature errors" and "Troubleshoot access
denied error messages"; EC2 API Reference, "Error codes" (UnauthorizedOperation and its encoded
message).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from batchml.errors import did_you_mean

MAX_SKEW = 240.0  # seconds; AWS refuses from 300 on
# Patterns are compiled at first use: most commands never need them.
_SERVER_TIME = r"\((?P<time>\d{8}T\d{6}Z) [+-] \d+ min"
_KEY_VARIABLES = "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN"


class AwsCaller(Struct, frozen=True):
    """The source of the credentials that sign the requests."""

    profile: str = ""  # the profile that batchml.toml names
    method: str = ""  # the provider, in botocore's words: "env", "sso", "login", "assume-role", ...
    known: tuple[str, ...] = ()  # the profiles of ~/.aws
    region: str = ""  # the region whose services are called

    @property
    def flag(self) -> str:
        """The option for the AWS CLI to use the same profile. It reads AWS_PROFILE by itself."""
        return f" --profile {self.profile}" if self.profile else ""

    @property
    def profile_words(self) -> str:
        return f"profile {self.profile!r}" if self.profile else "the default profile"


Details = Mapping[str, Any]
Explain = Callable[[AwsCaller, str, Details], str]


def _lines(problem: str, *fixes: str) -> str:
    """One line about the problem, and below it a line for each fix."""
    return "\n  ".join((" ".join(problem.split()), *fixes))


# --- By exception of botocore ---------------------------------------------------------------------


def _sso(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines(
        "you are not signed in to SSO, or the session has ended.", f"aws sso login{caller.flag}"
    )


def _login(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines("the `aws login` session is missing or has ended.", f"aws login{caller.flag}")


def _login_denied(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines(
        "you are not allowed to use `aws login`: AWS's policy SignInLocalDevelopmentAccess, or "
        "this statement, is missing.",
        '{"Effect": "Allow", "Action": ["signin:AuthorizeOAuth2Access", '
        '"signin:CreateOAuth2Token"], "Resource": '
        '["arn:aws:signin:*:*:oauth2/public-client/localhost"]}',
        f"aws login{caller.flag}",
    )


def _none(caller: AwsCaller, text: str, details: Details) -> str:
    if caller.profile:
        problem = f"{caller.profile_words} has no credentials."
        return _lines(problem, f"aws configure{caller.flag}", f"aws configure sso{caller.flag}")
    exports = [f"export AWS_PROFILE={name}   # an existing profile" for name in caller.known[:3]]
    return _lines(
        "no AWS credentials were found.",
        *exports,
        "aws configure sso   # with a company's IAM Identity Center",
        "aws login           # with the password of the AWS console",
        "aws configure       # with access keys",
    )


def _partial(caller: AwsCaller, text: str, details: Details) -> str:
    missing = str(details.get("cred_var", "a part"))
    if details.get("provider") == "env":
        name = missing.upper()
        return _lines(
            f"the credentials in environment variables are incomplete: {name} is missing.",
            f"export {name}=...",
            f"unset {_KEY_VARIABLES}   # to use none of them",
        )
    problem = f"the credentials of {caller.profile_words} are incomplete: {missing} is missing."
    return _lines(problem, f"aws configure{caller.flag}")


def _no_profile(caller: AwsCaller, text: str, details: Details) -> str:
    name = str(details.get("profile", caller.profile))
    source = "batchml.toml names it" if caller.profile == name else "AWS_PROFILE names it"
    known = f" Its profiles: {', '.join(caller.known)}." if caller.known else ""
    return _lines(
        f"the profile {name!r} is not in ~/.aws/config ({source})."
        f"{did_you_mean(name, caller.known)}{known}",
        f"aws configure sso --profile {name}",
        f"aws configure --profile {name}   # for access keys",
    )


def _retrieval(caller: AwsCaller, text: str, details: Details) -> str:
    provider, reason = details.get("provider", ""), str(details.get("error_msg", text))
    if provider == "custom-process":
        return _lines(
            f"the credential_process of {caller.profile_words} failed: {reason}",
            "run the command of credential_process in ~/.aws/config by hand, and correct it",
        )
    if provider == "sso":
        return _sso(caller, text, details)
    if provider == "login":
        return _login(caller, text, details)
    problem = f"{provider or 'their source'} gave no credentials: {reason}"
    return _lines(problem, f"aws sts get-caller-identity{caller.flag}   # try the AWS CLI")


def _metadata(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines(
        f"the instance metadata service gave no credentials: {text}",
        "attach an instance profile to the instance; on a machine outside EC2, sign in:",
        "aws configure sso, aws login or aws configure",
    )


def _config(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines(
        f"the AWS configuration is wrong: {text}",
        f"${{EDITOR:-vi}} ~/.aws/config   # {caller.profile_words}; or the file of AWS_CONFIG_FILE",
    )


def _no_region(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines("no region is set.", 'in batchml.toml, below [env.NAME]: region = "us-east-1"')


def _bad_region(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines(
        f"{text} The region is in batchml.toml.",
        f"aws ec2 describe-regions --all-regions --region us-east-1{caller.flag}",
    )


def explain_mfa(caller: AwsCaller) -> str:
    """Explain that a profile needs an MFA code, in a process without a terminal."""
    return _lines(
        f"{caller.profile_words} needs an MFA code, and there is no terminal to ask for it, or the "
        "session of the last code has ended. In a terminal, type the command below: batchml uses "
        "the session that it stores in ~/.aws/cli/cache, until that ends.",
        f"aws sts get-caller-identity{caller.flag}",
    )


def explain_unreadable(caller: AwsCaller, text: str) -> str:
    """Explain a missing credential_process, a cache that is not JSON, and similar failures."""
    return _lines(
        f"the credentials of {caller.profile_words} could not be read: {text}",
        f"aws sts get-caller-identity{caller.flag}   # try the AWS CLI",
    )


def _mfa(caller: AwsCaller, text: str, details: Details) -> str:
    return explain_mfa(caller)


def _crt(caller: AwsCaller, text: str, details: Details) -> str:
    return _lines(text, "pip install 'botocore[crt]'   # beside batchml")


CREDENTIAL_HELP: Mapping[str, Explain] = {
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

# --- By refusal of AWS ----------------------------------------------------------------------------


def explain_expired(caller: AwsCaller) -> str:
    return _lines("the credentials have expired.", *_renew(caller))


DOCTOR_HINT = ": batchml doctor tells the two apart"  # doctor itself leaves it out


def explain_wrong_keys(caller: AwsCaller) -> str:
    region = caller.region or "the region"
    return _lines(
        "AWS does not know these credentials, or they are turned off. (AWS says the same if the "
        f"account has not enabled {region}{DOCTOR_HINT}.)",
        *_renew(caller),
    )


def explain_wrong_signature(caller: AwsCaller, message: str) -> str:
    problem = f"the secret key does not belong to the access key. AWS says: {message}"
    return _lines(problem, *_renew(caller))


def explain_no_subscription(message: str) -> str:
    return _lines(
        f"the account is not subscribed to the service, or its sign-up is incomplete: {message}",
        "finish it: https://console.aws.amazon.com/billing/signup",
    )


def explain_missing_role(caller: AwsCaller, message: str) -> str:
    """Explain that the user does not have the SSO role of the profile."""
    return _lines(
        f"SSO does not give you the role of {caller.profile_words} ({message}): sso_account_id and "
        "sso_role_name in ~/.aws/config name it.",
        f"aws configure sso{caller.flag}   # to choose one of your roles",
    )


def _renew(caller: AwsCaller) -> tuple[str, ...]:
    """The commands that get new credentials from the same source."""
    flag = caller.flag
    match caller.method:
        case "env":
            return (
                "export new ones (they are in environment variables), or:",
                f"unset {_KEY_VARIABLES}",
            )
        case "sso":
            return (f"aws sso login{flag}",)
        case "login":
            return (f"aws login{flag}",)
        case "shared-credentials-file" | "config-file":
            return (f"aws configure{flag}   # new ones for {caller.profile_words}",)
        case "iam-role" | "container-role":
            return ("they belong to this machine's role: check that the role still exists",)
        case "":
            return (f"aws sso login{flag}, aws login{flag}, or aws configure{flag}",)
    return (f"aws sts get-caller-identity{flag}   # their source: {caller.method}",)


def clock_skew(date: str, message: str, now: float) -> float | None:
    """Return by how many seconds this machine's clock is ahead of the server's.

    The server's time is in the answer's Date header or in its message; None if neither has it.
    `now` is this machine's time in seconds since the epoch.
    """
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    try:
        return now - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        pass
    match = re.search(_SERVER_TIME, message)
    if match is None:
        return None
    server = datetime.strptime(match["time"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return now - server.timestamp()


def explain_clock_skew(seconds: float) -> str:
    """`seconds`: how far this machine's clock is ahead."""
    minutes = max(1, round(abs(seconds) / 60))
    amount = f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"
    direction = "fast" if seconds > 0 else "slow"
    return _lines(
        f"this machine's clock is {amount} {direction}, and AWS accepts at most 5 min.",
        "sudo timedatectl set-ntp true",
    )


# --- Missing permissions --------------------------------------------------------------------------


_WHO = r"User:? (?P<who>arn:\S+|\S+) is not authorized"
_ACTION = (
    r"(?:not authorized )?to perform:? \[?(?P<action>[a-z0-9-]+:[A-Za-z0-9*]+)\]?"
    r"(?: on (?:the )?(?:resource:?)?\s*\[?(?P<resource>arn:[^\s\],]+|\*))?"
)
_ENCODED = r"[Ee]ncoded authorization failure message: (?P<encoded>[\w=+/-]+)"
_EXPLICIT = (
    r"explicit deny(?: in an? (?P<policy>[A-Za-z -]*?(?:policy|permissions boundary))"
    r"(?::? (?P<arn>arn:\S+))?)?"
)
_ABSENT = r"because no (?P<policy>[A-Za-z -]*?(?:policy|permissions boundary)) allows"

# Kinds of policies to which the caller can add a statement. Other kinds have another owner.
_OWN_POLICIES = ("", "identity-based policy")


class Denial(Struct, frozen=True):
    """A message about a missing permission; "" for details that the message does not have."""

    action: str
    resource: str = ""
    who: str = ""  # the principal
    explicit: bool = False  # a Deny statement matched, which no other statement can undo
    policy: str = ""  # the kind of policy that decided, in AWS's words
    policy_arn: str = ""
    encoded: str = ""  # for `aws sts decode-authorization-message`

    @property
    def is_fixable(self) -> bool:
        """Whether a statement in one of the caller's own policies would help."""
        return not self.explicit and self.policy in _OWN_POLICIES


def parse_denial(message: str) -> Denial | None:
    """Parse an AccessDenied or UnauthorizedOperation message; None if it names no action."""
    encoded = re.search(_ENCODED, message)
    action = re.search(_ACTION, message)
    if action is None and encoded is None:
        return None
    who = re.search(_WHO, message)
    explicit = re.search(_EXPLICIT, message)
    absent = re.search(_ABSENT, message)
    decided = explicit or absent
    return Denial(
        action=action["action"] if action else "",
        resource=(action["resource"] or "").rstrip(".") if action else "",
        who=who["who"] if who else "",
        explicit=explicit is not None,
        policy=(decided["policy"] or "") if decided else "",
        policy_arn=(explicit["arn"] or "").rstrip(".") if explicit else "",
        encoded=encoded["encoded"] if encoded else "",
    )


def allow_statement(actions: Iterable[str], resources: Iterable[str]) -> dict[str, Any]:
    """The policy statement that allows `actions` on `resources`, or on any resource."""
    return {
        "Effect": "Allow",
        "Action": sorted(set(actions)),
        "Resource": sorted(set(resources)) or ["*"],
    }


def explain_denial(operation: str, denial: Denial) -> str:
    """One line that names the missing permission, and below it lines with fixes."""
    action = denial.action or operation
    where = f" on {denial.resource}" if denial.resource else ""
    who = f" to {denial.who}" if denial.who else ""
    problem = f"AWS denies {action}{where}{who}"
    if denial.explicit:
        policy = " ".join((denial.policy or "policy", denial.policy_arn)).strip()
        problem += f", by an explicit deny in a {policy}. No added statement can undo that."
        fixes = ["ask whoever owns that policy to remove the deny, or to exempt you"]
    elif not denial.is_fixable:
        problem += f", because no {denial.policy} allows it. A statement of your own does not help."
        fixes = [f"ask whoever owns the {denial.policy} to allow {action}"]
    elif denial.action:
        problem += ". Add this statement to a policy of yours:"
        resources = [denial.resource] if denial.resource else []
        fixes = [json.dumps(allow_statement([action], resources))]
        if denial.action == "sts:AssumeRole":
            fixes += [
                f"and name {denial.who or 'yourself'} as a principal in the role's trust policy"
            ]
    else:
        problem, fixes = f"{problem}.", []
    if denial.encoded:
        fixes += [
            "aws sts decode-authorization-message --query DecodedMessage --output text "
            f"--encoded-message {denial.encoded}"
        ]
    return "\n  ".join((problem, *fixes))
