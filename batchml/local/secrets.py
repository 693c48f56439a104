"""Secrets of jobs: resolved when an attempt starts, given to its program only, stored nowhere.

The user's own file comes first: `secrets.toml` or `secrets.json` in the state folder. Any other
`valueFrom` is an ARN of Secrets Manager or Parameter Store, a parameter's name, or the form of a
job.toml (`ssm:NAME`, `secretsmanager:NAME#KEY`). Its value comes from AWS, with the credentials
that the server was started with. Sources: AWS Batch API, Secret; ECS Developer Guide, "Pass
sensitive data to an Amazon ECS container".

No message of this module ever contains a value.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.local.batch.state import REGION

LIMIT = 20.0  # seconds for all secrets of an attempt

_ARN = re.compile(r"arn:[^:]+:(\w+):([\w-]*):(\d*):(.+)", re.DOTALL)
_SSM, _MANAGER = "ssm:", "secretsmanager:"  # as in a job.toml
_CALL_LIMIT = 5  # seconds for the connection, and again for the answer


class SecretError(Exception):
    """A secret cannot be resolved. The text names the secret and the reason."""


class SecretsManagerSecret(Struct, frozen=True):
    """A secret of Secrets Manager, or one member of the JSON object in it."""

    arn: str
    region: str
    key: str = ""
    stage: str = ""
    version: str = ""


class SsmParameter(Struct, frozen=True):
    """A parameter of Parameter Store, by name or ARN. Without a region: the server's own."""

    name: str
    region: str = ""


SecretReference = SecretsManagerSecret | SsmParameter
Fetch = Callable[[SecretReference], str]


def parse(value_from: str) -> SecretReference:
    """Parse a `valueFrom`, in ECS's forms or the forms of a job.toml. Raises SecretError."""
    if value_from.startswith(_SSM):
        return SsmParameter(value_from.removeprefix(_SSM))
    if value_from.startswith(_MANAGER):
        name, _, member_ = value_from.removeprefix(_MANAGER).partition("#")
        return SecretsManagerSecret(name, "", member_)
    if not value_from.startswith("arn:"):
        return SsmParameter(value_from)
    match = _ARN.fullmatch(value_from)
    service, region, _, resource = match.groups() if match else ("", "", "", "")
    if service == "ssm" and resource.startswith("parameter/"):
        return SsmParameter(value_from, region)
    if service == "secretsmanager":
        kind, name, *more = resource.split(":")
        if kind == "secret" and name and len(more) in (0, 3):
            arn = value_from.removesuffix("".join(f":{part}" for part in more))
            return SecretsManagerSecret(arn, region, *more)
        raise SecretError("it must end with the secret's name, or with NAME:KEY:STAGE:VERSION")
    raise SecretError("it is not an ARN of a secret or a parameter")


def resolve(
    entries: Sequence[Mapping[str, str]], root: Path, fetch: Fetch | None = None
) -> dict[str, str]:
    """Resolve a job's `secrets` to variables. May take long. Raises SecretError."""
    values: dict[str, str] = {}
    from_file: dict[str, str] | None = None
    for entry in entries:
        name, value_from = entry["name"], entry["valueFrom"]
        try:
            if from_file is None:
                from_file = read_secrets_file(root)
            value = _own_value(value_from, from_file)
            if value is None:
                fetch = fetch or _Aws().value
                value = _fetch(value_from, fetch, from_file)
            _check(value)
        except SecretError as error:
            raise SecretError(f"{name}: {value_from}: {error}") from None
        values[name] = value
    return values


def _own_value(value_from: str, from_file: Mapping[str, str]) -> str | None:
    """The value from the user's own file: looked up by the whole `valueFrom`, by `valueFrom`
    without `ssm:`, or, for `secretsmanager:NAME#KEY`, as member KEY of the entry
    `secretsmanager:NAME`.
    """
    for name in (value_from, value_from.removeprefix(_SSM)):
        if name in from_file:
            return from_file[name]
    name, mark, key = value_from.partition("#")
    if mark and name.startswith(_MANAGER) and name in from_file:
        return member(from_file[name], key)
    return None


def _fetch(value_from: str, fetch: Fetch, from_file: Mapping[str, str]) -> str:
    """Fetch from AWS. On failure, suggest a similar name of the user's own file."""
    try:
        return fetch(parse(value_from))
    except SecretError as error:
        if value_from.startswith("arn:"):
            raise
        near = get_close_matches(value_from, from_file, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        service = "Secrets Manager" if value_from.startswith(_MANAGER) else "SSM"
        raise SecretError(f"not in the secrets file{hint}, and from {service}: {error}") from None


def _check(value: str) -> None:
    try:
        possible = b"\0" not in value.encode()
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise SecretError("no variable can hold it: it is not text, or contains a NUL")


# --- The user's own file --------------------------------------------------------------------------


def read_secrets_file(root: Path) -> dict[str, str]:
    """The values in the secrets files of the state folder, by `valueFrom`. Raises SecretError."""
    found: dict[str, str] = {}
    for path, read in ((root / "secrets.json", _json), (root / "secrets.toml", _toml)):
        text = _private_text(path)
        if text is None:
            continue
        try:
            new = read(text)
        except ValueError as error:
            at = re.search(r"line \d+", str(error))  # the rest of the message may quote the file
            raise SecretError(
                f"{path} is not {path.suffix[1:].upper()}{f' ({at[0]})' if at else ''}"
            ) from None
        wrong = [name for name, value in new.items() if not isinstance(value, str)]
        if wrong:
            raise SecretError(f"{path}: {wrong[0]!r} is not text")
        found |= new
    return found


def _private_text(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise SecretError(f"{path} belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise SecretError(f"others can read {path}; run: chmod 600 {path}")
        try:
            return file.read().decode()
        except UnicodeDecodeError:
            raise SecretError(f"{path} is not UTF-8") from None


def _json(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


# --- AWS ------------------------------------------------------------------------------------------


class _Aws:
    """Makes the AWS requests for one attempt. Every attempt gets a new botocore session, because
    the user's credentials may have changed.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._strings: dict[tuple[str, str, str], str] = {}

    def value(self, source: SecretReference) -> str:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if isinstance(source, SsmParameter):
                return self._parameter(source)
            return member(self._string(source), source.key)
        except ClientError as error:
            details = error.response.get("Error", {})
            raise SecretError(f"{details.get('Code')}: {details.get('Message')}") from None
        except BotoCoreError as error:
            raise SecretError(str(error)) from None

    def _parameter(self, source: SsmParameter) -> str:
        client = self._client("ssm", source.region)
        # The operation that ECS uses, and that policies therefore allow.
        answer = client.get_parameters(Names=[source.name], WithDecryption=True)
        if not answer["Parameters"]:
            raise SecretError("no such parameter, neither in the state folder nor in AWS")
        return str(answer["Parameters"][0]["Value"])

    def _string(self, source: SecretsManagerSecret) -> str:
        key = (source.arn, source.stage, source.version)
        if key not in self._strings:
            version = {"VersionStage": source.stage, "VersionId": source.version}
            params = {name: value for name, value in version.items() if value}
            client = self._client("secretsmanager", source.region)
            answer = client.get_secret_value(SecretId=source.arn, **params)
            if "SecretString" not in answer:
                raise SecretError("it is binary, not text")
            self._strings[key] = answer["SecretString"]
        return self._strings[key]

    def _client(self, service: str, region: str) -> Any:
        import botocore.session
        from botocore.config import Config

        if self._session is None:
            self._session = botocore.session.Session()
        default = os.environ.get("AWS_REGION") or self._session.get_config_variable("region")
        region = region or default or REGION
        if (service, region) not in self._clients:
            config = Config(
                connect_timeout=_CALL_LIMIT, read_timeout=_CALL_LIMIT,
                retries={"total_max_attempts": 2, "mode": "standard"},
            )  # fmt: skip
            self._clients[service, region] = self._session.create_client(
                service, region_name=region, config=config
            )
        return self._clients[service, region]


def member(text: str, key: str) -> str:
    """The secret itself, or one member of the JSON object in it. Raises SecretError."""
    if not key:
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SecretError(f"the secret is not a JSON object, so it has no key {key!r}")
    if key not in found:
        raise SecretError(f"the secret has no key {key!r}")
    value = found[key]
    return value if isinstance(value, str) else json.dumps(value)
