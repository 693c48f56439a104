"""What AWS answered, judged. Pure: facts in, findings out, each with its fix."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from batchml.aws.capacity import OVER
from batchml.aws.credentials_help import statements
from batchml.aws.iam import (
    Command,
    Need,
    Quota,
    Verdict,
    find_quota,
    needed_permissions,
    needed_quotas,
)
from batchml.aws.session import Identity
from batchml.model.explanation import Finding, Mark
from batchml.ops.doctor.facts import Account, Failed
from batchml.ops.warm import reservation_words

SOON = 3 * 86_400  # seconds before the end of a reservation in which it is told of
MOST_SKEW = 240.0  # seconds; AWS refuses signatures from 300 on
SKEW_TO_TELL = 60.0

# AWS Batch User Guide, "Service quotas"; VPC User Guide and EC2 User Guide, defaults.
MOST_COMPUTE = MOST_QUEUES = 50
MOST_VPCS = MOST_ADDRESSES = 5


def check_account(account: Account) -> Iterator[Finding]:
    """Every finding about AWS, in the order in which things have to be mended."""
    for check in CHECKS:
        yield from check(account)


def _failed(check: str, mark: Mark, failed: Failed, what: str = "") -> Finding:
    """Errors say what is wrong in their first line, and the way out in the rest."""
    text, *fixes = f"{what}{failed.text}".splitlines()
    return Finding(check, mark, text, tuple(line.strip() for line in fixes), failed.is_access)


def check_identity(account: Account) -> Iterator[Finding]:
    found = account.identity
    if isinstance(found, Failed):
        yield _failed("credentials", "problem", found)
    elif found is not None:
        text = f"{found.arn} in account {found.account}"
        if found.is_root:
            yield Finding(
                "credentials", "warning", f"you are the root user: {text}. Nothing limits it, and "
                "AWS Batch needs none of it", ("aws configure sso   # or an IAM user's keys",),
            )  # fmt: skip
        else:
            yield Finding("credentials", "ok", text)


def check_clock(account: Account) -> Iterator[Finding]:
    from batchml.aws.credentials_help import clock_is_off, skew

    found = account.identity
    if not isinstance(found, Identity):
        return
    ahead = skew(found.date, "", account.now)
    if ahead is not None and abs(ahead) > SKEW_TO_TELL:
        mark: Mark = "problem" if abs(ahead) > MOST_SKEW else "warning"
        yield _failed("clock", mark, Failed(clock_is_off(ahead)))
    elif ahead is not None:
        yield Finding("clock", "ok", "the clock is right")


def check_region(account: Account) -> Iterator[Finding]:
    region, status = account.environment.region, account.region
    if isinstance(status, Failed):
        yield _failed("region", "warning", status, f"is {region} enabled? ")
    elif status == "":
        yield Finding(
            "region", "problem", f"there is no region {region!r}",
            ("aws ec2 describe-regions --all-regions --query Regions[].RegionName --output text",),
        )  # fmt: skip
    elif status == "not-opted-in":
        profile = account.environment.profile
        flag = f" --profile {profile}" if profile else ""
        yield Finding(
            "region", "problem", f"the account has not enabled the region {region}",
            (f"aws account enable-region --region-name {region}{flag}",),
        )  # fmt: skip
    elif status is not None:
        yield Finding("region", "ok", f"{region} is enabled")


# --- permissions ---------------------------------------------------------------------------------

_OWNERS = {
    "denied": "an explicit deny in a policy of yours forbids them, and no statement can undo that",
    "organization": "a policy of the organization (SCP) forbids them: ask who runs it",
    "boundary": "your permissions boundary leaves them out: ask who set it",
}


def check_permissions(account: Account) -> Iterator[Finding]:
    if isinstance(account.verdicts, Failed):
        yield from _check_probes(account, account.verdicts)
    elif account.verdicts is not None:
        if not account.verdicts:
            yield Finding("permissions", "ok", "the root user may do everything")
            return
        for command, needed in needed_permissions(account.environment).items():
            wanted = [each for each in account.verdicts if each.permission in needed]
            yield from _check_command(account, command, wanted)


def _check_command(
    account: Account, command: Command, verdicts: Sequence[Verdict]
) -> Iterator[Finding]:
    name = f"permissions for {command}"
    missing = [each for each in verdicts if each.word == "missing"]
    if all(each.word in ("allowed", "conditional") for each in verdicts):
        if any(each.word == "conditional" for each in verdicts):
            some = _actions(each for each in verdicts if each.word == "conditional")
            text = f"{name}: depends on conditions of your policies: {', '.join(some)}"
            yield Finding("permissions", "warning", text)
        else:
            yield Finding("permissions", "ok", f"{name}: all {len(verdicts)}")
        return
    mark = _mark_of(account, command)
    if missing:
        actions = _actions(missing)
        text = f"{name}: {len(actions)} missing. Add to a policy of yours:"
        fix = _statements(missing)
        yield Finding("permissions", mark, text, fix, is_access=True)
    for word, why in _OWNERS.items():
        closed = _actions(each for each in verdicts if each.word == word)
        if closed:
            text = f"{name}: {', '.join(closed)}: {why}"
            yield Finding("permissions", mark, text, is_access=True)


def _mark_of(account: Account, command: Command) -> Mark:
    """Who submits to what others have set up needs no right to set it up."""
    is_vital = command in ("submit", "logs") or (command == "setup" and not account.is_set_up)
    return "problem" if is_vital else "warning"


def _actions(verdicts: Iterable[Verdict]) -> list[str]:
    return sorted({each.permission.action for each in verdicts})


def _statements(missing: Sequence[Verdict]) -> tuple[str, ...]:
    pairs = [(each.permission.action, each.arn) for each in missing]
    return tuple(json.dumps(each) for each in statements(pairs))


def _check_probes(account: Account, why: Failed) -> Iterator[Finding]:
    """Policies may not be simulated: say what reading tells, and that writing is not known."""
    probes = {
        **account.probes,
        "batch:DescribeComputeEnvironments": account.compute,
        "batch:DescribeJobQueues": account.queues,
    }
    for answer in probes.values():
        if isinstance(answer, Failed):
            yield _failed("permissions", "problem" if answer.is_access else "warning", answer)
    allowed = sorted(action for action, answer in probes.items() if not isinstance(answer, Failed))
    text = (
        f"whether you may write could not be checked, only reading ({', '.join(allowed) or 'none'}"
        f" allowed). "
    )
    yield _failed("permissions", "warning", why, text)


# --- quotas --------------------------------------------------------------------------------------


def check_quotas(account: Account) -> Iterator[Finding]:
    if isinstance(account.quotas, Failed):
        yield _failed("quotas", "warning", account.quotas, "the quotas could not be read: ")
    elif account.quotas is not None:
        yield from quota_findings(
            needed_quotas(account.environment), account.quotas, flags=account.flags
        )


def quota_findings(
    needs: Iterable[Need], quotas: Mapping[str, Quota], *, flags: str = ""
) -> Iterator[Finding]:
    """A finding for each need. `flags` make the AWS CLI ask the right region and account.

    A problem where not one instance of the smallest type can start, or fewer than stand by; a
    warning where `max_vcpus` cannot be reached.
    """
    for need in needs:
        quota = find_quota(need, quotas)
        where = ", ".join(f"compute.{name}" for name in need.compute)
        if quota is None:
            page = "https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
            text = f"no quota is named {need.quota!r}, which {where} would need {need.most} of"
            yield Finding("quotas", "warning", text, (f"look there: {page}",))
            continue
        text = f"{quota.name} ({quota.code}) is {quota.value:g} vCPUs"
        fix = _increase(quota, need, flags)
        if quota.value < max(need.smallest, need.least):
            least = max(need.smallest, need.least)
            why = "its smallest instance needs" if least == need.smallest else "min_vcpus asks for"
            text += f": {where} cannot start, {why} {least}, and max_vcpus is {need.most}"
            yield Finding("quotas", "problem", text, (fix,))
        elif quota.value < need.most:
            text += f": {where} cannot reach max_vcpus, {need.most}"
            yield Finding("quotas", "warning", text, (fix,))
        else:
            yield Finding("quotas", "ok", f"{text}, {where} may use {need.most}")


def _increase(quota: Quota, need: Need, flags: str) -> str:
    wanted = max(need.most, need.smallest)
    return (
        "aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {quota.code} --desired-value {wanted}{flags}"
    )


# --- counts --------------------------------------------------------------------------------------


def check_limits(account: Account) -> Iterator[Finding]:
    env, environment = account.env, account.environment
    ours = f"batchml-{env}-"
    yield from _check_count(
        "compute environments", account.compute, [ours + name for name in environment.compute],
        MOST_COMPUTE, "aws batch describe-compute-environments" + account.flags,
    )  # fmt: skip
    yield from _check_count(
        "job queues", account.queues, [ours + name for name in environment.queues],
        MOST_QUEUES, "aws batch describe-job-queues" + account.flags,
    )  # fmt: skip
    if isinstance(account.vpcs, int) and account.vpcs >= MOST_VPCS:
        text = f"{account.vpcs} VPCs are there, and an account may have {MOST_VPCS} unless raised"
        fix = _raise_vpc("L-F678F1CE", "vpc", account)
        yield Finding("limits", "warning", text, (fix, "or give [network] subnets that exist"))
    if isinstance(account.addresses, int) and account.addresses >= MOST_ADDRESSES:
        text = f"{account.addresses} Elastic IPs are there, and the NAT gateway needs one more; an "
        text += f"account may have {MOST_ADDRESSES} unless raised"
        fix = _raise_vpc("L-0263D0A3", "ec2", account)
        yield Finding("limits", "warning", text, (fix, 'or egress = "endpoints" in [network]'))


def _raise_vpc(code: str, service: str, account: Account) -> str:
    return (
        f"aws service-quotas request-service-quota-increase --service-code {service} "
        f"--quota-code {code} --desired-value 10{account.flags}"
    )


def _check_count(
    what: str,
    there: Mapping[str, Mapping[str, Any]] | Failed | None,
    ours: Sequence[str],
    most: int,
    look: str,
) -> Iterator[Finding]:
    if isinstance(there, Failed):
        if not there.is_access:  # else it is among the permissions
            yield _failed("limits", "warning", there, f"the {what} could not be counted: ")
    elif there is not None:
        new = len(set(ours) - set(there))
        if len(there) + new > most:
            text = f"{len(there)} {what} are there and {new} are to come; an account has {most}"
            yield Finding("limits", "problem", text, (f"delete some: {look}",))
        else:
            text = f"{len(there)} of {most} {what}, {new} to come"
            yield Finding("limits", "ok", text)
        yield from _check_valid(what, there, ours)


def _check_valid(
    what: str, there: Mapping[str, Mapping[str, Any]], ours: Sequence[str]
) -> Iterator[Finding]:
    for name in ours:
        detail = there.get(name, {})
        if detail.get("status") == "INVALID":
            text = f"{name} is INVALID: {detail.get('statusReason', '')}"
            yield Finding("limits", "problem", text, ("batchml setup   # shows the way out",))


def check_service_role(account: Account) -> Iterator[Finding]:
    found = account.has_service_role
    if found is True:
        yield Finding("service-role", "ok", "AWSServiceRoleForBatch is there")
    elif found is False:
        text = "AWSServiceRoleForBatch is not there yet: the first compute environment makes it"
        yield Finding("service-role", "ok", text)


def check_reservations(account: Account) -> Iterator[Finding]:
    """Capacity that was reserved or paid for, and that jobs would wait for in vain."""
    known = account.reservations
    named = {each.reservation: name for name, each in account.environment.compute.items()}
    for each in known.found.values():
        text = f"compute {named.get(each.id, '')}: {reservation_words(each, account.now)}"
        is_over = each.state in ("gone", *OVER) or bool(each.last and each.last <= account.now)
        ends_soon = bool(each.last) and each.last - account.now < SOON
        mark: Mark = "problem" if is_over else "warning" if ends_soon else "ok"
        fix = ("name another in batchml.toml, or none, and run batchml setup",) if is_over else ()
        yield Finding("reservations", mark, text, fix)
    if known.why:
        yield Finding("reservations", "warning", f"not known: {known.why}")


CHECKS: tuple[Callable[[Account], Iterator[Finding]], ...] = (
    check_identity,
    check_clock,
    check_region,
    check_permissions,
    check_quotas,
    check_limits,
    check_service_role,
    check_reservations,
)
