"""Secrets of jobs: looked up when an attempt starts, given to its program alone, kept nowhere.

A `valueFrom` is looked for in the user's own file first (`secrets.toml` or `secrets.json` in the
state folder); else it is an ARN of Secrets Manager or of Parameter Store, a parameter's name, or
what a job.toml says (`ssm:NAME`, `secretsmanager:NAME#KEY`), and AWS is asked with the credentials
that the server was started with. Sources: AWS Batch API,
Secret; ECS Developer Guide, "Pass sensitive data to an Amazon ECS container".

No text made here ever holds a value.
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
_SSM, _MANAGER = "ssm:", "secretsmanager:"  # as a job.toml says it
_CALL_LIMIT = 5  # seconds, to connect and again to answer


class Unresolved(Exception):
    """A secret cannot be had; the text names it and says why."""


class Stored(Struct, frozen=True):
    """A secret of Secrets Manager, or one member of the JSON object that it holds."""

    arn: str
    region: str
    key: str = ""
    stage: str = ""
    version: str = ""


class Parameter(Struct, frozen=True):
    """A parameter of Parameter Store, by name or ARN. No region: the server's own."""

    name: str
    region: str = ""


Source = Stored | Parameter
Fetch = Callable[[Source], str]


def parse(value_from: str) -> Source:
    """Where a secret is kept, as ECS reads it, or as a job.toml says it. Raises Unresolved."""
    if value_from.startswith(_SSM):
        return Parameter(value_from.removeprefix(_SSM))
    if value_from.startswith(_MANAGER):
        name, _, member_ = value_from.removeprefix(_MANAGER).partition("#")
        return Stored(name, "", member_)
    if not value_from.startswith("arn:"):
        return Parameter(value_from)
    match = _ARN.fullmatch(value_from)
    service, region, _, resource = match.groups() if match else ("", "", "", "")
    if service == "ssm" and resource.startswith("parameter/"):
        return Parameter(value_from, region)
    if service == "secretsmanager":
        kind, name, *more = resource.split(":")
        if kind == "secret" and name and len(more) in (0, 3):
            arn = value_from.removesuffix("".join(f":{part}" for part in more))
            return Stored(arn, region, *more)
        raise Unresolved("it must end with the secret's name, or with NAME:KEY:STAGE:VERSION")
    raise Unresolved("it is no ARN of a secret or a parameter")


def resolve(
    entries: Sequence[Mapping[str, str]], root: Path, fetch: Fetch | None = None
) -> dict[str, str]:
    """The variables that a job's `secrets` stand for. Takes its time. Raises Unresolved."""
    found: dict[str, str] = {}
    own: dict[str, str] | None = None
    for entry in entries:
        name, value_from = entry["name"], entry["valueFrom"]
        try:
            if own is None:
                own = read_own(root)
            value = _own_value(value_from, own)
            if value is None:
                fetch = fetch or _Aws().value
                value = _fetched(value_from, fetch, own)
            _check(value)
        except Unresolved as error:
            raise Unresolved(f"{name}: {value_from}: {error}") from None
        found[name] = value
    return found


def _own_value(value_from: str, own: Mapping[str, str]) -> str | None:
    """What the user's own file says, under the whole text, or the name, or the secret of a key."""
    for name in (value_from, value_from.removeprefix(_SSM)):
        if name in own:
            return own[name]
    name, mark, key = value_from.partition("#")
    if mark and name.startswith(_MANAGER) and name in own:
        return member(own[name], key)
    return None


def _fetched(value_from: str, fetch: Fetch, own: Mapping[str, str]) -> str:
    """From AWS, where a plain name may also be a misspelt one of the user's own file."""
    try:
        return fetch(parse(value_from))
    except Unresolved as error:
        if value_from.startswith("arn:"):
            raise
        near = get_close_matches(value_from, own, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        service = "Secrets Manager" if value_from.startswith(_MANAGER) else "SSM"
        raise Unresolved(f"not in secrets.toml{hint}, and from {service}: {error}") from None


def _check(value: str) -> None:
    try:
        possible = b"\0" not in value.encode()
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise Unresolved("no variable can hold it: it is no text, or has a NUL in it")


# --- the user's own file ------------------------------------------------------------------------


def read_own(root: Path) -> dict[str, str]:
    """What the file in the state folder holds, by `valueFrom`. Raises Unresolved."""
    found: dict[str, str] = {}
    for path, read in ((root / "secrets.json", _json), (root / "secrets.toml", _toml)):
        text = _private_text(path)
        if text is None:
            continue
        try:
            values = read(text)
        except ValueError as error:
            at = re.search(r"line \d+", str(error))  # the rest of the message may quote the file
            raise Unresolved(
                f"{path} is not {path.suffix[1:].upper()}{f' ({at[0]})' if at else ''}"
            ) from None
        wrong = [name for name, value in values.items() if not isinstance(value, str)]
        if wrong:
            raise Unresolved(f"{path}: {wrong[0]!r} is no text")
        found |= values
    return found


def _private_text(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unresolved(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise Unresolved(f"{path} belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise Unresolved(f"others can read {path}; run: chmod 600 {path}")
        try:
            return file.read().decode()
        except UnicodeDecodeError:
            raise Unresolved(f"{path} is not UTF-8") from None


def _json(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


# --- AWS ----------------------------------------------------------------------------------------


class _Aws:
    """One attempt's questions to AWS. A session of its own: the user's credentials may change."""

    def __init__(self) -> None:
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._strings: dict[tuple[str, str, str], str] = {}

    def value(self, source: Source) -> str:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if isinstance(source, Parameter):
                return self._parameter(source)
            return member(self._string(source), source.key)
        except ClientError as error:
            told = error.response.get("Error", {})
            raise Unresolved(f"{told.get('Code')}: {told.get('Message')}") from None
        except BotoCoreError as error:
            raise Unresolved(str(error)) from None

    def _parameter(self, source: Parameter) -> str:
        client = self._client("ssm", source.region)
        # The operation that ECS uses, and that policies allow.
        answer = client.get_parameters(Names=[source.name], WithDecryption=True)
        if not answer["Parameters"]:
            raise Unresolved("no such parameter, neither in the state folder nor in AWS")
        return str(answer["Parameters"][0]["Value"])

    def _string(self, source: Stored) -> str:
        about = (source.arn, source.stage, source.version)
        if about not in self._strings:
            which = {"VersionStage": source.stage, "VersionId": source.version}
            chosen = {name: value for name, value in which.items() if value}
            client = self._client("secretsmanager", source.region)
            answer = client.get_secret_value(SecretId=source.arn, **chosen)
            if "SecretString" not in answer:
                raise Unresolved("it is binary, and no text")
            self._strings[about] = answer["SecretString"]
        return self._strings[about]

    def _client(self, service: str, region: str) -> Any:
        import botocore.session
        from botocore.config import Config

        if self._session is None:
            self._session = botocore.session.Session()
        own = os.environ.get("AWS_REGION") or self._session.get_config_variable("region")
        region = region or own or REGION
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
    """The secret itself, or one member of the JSON object that it holds. Raises Unresolved."""
    if not key:
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unresolved(f"the secret is no JSON object, so it has no key {key!r}")
    if key not in found:
        raise Unresolved(f"the secret has no key {key!r}")
    value = found[key]
    return value if isinstance(value, str) else json.dumps(value)
