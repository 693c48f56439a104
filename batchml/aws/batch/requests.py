"""Make the requests that submit a job: RegisterJobDefinition and SubmitJob.

Source of the retry rules: AWS Batch API Reference, RetryStrategy and EvaluateOnExit: at most five
rules, the first that matches decides, and AWS Batch retries what no rule matches.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from batchml.aws.naming import NOTICE_FILE, NOTICES, WORKSPACE, Platform
from batchml.errors import ConfigError
from batchml.model.environment import LOCAL
from batchml.model.group import launch_variables
from batchml.model.image import is_reference
from batchml.model.job import (
    DEFAULT_GRACE,
    MAX_OVERRIDES,
    JobSpec,
    SecretSource,
    arn_to_list,
    find_secret_arn,
    parse_secret,
)
from batchml.model.names import keyed_name, to_name
from batchml.model.tables import parse_size
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import LaunchPlan

# --- Retry rules ----------------------------------------------------------------------------------


MOST = 5  # rules

_FINAL = (CRASH_LOOP, DUPLICATE, CONFIGURATION_ERROR)  # another attempt would end the same way
_FINAL_SHORT = "7*"  # all of them, and 7, 70-75 and 79, which may be a program's own codes

_LOST = ("onStatusReason", "Host EC2*")
_IMAGE = ("onStatusReason", "Task failed to start")
_MEMORY = ("onReason", "OutOfMemoryError*")
_KILLED = "137"  # under torchrun: the main process was killed, and not by a rank
_EXITED = "Essential container in task exited*"  # the host was not lost, which may leave 143

RetryRule = dict[str, str]


def retry_strategy(
    spec: JobSpec, *, has_budget: bool = False, has_runtime: bool = False
) -> dict[str, Any]:
    """`[retry]` of a job as the retryStrategy of SubmitJob.

    With our runtime in the image, its exit codes (`runtime/protocol/exit_codes.py`) have rules:

    - 75 is a lost host: another host may work;
    - 76, 77 and 78 end the run, even if an app-error is retried;
    - 137 of ranks that restart in place is a lost host, unless the memory was exceeded: a rank that
      is killed never gives the run this code. If five rules do not suffice, it is an app-error;
    - 143 with a spent budget ends the run.
    """
    retries = "app-error" in spec.retry.on
    if not (has_runtime or has_budget):
        rules = [*_classes(spec), _rule(spec, ("onExitCode", "*"), "app-error"), _rest()]
    elif retries:
        rules = _exit_rules(spec, has_budget)
    else:
        rules = _retry_rules(spec)
    return {"attempts": spec.retry.attempts, "evaluateOnExit": rules}


def _retry_rules(spec: JobSpec) -> list[RetryRule]:
    """Rules for a job without retries of app-errors: the last rule ends the run."""
    lost, image, memory = _classes(spec)
    rules = [lost, _elsewhere(spec), image, memory, _rest()]
    if LaunchPlan(spec.launch.kind).restarts:
        # A missing image leaves no exit code, so the last rule may replace its rule.
        rules = [rule for rule in rules if rule is not image or rule["action"] == "RETRY"]
        killed = _rule(spec, ("onExitCode", _KILLED), "host-lost")
        rules[-1:] = [killed, _rest()] if len(rules) < MOST else [_rest()]
    return rules


def _exit_rules(spec: JobSpec, has_budget: bool) -> list[RetryRule]:
    """Rules for a job with retries of app-errors: AWS Batch retries what no rule matches.

    If five rules do not suffice, one pattern replaces the codes that end a run. A program's own
    codes 7, 70 to 74 and 79 then end it, too.
    """
    others = [rule for rule in _classes(spec) if rule["action"] == "EXIT"]
    if has_budget:
        others.append({**_exit(str(STOPPED)), "onStatusReason": _EXITED})
    elsewhere = _elsewhere(spec)
    ends = [elsewhere] if elsewhere["action"] == "EXIT" else []
    rules = [*others, *ends, *(_exit(str(code)) for code in _FINAL)]
    if len(rules) <= MOST:
        return rules
    first = [] if ends else [elsewhere]  # before "7*", which matches its code, too
    return [*others, *first, _exit(_FINAL_SHORT)]


def _classes(spec: JobSpec) -> Iterator[RetryRule]:
    yield _rule(spec, _LOST, "host-lost")
    yield _rule(spec, _IMAGE, "image-error")
    yield _rule(spec, _MEMORY, "out-of-memory")


def _elsewhere(spec: JobSpec) -> RetryRule:
    return _rule(spec, ("onExitCode", str(TRY_ELSEWHERE)), "host-lost")


def _rule(spec: JobSpec, condition: tuple[str, str], outcome: str) -> RetryRule:
    name, pattern = condition
    return {name: pattern, "action": "RETRY" if outcome in spec.retry.on else "EXIT"}


def _exit(code: str) -> RetryRule:
    return {"onExitCode": code, "action": "EXIT"}


def _rest() -> RetryRule:
    return {"onReason": "*", "action": "EXIT"}


# --- Secrets --------------------------------------------------------------------------------------


def secret_entries(spec: JobSpec, platform: Platform) -> list[dict[str, str]]:
    """The `secrets` of a job definition: names of variables, and where AWS finds their values.

    On `local`, the server looks up the text of job.toml in its user's file of secrets. In AWS, the
    execution role may only read the secrets that the environment lists. Raises ConfigError for the
    others, with the line to add.
    """
    found, missing = list[dict[str, str]](), list[tuple[str, SecretSource]]()
    for name, text in spec.secrets.items():
        kept = parse_secret(text)
        assert kept is not None, "read_job refused it"
        if platform.env == LOCAL:
            address = kept.value_from(arn_to_list(kept, "", "")) if kept.scope else text
            found.append({"name": name, "valueFrom": address})
            continue
        arn = find_secret_arn(kept, platform.secrets)
        if arn is None:
            missing.append((name, kept))
        else:
            found.append({"name": name, "valueFrom": kept.value_from(arn)})
    if missing:
        raise ConfigError(spec.name, _unlisted(missing, platform))
    return found


def _unlisted(missing: list[tuple[str, SecretSource]], platform: Platform) -> list[str]:
    """A mistake for each secret. The last one has the whole line for batchml.toml."""
    _, partition, _, _, account, *_ = [*platform.execution_role.split(":"), *[""] * 6]
    lines = [arn_to_list(kept, platform.region, account, partition or "aws") for _, kept in missing]
    listed = ", ".join(f'"{arn}"' for arn in dict.fromkeys([*platform.secrets, *lines]))
    mistakes = [
        f"secrets.{name}: {arn} is not among the secrets that jobs of {platform.env} may use."
        for (name, _), arn in zip(missing, lines, strict=True)
    ]
    mistakes[-1] += (
        f" Write under [env.{platform.env}] of batchml.toml: secrets = [{listed}], then: "
        f"batchml setup --env {platform.env}"
    )
    return mistakes


# --- Requests -------------------------------------------------------------------------------------


_HASH = 10  # hex digits of a definition's content in its name

# The folder of the NVIDIA driver's libraries on instances of our AMI (cfn/ami.yaml), and in jobs.
DRIVER_ON_HOST = "/opt/nvidia"
DRIVER = "/usr/local/nvidia"
REGISTERED = "batchml:registered"  # the tag with the date of registration, which AWS Batch lacks

# The command of a run whose true command is in a document, which the runtime of our images reads.
BY_DOCUMENT = "batchml-order"

# AWS Batch also counts the variables that it adds itself, and those of the definition.
_ROOM = MAX_OVERRIDES - 512
_FOR_A_NODE = 256  # bytes that AWS Batch adds for each node: its index, the main node's address

# All nodes are alike: one range without an end. Each run overrides the definition's number of
# nodes.
_ALL_NODES = "0:"
_LEAST_NODES = 2


class CommandDocument(Struct, frozen=True):
    """A command that is too long for AWS Batch: `{"command", "env", "params"}` as JSON."""

    name: str
    data: bytes


class SubmissionRequests(Struct, frozen=True):
    """The two requests of a run. `register` is sent only if AWS does not have the definition.

    `document` must be stored before either is sent.
    """

    register: dict[str, Any]
    submit: dict[str, Any]
    document: CommandDocument | None = None


class SubmissionContext(Struct, frozen=True):
    """The properties of a submission beside its job: key, code package, tags and others."""

    key: str = ""  # of the submission; part of the job's name
    name: str = ""  # the run's name, if it differs from the job's
    code: str = ""  # the address of the code package
    store: str = ""  # the address of the store for files that outlive the run
    documents: str = ""  # the address for documents; "" if the image cannot read any
    env: dict[str, str] = {}
    tags: dict[str, str] = {}
    depends_on: tuple[str, ...] = ()
    share: str = ""  # the share identifier in a queue with fair share
    array: int | None = None  # the number of children
    consumables: dict[str, int] = {}  # the quantity of each consumable resource that a run holds
    token: str = ""  # hex digits by which the nodes of a run recognize each other
    command: tuple[str, ...] | None = None  # the command in which the runtime fills in parameters


_LOCAL = Platform()


def make_submission(
    spec: JobSpec,
    *,
    image: str,
    queue: str,
    submission: SubmissionContext,
    platform: Platform = _LOCAL,
) -> SubmissionRequests:
    """Make the requests that submit `spec` with the image `image`.

    The definition has the properties that SubmitJob cannot override. Its name is a hash of its
    content, so that the runs of a job share it. Raises ConfigError if the overrides exceed AWS
    Batch's limit and the image cannot read a document.
    """
    name = to_name(submission.name or spec.name)
    register = definition_request(spec, image, platform)
    overrides, document = _overrides(spec, submission)
    container = {**overrides, "resourceRequirements": _requirements(spec)}
    submit: dict[str, Any] = {
        "jobName": keyed_name(name, submission.key) if submission.key else name,
        "jobQueue": queue,
        "jobDefinition": register["jobDefinitionName"],
        **_overriding(spec.nodes, container),
        "retryStrategy": retry_strategy(
            spec,
            has_budget="BATCHML_MAX_SECONDS" in submission.env,
            has_runtime=_has_runtime(spec, submission),
        ),
    }
    if spec.timeout_seconds is not None:
        submit["timeout"] = {"attemptDurationSeconds": spec.timeout_seconds}
    if submission.array is not None:
        submit["arrayProperties"] = {"size": submission.array}
    if submission.share:
        submit["shareIdentifier"] = submission.share
    if submission.tags:
        submit["tags"] = submission.tags
    if submission.depends_on:
        submit["dependsOn"] = [{"jobId": job_id} for job_id in submission.depends_on]
    if submission.consumables:
        submit["consumableResourcePropertiesOverride"] = {
            "consumableResourceList": [
                {"consumableResource": name, "quantity": quantity}
                for name, quantity in submission.consumables.items()
            ]
        }
    return SubmissionRequests(register, submit, document)


def _overriding(count: int, container: dict[str, Any]) -> dict[str, Any]:
    """The overrides of a run's container, or of the containers of all its nodes."""
    if count == 1:
        return {"containerOverrides": container}
    override = {"targetNodes": _ALL_NODES, "containerOverrides": container}
    return {"nodeOverrides": {"numNodes": count, "nodePropertyOverrides": [override]}}


def _has_runtime(spec: JobSpec, submission: SubmissionContext) -> bool:
    """Whether our runtime runs the command, so that its exit codes have a meaning."""
    has_store = bool(submission.store or submission.documents)
    return has_store or "BATCHML_SWEEP" in submission.env or spec.launch.kind != "plain"


def _overrides(
    spec: JobSpec, submission: SubmissionContext
) -> tuple[dict[str, Any], CommandDocument | None]:
    """The command and environment, in the request or in a document."""
    ours, theirs = _variables(spec, submission), {k: str(v) for k, v in spec.env.items()}
    command = list(submission.command) if submission.command is not None else spec.argv()
    whole = {"command": command, "environment": _pairs(ours | theirs)}
    size, room = len(json.dumps(whole)), _room(spec)
    if size <= room:
        return whole, None
    if not submission.documents:
        raise ConfigError(
            spec.name,
            [
                f"command and env: {size} bytes as JSON; AWS Batch allows {MAX_OVERRIDES}, with "
                f"its own variables, and only images that batchml built can read more from a "
                f"document. Put long values into the image."
            ],
        )
    content = {"command": command, "env": theirs, "params": spec.params}
    data = json.dumps(content, sort_keys=True).encode()
    document = CommandDocument(f"{hashlib.sha256(data).hexdigest()}.json", data)
    return _shortened(ours, theirs, f"{submission.documents}/{document.name}", room), document


def _room(spec: JobSpec) -> int:
    """The bytes of overrides that each container of a job can have."""
    return _ROOM - (_FOR_A_NODE if spec.nodes > 1 else 0)


def _shortened(
    ours: dict[str, str], theirs: dict[str, str], document: str, room: int
) -> dict[str, Any]:
    """The overrides of a run with a document: as many variables as fit.

    Variables that are in the document alone are missing while the runtime reads the document: those
    with the credentials and the address for it go first.
    """
    ours = {**ours, "BATCHML_ORDER": document}
    aws = {name: value for name, value in theirs.items() if name.startswith("AWS_")}
    found: dict[str, Any] = {}
    for variables in (
        ours | theirs,
        _without(ours, "BATCHML_PARAMS") | theirs,
        ours | aws,
        _without(ours, "BATCHML_PARAMS") | aws,
        _without(ours, "BATCHML_PARAMS"),
    ):
        found = {"command": [BY_DOCUMENT], "environment": _pairs(variables)}
        if len(json.dumps(found)) <= room:
            break
    return found


def _without(variables: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


def _pairs(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def definition_request(spec: JobSpec, image: str, platform: Platform = _LOCAL) -> dict[str, Any]:
    """The RegisterJobDefinition request of a job. The name ends in a hash of the content.

    So the same content has the same name on every machine.
    """
    name = to_name(spec.name)
    container = _container(spec, name, image) | _placed(spec, name, platform)
    if spec.secrets:
        container["secrets"] = secret_entries(spec, platform)
    kind = _for_nodes(container) if spec.nodes > 1 else _alone(container)
    content = json.dumps(container if spec.nodes == 1 else kind, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()[:_HASH]
    return {
        "jobDefinitionName": f"{name[: 128 - _HASH - 1]}-{digest}",
        **kind,
        "tags": {**platform.tags, "batchml": name},
    }


def _alone(container: dict[str, Any]) -> dict[str, Any]:
    return {"type": "container", "containerProperties": container}


def _for_nodes(container: dict[str, Any]) -> dict[str, Any]:
    """The main node is the first. The compute environment chooses the instance types."""
    nodes = {
        "numNodes": _LEAST_NODES,
        "mainNode": 0,
        "nodeRangeProperties": [{"targetNodes": _ALL_NODES, "container": container}],
    }
    return {"type": "multinode", "nodeProperties": nodes}


def dated_registration(request: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Add the date of `now` (seconds since the epoch) to a RegisterJobDefinition request."""
    day = datetime.fromtimestamp(now, UTC).date().isoformat()
    return {**request, "tags": {**request.get("tags", {}), REGISTERED: day}}


def _container(spec: JobSpec, name: str, image: str) -> dict[str, Any]:
    linux: dict[str, Any] = {"initProcessEnabled": True}
    if spec.resources.shm is not None:
        linux["sharedMemorySize"] = (parse_size(spec.resources.shm) or 0) // 1024**2
    return {
        "image": image,
        "command": _registered(spec),
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"},
            {"type": "MEMORY", "value": "1024"},
        ],
        "linuxParameters": linux,
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {"awslogs-stream-prefix": name},
        },
    }


def _registered(spec: JobSpec) -> list[str]:
    """The command of a definition. Every run overrides it.

    AWS Batch allows some 24 KiB for a definition: a command that is too long for the overrides is
    replaced.
    """
    command = list(spec.command)
    return command if len(json.dumps(command)) <= _ROOM else [BY_DOCUMENT]


def _placed(spec: JobSpec, name: str, platform: Platform) -> dict[str, Any]:
    """The container properties of the platform; none on `local`."""
    found: dict[str, Any] = {}
    environment: dict[str, str] = {}
    mounts: list[tuple[str, str, str, bool]] = []  # name, on the host, in the container, read-only
    if platform.workspace:
        mounts.append(("workspace", platform.workspace, WORKSPACE, False))
        environment["BATCHML_WORKSPACE"] = WORKSPACE
    if platform.gpu == "driver-mount" and spec.resources.gpus:
        # Privileged containers have the devices. PATH and LD_LIBRARY_PATH are not set here: that
        # would replace the image's values.
        found["privileged"] = True
        mounts.append(("nvidia", DRIVER_ON_HOST, DRIVER, True))
    if platform.notices:
        mounts.append(("notices", platform.notices, NOTICES, True))
        environment["BATCHML_NOTICE_FILE"] = NOTICE_FILE
    for key, value in (
        ("jobRoleArn", platform.job_role),
        ("executionRoleArn", platform.execution_role),
        # Our images set the user, too. It is in the request for rules that check requests.
        ("user", "" if is_reference(spec.image) else platform.user),
    ):
        if value:
            found[key] = value
    if platform.job_role:  # for `batchml shell`: ECS Exec uses this role
        found["enableExecuteCommand"] = True
    if platform.log_group:
        options = {"awslogs-stream-prefix": name, "awslogs-group": platform.log_group}
        found["logConfiguration"] = {"logDriver": "awslogs", "options": options}
    if environment:
        found["environment"] = _pairs(environment)
    if mounts:
        found["volumes"] = [{"name": n, "host": {"sourcePath": host}} for n, host, _, _ in mounts]
        found["mountPoints"] = [
            {"sourceVolume": n, "containerPath": inside, "readOnly": read_only}
            for n, _, inside, read_only in mounts
        ]
    return found


def _variables(spec: JobSpec, submission: SubmissionContext) -> dict[str, str]:
    """Our variables. The job's own `[env]` may replace them."""
    found = {**params_variable(spec), **launch_variables(spec, submission.token), **submission.env}
    for name, value in (
        ("BATCHML_KEY", submission.key),
        ("BATCHML_CODE", submission.code),
        ("BATCHML_STORE", submission.store),
        ("BATCHML_ARRAY_SIZE", str(submission.array or "")),
    ):
        if value:
            found[name] = value
    if spec.checkpoint.grace_seconds != DEFAULT_GRACE:
        found["BATCHML_GRACE"] = str(spec.checkpoint.grace_seconds)
    return found


def params_variable(spec: JobSpec) -> dict[str, str]:
    """The variable with the parameters as JSON."""
    return {"BATCHML_PARAMS": json.dumps(spec.params, sort_keys=True)}


def _requirements(spec: JobSpec) -> list[dict[str, str]]:
    resources = spec.resources
    found = [
        {"type": "VCPU", "value": str(resources.vcpus)},
        {"type": "MEMORY", "value": str(resources.memory_mib)},
    ]
    if resources.gpus:
        found.append({"type": "GPU", "value": str(resources.gpus)})
    return found
