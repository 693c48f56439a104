"""Make the requests that submit a job: RegisterJobDefinition and SubmitJob.

Source of the retry rules: AWS Batch API Reference, RetryStrategy and EvaluateOnExit: there are at
most five rules, the first rule that matches decides, and without a match AWS Batch retries.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from batchml.aws.batch.network import network_properties
from batchml.aws.naming import (
    CACHE,
    CACHE_ON_HOST,
    NOTICE_FILE,
    NOTICES,
    REGISTERED,
    WORKSPACE,
    Platform,
)
from batchml.errors import ConfigError
from batchml.model.environment import LOCAL
from batchml.model.group import launch_variables
from batchml.model.image import is_reference
from batchml.model.job import (
    DEFAULT_GRACE,
    MAX_OVERRIDES,
    JobSpec,
)
from batchml.model.names import keyed_name, to_name
from batchml.model.run import NO_DEVICE
from batchml.model.secrets import SecretSource, arn_to_list, find_secret_arn, parse_secret
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import GPUS, NEURON_DEVICE, NEURONS, VCPUS, LaunchPlan
from batchml.runtime.protocol.variables import (
    DATA,
    DATA_CACHE,
    FILL,
    IDLE_AFTER,
    KEEP,
    folder_placeholders,
    params_placeholders,
)

# --- Retry rules ----------------------------------------------------------------------------------


MAX_RULES = 5

_FINAL = (CRASH_LOOP, DUPLICATE, CONFIGURATION_ERROR)  # another attempt would end in the same way
_FINAL_SHORT = "7*"  # matches all of _FINAL, and 7, 70-75 and 79, which a program may use itself

_LOST = ("onStatusReason", "Host EC2*")
_IMAGE = ("onStatusReason", "Task failed to start")
_MEMORY = ("onReason", "OutOfMemoryError*")
_DEVICE = ("onReason", f"{NO_DEVICE}*")
_KILLED = "137"  # with torchrun: the main process was killed, or a rank for lack of memory
_EXITED = "Essential container in task exited*"  # not a lost host, after which 143 is possible, too

RetryRule = dict[str, str]


def retry_strategy(
    spec: JobSpec,
    *,
    has_budget: bool = False,
    has_runtime: bool = False,
    lists_devices: bool = False,
) -> dict[str, Any]:
    """`[retry]` of a job as the retryStrategy of SubmitJob. `has_budget`: the run has `--max-cost`.
    `lists_devices`: a host without one of the definition's devices cannot start the container,
    which counts as a lost host, as far as five rules suffice.

    With batchml's runtime in the image, its exit codes (`runtime/protocol/exit_codes.py`) count:

    - 75 counts as a lost host: another host may work;
    - 76, 77 and 78 end the run, even if an app-error is retried;
    - 137 with ranks that restart in place counts as a lost host, unless the memory was exceeded: a
      rank killed otherwise never gives the run this code. If five rules do not suffice, it is an
      app-error;
    - 143 with a spent budget ends the run.
    """
    retries = "app-error" in spec.retry.on
    if not (has_runtime or has_budget):
        ended = _rule(spec, ("onExitCode", "*"), "app-error")
        rules = [*_rules_before_exit(spec, lists_devices), ended, _last_rule()]
    elif retries:
        rules = _rules_with_app_errors(spec, has_budget, lists_devices)
    else:
        rules = _rules_without_app_errors(spec, lists_devices)
    return {"attempts": spec.retry.attempts, "evaluateOnExit": rules}


def _rules_without_app_errors(spec: JobSpec, lists_devices: bool) -> list[RetryRule]:
    """Rules for a job without retries of app-errors: the last rule ends the run."""
    lost, image, memory = _rules_before_exit(spec, lists_devices)
    rules = [lost, _elsewhere(spec), image, memory, _last_rule()]
    if LaunchPlan(spec.launch.kind).restarts:
        # A missing image leaves no exit code, so the last rule may replace its rule.
        rules = [rule for rule in rules if rule is not image or rule["action"] == "RETRY"]
        killed = _rule(spec, ("onExitCode", _KILLED), "host-lost")
        rules[-1:] = [killed, _last_rule()] if len(rules) < MAX_RULES else [_last_rule()]
    return rules


def _rules_before_exit(spec: JobSpec, lists_devices: bool) -> list[RetryRule]:
    """The rules of `_outcome_rules`, with one for a missing device if no rule for images is needed:
    the last rule ends a run whose image is wrong, too.
    """
    lost, image, memory = _outcome_rules(spec)
    is_needed = not lists_devices or image["action"] == "RETRY"
    return [lost, image if is_needed else _rule(spec, _DEVICE, "host-lost"), memory]


def _rules_with_app_errors(spec: JobSpec, has_budget: bool, lists_devices: bool) -> list[RetryRule]:
    """Rules for a job with retries of app-errors: AWS Batch retries what no rule matches.

    If five rules do not suffice, one pattern replaces the codes that end a run. Then the codes 7,
    70 to 74 and 79 of a program also end it.
    """
    others = [rule for rule in _outcome_rules(spec) if rule["action"] == "EXIT"]
    if has_budget:
        others.append({**_exit(str(STOPPED)), "onStatusReason": _EXITED})
    elsewhere = _elsewhere(spec)
    ends = [elsewhere] if elsewhere["action"] == "EXIT" else []
    device = _rule(spec, _DEVICE, "host-lost")
    # Before the rule of images, which also matches a container that did not start.
    devices = [device] if lists_devices else []
    rules = [*devices, *others, *ends, *(_exit(str(code)) for code in _FINAL)]
    if len(rules) <= MAX_RULES:
        return rules
    first = [] if ends else [elsewhere]  # before "7*", which also matches its code
    short = [*others, *first, _exit(_FINAL_SHORT)]
    return [*devices, *short] if len(short) < MAX_RULES else short


def _outcome_rules(spec: JobSpec) -> Iterator[RetryRule]:
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


def _last_rule() -> RetryRule:
    return {"onReason": "*", "action": "EXIT"}


# --- Secrets --------------------------------------------------------------------------------------


def secret_entries(spec: JobSpec, platform: Platform) -> list[dict[str, str]]:
    """The `secrets` of a job definition: names of variables, and the ARNs of their values.

    On `local`, the server looks up the text of job.toml in the user's file of secrets. In AWS, the
    execution role may only read secrets that the environment lists. Raises ConfigError for other
    secrets, with the line to add.
    """
    found, missing = list[dict[str, str]](), list[tuple[str, SecretSource]]()
    for name, text in spec.secrets.items():
        source = parse_secret(text)
        assert source is not None, "read_job refuses wrong texts"
        if platform.env == LOCAL:
            address = source.value_from(arn_to_list(source, "", "")) if source.scope else text
            found.append({"name": name, "valueFrom": address})
            continue
        arn = find_secret_arn(source, platform.secrets)
        if arn is None:
            missing.append((name, source))
        else:
            found.append({"name": name, "valueFrom": source.value_from(arn)})
    if missing:
        raise ConfigError(spec.name, _unlisted_mistakes(missing, platform))
    return found


def _unlisted_mistakes(missing: list[tuple[str, SecretSource]], platform: Platform) -> list[str]:
    """A mistake for each secret. The last one has the whole line for batchml.toml."""
    _, partition, _, _, account, *_ = [*platform.execution_role.split(":"), *[""] * 6]
    arns = [
        arn_to_list(source, platform.region, account, partition or "aws") for _, source in missing
    ]
    listed = ", ".join(f'"{arn}"' for arn in dict.fromkeys([*platform.secrets, *arns]))
    mistakes = [
        f"secrets.{name}: {arn} is not among the secrets that jobs of {platform.env} may use."
        for (name, _), arn in zip(missing, arns, strict=True)
    ]
    mistakes[-1] += (
        f" Write under [env.{platform.env}] of batchml.toml: secrets = [{listed}], then: "
        f"batchml setup --env {platform.env}"
    )
    return mistakes


# --- Requests -------------------------------------------------------------------------------------


_HASH = 10  # hex digits of the hash of a definition's content, in its name

# The folder of the NVIDIA driver's libraries on instances of our AMI (cfn/ami.yaml), and in jobs.
DRIVER_ON_HOST = "/opt/nvidia"
DRIVER = "/usr/local/nvidia"

# The command that makes the runtime of our images read the true command from a document.
BY_DOCUMENT = "batchml-order"

# AWS Batch also counts the variables that it adds itself, and the variables of the definition.
_MAX_SIZE = MAX_OVERRIDES - 512
_NODE_VARIABLES = 256  # bytes that AWS Batch adds on each node: its index, the main node's address

# All nodes are alike, so there is one range, without an end. Each run overrides the definition's
# number of nodes.
_ALL_NODES = "0:"
_LEAST_NODES = 2


class CommandDocument(Struct, frozen=True):
    """A command that is too long for AWS Batch: `{"command", "env", "params"}` as JSON."""

    name: str
    data: bytes


class SubmissionRequests(Struct, frozen=True):
    """The two requests of a submission. `register` is sent only if the definition does not exist.

    `document` must be stored before a request is sent.
    """

    register: dict[str, Any]
    submit: dict[str, Any]
    document: CommandDocument | None = None


class SubmissionContext(Struct, frozen=True):
    """The properties of a submission that are not in its job."""

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
    token: str = ""  # the secret by which the nodes of a run recognize each other, in hex
    command: tuple[str, ...] | None = None  # a command whose parameters the runtime fills in


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
    register = definition_request(spec, image, platform, queue)
    overrides, document = _overrides(spec, submission)
    container = {**overrides, "resourceRequirements": _requirements(spec)}
    submit: dict[str, Any] = {
        "jobName": keyed_name(name, submission.key) if submission.key else name,
        "jobQueue": queue,
        "jobDefinition": register["jobDefinitionName"],
        **_for_nodes(spec.nodes, container),
        "retryStrategy": retry_strategy(
            spec,
            has_budget="BATCHML_MAX_SECONDS" in submission.env,
            has_runtime=_has_runtime(spec, submission),
            lists_devices=_lists_devices(register),
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


def _for_nodes(count: int, container: dict[str, Any]) -> dict[str, Any]:
    """The overrides of a run's container, or of the containers of all its nodes."""
    if count == 1:
        return {"containerOverrides": container}
    override = {"targetNodes": _ALL_NODES, "containerOverrides": container}
    return {"nodeOverrides": {"numNodes": count, "nodePropertyOverrides": [override]}}


def _has_runtime(spec: JobSpec, submission: SubmissionContext) -> bool:
    """Whether batchml's runtime runs the command, so that its exit codes have a meaning."""
    has_store = bool(submission.store or submission.documents)
    return has_store or "BATCHML_SWEEP" in submission.env or spec.launch.kind != "plain"


def _overrides(
    spec: JobSpec, submission: SubmissionContext
) -> tuple[dict[str, Any], CommandDocument | None]:
    """The command and environment, in the request or in a document."""
    ours, theirs = _variables(spec, submission), {k: str(v) for k, v in spec.env.items()}
    command = list(submission.command) if submission.command is not None else spec.argv()
    whole = {"command": command, "environment": _pairs(ours | theirs)}
    size = len(json.dumps(whole))
    max_size = _MAX_SIZE - (_NODE_VARIABLES if spec.nodes > 1 else 0)
    if size <= max_size:
        return whole, None
    if not submission.documents:
        raise ConfigError(
            spec.name,
            [
                f"command and env: {size} bytes as JSON; AWS Batch allows {MAX_OVERRIDES}, with "
                f"its own variables. Only images that batchml built can read more from a "
                f"document. Put long values into files of the image."
            ],
        )
    content = {"command": command, "env": theirs, "params": spec.params}
    data = json.dumps(content, sort_keys=True).encode()
    document = CommandDocument(f"{hashlib.sha256(data).hexdigest()}.json", data)
    address = f"{submission.documents}/{document.name}"
    return _shortened_overrides(ours, theirs, address, max_size), document


def _shortened_overrides(
    ours: dict[str, str], theirs: dict[str, str], document: str, max_size: int
) -> dict[str, Any]:
    """The overrides of a run with a document: as many variables as fit.

    Variables that are only in the document are missing while the runtime reads it. So the variables
    with its address and with credentials are kept longest.
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
        if len(json.dumps(found)) <= max_size:
            break
    return found


def _without(variables: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


def _pairs(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def definition_request(
    spec: JobSpec, image: str, platform: Platform = _LOCAL, queue: str = ""
) -> dict[str, Any]:
    """The RegisterJobDefinition request of a job. `queue`: its name in AWS.

    The name ends in a hash of the content, so equal content has the same name on every machine.
    """
    name = to_name(spec.name)
    container = _container(spec, name, image) | _platform_properties(spec, name, platform, queue)
    if spec.secrets:
        container["secrets"] = secret_entries(spec, platform)
    kind = _multinode(container) if spec.nodes > 1 else _single(container)
    content = json.dumps(container if spec.nodes == 1 else kind, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()[:_HASH]
    return {
        "jobDefinitionName": f"{name[: 128 - _HASH - 1]}-{digest}",
        **kind,
        "tags": {**platform.tags, "batchml": name},
    }


def container_properties(register: Mapping[str, Any]) -> dict[str, Any]:
    """The containerProperties of a RegisterJobDefinition request, those of all nodes."""
    nodes = register.get("nodeProperties")
    single = register.get("containerProperties")
    found = nodes["nodeRangeProperties"][0]["container"] if nodes else single
    return dict(found or {})


def _single(container: dict[str, Any]) -> dict[str, Any]:
    return {"type": "container", "containerProperties": container}


def _multinode(container: dict[str, Any]) -> dict[str, Any]:
    """The main node is the first. The compute environment chooses the instance types."""
    nodes = {
        "numNodes": _LEAST_NODES,
        "mainNode": 0,
        "nodeRangeProperties": [{"targetNodes": _ALL_NODES, "container": container}],
    }
    return {"type": "multinode", "nodeProperties": nodes}


def _lists_devices(definition: Mapping[str, Any]) -> bool:
    """Whether a host without a device of this definition cannot start its container.

    Docker gives all devices that there are to a privileged container, and skips the list.
    """
    nodes = definition.get("nodeProperties", {}).get("nodeRangeProperties", [{}])
    container = definition.get("containerProperties") or nodes[0].get("container", {})
    devices = container.get("linuxParameters", {}).get("devices")
    return bool(devices) and not container.get("privileged")


def dated_registration(request: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Add the date of `now` (seconds since the epoch) to a RegisterJobDefinition request."""
    day = datetime.fromtimestamp(now, UTC).date().isoformat()
    return {**request, "tags": {**request.get("tags", {}), REGISTERED: day}}


def _container(spec: JobSpec, name: str, image: str) -> dict[str, Any]:
    return {
        "image": image,
        "command": _definition_command(spec),
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"},
            {"type": "MEMORY", "value": "1024"},
        ],
        "linuxParameters": _linux_parameters(spec),
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {"awslogs-stream-prefix": name},
        },
    }


def _linux_parameters(spec: JobSpec) -> dict[str, Any]:
    """The shared memory, and the Neuron chips: a device for each, as AWS's own samples have them.

    Source: ECS Developer Guide, "Amazon ECS task definitions for AWS Neuron machine learning
    workloads".
    """
    found: dict[str, Any] = {
        "initProcessEnabled": True,
        "sharedMemorySize": spec.resources.shm_mib,
    }
    if spec.resources.neurons:
        found["devices"] = [
            {"hostPath": f"{NEURON_DEVICE}{chip}", "permissions": ["READ", "WRITE", "MKNOD"]}
            for chip in range(spec.resources.neurons)
        ]
    return found


def _definition_command(spec: JobSpec) -> list[str]:
    """The command of a definition, which every run overrides.

    AWS Batch allows about 24 KiB for a definition, so a command that is too long for overrides is
    replaced.
    """
    command = list(spec.command)
    return command if len(json.dumps(command)) <= _MAX_SIZE else [BY_DOCUMENT]


def _platform_properties(
    spec: JobSpec, name: str, platform: Platform, queue: str
) -> dict[str, Any]:
    """The container properties that the platform decides; none on `local`."""
    found: dict[str, Any] = {}
    network = network_properties(spec, platform.efa.get(queue))
    environment = dict(network.environment)
    if network.devices:
        linux = _linux_parameters(spec)
        linux["devices"] = [*linux.get("devices", ()), *network.devices]
        found |= {"linuxParameters": linux, "ulimits": list(network.ulimits)}
    mounts: list[tuple[str, str, str, bool]] = []  # name, on the host, in the container, read-only
    if platform.workspace:
        mounts.append(("workspace", platform.workspace, WORKSPACE, False))
        environment["BATCHML_WORKSPACE"] = WORKSPACE
    if platform.gpu == "driver-mount" and spec.resources.gpu_count:
        # Privileged containers have the devices. PATH and LD_LIBRARY_PATH stay unset: values here
        # would replace the values of the image.
        found["privileged"] = True
        mounts.append(("nvidia", DRIVER_ON_HOST, DRIVER, True))
    if platform.notices:
        mounts.append(("notices", platform.notices, NOTICES, True))
        environment["BATCHML_NOTICE_FILE"] = NOTICE_FILE
    if spec.data and platform.data_cache:
        mounts.append(("cache", CACHE_ON_HOST, CACHE, False))
        environment[DATA_CACHE] = CACHE
    for key, value in (
        ("jobRoleArn", platform.job_role),
        ("executionRoleArn", platform.execution_role),
        # Our images also set the user. Policies that check requests need it in the request.
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
    """The variables that batchml sets. `[env]` of the job may replace them."""
    found = {**params_variable(spec), **launch_variables(spec, submission.token), **submission.env}
    for name, value in (
        (VCPUS, str(spec.resources.vcpus)),
        (GPUS, str(spec.resources.gpu_count or "")),
        (NEURONS, str(spec.resources.neurons or "")),
        ("BATCHML_KEY", submission.key),
        ("BATCHML_CODE", submission.code),
        ("BATCHML_STORE", submission.store),
        ("BATCHML_ARRAY_SIZE", str(submission.array or "")),
        (KEEP, "" if spec.keep is True else json.dumps(spec.keep)),
        (IDLE_AFTER, str(spec.idle_seconds or "")),
        (DATA, json.dumps(spec.data, sort_keys=True) if spec.data else ""),
        (FILL, "1" if folder_placeholders(spec.argv()) or params_placeholders(spec.params) else ""),
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
    if resources.gpu_count:
        found.append({"type": "GPU", "value": str(resources.gpu_count)})
    return found
