"""Append each attempt of an AWS call to the file that BATCHML_RECORDING names.

One line of JSON for an attempt; `CallRecorder` describes its members. Answers are read from the
body, not from botocore's result, which lacks the members that its models do not know. Names of
members are those of the models, in all protocols.

Never written: headers, bodies of objects and other binary values (their size and SHA-256 stand for
them), and values that the models mark as sensitive, such as tokens and secrets (`REDACTED`).

Sources: botocore, endpoint.py (the event `response-received`) and parsers.py (names in XML); Smithy
2.0, "AWS Query", "AWS EC2 query", "AWS restXml"; open(2) and flock(2).
"""

import fcntl
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

from batchml.clock import Clock, SystemClock
from batchml.errors import UsageError

RECORDING_VARIABLE = "BATCHML_RECORDING"
REDACTED = "REDACTED"
AWS, EMBEDDED, OTHER = "AWS", "embedded server", "another server"

# Values that are secret although botocore's models, or those of its older versions, do not say so.
_SECRET = {
    "authorizationToken", "TokenValue", "tokenValue", "SessionToken", "sessionToken",
    "SecretAccessKey", "secretAccessKey",
}  # fmt: skip
_STARTED = "batchml_recording_started"
_PARAMS = "batchml_recording_params"
_HELP_TEXTS = Path(__file__).parents[1] / "cli" / "help"


class RecordingFile:
    """A file to which several processes and threads append lines.

    The file is opened for each line: `flock` then excludes threads and forks as well. A line whose
    writer was killed in the middle is ended first, so that it cannot damage the next line.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_failed = False

    def prepare(self) -> None:
        """Make the file. Raises UsageError if it cannot be written, or others can read it."""
        try:
            descriptor = self._open()
        except OSError as error:
            raise self._refusal(f"{error.strerror}") from error
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise self._refusal("it is not a regular file")
        if found.st_mode & 0o077:
            raise self._refusal(f"others can read it. Run: chmod 600 {self._path}")

    def append(self, value: Mapping[str, Any]) -> None:
        """Write a line. If that fails, the first failure is reported, and the command goes on."""
        line = json.dumps(value, default=_plain, separators=(",", ":")).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                print(
                    f"batchml: calls could not be written to {self._path}: {error.strerror}",
                    file=sys.stderr,
                )

    def _append(self, line: bytes) -> None:
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self._path, flags, 0o600)

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(f"{RECORDING_VARIABLE}={self._path}: {reason}.")


class CallRecorder:
    """Writes the attempts of the calls of clients.

    Members of a line: `time` (seconds since the epoch, when the request was sent), `seconds` (to
    the answer), `process` (its id), `command` (such as "batchml queue list"; "python" for other
    programs), `server` (AWS, EMBEDDED or OTHER), `service`, `operation`, `region`, `attempt` (from
    1), `params`, `status` (0 without an answer), `answer`, `error` (`code` and `message`, or null),
    `failure` (why there is no answer, or it could not be read; or "").
    """

    def __init__(self, path: str, is_local: bool, clock: Clock | None = None) -> None:
        self._file = RecordingFile(path)
        self._is_local = is_local
        self._clock = clock or SystemClock()
        self._command = command_of(sys.argv)
        self._file.prepare()

    def watch(self, client: Any) -> None:
        attempts = _Attempts(self._file, self._clock, self._describe(client))
        events = client.meta.events
        events.register_last("before-parameter-build", attempts.note_params)
        events.register_first("request-created", attempts.start)
        events.register_first("response-received", attempts.write)

    def _describe(self, client: Any) -> dict[str, Any]:
        host = urlsplit(client.meta.endpoint_url).hostname or ""
        is_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
        return {
            "process": os.getpid(),
            "command": self._command,
            "server": EMBEDDED if self._is_local else AWS if is_aws else OTHER,
            "service": client.meta.service_model.service_name,
            "region": client.meta.region_name or "",
        }


class _Attempts:
    """The attempts of one client's calls."""

    def __init__(self, file: RecordingFile, clock: Clock, about: Mapping[str, Any]) -> None:
        self._file = file
        self._clock = clock
        self._about = about

    def note_params(self, params: Any, model: Any, context: dict[str, Any], **_: Any) -> None:
        # Later the SDK changes the parameters, and wraps bodies.
        context[_PARAMS] = model, _copy(model.input_shape, params)

    def start(self, request: Any, **_: Any) -> None:
        context = request.context
        number = context.get(_STARTED, (0,))[0] + 1
        context[_STARTED] = number, self._clock.now(), self._clock.monotonic()

    def write(
        self,
        context: dict[str, Any],
        response_dict: Mapping[str, Any] | None,
        parsed_response: Mapping[str, Any] | None,
        exception: Exception | None,
        **_: Any,
    ) -> None:
        if _PARAMS not in context or _STARTED not in context:
            return  # not the call of an operation
        model, params = context[_PARAMS]
        attempt, began, since = context[_STARTED]
        line = {
            "time": round(began, 3),
            "seconds": round(self._clock.monotonic() - since, 3),
            **self._about,
            "operation": model.name,
            "attempt": attempt,
            "params": params,
            "status": 0,
            "answer": None,
            "error": None,
            "failure": "" if exception is None else f"{type(exception).__name__}: {exception}",
        }
        if response_dict is not None:
            line["status"] = response_dict["status_code"]
            error = (parsed_response or {}).get("Error")
            if error:
                line["error"] = {"code": error.get("Code"), "message": error.get("Message")}
            try:
                line["answer"] = read_answer(model, response_dict, parsed_response or {})
            except ValueError as problem:
                line["failure"] = f"unreadable body: {problem}"
                line["answer"] = _fingerprint(response_dict["body"])
        self._file.append(line)


def command_of(arguments: Sequence[str]) -> str:
    """The name of a process's command: "batchml queue list"; "python" for other programs.

    The words of a command are those that have a stored help text; of a hidden subcommand, the word
    after a group.
    """
    program, *words = arguments or [""]
    path = Path(program)
    is_ours = path.name == "batchml" or path.parts[-2:] == ("batchml", "__main__.py")
    if not is_ours:
        return "python"
    name = ["batchml", *(word for word in words[:1] if _is_word(word))]
    is_group = any(_HELP_TEXTS.glob(f"{'-'.join(name)}-*.txt")) and len(name) > 1
    name += [word for word in words[1:2] if is_group and _is_word(word)]
    return " ".join(name)


def _is_word(text: str) -> bool:
    return text.replace("-", "").isalpha() and not text.startswith("-")


# --- Values ---------------------------------------------------------------------------------------


def read_answer(
    model: Any, response: Mapping[str, Any], parsed: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The answer of a call as a value of JSON, by the names of its members in botocore's model.

    Members that the model does not know keep the names that they have in the body. Members that are
    sent as headers are taken from `parsed`, botocore's result. Raises ValueError for a body that is
    neither JSON nor XML.
    """
    shape, protocol = model.output_shape, protocol_of(model)
    is_error = response["status_code"] >= 300
    if protocol == "smithy-rpc-v2-cbor":  # botocore's result: it lacks members unknown to it
        return None if is_error else _copy(shape, _without_metadata(parsed))
    found = {} if shape is None or is_error else _sent_as_headers(shape, parsed)
    payload = shape.serialization.get("payload") if shape is not None and not is_error else None
    if payload is not None and shape.members[payload].type_name in ("blob", "string"):
        return {**found, payload: _size_alone(response)}
    body = response["body"]
    if not body:
        return found or None
    if protocol in ("json", "rest-json"):
        value = json.loads(body)
    else:
        try:
            root = ElementTree.fromstring(body)
        except ElementTree.ParseError as error:
            raise ValueError(str(error)) from None
        value = _element_value(root) if is_error else _from_xml(shape, payload, protocol, root)
    if payload is not None and not is_error:
        value = {payload: value}
    value = value if is_error else _copy(shape, value, by_wire_name=True)
    return {**value, **found} if isinstance(value, dict) else value


def protocol_of(model: Any) -> str:
    """The protocol that botocore chooses for an operation; its older versions know one each."""
    service = model.service_model
    return str(getattr(service, "resolved_protocol", None) or service.protocol)


def _without_metadata(parsed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parsed.items() if name != "ResponseMetadata"}


def _sent_as_headers(shape: Any, parsed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copy(member, parsed[name])
        for name, member in shape.members.items()
        if member.serialization.get("location") in ("header", "headers", "statusCode")
        and name in parsed
    }


def _size_alone(response: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a streamed body, which must not be read here: the command reads it."""
    size = response["headers"].get("content-length", "")
    return {"bytes": int(size) if str(size).isdigit() else -1}


def _fingerprint(value: Any) -> dict[str, Any]:
    """The size of binary content in bytes, -1 if it is unknown; and its hash, unless in a file."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, BytesIO):  # as S3's clients wrap a body
        value = value.getvalue()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    try:
        return {"bytes": os.fstat(value.fileno()).st_size}
    except (OSError, AttributeError, ValueError):
        return {"bytes": -1}


def _plain(value: Any) -> Any:
    """A value of a type that JSON lacks."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return _fingerprint(value)


def _copy(shape: Any, value: Any, *, by_wire_name: bool = False) -> Any:
    """Copy a value of a shape without what must not be written.

    With `by_wire_name` members have the names of the body, and get those of the model.
    """
    kind = shape.type_name if shape is not None else ""
    if shape is not None and shape.metadata.get("sensitive"):
        return _redact(value)
    if kind == "structure" and isinstance(value, dict):
        names = {_wire_name(name, member): name for name, member in shape.members.items()}
        names = names if by_wire_name else {}
        return {
            name: _redact(inner)
            if name in _SECRET
            else _copy(shape.members.get(name), inner, by_wire_name=by_wire_name)
            for name, inner in ((names.get(wire, wire), inner) for wire, inner in value.items())
        }
    if kind == "list" and isinstance(value, (list, tuple)):
        return [_copy(shape.member, inner, by_wire_name=by_wire_name) for inner in value]
    if kind == "map" and isinstance(value, dict):
        return {
            key: _copy(shape.value, inner, by_wire_name=by_wire_name)
            for key, inner in value.items()
        }
    if kind == "blob" and value is not None:
        return _fingerprint(value)
    return _copy_unknown(value)


def _copy_unknown(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(name): _redact(inner) if name in _SECRET else _copy_unknown(inner)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy_unknown(inner) for inner in value]
    is_plain = value is None or isinstance(value, (str, int, float, bool))
    return value if is_plain else _plain(value)


def _redact(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redact(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(inner) for inner in value]
    return value if value is None else REDACTED


# --- XML ------------------------------------------------------------------------------------------


def _wire_name(name: str, member: Any) -> str:
    """The name of a member in a body. A flattened list is named by its items."""
    if member.type_name == "list" and member.serialization.get("flattened"):
        item = member.member.serialization.get("name")
        if item is not None:
            return str(item)
    return str(member.serialization.get("name", name))


def _from_xml(shape: Any, payload: str | None, protocol: str, root: Any) -> Any:
    """The value of a successful answer, its members by their names in the body."""
    if protocol == "query" and shape is not None:
        wrapper = shape.serialization.get("resultWrapper")
        inner = next((each for each in root if _tag(each) == wrapper), None)
        root = root if inner is None else inner
    if payload is not None:
        shape = shape.members[payload]
    value = _shaped(shape, root) if shape is not None else _element_value(root)
    if isinstance(value, dict):  # what every answer has, and no model
        value = {key: each for key, each in value.items() if key not in _ENVELOPE}
    return value


_ENVELOPE = ("ResponseMetadata", "requestId", "RequestId")


def _tag(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _shaped(shape: Any, element: Any) -> Any:
    if shape.type_name == "structure":
        return _structure(shape, element)
    if shape.type_name == "list":
        return [_shaped(shape.member, each) for each in element]
    if shape.type_name == "map":
        return dict(_pairs(shape, element))
    return _scalar(shape.type_name, element.text or "")


def _structure(shape: Any, element: Any) -> dict[str, Any]:
    members = {_wire_name(name, member): member for name, member in shape.members.items()}
    found: dict[str, Any] = {}
    for child in element:
        name = _tag(child)
        member = members.get(name)
        if member is None:
            _add(found, name, _element_value(child))
        elif not member.serialization.get("flattened"):
            found[name] = _shaped(member, child)
        elif member.type_name == "list":
            found.setdefault(name, []).append(_shaped(member.member, child))
        else:
            found.setdefault(name, {}).update(_pairs(member, [child]))
    for attribute, value in element.attrib.items():  # such as the type of a grantee of S3
        name = next((each for each in members if each.rpartition(":")[2] == _local(attribute)), "")
        if name:
            found[name] = value
    return found


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _pairs(shape: Any, entries: Any) -> Iterator[tuple[str, Any]]:
    key_name = shape.key.serialization.get("name", "key")
    value_name = shape.value.serialization.get("name", "value")
    for entry in entries:
        parts = {_tag(each): each for each in entry}
        if key_name in parts and value_name in parts:
            yield parts[key_name].text or "", _shaped(shape.value, parts[value_name])


def _scalar(kind: str, text: str) -> Any:
    """Text as the type of its shape; unchanged if it is not of that type."""
    try:
        if kind in ("integer", "long"):
            return int(text)
        if kind in ("float", "double"):
            return float(text)
    except ValueError:
        return text
    return text == "true" if kind == "boolean" and text in ("true", "false") else text


def _element_value(element: Any) -> Any:
    """The value of an element without a shape."""
    if not len(element):
        return element.text or ""
    found: dict[str, Any] = {}
    for child in element:
        _add(found, _tag(child), _element_value(child))
    return found


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    """Add a member; members of one name become a list."""
    if name not in found:
        found[name] = value
    elif isinstance(found[name], list):
        found[name].append(value)
    else:
        found[name] = [found[name], value]
