"""Secrets of a job: `[secrets]` of a job.toml names the place of each value in AWS.

batchml never has the value.
Sources: Amazon ECS Developer Guide, "Pass Secrets Manager secrets through environment variables"
(`ARN:KEY:STAGE:VERSION`); AWS Secrets Manager User Guide, "What's in a secret" (an ARN ends with
six random characters; AWS accepts an ARN without them, but it matches no policy).
"""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

SSM, MANAGER = "ssm", "secretsmanager"
EXAMPLES = '"ssm:/team/wandb", "secretsmanager:NAME" or "secretsmanager:NAME#KEY"'

_PARAMETER = r"[A-Za-z0-9_.\-/]{1,1011}"
_SECRET = r"[A-Za-z0-9/_+=.@\-]{1,512}"
_KEY = r"[^:#\s]+"
_ARN = (
    r"(arn:aws[a-z-]*:(ssm|secretsmanager):[a-z0-9-]+:\d{12}):(parameter/|secret:)([^:#\s]+)"
    r"(?::([^:]*):([^:]*):([^:]*))?(?:#(\S+))?"
)
ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_SUFFIX = "AbCdEf"  # stands for the six random characters of an ARN


class SecretSource(Struct, frozen=True):
    """The service that has a secret, and the secret's name there."""

    service: str
    name: str
    key: str = ""  # of the JSON object that is the secret's value
    scope: str = ""  # `arn:aws:SERVICE:REGION:ACCOUNT` if the text is an ARN
    version: str = ""  # `STAGE:VERSION` of an ARN

    def value_from(self, arn: str) -> str:
        """AWS Batch's `valueFrom` for the secret with this ARN."""
        if self.key or self.version.strip(":"):
            return f"{arn}:{self.key}:{self.version or ':'}"
        return arn


def parse_secret(text: str) -> SecretSource | None:
    """Parse a value of `[secrets]`; None for a wrong text."""
    arn = re.fullmatch(_ARN, text)
    if arn:
        scope, service, kind, name, key, stage, version, member = arn.groups()
        if (kind == "parameter/") != (service == SSM) or (service == SSM and (key or member)):
            return None
        if key and member:
            return None
        return SecretSource(
            service, name, key or member or "", scope, f"{stage or ''}:{version or ''}"
        )
    service, _, rest = text.partition(":")
    name, mark, key = rest.partition("#")
    if service == SSM and not mark and re.fullmatch(_PARAMETER, name):
        return SecretSource(SSM, name)
    if service == MANAGER and re.fullmatch(_SECRET, name) and (not mark or re.fullmatch(_KEY, key)):
        return SecretSource(MANAGER, name, key)
    return None


def secret_mistakes(secrets: dict[str, str], env: Sequence[str]) -> Iterator[str]:
    """The mistakes in `[secrets]`. A wrong text is not shown, because it may be the secret itself.

    `env` has the names of the variables in `[env]`.
    """
    for name, text in secrets.items():
        if not re.fullmatch(ENV_NAME, name):
            yield f"secrets.{name}: is not a name for an environment variable."
        elif name.startswith(("AWS_BATCH", "BATCHML_")):
            yield f"secrets.{name}: such names are reserved for AWS Batch and batchml."
        elif name in env:
            yield f"secrets.{name}: is also under [env], where everybody can read its value."
        if parse_secret(text) is None:
            yield (
                f"secrets.{name}: does not name a secret (its text is not shown here). Write "
                f"{EXAMPLES}, or an ARN. A job.toml must not have the value itself."
            )


def find_secret_arn(secret: SecretSource, allowed: Sequence[str]) -> str | None:
    """The ARN of a secret if an allowed ARN matches it, perhaps with wildcards; else None."""
    for each in allowed:
        scope, kind, resource = _split_arn(each)
        if kind is None or scope.split(":")[2:3] != [secret.service]:
            continue
        if secret.scope and secret.scope != scope:
            continue
        found = _match_resource(secret, resource)
        if found:
            return f"{scope}:{kind}{found}"
    return None


def _split_arn(arn: str) -> tuple[str, str | None, str]:
    """The scope, kind and resource of an ARN; the kind is None for other resources."""
    parts = arn.split(":", 5)
    resource = parts[5] if len(parts) == 6 else ""
    for kind in ("parameter/", "secret:"):
        if resource.startswith(kind):
            return ":".join(parts[:5]), kind, resource.removeprefix(kind)
    return ":".join(parts[:5]), None, ""


def _match_resource(secret: SecretSource, resource: str) -> str | None:
    """The name of the secret in its ARN, if the resource of an allowed ARN matches it."""
    if secret.service == SSM:
        name = secret.name.removeprefix("/")
        return name if _matches(resource, name) else None
    if resource == secret.name and secret.scope:
        return resource
    if re.fullmatch(rf"{re.escape(secret.name)}-[A-Za-z0-9]{{6}}", resource):
        return resource
    # With a pattern the six characters are unknown. AWS accepts an ARN without them.
    if set(resource) & set("*?") and (
        _matches(resource, f"{secret.name}-{_SUFFIX}")
        or (secret.scope and _matches(resource, secret.name))
    ):
        return secret.name
    return None


def _matches(pattern: str, name: str) -> bool:
    """Match as IAM does: `*` is any characters, `?` is one."""
    parts = (".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern)
    return re.fullmatch("".join(parts), name, re.DOTALL) is not None


def arn_to_list(secret: SecretSource, region: str, account: str, partition: str = "aws") -> str:
    """The ARN to add to `secrets` of an environment, so that its jobs may use the secret."""
    scope = secret.scope or f"arn:{partition}:{secret.service}:{region}:{account or 'ACCOUNT'}"
    if secret.service == SSM:
        return f"{scope}:parameter/{secret.name.removeprefix('/')}"
    return f"{scope}:secret:{secret.name}" + ("" if secret.scope else "-??????")
