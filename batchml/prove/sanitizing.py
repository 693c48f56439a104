"""Replace everything in recorded calls that identifies the account.

A text is kept only if it is one of AWS's own words: a value of an enum in botocore's model, a
region, an instance type, a word of AWS's documentation in a message. All else is replaced, the same
text always by the same replacement, so that the conversation stays coherent: names, ARNs and ids
keep their form (`arn:aws:batch:us-east-1:000000000001:job-queue/name-1`). Replacements are counted
in the order of the calls, and nothing of the original is in them.

Logs, values of variables, tags, parameters and words of commands are replaced as a whole. Numbers,
dates, and texts that are integers of up to nine digits stay.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from batchml.aws.recording import REDACTED
from batchml.local.server.protocol import service_model
from batchml.prove.recording import CallError, RecordedCall, number_calls

_REGION = re.compile(
    r"(us|eu|ap|sa|ca|me|af|il|mx|cn)(-gov)?-(north|south|east|west|central|northeast|northwest"
    r"|southeast|southwest)-\d[a-z]?|[a-z]{3,4}\d-az\d"
)
_ACCOUNT = re.compile(r"\d{12}")
_NUMBER = re.compile(r"-?\d{1,9}|-?\d{1,6}\.\d{1,6}|1\d{12}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:.]+(Z|[+-]\d\d:?\d\d)?)?")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{16,128}")
_ADDRESS = re.compile(r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}")
_ID_KINDS = (
    "i|vpc|subnet|sg|sgr|eni|ami|lt|igw|nat|rtb|rtbassoc|eipalloc|eipassoc|acl|fs|fsap|fsmt|fsvol|fl"
    "|vpce|vol|snap|key|cr|pg|r|dra|task"
)
_ID = re.compile(rf"({_ID_KINDS})-([0-9a-f]{{8,17}})")
_UNIQUE_ID = re.compile(r"A(KI|SI|RO|ID|IP|NP|GP)A[A-Z0-9]{12,28}")  # IAM User Guide, identifiers
_SEPARATORS = re.compile(r"([/:@=,;|\s()\[\]{}<>\"'?&#!*$\\^`~+]+)")
# Literal parts of ARNs, paths and addresses, whoever owns them.
_LITERALS = """
    arn aws aws-cn aws-us-gov s3 http https wss batch job job-queue job-definition
    compute-environment scheduling-policy consumable-resource log-group log-stream role default
    instance-profile user assumed-role policy instance subnet vpc security-group task cluster
    container-instance repository key alias stack secret parameter ecs ec2 iam sts logs kms ecr
    ssm secretsmanager cloudformation elasticfilesystem fsx imagebuilder file-system
    access-point events launch-template root dkr amazonaws com cn sha256 service-role
    aws-service-role Ref true false null batchml local pricing servicequotas
    this-machine
"""
_RESERVED = frozenset(_LITERALS.split())
_INSTANCE_TYPE = re.compile(
    r"[a-z]{1,6}\d{1,2}[a-z]{0,4}(-[a-z0-9]+)?(\.[a-z0-9-]{2,12})?|optimal|default_\w+"
)
_CONSTANT = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Members without an enum whose values are words of AWS, by the form of those words.
_KEPT = {
    "instanceType": _INSTANCE_TYPE, "InstanceType": _INSTANCE_TYPE,
    "instanceTypes": _INSTANCE_TYPE, "InstanceTypes": _INSTANCE_TYPE,
    "ActionNames": re.compile(r"[a-z0-9-]+:[A-Za-z0-9*]+"),
    "EvalActionName": re.compile(r"[a-z0-9-]+:[A-Za-z0-9*]+"),
    "ResourceType": re.compile(r"AWS::\w+::\w+"),
    "QuotaCode": re.compile(r"L-[0-9A-F]{8}"),
    "ServiceCode": re.compile(r"[A-Za-z0-9]{2,24}"),
    "cpuArchitecture": re.compile(r"[A-Z0-9_]+"),
    "operatingSystemFamily": re.compile(r"[A-Z0-9_]+"),
    "version": re.compile(r"\$Latest|\$Default|\d+"),
    "status": re.compile(r"[A-Z][A-Z_]{2,30}"),
    "type": re.compile("container|multinode"),
    "reason": re.compile(r"[A-Z]{3,20}:[A-Z_]{3,50}"),  # of jobStateTimeLimitActions
    "statusSummary": re.compile(r"[A-Z]{5,12}"),
    "options": re.compile(r"awslogs-[a-z-]+"),
}  # fmt: skip
_TEXTS = {
    "message", "Message", "statusReason", "StatusReason", "reason", "Reason", "StatusMessage",
    "ResourceStatusReason", "onStatusReason", "onReason", "QuotaName", "title", "cause",
}  # fmt: skip
_DOCUMENTS = {"TemplateBody", "PriceList", "UserData", "userData", "data", "PolicyDocument",
              "AssumeRolePolicyDocument", "Policy", "policyText", "PolicyInputList"}  # fmt: skip
_WHOLE_MAPS = {"tags", "Tags", "parameters", "Metadata", "metadata"}
_PAIRS = {"tags", "Tags", "TagSet", "TagSpecifications", "environment", "Environment"}
_NAMING = ("name", "names", "arn", "arns", "queue", "queues", "definition", "environment", "id")
_OUR_KEY = re.compile(r"(batchml:[a-z-]+|aws:[a-z:-]+|BATCHML_[A-Z_]+|AWS_[A-Z_]+|Name)")
# Words of AWS's messages that its documentation lacks.
_MORE_WORDS = "exited please unable healthy wasn isn doesn couldn didn"
_EVERYWHERE = ("batch", "logs", "iam", "sts")  # whose documentation has most words of messages


def sanitize(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls without anything that identifies their owner, with times since the first call.

    Two rounds: the first learns all names, and the second also replaces them in messages.
    """
    words = vocabulary(tuple(sorted({*_EVERYWHERE, *(call.service for call in calls)})))
    known = Replacements(words)
    for _ in range(2):
        known.begin_round()
        cleaned = [_Sanitizer(known, words).clean(call) for call in calls]
    return number_calls(cleaned)


class Replacements:
    """Original -> replacement, counted by kind."""

    def __init__(self, words: frozenset[str]) -> None:
        self.by_original: dict[str, str] = {}
        self.made: set[str] = set()
        self.names: set[str] = set()  # originals from members that name something
        self._words = words
        self._counts: dict[str, int] = {}
        self._names: re.Pattern[str] | None = None

    def begin_round(self) -> None:
        """Search the messages of this round for all names that are known by now."""
        names = [each for each, new in self.by_original.items() if self._is_in_texts(each, new)]
        names.sort(key=len, reverse=True)
        joined = "|".join(map(re.escape, names))
        self._names = re.compile(rf"(?<![\w-])(?:{joined})(?![\w-])") if names else None

    def get(self, original: str, kind: str, form: Callable[[int], str]) -> str:
        found = self.by_original.get(original)
        if found is None:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            found = self.by_original[original] = form(number)
            self.made.add(found)
        return found

    def _is_in_texts(self, original: str, new: str) -> bool:
        """Whether to look for an original in messages: for a plain word only if it is a name."""
        if len(original) < 3 or new.startswith("value-"):
            return False
        return original in self.names or original.lower() not in self._words

    def replace_names(self, text: str) -> str:
        if self._names is None:
            return text
        return self._names.sub(lambda match: self.by_original[match[0]], text)


def _without_error(answer: Any) -> Any:
    """The other members of an error; its code and message are kept in `error`."""
    if not isinstance(answer, dict):
        return None
    return {
        name: inner
        for name, inner in answer.items()
        if name.lower() not in ("__type", "message", "code", "error", "errors", "requestid")
    } or None


def _is_fault(key: str, value: Any) -> bool:
    """Whether a tag asks the embedded server for a fault, in batchml's own words."""
    return key == "batchml:chaos" and bool(re.fullmatch(r"[a-z-]{3,12}(@\d+[a-z]?)?", str(value)))


class _Sanitizer:
    def __init__(self, known: Replacements, words: frozenset[str]) -> None:
        self._known = known
        self._words = words
        self._is_log = False

    def clean(self, call: RecordedCall) -> RecordedCall:
        model = service_model(call.service)
        names = model.operation_names
        operation = model.operation_model(call.operation) if call.operation in names else None
        self._is_log = call.service == "logs"
        is_error = call.error is not None
        output = None if operation is None or is_error else operation.output_shape
        error = call.error
        if error is not None:
            code = error.code if _CONSTANT.fullmatch(error.code or "") else None
            error = CallError(code, self._text(error.message or ""))
        return msgspec.structs.replace(
            call,
            region=call.region if _REGION.fullmatch(call.region) else "us-east-1",
            command=call.command if re.fullmatch(r"[a-z -]{1,40}", call.command) else "python",
            params=self._value(operation and operation.input_shape, call.params, ""),
            answer=self._value(
                output, _without_error(call.answer) if is_error else call.answer, ""
            ),
            error=error,
            failure=self._text(call.failure),
        )

    # --- Values by their shapes ---------------------------------------------------------------

    def _value(self, shape: Any, value: Any, name: str, parent: str = "") -> Any:
        """Clean a value; `name` is the member that it is, or is in; `parent` the member above."""
        if isinstance(value, dict):
            return self._mapping(shape, value, name)
        if isinstance(value, list):
            inner = shape.member if shape is not None and shape.type_name == "list" else None
            return [self._value(inner, each, name, parent) for each in value]
        if isinstance(value, str):
            return self._string(shape, value, name)
        return value

    def _mapping(self, shape: Any, value: dict[str, Any], name: str) -> dict[str, Any]:
        kind = shape.type_name if shape is not None else ""
        if kind == "map":
            is_whole = name in _WHOLE_MAPS
            kept = _KEPT.get(name)
            return {
                key if kept and kept.fullmatch(key) else self._key(key): self._whole(inner)
                if is_whole and not _is_fault(key, inner)
                else self._value(shape.value, inner, key if is_whole else name)
                for key, inner in value.items()
            }
        if name in _PAIRS and {key.lower() for key in value} <= {"key", "value", "name"}:
            return {
                key: self._whole(inner) if key.lower() == "value" else self._key(str(inner))
                for key, inner in value.items()
            }
        if kind == "blob" or {*value} in ({"bytes"}, {"bytes", "sha256"}):
            return {"bytes": int(value["bytes"])} if "bytes" in value else {}
        if kind != "structure":  # of a member that the model does not know: perhaps a map
            return {
                self._document_key(key): self._value(None, inner, key, name)
                for key, inner in value.items()
            }
        is_filter = name in ("filters", "Filters", "filter")
        return {
            key if _IDENTIFIER.fullmatch(key) else self._key(key): inner
            if is_filter
            and key in ("name", "Name", "Field", "Type")
            and self._is_filter_name(inner)
            else self._value(shape.members.get(key), inner, key, name)
            for key, inner in value.items()
        }

    def _is_filter_name(self, value: Any) -> bool:
        return isinstance(value, str) and bool(re.fullmatch(r"[A-Za-z][A-Za-z_-]{0,40}", value))

    def _string(self, shape: Any, value: str, name: str) -> str:
        if not value or value == REDACTED or _is_fault(name, value):
            return value
        enum = getattr(shape, "enum", None)
        if enum and (value in enum or _CONSTANT.fullmatch(value)):
            return value  # also a word that this botocore does not know yet: replay reports it
        if name in _KEPT and _KEPT[name].fullmatch(value):
            return value
        if name == "message" and self._is_log:
            return f"a line of {len(value)} characters"
        if name in _DOCUMENTS and len(value) > 40:
            return self._known.get(value, "document", lambda number: f"document-{number}")
        if name in _TEXTS:
            return self._text(value)
        if name in ("command", "commands", "entryPoint", "args"):
            return self._word(value)
        if name.lower().endswith(_NAMING):
            self._known.names |= {*_SEPARATORS.split(value)[::2]}
        return self._composite(value)

    def _word(self, value: str) -> str:
        """A word of a command; `Ref::NAME` still refers to the parameter."""
        if value.startswith("Ref::"):
            return f"Ref::{self._key(value[5:])}"
        return str(self._whole(value))

    def _whole(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(str(key)): self._whole(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._whole(inner) for inner in value]
        if not isinstance(value, str) or value in ("", REDACTED):
            return value if isinstance(value, (str, bool)) or value is None else 0
        # Not under the text itself, which may be a name elsewhere, too.
        return self._known.get(f"value of {value}", "value", lambda number: f"value-{number}")

    def _key(self, key: str) -> str:
        return key if _OUR_KEY.fullmatch(key) else self._composite(key)

    # --- Texts without a shape ----------------------------------------------------------------

    def _composite(self, value: str) -> str:
        """A name, an ARN, a path, an address, JSON: its parts are replaced one by one."""
        if value[:1] in "{[":
            try:
                return json.dumps(self._json(json.loads(value)), separators=(",", ":"))
            except (ValueError, RecursionError):
                pass
        if re.fullmatch(r"arn:aws[a-z-]*:iam::aws:policy/[\w+=,.@/-]+", value):
            return value  # AWS's own policies
        if re.fullmatch(r"/aws/service/[a-z0-9_./-]+|[a-z-]+\.amazonaws\.com(\.cn)?", value):
            return value
        if _DATE.fullmatch(value):
            return value
        parts = _SEPARATORS.split(value)
        return "".join(part if at % 2 else self._host(part) for at, part in enumerate(parts))

    def _json(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._document_key(key): self._json(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._json(inner) for inner in value]
        if isinstance(value, str):
            return self._composite(value)
        return value

    def _document_key(self, key: str) -> str:
        return key if self._is_of_aws(key) else self._key(key)

    def _is_of_aws(self, word: str) -> bool:
        """Whether a word is of AWS's documentation, or is made of such words: as newMember."""
        if word in self._words or word.lower() in self._words:
            return True
        parts = _CAMEL.sub(" ", word).replace("-", " ").replace("_", " ").split()
        return bool(parts) and all(part.lower() in self._words for part in parts)

    def _host(self, token: str) -> str:
        """A part between separators; of a host of AWS label by label."""
        if token.endswith((".amazonaws.com", ".amazonaws.com.cn")):
            return ".".join(self._atom(label) for label in token.split("."))
        return self._atom(token)

    def _atom(self, token: str) -> str:
        known = self._known
        if not token or token in _RESERVED or token in known.made or token == REDACTED:
            return token
        if _REGION.fullmatch(token) or _NUMBER.fullmatch(token):
            return token
        if not token.strip(".%_-"):
            return token
        if _ACCOUNT.fullmatch(token):
            return known.get(token, "account", lambda number: f"{number:012d}")
        if _UUID.fullmatch(token):
            form = "00000000-0000-4000-8000-{:012x}"
            return known.get(token, "uuid", form.format)
        if _UNIQUE_ID.fullmatch(token):
            form = f"{token[:4]}{{:0{len(token) - 4}d}}"
            return known.get(token, token[:4], form.format)
        match = _ID.fullmatch(token)
        if match:
            prefix, digits = match[1], len(match[2])
            return known.get(token, prefix, lambda number: f"{prefix}-{number:0{digits}x}")
        if _HEX.fullmatch(token):
            return known.get(token, "hex", lambda number: f"{number:0{len(token)}x}")
        if _ADDRESS.fullmatch(token):
            form = "198.18.{}.{}"
            return known.get(token, "address", lambda number: form.format(*divmod(number, 250)))
        return known.get(token, "name", lambda number: f"name-{number}")

    # --- Messages -----------------------------------------------------------------------------

    def _text(self, text: str) -> str:
        """A message: known names are replaced, and words that are not of AWS's documentation."""
        replaced = self._known.replace_names(text)
        return "".join(
            part if part.isspace() else self._text_word(part)
            for part in re.split(r"(\s+)", replaced)
            if part
        )

    def _text_word(self, chunk: str) -> str:
        parts = _SEPARATORS.split(chunk)
        return "".join(part if at % 2 else self._text_atom(part) for at, part in enumerate(parts))

    def _text_atom(self, token: str) -> str:
        core = token.rstrip(".")
        dots = token[len(core) :]
        if not core or self._is_of_aws(core):
            return token
        return self._host(core) + dots


@cache
def vocabulary(services: tuple[str, ...]) -> frozenset[str]:
    """The words in botocore's documentation of services, lower case, and the names in their models.

    A word with a capital is often a name: it is in if it also occurs in lower case, or has a second
    capital or a digit, as EC2 and CannotPullContainerError.
    """
    found: set[str] = {*_MORE_WORDS.split()}
    for service in services:
        model = service_model(service)
        found |= {*model.operation_names, *model.shape_names}
        texts = [model.documentation]
        texts += [model.operation_model(name).documentation for name in model.operation_names]
        for name in model.shape_names:
            shape = model.shape_for(name)
            texts.append(shape.documentation)
            members: Mapping[str, Any] = getattr(shape, "members", None) or {}
            found |= {*members}
            texts += [member.documentation for member in members.values()]
        for text in texts:
            plain = _EXAMPLES.sub(" ", text or "")
            found |= {*_WORDS.findall(plain), *_ACRONYMS.findall(plain)}
    return frozenset(found)


_WORDS = re.compile(r"(?<![\w<&/.-])[a-z]+(?![\w.-]\w)")
_ACRONYMS = re.compile(r"(?<![\w&/.-])[A-Z][A-Za-z]*[A-Z0-9][A-Za-z0-9]*(?![\w.-]\w)")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # jobQueue: job, Queue
_EXAMPLES = re.compile(r"<code>.*?</code>|<[^>]*>|https?://\S+", re.DOTALL)
