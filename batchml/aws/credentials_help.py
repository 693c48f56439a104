"""What is wrong with credentials, and the exact way out, by how they came about.

Sources: botocore's credential providers (their METHOD words); AWS CLI User Guide, "Authentication
and access credentials"; IAM User Guide, "Troubleshoot signature errors".
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
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


# --- missing permissions --------------------------------------------------------------------------
# What AWS says when it denies, and the policy statement that would allow it.
#
# Sources: IAM User Guide, "Troubleshoot access denied error messages"; EC2 API Reference, "Error
# codes" (UnauthorizedOperation and its encoded message).


_WHO = re.compile(r"User:? (?P<who>arn:\S+|\S+) is not authorized")
_ACTION = re.compile(
    r"(?:not authorized )?to perform:? \[?(?P<action>[a-z0-9-]+:[A-Za-z0-9*]+)\]?"
    r"(?: on (?:the )?(?:resource:?)?\s*\[?(?P<resource>arn:[^\s\],]+|\*))?"
)
_ENCODED = re.compile(r"[Ee]ncoded authorization failure message: (?P<encoded>[\w=+/-]+)")
_EXPLICIT = re.compile(
    r"explicit deny(?: in an? (?P<policy>[A-Za-z -]*?(?:policy|permissions boundary))"
    r"(?::? (?P<which>arn:\S+))?)?"
)
_ABSENT = re.compile(r"because no (?P<policy>[A-Za-z -]*?(?:policy|permissions boundary)) allows")

# Where a statement for the caller helps. Elsewhere somebody else has closed a door before it.
_OWN = ("", "identity-based policy")


class Denial(Struct, frozen=True):
    """One denial: empty strings for what the message leaves out.

    `policy` is the kind of policy that decided, in AWS's words; `explicit` is True when it denies
    in so many words, which no other statement can undo.
    """

    action: str
    resource: str = ""
    who: str = ""
    explicit: bool = False
    policy: str = ""
    which: str = ""  # the ARN of that policy
    encoded: str = ""

    @property
    def is_mendable(self) -> bool:
        """True when a statement added to the caller's own policies would help."""
        return not self.explicit and self.policy in _OWN


def parse_denial(message: str) -> Denial | None:
    """Read an AccessDenied or UnauthorizedOperation message; None when it names no action."""
    encoded = _ENCODED.search(message)
    action = _ACTION.search(message)
    if action is None and encoded is None:
        return None
    who = _WHO.search(message)
    explicit = _EXPLICIT.search(message)
    absent = _ABSENT.search(message)
    decided = explicit or absent
    return Denial(
        action=action["action"] if action else "",
        resource=(action["resource"] or "").rstrip(".") if action else "",
        who=who["who"] if who else "",
        explicit=explicit is not None,
        policy=(decided["policy"] or "") if decided else "",
        which=(explicit["which"] or "").rstrip(".") if explicit else "",
        encoded=encoded["encoded"] if encoded else "",
    )


def statement(actions: Iterable[str], resources: Iterable[str]) -> dict[str, Any]:
    """The policy statement that allows `actions` on `resources`, on anything unless given."""
    return {
        "Effect": "Allow",
        "Action": sorted(set(actions)),
        "Resource": sorted(set(resources)) or ["*"],
    }


def statements(missing: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """What allows each (action, resource): one statement for those that name resources, and one
    for those that take none, so that neither widens the other."""
    pairs = list(missing)
    named = [pair for pair in pairs if pair[1] != "*"]
    free = [action for action, resource in pairs if resource == "*"]
    found = [statement(*zip(*named, strict=True))] if named else []
    return [*found, *([statement(free, ["*"])] if free else [])]


def in_one_line(policy: object) -> str:
    """JSON that can be pasted."""
    return json.dumps(policy)


def explain_denial(operation: str, denial: Denial) -> str:
    """One line that says what is denied, and below it the way out."""
    what = denial.action or operation
    where = f" on {denial.resource}" if denial.resource else ""
    who = f" to {denial.who}" if denial.who else ""
    said = f"AWS denies {what}{where}{who}"
    if denial.explicit:
        policy = " ".join((denial.policy or "policy", denial.which)).strip()
        said += f", by an explicit deny in a {policy}. No added statement can undo that."
        fixes = ["ask whoever owns that policy to take the deny out, or to exempt you"]
    elif not denial.is_mendable:
        said += f", because no {denial.policy} allows it. A statement of your own does not help."
        fixes = [f"ask whoever owns the {denial.policy} to allow {what}"]
    elif denial.action:
        said += ". Add this statement to a policy of yours:"
        fixes = [in_one_line(statement([what], [denial.resource] if denial.resource else []))]
        if denial.action == "sts:AssumeRole":
            fixes += [
                f"and name {denial.who or 'yourself'} as a principal in the role's trust policy"
            ]
    else:
        said, fixes = f"{said}.", []
    if denial.encoded:
        fixes += [
            "aws sts decode-authorization-message --query DecodedMessage --output text "
            f"--encoded-message {denial.encoded}"
        ]
    return "\n  ".join((said, *fixes))
