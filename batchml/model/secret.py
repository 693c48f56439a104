"""`[secrets]` of a job.toml: where each value is kept, and how AWS is told so. No I/O, no value.

Sources: Amazon ECS Developer Guide, "Pass Secrets Manager secrets through environment variables"
(`ARN:KEY:STAGE:VERSION`); AWS Secrets Manager User Guide, "What's in a secret" (an ARN ends with
six characters that nobody chooses; one without them is understood, but matches no policy).
"""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

SSM, MANAGER = "ssm", "secretsmanager"
EXAMPLES = '"ssm:/team/wandb", "secretsmanager:NAME" or "secretsmanager:NAME#KEY"'

_PARAMETER = re.compile(r"[A-Za-z0-9_.\-/]{1,1011}")
_SECRET = re.compile(r"[A-Za-z0-9/_+=.@\-]{1,512}")
_KEY = re.compile(r"[^:#\s]+")
_ARN = re.compile(
    r"(arn:aws[a-z-]*:(ssm|secretsmanager):[a-z0-9-]+:\d{12}):(parameter/|secret:)([^:#\s]+)"
    r"(?::([^:]*):([^:]*):([^:]*))?(?:#(\S+))?"
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SUFFIX = "AbCdEf"  # as AWS Secrets Manager ends an ARN


class Kept(Struct, frozen=True):
    """Where a secret is kept. `scope` is `arn:aws:SERVICE:REGION:ACCOUNT` where an ARN says it."""

    service: str
    name: str
    key: str = ""  # of the JSON object that the secret holds
    scope: str = ""
    version: str = ""  # `STAGE:VERSION` of an ARN

    def value_from(self, arn: str) -> str:
        """What AWS Batch is told, of the secret with this ARN."""
        if self.key or self.version.strip(":"):
            return f"{arn}:{self.key}:{self.version or ':'}"
        return arn


def parse_kept(text: str) -> Kept | None:
    """Where `[secrets]` says that a value is kept; None for any other text."""
    arn = _ARN.fullmatch(text)
    if arn:
        scope, service, kind, name, key, stage, version, member = arn.groups()
        if (kind == "parameter/") != (service == SSM) or (service == SSM and (key or member)):
            return None
        if key and member:
            return None
        return Kept(service, name, key or member or "", scope, f"{stage or ''}:{version or ''}")
    service, _, rest = text.partition(":")
    name, mark, key = rest.partition("#")
    if service == SSM and not mark and _PARAMETER.fullmatch(name):
        return Kept(SSM, name)
    if service == MANAGER and _SECRET.fullmatch(name) and (not mark or _KEY.fullmatch(key)):
        return Kept(MANAGER, name, key)
    return None


def secret_mistakes(secrets: dict[str, str], env: Sequence[str]) -> Iterator[str]:
    """What is wrong with `[secrets]`, without a word of what it holds: it may be the value itself.

    `env` are the names of the job's variables.
    """
    for name, text in secrets.items():
        if not _ENV_NAME.fullmatch(name):
            yield f"secrets.{name}: not a name of an environment variable."
        elif name.startswith(("AWS_BATCH", "BATCHML_")):
            yield f"secrets.{name}: names that start so are AWS Batch's and batchml's own."
        elif name in env:
            yield f"secrets.{name}: is under [env] as well, where its value would be seen."
        if parse_kept(text) is None:
            yield (
                f"secrets.{name}: says no place where a value is kept (not shown here). Write "
                f"{EXAMPLES}, or an ARN. The value itself never stands in a job.toml."
            )


def find_arn(kept: Kept, allowed: Sequence[str]) -> str | None:
    """The ARN of a secret among those that jobs may be given, patterns as in a policy; or None."""
    for each in allowed:
        scope, kind, resource = _split(each)
        if kind is None or scope.split(":")[2:3] != [kept.service]:
            continue
        if kept.scope and kept.scope != scope:
            continue
        found = _found(kept, resource)
        if found:
            return f"{scope}:{kind}{found}"
    return None


def _split(arn: str) -> tuple[str, str | None, str]:
    parts = arn.split(":", 5)
    resource = parts[5] if len(parts) == 6 else ""
    for kind in ("parameter/", "secret:"):
        if resource.startswith(kind):
            return ":".join(parts[:5]), kind, resource.removeprefix(kind)
    return ":".join(parts[:5]), None, ""


def _found(kept: Kept, resource: str) -> str | None:
    if kept.service == SSM:
        name = kept.name.removeprefix("/")
        return name if _matches(resource, name) else None
    if resource == kept.name and kept.scope:
        return resource
    if re.fullmatch(rf"{re.escape(kept.name)}-[A-Za-z0-9]{{6}}", resource):
        return resource
    # A pattern does not know the six characters either, and AWS understands an ARN without them.
    if set(resource) & set("*?") and (
        _matches(resource, f"{kept.name}-{_SUFFIX}")
        or (kept.scope and _matches(resource, kept.name))
    ):
        return kept.name
    return None


def _matches(pattern: str, name: str) -> bool:
    """As IAM compares: `*` is any characters, `?` one."""
    parts = (".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern)
    return re.fullmatch("".join(parts), name, re.DOTALL) is not None


def arn_to_list(kept: Kept, region: str, account: str, partition: str = "aws") -> str:
    """The ARN for `secrets` of an environment, as a person would write it."""
    scope = kept.scope or f"arn:{partition}:{kept.service}:{region}:{account or 'ACCOUNT'}"
    if kept.service == SSM:
        return f"{scope}:parameter/{kept.name.removeprefix('/')}"
    return f"{scope}:secret:{kept.name}" + ("" if kept.scope else "-??????")
