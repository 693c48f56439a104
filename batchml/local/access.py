"""How a job calls the server that runs it: the server's address, and keys of its own. Pure.

The keys of an attempt are worked out from the server's, so that nobody has to keep them; they are
good for as long as the attempt lives (docs/decisions/013-job-credentials.md).
"""

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Collection, Mapping, MutableMapping

from batchml.local.sigv4 import Keys
from batchml.local.state import ACCOUNT, REGION
from batchml.local.wire import Refused

ROLE = "batchml-job"  # where a definition names none

_HOST = "127.0.0.1"
_PREFIX = "BMLJOB"
_OURS = (_PREFIX, "BMLLOCAL")

# The services that the server speaks. Without the plain AWS_ENDPOINT_URL: S3 stays S3.
ENDPOINTS = (
    "AWS_ENDPOINT_URL_BATCH", "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", "AWS_ENDPOINT_URL_ECS",
    "AWS_ENDPOINT_URL_STS",
)  # fmt: skip
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

# Whoever sets one of these has credentials in mind, and ours would be taken before or with them.
_CREDENTIALS = {
    *_KEYS, "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
    "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}  # fmt: skip

# What changes where and how jobs run is its user's to do, not a job's.
_KEPT_FROM_JOBS = ("Create", "Update", "Delete")


def job_keys(server: Keys, task_id: str) -> Keys:
    """The keys of one attempt."""
    secret = server.secret_access_key.encode()
    made = hmac.digest(secret, f"batchml job credentials\n{task_id}".encode(), "sha256")
    return Keys(_PREFIX + task_id.upper(), urlsafe_b64encode(made).decode().rstrip("="))


def task_of(access_key_id: str) -> str:
    """Whose attempt's keys these are; "" for the server's own and any other."""
    task_id = access_key_id.removeprefix(_PREFIX)
    return task_id.lower() if task_id != access_key_id else ""


def variables(
    endpoint: str, keys: Keys, given: Collection[str], *, has_role: bool, has_others: bool
) -> dict[str, str]:
    """What an attempt is told. `given` are the names of the variables that the job sets itself.

    `has_others`: programs of this machine find credentials of the user's in files, which ours
    would hide. Only a job with a role wants that, as in AWS.
    """
    told = {
        "BATCHML_ENDPOINT_URL": endpoint,
        "BATCHML_ACCESS_KEY_ID": keys.access_key_id,
        "BATCHML_SECRET_ACCESS_KEY": keys.secret_access_key,
    }
    if not _CREDENTIALS.isdisjoint(given) or (has_others and not has_role):
        return told
    told |= dict.fromkeys(ENDPOINTS, endpoint)
    told |= {_KEYS[0]: keys.access_key_id, _KEYS[1]: keys.secret_access_key}
    if set(_REGIONS).isdisjoint(given):
        told |= dict.fromkeys(_REGIONS, REGION)
    return told


def identity(access_key_id: str, user: str) -> dict[str, str]:
    """Who a caller is, as STS says it."""
    task_id = task_of(access_key_id)
    if not task_id:
        arn = f"arn:aws:iam::{ACCOUNT}:user/{user}"
        return {"Arn": arn, "UserId": access_key_id, "Account": ACCOUNT}
    arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/{ROLE}/{task_id}"
    return {"Arn": arn, "UserId": f"{access_key_id}:{task_id}", "Account": ACCOUNT}


def check_permitted(access_key_id: str, service: str, operation: str) -> None:
    """Refuse what is not a job's to do. Raises Refused."""
    if task_of(access_key_id) and operation.startswith(_KEPT_FROM_JOBS):
        who = identity(access_key_id, "")["Arn"]
        raise Refused(
            "AccessDeniedException",
            f"User: {who} is not authorized to perform: {service}:{operation}. "
            f"A job's own credentials submit, look and cancel.",
            403,
        )


def forget_ourselves(environ: MutableMapping[str, str]) -> None:
    """Take out of the server's environment what points at a server like it, as `batchml local env`
    prints it: its user's AWS is meant where it asks for secrets.
    """
    if environ.get(_KEYS[0], "").startswith(_OURS):
        for name in (*_KEYS, *ENDPOINTS, *_REGIONS):
            environ.pop(name, None)


def past_proxies(env: Mapping[str, str], given: Collection[str]) -> dict[str, str]:
    """The variables that keep calls to the server from proxies, where there are any."""
    if not {"http_proxy", "HTTP_PROXY"} & {*env} or {"no_proxy", "NO_PROXY"} & {*given}:
        return {}
    names = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*names[:1], _HOST]))
