"""Our nouns -> AWS request arguments. Pure."""

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
from batchml.model.job import (
    DEFAULT_GRACE,
    MAX_OVERRIDES,
    JobSpec,
    Kept,
    arn_to_list,
    find_arn,
    parse_kept,
)
from batchml.model.names import keyed_name, to_name
from batchml.model.project import is_reference
from batchml.model.tables import parse_size
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import TORCHRUN

# --- retries --------------------------------------------------------------------------------------
# `[retry]` of a job -> AWS Batch's rules. Pure.
#
# Source: AWS Batch API Reference, RetryStrategy and EvaluateOnExit: five rules at most, the first
# that matches decides, and what no rule matches is tried again.


MOST = 5  # rules

_FINAL = (CRASH_LOOP, DUPLICATE, CONFIGURATION_ERROR)  # another try would end the same way
_FINAL_SHORT = "7*"  # all of them, and 7, 70-75 and 79, which a program may have for itself

_LOST = ("onStatusReason", "Host EC2*")
_IMAGE = ("onStatusReason", "Task failed to start")
_MEMORY = ("onReason", "OutOfMemoryError*")
_KILLED = "137"  # of a run of ranks: whoever killed its main process, it was no rank
_EXITED = "Essential container in task exited*"  # not by the loss of its host, which may leave 143

Rule = dict[str, str]


def retry_strategy(
    spec: JobSpec, *, has_budget: bool = False, has_runtime: bool = False
) -> dict[str, Any]:
    """`[retry]` as the retryStrategy of SubmitJob.

    Exit codes of our runtime (`runtime/protocol/exit_codes.py`) are understood if the image has it:

    - 75 is a lost host: another one may do;
    - 76, 77 and 78 end the run, also where an app-error is worth another try;
    - 137 of ranks that our runtime leads is a lost host, unless it was for memory: what kills a
      rank never becomes the code of the run. Where five rules are too few it is an app-error;
    - a budget that is spent (143) is no error to try again after.
    """
    retries = "app-error" in spec.retry.on
    if not (has_runtime or has_budget):
        rules = [*_classes(spec), _rule(spec, ("onExitCode", "*"), "app-error"), _rest()]
    elif retries:
        rules = _but_final(spec, has_budget)
    else:
        rules = _but_lost(spec)
    return {"attempts": spec.retry.attempts, "evaluateOnExit": rules}


def _but_lost(spec: JobSpec) -> list[Rule]:
    """What is tried again, and then that nothing else is."""
    lost, image, memory = _classes(spec)
    rules = [lost, _elsewhere(spec), image, memory, _rest()]
    if spec.launch.kind == TORCHRUN:
        # An image that cannot be had leaves no code, so the last rule may stand for it.
        rules = [rule for rule in rules if rule is not image or rule["action"] == "RETRY"]
        killed = _rule(spec, ("onExitCode", _KILLED), "host-lost")
        rules[-1:] = [killed, _rest()] if len(rules) < MOST else [_rest()]
    return rules


def _but_final(spec: JobSpec, has_budget: bool) -> list[Rule]:
    """Only what is not tried again: no rule has to say that all else is.

    Where five rules are too few, one stands for the codes that end a run: then a program's own 7,
    70 to 74 and 79 end it, too.
    """
    others = [rule for rule in _classes(spec) if rule["action"] == "EXIT"]
    if has_budget:
        others.append({**_exit(str(STOPPED)), "onStatusReason": _EXITED})
    elsewhere = _elsewhere(spec)
    ends = [elsewhere] if elsewhere["action"] == "EXIT" else []
    whole = [*others, *ends, *(_exit(str(code)) for code in _FINAL)]
    if len(whole) <= MOST:
        return whole
    first = [] if ends else [elsewhere]  # which "7*" stands for as well
    return [*others, *first, _exit(_FINAL_SHORT)]


def _classes(spec: JobSpec) -> Iterator[Rule]:
    yield _rule(spec, _LOST, "host-lost")
    yield _rule(spec, _IMAGE, "image-error")
    yield _rule(spec, _MEMORY, "out-of-memory")


def _elsewhere(spec: JobSpec) -> Rule:
    return _rule(spec, ("onExitCode", str(TRY_ELSEWHERE)), "host-lost")


def _rule(spec: JobSpec, condition: tuple[str, str], outcome: str) -> Rule:
    name, pattern = condition
    return {name: pattern, "action": "RETRY" if outcome in spec.retry.on else "EXIT"}


def _exit(code: str) -> Rule:
    return {"onExitCode": code, "action": "EXIT"}


def _rest() -> Rule:
    return {"onReason": "*", "action": "EXIT"}


# --- secrets --------------------------------------------------------------------------------------
# `secrets` of a job definition: names of variables, and where AWS finds their values. Pure.


def secrets(spec: JobSpec, platform: Platform) -> list[dict[str, str]]:
    """What the definition of a job says of its `[secrets]`.

    On `local` it says what the job.toml says; the server looks that up in its user's own file. In
    AWS the execution role may read what the environment lists, and no more.
    Raises ConfigError for all that is not listed there, with the line to add.
    """
    found, missing = list[dict[str, str]](), list[tuple[str, Kept]]()
    for name, text in spec.secrets.items():
        kept = parse_kept(text)
        assert kept is not None, "read_job refused it"
        if platform.env == LOCAL:
            told = kept.value_from(arn_to_list(kept, "", "")) if kept.scope else text
            found.append({"name": name, "valueFrom": told})
            continue
        arn = find_arn(kept, platform.secrets)
        if arn is None:
            missing.append((name, kept))
        else:
            found.append({"name": name, "valueFrom": kept.value_from(arn)})
    if missing:
        raise ConfigError(spec.name, _refused(missing, platform))
    return found


def _refused(missing: list[tuple[str, Kept]], platform: Platform) -> list[str]:
    """One mistake for each, and the whole line of the file in the last."""
    _, partition, _, _, account, *_ = [*platform.execution_role.split(":"), *[""] * 6]
    lines = [arn_to_list(kept, platform.region, account, partition or "aws") for _, kept in missing]
    listed = ", ".join(f'"{arn}"' for arn in dict.fromkeys([*platform.secrets, *lines]))
    told = [
        f"secrets.{name}: {arn} is not among what jobs of {platform.env} may be given."
        for (name, _), arn in zip(missing, lines, strict=True)
    ]
    told[-1] += (
        f" Write under [env.{platform.env}] of batchml.toml: secrets = [{listed}], then: "
        f"batchml setup --env {platform.env}"
    )
    return told


# --- requests -------------------------------------------------------------------------------------


_HASH = 10  # hex digits of a definition's content in its name

# Where the NVIDIA driver's user space is on instances of our image (cfn/ami.yaml), and in jobs.
DRIVER_ON_HOST = "/opt/nvidia"
DRIVER = "/usr/local/nvidia"
REGISTERED = "batchml:registered"  # the tag with the date; AWS Batch keeps none

# The command where the true one is in a document: the runtime of our images reads it.
BY_DOCUMENT = "batchml-order"

# AWS Batch counts the variables that it adds itself, and those of the definition.
_ROOM = MAX_OVERRIDES - 512
_FOR_A_NODE = 256  # bytes that AWS Batch adds for each node: which it is, and where the main one is

# Every node is alike: one range, without an end, so that a run may have any number of nodes. What a
# definition says of the number counts for nobody: each run says its own.
_ALL_NODES = "0:"
_LEAST_NODES = 2


class Document(Struct, frozen=True):
    """What to run, where it is too long for AWS Batch: `{"command", "env", "params"}` as JSON."""

    name: str
    data: bytes


class Submission(Struct, frozen=True):
    """The two requests of a run. The first is sent only when AWS does not have the definition.

    `document` has to be where the run looks for it before either is sent.
    """

    register: dict[str, Any]
    submit: dict[str, Any]
    document: Document | None = None


class Travel(Struct, frozen=True):
    """What a run takes along: where its code is, and variables of the place that it runs in."""

    key: str = ""  # of the submission; part of the job's name
    name: str = ""  # the run's, where that is not the job's
    code: str = ""
    store: str = ""  # what outlives the run
    documents: str = ""  # where documents are put; empty: the image could not read one
    env: dict[str, str] = {}
    tags: dict[str, str] = {}
    depends_on: tuple[str, ...] = ()
    share: str = ""  # of a queue with fair share
    array: int | None = None  # children
    consumables: dict[str, int] = {}  # name of a consumable resource -> what each run holds of it
    token: str = ""  # hex digits by which the nodes of a run know each other
    command: tuple[str, ...] | None = None  # as it is, where the runtime fills in the parameters


_LOCAL = Platform()


def submission(
    spec: JobSpec, *, image: str, queue: str, travel: Travel, platform: Platform = _LOCAL
) -> Submission:
    """The requests that submit `spec` with the image that `image` refers to.

    The definition holds what SubmitJob cannot override and is named by its content, so that runs
    of a job share one. Raises ConfigError when the overrides exceed AWS Batch's limit and cannot
    travel as a document.
    """
    name = to_name(travel.name or spec.name)
    register = definition(spec, image, platform)
    overrides, document = _overrides(spec, travel)
    container = {**overrides, "resourceRequirements": _requirements(spec)}
    submit: dict[str, Any] = {
        "jobName": keyed_name(name, travel.key) if travel.key else name,
        "jobQueue": queue,
        "jobDefinition": register["jobDefinitionName"],
        **_overriding(spec.nodes, container),
        "retryStrategy": retry_strategy(
            spec,
            has_budget="BATCHML_MAX_SECONDS" in travel.env,
            has_runtime=_has_runtime(spec, travel),
        ),
    }
    if spec.timeout_seconds is not None:
        submit["timeout"] = {"attemptDurationSeconds": spec.timeout_seconds}
    if travel.array is not None:
        submit["arrayProperties"] = {"size": travel.array}
    if travel.share:
        submit["shareIdentifier"] = travel.share
    if travel.tags:
        submit["tags"] = travel.tags
    if travel.depends_on:
        submit["dependsOn"] = [{"jobId": job_id} for job_id in travel.depends_on]
    if travel.consumables:
        submit["consumableResourcePropertiesOverride"] = {
            "consumableResourceList": [
                {"consumableResource": name, "quantity": quantity}
                for name, quantity in travel.consumables.items()
            ]
        }
    return Submission(register, submit, document)


def _overriding(count: int, container: dict[str, Any]) -> dict[str, Any]:
    """Overrides of a run's container, or of those of all its nodes."""
    if count == 1:
        return {"containerOverrides": container}
    override = {"targetNodes": _ALL_NODES, "containerOverrides": container}
    return {"nodeOverrides": {"numNodes": count, "nodePropertyOverrides": [override]}}


def _has_runtime(spec: JobSpec, travel: Travel) -> bool:
    """True where the command is run by our runtime, whose exit codes then mean something."""
    told = bool(travel.store or travel.documents) or "BATCHML_SWEEP" in travel.env
    return told or spec.launch.kind != "plain"


def _overrides(spec: JobSpec, travel: Travel) -> tuple[dict[str, Any], Document | None]:
    """Command and environment, in the request or in a document beside it."""
    ours, theirs = _variables(spec, travel), {k: str(v) for k, v in spec.env.items()}
    command = list(travel.command) if travel.command is not None else spec.argv()
    whole = {"command": command, "environment": _pairs(ours | theirs)}
    size, room = len(json.dumps(whole)), _room(spec)
    if size <= room:
        return whole, None
    if not travel.documents:
        raise ConfigError(
            spec.name,
            [
                f"command and env: {size} bytes as JSON; AWS Batch takes {MAX_OVERRIDES}, with its "
                f"own variables, and an image that batchml did not build cannot read more from "
                f"elsewhere. Put long values into the image."
            ],
        )
    told = {"command": command, "env": theirs, "params": spec.params}
    data = json.dumps(told, sort_keys=True).encode()
    document = Document(f"{hashlib.sha256(data).hexdigest()}.json", data)
    return _shortened(ours, theirs, f"{travel.documents}/{document.name}", room), document


def _room(spec: JobSpec) -> int:
    """Bytes of overrides that each container of a job can have."""
    return _ROOM - (_FOR_A_NODE if spec.nodes > 1 else 0)


def _shortened(
    ours: dict[str, str], theirs: dict[str, str], document: str, room: int
) -> dict[str, Any]:
    """What is said to Batch beside a document: as much of it as there is room for.

    A variable of the job's that is not said may come too late: for the runtime, which reads the
    document with the credentials and at the address that variables name.
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


def definition(spec: JobSpec, image: str, platform: Platform = _LOCAL) -> dict[str, Any]:
    """The RegisterJobDefinition arguments of a job, named by what the container is.

    Who asks for the same again, from wherever, comes to the same name.
    """
    name = to_name(spec.name)
    container = _container(spec, name, image) | _placed(spec, name, platform)
    if spec.secrets:
        container["secrets"] = secrets(spec, platform)
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
    """The main node is the first. Instance types are for the compute environment to say."""
    nodes = {
        "numNodes": _LEAST_NODES,
        "mainNode": 0,
        "nodeRangeProperties": [{"targetNodes": _ALL_NODES, "container": container}],
    }
    return {"type": "multinode", "nodeProperties": nodes}


def registration(request: Mapping[str, Any], now: float) -> dict[str, Any]:
    """A RegisterJobDefinition request as it is sent at `now`, seconds since the epoch."""
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
    """The command of a definition, which every run says anew.

    AWS Batch takes some 24 KiB for a definition: what no run could say to it does not go there.
    """
    command = list(spec.command)
    return command if len(json.dumps(command)) <= _ROOM else [BY_DOCUMENT]


def _placed(spec: JobSpec, name: str, platform: Platform) -> dict[str, Any]:
    """What the place adds to a container's properties, or says instead; nothing on `local`."""
    found: dict[str, Any] = {}
    environment: dict[str, str] = {}
    mounts: list[tuple[str, str, str, bool]] = []  # name, on the host, in the container, read-only
    if platform.workspace:
        mounts.append(("workspace", platform.workspace, WORKSPACE, False))
        environment["BATCHML_WORKSPACE"] = WORKSPACE
    if platform.gpu == "driver-mount" and spec.resources.gpus:
        # Privileged, so that the devices are there. Where to look for programs and libraries is
        # the image's to say (PATH, LD_LIBRARY_PATH): a value here would replace the image's.
        found["privileged"] = True
        mounts.append(("nvidia", DRIVER_ON_HOST, DRIVER, True))
    if platform.notices:
        mounts.append(("notices", platform.notices, NOTICES, True))
        environment["BATCHML_NOTICE_FILE"] = NOTICE_FILE
    for key, value in (
        ("jobRoleArn", platform.job_role),
        ("executionRoleArn", platform.execution_role),
        # Said again, though images of ours say it, so that rules about requests can see it.
        ("user", "" if is_reference(spec.image) else platform.user),
    ):
        if value:
            found[key] = value
    if platform.job_role:  # `batchml shell`: ECS Exec opens its channel by this role
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


def _variables(spec: JobSpec, travel: Travel) -> dict[str, str]:
    """Ours, which a job's own `[env]` may replace."""
    found = {**params_variable(spec), **launch_variables(spec, travel.token), **travel.env}
    for name, value in (
        ("BATCHML_KEY", travel.key),
        ("BATCHML_CODE", travel.code),
        ("BATCHML_STORE", travel.store),
        ("BATCHML_ARRAY_SIZE", str(travel.array or "")),
    ):
        if value:
            found[name] = value
    if spec.checkpoint.grace_seconds != DEFAULT_GRACE:
        found["BATCHML_GRACE"] = str(spec.checkpoint.grace_seconds)
    return found


def params_variable(spec: JobSpec) -> dict[str, str]:
    """The parameters as the program finds them: as JSON, in one variable."""
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
