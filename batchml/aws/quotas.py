"""EC2's vCPU quotas: those that an environment needs, and those that the account has.

New accounts have a quota of 0 for GPU instances, and AWS Batch then waits without a message. Quotas
are found by name; their codes are in the answer.

Sources: EC2 User Guide, "Amazon EC2 service quotas"; Service Quotas API Reference,
ListServiceQuotas.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.model.environment import Environment

# The classes of instance families. A class is a word of its quotas' names, such as "P" in "Running
# On-Demand P instances".
_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_CLASSES = {
    "P": r"p\d",
    "G and VT": r"(g|gr|vt)\d",
    "DL": r"dl\d",
    "Trn": r"trn\d",
    "Inf": r"inf\d",
    "F": r"f\d",
    "X": r"x\d",
    "High Memory": r"u(-|\d)",
    "HPC": r"hpc\d",
}
# Spot P instances have two quotas; they had one.
_SPOT_P = ("All P5 Spot Instance Requests", "All P4, P3 and P2 Spot Instance Requests")
_SPOT_ANY_P = "All P Spot Instance Requests"

# The smallest size of families without the size `large`.
_SMALLEST = {
    "p2": "xlarge", "p3": "2xlarge", "p3dn": "24xlarge", "p4d": "24xlarge", "p4de": "24xlarge",
    "p5": "4xlarge", "p5e": "48xlarge", "p5en": "48xlarge", "p6-b200": "48xlarge",
    "p6-b300": "48xlarge", "p6e-gb200": "36xlarge", "g3": "4xlarge", "g3s": "xlarge",
    "g4dn": "xlarge", "g4ad": "xlarge", "g5": "xlarge", "g5g": "xlarge", "g6": "xlarge",
    "g6e": "xlarge", "g7e": "2xlarge", "gr6": "4xlarge", "gr6f": "4xlarge", "dl1": "24xlarge",
    "trn1": "2xlarge", "trn2": "48xlarge", "inf1": "xlarge", "inf2": "xlarge", "vt1": "3xlarge",
}  # fmt: skip
_SIZE = re.compile(r"(\d*)xlarge")
_METAL = 96  # vCPUs; most metal types have that or more


class Quota(Struct, frozen=True):
    """A quota of the account. The values of EC2's quotas are vCPUs."""

    name: str
    code: str
    value: float


class QuotaNeed(Struct, frozen=True):
    """The vCPUs that compute sections need of a quota."""

    quota: str  # its name in Service Quotas
    names: tuple[str, ...]  # its present and former names, the present one first
    compute: tuple[str, ...]
    smallest: int  # to start one instance
    least: int  # for instances that always run (`min_vcpus`)
    most: int  # with every compute section at its `max_vcpus`


def quota_class(instance_type: str) -> str:
    """The quota class of an instance type or family, such as P, or "G and VT"."""
    for name, pattern in _CLASSES.items():
        if re.match(pattern, instance_type):
            return name
    return _STANDARD


def quota_names(instance_type: str, *, spot: bool) -> tuple[str, ...]:
    """The present and former names of a type's quota, the present one first."""
    instance_class = quota_class(instance_type)
    if not spot:
        return (f"Running On-Demand {instance_class} instances",)
    if instance_class == "P":
        return (_SPOT_P[instance_type[1] in "234"], _SPOT_ANY_P)
    return (f"All {instance_class} Spot Instance Requests",)


def vcpus_of(instance_type: str, known: Mapping[str, int] | None = None) -> int:
    """The vCPUs of a type, or of a family's smallest type.

    They are those of `known` (DescribeInstanceTypes), or else by the name: an xlarge has 4, an
    Nxlarge 4 N, and a smaller one 2.
    """
    if known and instance_type in known:
        return known[instance_type]
    family, _, size = instance_type.partition(".")
    size = size or _SMALLEST.get(family, "large")
    match = _SIZE.match(size.removeprefix("metal-"))
    if match:
        return 4 * int(match[1] or 1)
    return _METAL if size.startswith("metal") else 2


def needed_quotas(
    environment: Environment, vcpus: Mapping[str, int] | None = None
) -> tuple[QuotaNeed, ...]:
    """The quotas that the compute sections need, by name.

    A section with types of several classes may take all its vCPUs from any one of them. `vcpus` has
    the vCPUs of instance types, as far as they are known.
    """
    found: dict[str, QuotaNeed] = {}
    for name, compute in environment.compute.items():
        by_quota: dict[tuple[str, ...], list[str]] = {}
        for each in compute.instance_types:
            by_quota.setdefault(quota_names(each, spot=compute.spot), []).append(each)
        for names, types in by_quota.items():
            need = QuotaNeed(
                quota=names[0],
                names=names,
                compute=(name,),
                smallest=min(vcpus_of(each, vcpus) for each in types),
                # With several quotas, the instances that always run may be of another one.
                least=compute.min_vcpus if len(by_quota) == 1 else 0,
                most=compute.max_vcpus,
            )
            found[need.quota] = _sum(found[need.quota], need) if need.quota in found else need
    return tuple(found[name] for name in sorted(found))


def _sum(one: QuotaNeed, other: QuotaNeed) -> QuotaNeed:
    return QuotaNeed(
        quota=one.quota,
        names=one.names,
        compute=(*one.compute, *other.compute),
        # Each section must be able to start one instance.
        smallest=max(one.smallest, other.smallest),
        least=one.least + other.least,
        most=one.most + other.most,
    )


def find_quota(need: QuotaNeed, quotas: Mapping[str, Quota]) -> Quota | None:
    """The account's quota with one of the need's names. Case and spaces do not matter."""
    by_name = {_plain(name): quota for name, quota in quotas.items()}
    return next((by_name[_plain(name)] for name in need.names if _plain(name) in by_name), None)


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


def read_quotas(session: Session, service: str = "ec2") -> dict[str, Quota]:
    """The account's quotas of a service by name. Raises AccessError, ServiceError,
    ServiceUnreachable.
    """
    found: dict[str, Quota] = {}
    with translate_errors("ListServiceQuotas"):
        pages = session.client("service-quotas").get_paginator("list_service_quotas")
        for page in pages.paginate(ServiceCode=service, PaginationConfig={"PageSize": 100}):
            for quota in page["Quotas"]:
                found[quota["QuotaName"]] = _quota(quota)
    return found


def _quota(raw: Mapping[str, Any]) -> Quota:
    return Quota(raw["QuotaName"], raw["QuotaCode"], float(raw["Value"]))
