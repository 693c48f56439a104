"""In front of moto's server: reads each call by botocore's model, keeps it, denies what a test
denies, and answers what moto lacks. Imported by `moto_aws.py` in its own process.
"""

import io
import json
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any, Literal

import msgspec
from moto.batch.models import batch_backends
from moto.cloudformation.models import cloudformation_backends
from moto.core.parse import PROTOCOL_PARSERS
from moto.core.routing import get_service_router
from moto.core.serialize import get_serializer_class
from moto.core.utils import get_service_model
from moto.ec2.models import ec2_backends
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import BackendRequest as Request
from moto.sts.models import sts_backends
from werkzeug.wrappers import Response

from tests.support import moto_stacks  # noqa: F401  (patches moto)
from tests.support.aws_world import AwsError
from tests.support.iam_judge import Need, is_allowed, needs_of
from tests.support.registry_rig import Registry

Json = dict[str, Any]
ACCOUNT = "123456789012"
_SCOPE = re.compile(r"Credential=([^/]+)/\d{8}/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request")
# Names in signatures -> botocore's names of services.
_SERVICES = {
    "servicequotas": "service-quotas", "elasticfilesystem": "efs",
    "tagging": "resourcegroupstaggingapi", "monitoring": "cloudwatch",
}  # fmt: skip


class Rules(msgspec.Struct):
    """How it answers.

    `denied`: IAM actions that nobody may call, such as `ec2:DescribeVpcs`; `scp`: those that a
    service control policy denies. `errors`: operations such as `ec2:DescribeVpcs` -> (code,
    message, HTTP status). `keys`: "expired" or "unknown", whatever keys sign. `missing_is_403`: S3
    answers 403 for an object that is not there, as it does without s3:ListBucket. `quotas`: names
    -> vCPUs. `not_enabled`: regions that the account has not enabled. `not_offered`: instance types
    that no zone offers.
    """

    denied: list[str] = []
    scp: list[str] = []
    errors: dict[str, tuple[str, str, int]] = {}
    keys: Literal["valid", "expired", "unknown"] = "valid"
    missing_is_403: bool = False
    quotas: dict[str, float] = {}
    not_enabled: list[str] = []
    not_offered: list[str] = []


# Codes and statuses of errors by protocol: "Common errors" in each service's API reference.
_CODES = {
    "denied": {
        "query": ("AccessDenied", 403), "ec2": ("UnauthorizedOperation", 403),
        "json": ("AccessDeniedException", 400), "rest-json": ("AccessDeniedException", 403),
        "rest-xml": ("AccessDenied", 403),
    },
    "expired": {
        "query": ("ExpiredToken", 403), "ec2": ("RequestExpired", 400),
        "json": ("ExpiredTokenException", 400), "rest-json": ("ExpiredTokenException", 403),
        "rest-xml": ("ExpiredToken", 400),
    },
    "unknown": {
        "query": ("InvalidClientTokenId", 403), "ec2": ("AuthFailure", 401),
        "json": ("UnrecognizedClientException", 400),
        "rest-json": ("UnrecognizedClientException", 403), "rest-xml": ("InvalidAccessKeyId", 403),
    },
}  # fmt: skip
_TEXTS = {
    "expired": "The security token included in the request is expired",
    "unknown": "The security token included in the request is invalid.",
}


class Front:
    """A WSGI application."""

    def __init__(self, inner: Any, registry: Registry | None = None) -> None:
        self.inner, self.registry = inner, registry
        self.rules = Rules()
        self.calls: list[Any] = []
        self.placement_groups: dict[str, Json] = {}
        self.lock = threading.Condition()

    def __call__(self, environ: Json, start: Any) -> Iterable[bytes]:
        request = Request(environ)
        if request.path.startswith("/_batchml"):
            return self._control(request)(environ, start)
        body = request.get_data(cache=True)
        with self.lock:
            response = self._answer(request, body)
        return response(environ, start)

    def _control(self, request: Request) -> Response:
        if request.path.endswith("/rules"):
            changed = {**msgspec.to_builtins(self.rules), **json.loads(request.get_data())}
            self.rules = msgspec.convert(changed, Rules)
        found: Any = self.calls if request.path.endswith("/calls") else {}
        if request.path.endswith("/wait"):
            found = self._wait(json.loads(request.get_data()))
        return Response(json.dumps(found, default=str), content_type="application/json")

    def _wait(self, wanted: str) -> bool:
        """Wait for the next call, or for the next one of `service:Operation`, for a minute."""
        with self.lock:
            seen = len(self.calls)

            def has_come() -> bool:
                new = [f"{service}:{name}" for service, name, *_ in self.calls[seen:]]
                return wanted in new if wanted else bool(new)

            return self.lock.wait_for(has_come, 60)

    def _answer(self, request: Request, body: bytes) -> Response:
        scope = _SCOPE.search(request.headers.get("Authorization", ""))
        if scope is None:
            return self._pass(request, body)
        service = _SERVICES.get(scope[3], scope[3])
        call = ReadCall(request, body, service, scope[2])
        try:
            response = (
                self._refuse(call, scope[1]) or self._decide(call) or self._pass(request, body)
            )
        except AwsError as error:
            response = call.write(error)
        except Exception:
            response = Response(traceback.format_exc(), 500)
        if response.status_code == 404 and self.rules.missing_is_403 and service == "s3":
            response = call.write(AwsError("AccessDenied", "Access Denied"), 403)
        self.calls.append((service, call.operation, call.params, scope[1], response.status_code))
        self.lock.notify_all()
        return response

    def _refuse(self, call: "ReadCall", access_key: str) -> Response | None:
        """The refusal of a call that the caller may not make.

        A role that was assumed may do what its policies allow; other callers may do all. IAM User
        Guide, "Access denied error messages" and "Policy evaluation logic".
        """
        if self.rules.keys != "valid":
            return call.refuse(self.rules.keys, _TEXTS[self.rules.keys])
        if call.region in self.rules.not_enabled or call.region not in _REGIONS:
            # Account Management User Guide, "Enable or disable AWS Regions": IAM's data is not
            # there. The host name of a region that does not exist has no address.
            return call.refuse("unknown", _TEXTS["unknown"])
        who, policies = _caller(access_key)
        for need in needs_of(call.service, call.operation, call.params, call.region):
            reason, need = "", _with_tags(need, call.region)
            if need.action in self.rules.scp:
                reason = "with an explicit deny in a service control policy: arn:aws:organizations"
            elif need.action in self.rules.denied or not all(
                is_allowed(statements, need) for statements in policies
            ):
                reason = f"because no identity-based policy allows the {need.action} action"
            if reason:
                text = f"User: {who} is not authorized to perform: {need.action} on resource: "
                return call.refuse("denied", f"{text}{need.resource} {reason}")
        return None

    def _decide(self, call: "ReadCall") -> Response | None:
        """The answer, if moto shall not give it."""
        if error := self.rules.errors.get(f"{call.service}:{call.operation}"):
            code, message, status = error
            return call.write(AwsError(code, message), status)
        if call.service == "ecr" and self.registry and hasattr(self.registry, f"_{call.operation}"):
            status, answer = self.registry.call(call.operation, call.params)
            return Response(json.dumps(answer), status)
        own = ANSWERS.get((call.service, call.operation))
        return call.write(own(self, call)) if own else None

    def _pass(self, request: Request, body: bytes) -> Response:
        environ = {**request.environ, "wsgi.input": io.BytesIO(body)}
        environ.pop("werkzeug.request", None)
        return Response.from_app(self.inner, environ, buffered=True)


class ReadCall:
    """A request, read by botocore's model of its service."""

    def __init__(self, request: Request, body: bytes, service: str, region: str) -> None:
        self.service, self.region = service, region
        self.model = get_service_model(service)
        self.protocol = self.model.resolved_protocol
        target = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        name = target or request.values.get("Action", "")
        in_path: Json = {}
        if name:
            self.operation_model = self.model.operation_model(name)
        else:
            self.operation_model, in_path = get_service_router(service).match(request)
        self.operation = self.operation_model.name
        asked: Any = {
            "body": body, "headers": request.headers, "method": request.method,
            "url_params": in_path, "url_path": request.path, "values": request.values,
        }  # fmt: skip
        self.params: Json = PROTOCOL_PARSERS[self.protocol](self.operation_model).parse(asked)
        self.params.pop("Body", None)

    def refuse(self, why: str, text: str) -> Response:
        code, status = _CODES[why][self.protocol]
        return self.write(AwsError(code, text), status)

    def write(self, result: Any, status: int = 0) -> Response:
        serializer = get_serializer_class(self.model.service_name, self.protocol)
        found = serializer(self.operation_model).serialize(result)
        return Response(found["body"], status or found["status_code"], dict(found["headers"]))


def _caller(access_key: str) -> tuple[str, list[list[Json]]]:
    """Who signs, and the statements of the policies that must all allow a call."""
    for each in sts_backends[ACCOUNT]["aws"].assumed_roles:
        if each.access_key_id == access_key:
            found = [_statements_of(each.role_arn.rpartition("/")[2])]
            if each.policy:
                found.append(_statements(each.policy))
            return each.arn, found
    return f"arn:aws:iam::{ACCOUNT}:user/admin", []


def _with_tags(need: Need, region: str) -> Need:
    """The need with the tags of the run that it is about."""
    if ":job/" not in need.resource:
        return need
    tags = batch_backends[ACCOUNT][region].list_tags_for_resource(need.resource)
    found = {f"aws:ResourceTag/{key}": (value,) for key, value in tags.items()}
    kept = {key: value for key, value in need.context.items() if "ResourceTag" not in key}
    return need._replace(context={**kept, **found})


def _statements_of(role: str) -> list[Json]:
    iam = iam_backends[ACCOUNT]["aws"]
    documents = [iam.get_role_policy(role, name)[1] for name in iam.list_role_policies(role)]
    attached, _ = iam.list_attached_role_policies(role)
    documents += [
        version.document
        for policy in attached
        for version in policy.versions
        if version.version_id == policy.default_version_id
    ]
    return [statement for each in documents for statement in _statements(each)]


def _statements(document: Any) -> list[Json]:
    found = (json.loads(document) if isinstance(document, str) else document)["Statement"]
    return found if isinstance(found, list) else [found]


# --- operations that moto lacks -----------------------------------------------------------------

Answer = Callable[[Front, ReadCall], Any]
ANSWERS: dict[tuple[str, str], Answer] = {}


def answers(service: str, operation: str) -> Callable[[Answer], Answer]:
    def put(function: Answer) -> Answer:
        ANSWERS[service, operation] = function
        return function

    return put


@answers("service-quotas", "ListServiceQuotas")
def list_quotas(front: Front, call: ReadCall) -> Json:
    """Service Quotas API reference. The quotas of an account that has run for a while."""
    names = {
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 256.0,
        "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests": 256.0,
        "Running On-Demand G and VT instances": 64.0,
        "All G and VT Spot Instance Requests": 64.0,
        **front.rules.quotas,
    }
    return {
        "Quotas": [
            {"ServiceCode": "ec2", "QuotaName": name, "QuotaCode": f"L-{i:08}", "Value": value}
            for i, (name, value) in enumerate(names.items())
        ]
    }


@answers("pricing", "GetProducts")
def get_products(front: Front, call: ReadCall) -> Json:
    """Price List API reference: a list of JSON texts, which may be empty."""
    return {"FormatVersion": "aws_v1", "PriceList": []}


@answers("iam", "SimulatePrincipalPolicy")
def simulate(front: Front, call: ReadCall) -> Json:
    """IAM API reference. The caller is an administrator, with what a test denies taken away."""
    rules = front.rules
    denied = {*rules.denied, *rules.scp}
    return {
        "EvaluationResults": [
            {
                "EvalActionName": action,
                "EvalResourceName": resource,
                "EvalDecision": "implicitDeny" if action in denied else "allowed",
                "OrganizationsDecisionDetail": {"AllowedByOrganizations": action not in rules.scp},
            }
            for action in call.params["ActionNames"]
            for resource in call.params.get("ResourceArns", ["*"])
        ],
        "IsTruncated": False,
    }


_REGIONS: Mapping[str, str] = {
    each.name: each.opt_in_status for each in RegionsAndZonesBackend.regions
}


@answers("ec2", "DescribeRegions")
def describe_regions(front: Front, call: ReadCall) -> Json:
    """EC2 API reference. moto knows no filters."""
    wanted = [f["Values"] for f in call.params.get("Filters", ()) if f["Name"] == "region-name"]
    off = front.rules.not_enabled
    return {
        "Regions": [
            {"RegionName": name, "Endpoint": f"ec2.{name}.amazonaws.com",
             "OptInStatus": "not-opted-in" if name in off else status}
            for name, status in _REGIONS.items()
            if all(name in names for names in wanted)
        ]
    }  # fmt: skip


@answers("ec2", "DescribeInstanceTypeOfferings")
def describe_offerings(front: Front, call: ReadCall) -> Json:
    """EC2 API reference: a filter's values may have wildcards. moto knows none."""
    wanted = [f["Values"] for f in call.params.get("Filters", ()) if f["Name"] == "instance-type"]
    backend = ec2_backends[ACCOUNT][call.region]
    return {
        "InstanceTypeOfferings": [
            each
            for each in backend.describe_instance_type_offerings(call.params.get("LocationType"))
            if each["InstanceType"] not in front.rules.not_offered
            and all(any(map(partial(fnmatch, each["InstanceType"]), names)) for names in wanted)
        ]
    }


@answers("ec2", "DescribePlacementGroups")
def describe_placement_groups(front: Front, call: ReadCall) -> Json:
    """EC2 API reference."""
    wanted = {
        (each["Name"].removeprefix("tag:"), value)
        for each in call.params.get("Filters", ()) for value in each["Values"]
    }  # fmt: skip
    groups = front.placement_groups.values()
    return {
        "PlacementGroups": [
            group for group in groups
            if not wanted or wanted & {(tag["Key"], tag["Value"]) for tag in group["Tags"]}
        ]
    }  # fmt: skip


@answers("ec2", "CreatePlacementGroup")
def create_placement_group(front: Front, call: ReadCall) -> Json:
    name = call.params["GroupName"]
    if name in front.placement_groups:
        raise AwsError("InvalidPlacementGroup.Duplicate", f"{name} exists")
    tags = [tag for each in call.params.get("TagSpecifications", ()) for tag in each["Tags"]]
    group = {"GroupName": name, "State": "available", "Strategy": "cluster", "Tags": tags}
    front.placement_groups[name] = group
    return {"PlacementGroup": group}


@answers("ec2", "DeletePlacementGroup")
def delete_placement_group(front: Front, call: ReadCall) -> Json:
    if front.placement_groups.pop(call.params["GroupName"], None) is None:
        raise AwsError("InvalidPlacementGroup.Unknown", "it does not exist")
    return {}


@answers("cloudformation", "DetectStackDrift")
def detect_drift(front: Front, call: ReadCall) -> Json:
    """CloudFormation API reference. Nothing was changed by hand."""
    return {"StackDriftDetectionId": "b78ac9b0-dec1-11e7-a451-503a3example"}


@answers("cloudformation", "DescribeStackDriftDetectionStatus")
def describe_drift(front: Front, call: ReadCall) -> Json:
    return {
        "StackDriftDetectionId": call.params["StackDriftDetectionId"],
        "StackDriftStatus": "IN_SYNC", "DetectionStatus": "DETECTION_COMPLETE",
    }  # fmt: skip


@answers("cloudformation", "DescribeStackResourceDrifts")
def describe_drifts(front: Front, call: ReadCall) -> Json:
    return {"StackResourceDrifts": []}


@answers("cloudformation", "UpdateTerminationProtection")
def protect_stack(front: Front, call: ReadCall) -> Json:
    """CloudFormation API reference."""
    stack = cloudformation_backends[ACCOUNT][call.region].get_stack(call.params["StackName"])
    stack.enable_termination_protection = call.params["EnableTerminationProtection"]
    return {"StackId": stack.stack_id}


@answers("batch", "GetJobQueueSnapshot")
def read_snapshot(front: Front, call: ReadCall) -> Json:
    """AWS Batch API reference: the runs that are RUNNABLE, the next one first."""
    queue = batch_backends[ACCOUNT][call.region].get_job_queue(call.params["jobQueue"])
    if queue is None:
        raise AwsError("ClientException", "the job queue does not exist")
    waiting = [job for job in queue.jobs if job.status == "RUNNABLE"]
    jobs = [
        {"jobArn": job.arn, "earliestTimeAtPosition": int(job.job_created_at.timestamp() * 1000)}
        for job in waiting[:100]
    ]
    return {"frontOfQueue": {"jobs": jobs, "lastUpdatedAt": 0}}
