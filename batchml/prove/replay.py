"""Compare a recording with botocore's models and with the embedded server.

With the models: each request and each answer, of all services. With the embedded server: the
requests of Batch and Logs are sent in the same order to a new server (`ReplayServer`), whose
answers must have the same status, error, members, values and wording. Both servers make up ids. The
pairs are learned from the answers; from then on each id must stand for the same other id.

Times are not compared. Before a job is described, the server is told the events of its attempts up
to then. A waiting job is not compared in detail, because AWS takes minutes for states that the
embedded server passes at once. The states of each job must come in an order that is possible in the
embedded server, too. Times, sizes of logs, pages and used capacity are not compared; of messages
the words are compared, not the names in them.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.aws.recording import REDACTED, read_answer
from batchml.clock import Clock
from batchml.local.server.daemon import MACHINE
from batchml.local.server.protocol import HttpResponse, problems, service_model
from batchml.model.names import bare_name
from batchml.prove.embedded import ENDED, ENOUGH_VCPUS, ReplayClock, ReplayServer
from batchml.prove.recording import RecordedCall, Recording, read_recording

MODELS, EMBEDDED_SERVER = "botocore's models", "the embedded server"
_ABSENT = "absent"
_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")
# The order of the states of a job; a state may be missed between two answers.
_ORDER = (*_WAITING, "RUNNING", *ENDED)
# Not compared: times, sizes, and numbers that a server counts by itself.
_MOMENT = re.compile(
    r".*(At|Time|Timestamp|timestamp|Token)|revision|storedBytes|desiredvCpus|uuid"
)
_TEXTS = {"message", "statusReason", "reason", "Message"}
_KEYS = ("jobId", "jobQueueName", "computeEnvironmentName", "jobDefinitionArn", "name",
         "logStreamName", "logGroupName", "resourceArn")  # fmt: skip
# Members of requests that name a resource, and its kind.
_REFERENCES = {
    "jobQueue": "job-queue", "jobQueues": "job-queue", "jobDefinition": "job-definition",
    "computeEnvironment": "compute-environment", "computeEnvironments": "compute-environment",
    "jobId": "job", "jobs": "job", "arrayJobId": "job", "multiNodeJobId": "job",
}  # fmt: skip


class ReplayDifference(Struct, frozen=True):
    """A difference in calls of one operation. `path` names a member, with [] for all items."""

    operation: str  # "batch:DescribeJobs"
    against: str  # MODELS or EMBEDDED_SERVER
    path: str
    recorded: str
    found: str
    count: int = 1


class ReplayResult(Struct, frozen=True):
    """The result of a replay. `not_asked`: calls not sent to the embedded server, by reason."""

    recording: Recording
    differences: tuple[ReplayDifference, ...]
    asked: int
    not_asked: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "recording": msgspec.to_builtins(self.recording.header),
            "asked": self.asked,
            "not_asked": self.not_asked,
            "differences": msgspec.to_builtins(self.differences),
        }


def replay_file(path: Path, clock: Clock) -> ReplayResult:
    """Replay a recording in a temporary folder. Raises RecordingRefused."""
    return replay(read_recording(path), clock)


def replay(recording: Recording, clock: Clock) -> ReplayResult:
    wrong = list(check_against_models(recording.calls))
    with tempfile.TemporaryDirectory(prefix="batchml-replay-") as folder:
        moved = ReplayClock(clock)
        server = ReplayServer(Path(folder), moved, _own_vcpus(recording.calls))
        try:
            asked = _Replay(server, moved, recording.calls)
            wrong += asked.run()
        finally:
            server.close()
    counts = Counter(wrong)
    merged = [msgspec.structs.replace(each, count=count) for each, count in counts.items()]
    merged.sort(key=lambda each: (each.against, each.operation, each.path))
    return ReplayResult(recording, tuple(merged), asked.count, dict(asked.not_asked))


def _own_vcpus(calls: Iterable[RecordedCall]) -> int:
    """The vCPUs of the machine, if the recording is of an embedded server."""
    for call in calls:
        if call.operation == "DescribeComputeEnvironments" and isinstance(call.answer, dict):
            for each in call.answer.get("computeEnvironments") or ():
                if each.get("computeEnvironmentName") == MACHINE:
                    return int(each["computeResources"]["maxvCpus"])
    return ENOUGH_VCPUS


# --- Against botocore's models --------------------------------------------------------------------

# Errors of every service, which no model lists. Source: each API reference, "Common Errors".
_COMMON_ERRORS = re.compile(
    r"AccessDenied(Exception)?|Throttling(Exception)?|TooManyRequestsException|ServiceUnavailable"
    r"|InternalFailure|InternalServerError|ValidationException|ValidationError|ExpiredToken.*"
    r"|UnrecognizedClientException|InvalidClientTokenId|InvalidSignatureException|OptInRequired"
    r"|SignatureDoesNotMatch|RequestExpired|UnauthorizedOperation|MissingAuthenticationToken.*"
    r"|SerializationException|UnknownOperationException|[1-5]\d\d"
)


def check_against_models(calls: Iterable[RecordedCall]) -> Iterator[ReplayDifference]:
    """The parts of requests, answers and error codes that botocore's models do not allow.

    Maxima and patterns are not checked: replaced texts have other lengths.
    """
    for call in calls:
        for path, recorded, found in _check_call(call):
            yield ReplayDifference(_name(call), MODELS, _items(path), recorded, found)


def _check_call(call: RecordedCall) -> Iterator[tuple[str, str, str]]:
    try:
        model = service_model(call.service)
    except Exception as error:  # botocore's own, which only its modules import
        yield "", call.service, f"no such service: {type(error).__name__}"
        return
    if call.operation not in model.operation_names:
        yield "", call.operation, "no such operation"
        return
    operation = model.operation_model(call.operation)
    yield from _check_shape(operation.input_shape, call.params, "request.")
    if call.error is not None:
        yield from _check_error(operation, call.error.code or "")
    elif 200 <= call.status < 300:
        yield from _check_shape(operation.output_shape, call.answer or {}, "answer.")


def _check_shape(shape: Any, value: Any, what: str) -> Iterator[tuple[str, str, str]]:
    if shape is None:
        if value:
            yield what.rstrip("."), "present", "the model has none"
        return
    for path, text in problems(shape, value, strict=True, maxima=False):
        at = _value_at(value, path)
        if at != REDACTED:
            yield f"{what}{path}", _show(at), text


def _check_error(operation: Any, code: str) -> Iterator[tuple[str, str, str]]:
    listed = operation.error_shapes
    codes = {each.name for each in listed}
    codes |= {str((each.metadata.get("error") or {}).get("code")) for each in listed}
    if listed and code not in codes and not _COMMON_ERRORS.fullmatch(code):
        yield "error.code", code, f"the model lists {', '.join(sorted(codes - {'None'}))}"


def _value_at(value: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)
        else:
            return None
    return value


def _items(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path).rstrip(".")


def _name(call: RecordedCall) -> str:
    return f"{call.service}:{call.operation}"


def _show(value: Any) -> str:
    if value is None:
        return "null or absent"
    if isinstance(value, (dict, list)):
        return f"{len(value)} {'members' if isinstance(value, dict) else 'items'}"
    return value if isinstance(value, str) else json.dumps(value)


# --- Against the embedded server ------------------------------------------------------------------


class _Replay:
    """The state of one replay: the recorded descriptions of jobs, and the pairs of ids."""

    def __init__(
        self, server: ReplayServer, clock: ReplayClock, calls: Sequence[RecordedCall]
    ) -> None:
        self._server = server
        self._clock = clock
        self._calls = calls
        self._pairs = _Pairs()
        self._last = _last_facts(calls)  # by the recording's job ids
        self._now: dict[str, Mapping[str, Any]] = {}  # of the answer that is compared
        self._states: dict[str, str] = {}  # the recording's job id -> its last state
        self._logged: Counter[tuple[str, str]] = Counter()
        self._differences: list[ReplayDifference] = []
        self.count = 0
        self.not_asked: Counter[str] = Counter()

    def run(self) -> list[ReplayDifference]:
        for call in self._calls:
            if call.service not in ("batch", "logs"):
                self.not_asked["the embedded server has only Batch and Logs"] += 1
                continue
            reason = self._reason_to_skip(call)
            if reason:
                self.not_asked[reason] += 1
                continue
            self._clock.passed = max(self._clock.passed, call.time)
            self._ask(call)
            self.count += 1
        return self._differences

    def _reason_to_skip(self, call: RecordedCall) -> str:
        if not self._server.serves(call.service, call.operation):
            return f"the embedded server does not serve {call.operation}"
        if not call.status:
            return "no answer was recorded"
        if call.status == 429 or call.status >= 500 or "Throttl" in _code(call):
            return "the call was throttled, or failed in the server"
        if call.error is None and self._names_unknown(call):
            return "its resource was made before the recording began"
        return "" if _code(call) not in _DENIALS else "the call was denied"

    def _names_unknown(self, call: RecordedCall) -> bool:
        """Whether an answered call names a resource that this server never made."""
        params = self._pairs.translate(call.params)
        named = [
            (kind, each)
            for member, kind in _REFERENCES.items()
            if member in params
            for each in (params[member] if isinstance(params[member], list) else [params[member]])
            if isinstance(each, str)
        ]
        answer = call.answer or {}
        is_empty = all(not value for value in answer.values()) and call.operation != "CancelJob"
        if is_empty and call.operation.startswith(("Describe", "List")):
            return False
        return any(not self._server.has(kind, bare_name(each)) for kind, each in named)

    def _ask(self, call: RecordedCall) -> None:
        operation = service_model(call.service).operation_model(call.operation)
        self._set_stage(call)
        response = self._server.ask(
            call.service, call.operation, self._pairs.translate(call.params)
        )
        status, found = response.status, _read(operation, response)
        if status != call.status:
            self._note(call, "status", str(call.status), str(status))
        if call.error is not None or status >= 300:
            self._compare_errors(call, found if status >= 300 else {})
            return
        if operation.output_shape is not None:
            self._compare(call, operation.output_shape, call.answer or {}, found, "answer")

    def _note(self, call: RecordedCall, path: str, recorded: str, found: str) -> None:
        self._differences.append(
            ReplayDifference(_name(call), EMBEDDED_SERVER, path, recorded, found)
        )

    # --- Events of jobs and lines of logs, before they are described --------------------------

    def _set_stage(self, call: RecordedCall) -> None:
        answer = call.answer if isinstance(call.answer, dict) else {}
        jobs = answer.get("jobs") or answer.get("jobSummaryList") or []
        self._now = {str(job.get("jobId")): job for job in jobs if isinstance(job, dict)}
        for job_id, job in self._now.items():
            status = str(job.get("status", ""))
            self._check_order(call, job_id, status)
            self._server.advance(self._pairs.find(job_id), status, self._fact_of)
        if call.operation == "GetLogEvents":
            self._write_log(call, answer.get("events") or [])

    def _fact_of(self, found_id: str) -> Mapping[str, Any]:
        """The recorded description of a job: that of now, with all attempts once it has ended."""
        job_id = self._pairs.find_recorded(found_id)
        now, last = self._now.get(job_id), self._last.get(job_id, {})
        if now is None:
            return last
        is_over = now.get("status") in ENDED
        attempts = last.get("attempts") if is_over else None
        return {**now, "attempts": attempts} if attempts else now

    def _check_order(self, call: RecordedCall, job_id: str, status: str) -> None:
        before = self._states.get(job_id, status)
        self._states[job_id] = status
        if status not in _ORDER or before not in _ORDER:
            self._note(call, "states of a job", f"{before}, then {status}", "no such state")
            return
        is_retry = before in ("STARTING", "RUNNING") and status == "RUNNABLE"
        is_back = _ORDER.index(status) < _ORDER.index(before) and not is_retry
        if is_back or (before in ENDED and status != before):
            self._note(call, "states of a job", f"{before}, then {status}", "never in this order")

    def _write_log(self, call: RecordedCall, events: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of an answer that earlier answers did not have."""
        stream = str(call.params.get("logStreamName", ""))
        of_answer: Counter[str] = Counter()
        new = []
        for event in events:
            key = f"{event.get('timestamp')} {event.get('message')}"
            of_answer[key] += 1
            if of_answer[key] > self._logged[stream, key]:
                self._logged[stream, key] += 1
                new.append(event)
        if new:
            self._server.add_log(self._pairs.find(stream), new)

    # --- Comparisons --------------------------------------------------------------------------

    def _compare_errors(self, call: RecordedCall, found: Mapping[str, Any]) -> None:
        recorded = call.error
        code, message = str(found.get("__type", "")), str(found.get("message", ""))
        if (recorded.code if recorded else "") != code:
            self._note(call, "error.code", _code(call) or _ABSENT, code or _ABSENT)
        text = (recorded.message or "") if recorded else ""
        if not has_same_wording(text, message):
            self._note(call, "error.message", wording(text) or _ABSENT, wording(message) or _ABSENT)

    def _compare(self, call: RecordedCall, shape: Any, old: Any, new: Any, path: str) -> None:
        """Compare a recorded value with the found one; `path` is that of both."""
        kind = shape.type_name if shape is not None else ""
        if isinstance(old, dict) and isinstance(new, dict):
            self._compare_members(call, shape, old, new, path)
        elif isinstance(old, list) and isinstance(new, list):
            self._compare_lists(call, shape.member if kind == "list" else None, old, new, path)
        elif type(old) is not type(new):
            self._note(call, path, _show(old), _show(new))
        elif isinstance(old, str) and _last_name(path).endswith("Token"):
            self._pairs.set_token(old, new)
        elif old != new and not _MOMENT.fullmatch(_last_name(path)):
            self._compare_scalars(call, shape, old, new, path)

    def _compare_scalars(
        self, call: RecordedCall, shape: Any, old: Any, new: Any, path: str
    ) -> None:
        name = _last_name(path)
        if not isinstance(old, str):
            self._note(call, path, _show(old), _show(new))
        elif name in _TEXTS:
            if not has_same_wording(old, new):
                self._note(call, path, wording(old), wording(new))
        elif getattr(shape, "enum", None) or name in ("status", "state"):
            self._note(call, path, old, new)
        elif not self._pairs.learn(old, new):
            self._note(call, path, self._pairs.find(old), new)

    def _compare_members(
        self, call: RecordedCall, shape: Any, old: dict[str, Any], new: dict[str, Any], path: str
    ) -> None:
        if shape is not None and shape.type_name == "map":
            if {*map(self._pairs.find, old)} != {*new} and path.endswith("tags"):
                self._note(call, path, "other keys", "other keys")
            for key in {*old} & {*new}:
                self._compare(call, shape.value, old[key], new[key], f"{path}.{key}")
            return
        if self._is_other_moment(call, old, new, path):
            return
        members = shape.members if shape is not None else {}
        # Reasons of waiting jobs differ: the server prepares something, or no host is there.
        passing = {"statusReason"} if "jobId" in old and old.get("status") in _WAITING else set()
        for name in dict.fromkeys((*old, *new)):
            if name in passing:
                continue
            where = f"{path}.{name}"
            if name not in new or name not in old:
                self._note(call, where, _presence(name, old), _presence(name, new))
            else:
                self._compare(call, members.get(name), old[name], new[name], where)

    def _is_other_moment(
        self, call: RecordedCall, old: dict[str, Any], new: dict[str, Any], path: str
    ) -> bool:
        """Whether these are jobs in different states, which are not compared in detail."""
        if "jobId" not in old or "status" not in old:
            return False
        before, now = str(old["status"]), str(new.get("status"))
        if before == now:
            return False
        if not (before in _WAITING and now in _WAITING):
            self._note(call, f"{path}.status", before, now)
        self._pairs.learn_all(old, new)
        return True

    def _compare_lists(
        self, call: RecordedCall, shape: Any, old: list[Any], new: list[Any], path: str
    ) -> None:
        key = _key_of(old) or _key_of(new)
        if not key:
            if len(old) != len(new) and not path.endswith("events"):
                self._note(call, path, f"{len(old)} items", f"{len(new)} items")
            for each, other in zip(old, new, strict=False):
                self._compare(call, shape, each, other, f"{path}[]")
            return
        by_key = {str(each.get(key)): each for each in new if isinstance(each, dict)}
        for each in old:
            wanted = str(each.get(key))
            other = by_key.get(self._pairs.find(wanted))
            if other is not None:
                self._compare(call, shape, each, other, f"{path}[]")
            elif self._pairs.knows(wanted) and not self._is_elsewhere(each, path):
                self._note(call, f"{path}[].{key}", "listed", "not listed")

    def _is_elsewhere(self, job: Mapping[str, Any], path: str) -> bool:
        """Whether a job may be in the list of another state by now: each list is of one state."""
        return path.endswith("jobSummaryList") and job.get("status") in _WAITING


_DENIALS = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "ExpiredToken",
            "UnrecognizedClientException", "ExpiredTokenException")  # fmt: skip


def _code(call: RecordedCall) -> str:
    return (call.error.code or "") if call.error is not None else ""


def _read(operation: Any, response: HttpResponse) -> Any:
    """The found answer, in the form of a recording."""
    return read_answer(operation, {"status_code": response.status, "body": response.body}, {}) or {}


def _last_facts(calls: Iterable[RecordedCall]) -> dict[str, Mapping[str, Any]]:
    """The newest description of each job, the detailed ones before summaries."""
    found: dict[str, Mapping[str, Any]] = {}
    for call in calls:
        answer = call.answer if isinstance(call.answer, dict) else {}
        if call.service == "batch" and call.error is None:
            for job in answer.get("jobSummaryList") or ():
                found[str(job.get("jobId"))] = {**found.get(str(job.get("jobId")), {}), **job}
            for job in answer.get("jobs") or ():
                found[str(job.get("jobId"))] = job
    return found


def _presence(name: str, members: Mapping[str, Any]) -> str:
    value = members.get(name)
    return _ABSENT if name not in members else "empty" if value in ([], {}, "") else "present"


def _last_name(path: str) -> str:
    return path.rpartition(".")[2].removesuffix("[]")


def _key_of(items: Sequence[Any]) -> str:
    """The member by which the items of a list are told apart; "" for lists without one."""
    if not items or not all(isinstance(each, dict) for each in items):
        return ""
    return next((key for key in _KEYS if all(key in each for each in items)), "")


class _Pairs:
    """The pairs of a text in the recording and the server's text for the same thing."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._recorded: dict[str, str] = {}
        self._sent: dict[str, str] = {}  # text in a request -> the recorded text

    def learn(self, recorded: str, found: str) -> bool:
        """Whether `found` may stand for `recorded`; of ARNs and paths the ends are learned, too."""
        if recorded in self._found:
            return self._found[recorded] == found
        if self._sent.get(found, recorded) != recorded:
            return False  # it is our own name, which stands for another
        for old, new in ((recorded, found), _ends(recorded, found)):
            if old and old not in self._found:
                self._found[old] = new
                self._recorded.setdefault(new, old)
        return True

    def learn_all(self, recorded: Any, found: Any) -> None:
        """Learn the pairs in values that are not compared."""
        if isinstance(recorded, dict) and isinstance(found, dict):
            for name in {*recorded} & {*found} - _TEXTS - {"status"}:
                self.learn_all(recorded[name], found[name])
        elif isinstance(recorded, list) and isinstance(found, list):
            for old, new in zip(recorded, found, strict=False):
                self.learn_all(old, new)
        elif isinstance(recorded, str) and isinstance(found, str) and recorded != found:
            self.learn(recorded, found)

    def set_token(self, recorded: str, found: str) -> None:
        """The token of the page after this one; the same position may be told anew."""
        self._found[recorded] = found

    def knows(self, recorded: str) -> bool:
        return self.find(recorded) != recorded or recorded in self._found

    def find(self, recorded: str) -> str:
        return _translated(recorded, self._found)

    def find_recorded(self, found: str) -> str:
        return _translated(found, self._recorded)

    def translate(self, value: Any) -> Any:
        """A recorded request with this server's texts in place of the recorded ones."""
        if isinstance(value, dict):
            return {key: self.translate(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.translate(inner) for inner in value]
        if not isinstance(value, str):
            return value
        found = self.find(value)
        self._sent[found] = value
        if found == value:
            self._found.setdefault(value, value)  # our own name stands for itself
        return found


def _translated(text: str, by: Mapping[str, str]) -> str:
    if text in by:
        return by[text]
    base, sign, number = re.fullmatch(r"(.*?)([:#]?)(\d*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    is_child = sign and number and base in by  # a child of an array, a node, a revision
    return f"{by[base]}{sign}{number}" if is_child else text


def _ends(recorded: str, found: str) -> tuple[str, str]:
    """The last parts of two ARNs or paths, if they differ."""
    old, new = recorded.rpartition("/")[2], found.rpartition("/")[2]
    return (old, new) if "/" in recorded and old != new else ("", "")


# --- Wording --------------------------------------------------------------------------------------

_VARIABLE = re.compile(
    r"arn:[^\s,]+|[0-9a-f]{8}-[0-9a-f-]{27}(:\d+)?|\b(name|value|document)-\d+\b"
    r"|\b[\w-]*\d[\w.:-]*|'[^']*'|\"[^\"]*\"|\[[^\]]*\]"
)


def wording(text: str) -> str:
    """The words of a message, with * for names, ids and numbers."""
    return re.sub(r"\*[*:/.@-]*\*", "*", " ".join(_VARIABLE.sub("*", text).split()))


def has_same_wording(recorded: str, found: str) -> bool:
    """Whether two messages differ at most where the recorded one has a name, an id or a number."""
    old, new = wording(recorded).split(), wording(found).split()
    return len(old) == len(new) and all(
        each == other or "*" in each for each, other in zip(old, new, strict=True)
    )


# --- For people -----------------------------------------------------------------------------------


def render(result: ReplayResult) -> Iterator[str]:
    """Lines of text: a sentence about the recording, and the differences by operation."""
    header = result.recording.header
    yield (
        f"{header.calls} calls of {header.date} in {header.region}, answered by {header.made_by}; "
        f"{result.asked} of them were sent to the embedded server."
    )
    for reason, count in sorted(result.not_asked.items()):
        yield f"Not sent: {count} ({reason})."
    if not result.differences:
        yield "No differences."
    operation = ""
    for each in result.differences:
        title = f"{each.operation}, compared with {each.against}:"
        if title != operation:
            operation = title
            yield title
        times = f"  ({each.count} times)" if each.count > 1 else ""
        yield f"  {each.path}: recorded {each.recorded}; found {each.found}{times}"
