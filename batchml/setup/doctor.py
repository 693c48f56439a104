"""Check an AWS account for `doctor`, by about twenty read-only calls.

A failed call is an answer, too: pure functions convert the answers into findings.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws import session as identity
from batchml.aws import simulation
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.capacity import (
    ENDED_STATES,
    Quota,
    QuotaNeed,
    ReservationTable,
    fetch_reservations,
    find_quota,
    needed_quotas,
    read_quotas,
)
from batchml.aws.credentials_help import DOCTOR_HINT, MAX_SKEW, clock_skew, explain_clock_skew
from batchml.aws.errors import call
from batchml.aws.iam import (
    Command,
    Permission,
    needed_permissions,
    scope_of,
    statements,
    unknown_account,
)
from batchml.aws.session import CallerIdentity, Session
from batchml.aws.simulation import PermissionCheck
from batchml.clock import Clock
from batchml.cost.capacity import describe_reservation
from batchml.errors import BatchmlError
from batchml.local.disk import DiskUse
from batchml.model.environment import Environment

Mark = Literal["ok", "warning", "problem"]

EXIT_OK, EXIT_PROBLEM, EXIT_ACCESS, EXIT_UNREACHABLE = 0, 1, 77, 74  # exit codes of `doctor`


class Finding(Struct, frozen=True):
    """The result of a check: one line, and the lines below it, to type or to paste.

    `check` is a word for scripts. `exit_code`: of `doctor` if this is its only problem.
    """

    check: str
    mark: Mark
    text: str
    fix: tuple[str, ...] = ()
    exit_code: int = EXIT_PROBLEM


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without problems; 77: credentials or permissions; 74: no answer from AWS; 1: others."""
    codes = {finding.exit_code for finding in findings if finding.mark == "problem"}
    order = (EXIT_ACCESS, EXIT_UNREACHABLE, EXIT_PROBLEM)
    return next((code for code in order if code in codes), EXIT_OK)


# --- answers --------------------------------------------------------------------------------


class FailedQuestion(Struct, frozen=True):
    """A call that failed: its error, and the exit code of `doctor` for it."""

    text: str
    exit_code: int = EXIT_PROBLEM

    @property
    def is_access(self) -> bool:
        """Whether credentials or permissions are the cause."""
        return self.exit_code == EXIT_ACCESS


class ConfigCheck(Struct, frozen=True):
    """The configuration. `path`: of batchml.toml; None without one. `mistakes`: in this file."""

    path: str | None = None
    mistakes: tuple[str, ...] = ()
    env: str = ""


class EngineCheck(Struct, frozen=True):
    """The answer of a Docker engine. An empty `trouble` means that it answered."""

    address: str
    trouble: Literal["", "missing", "permission", "silent", "unchecked"] = ""
    text: str = ""
    version: str = ""
    api: str = ""
    group: str = ""  # the group that may use the socket
    root: str = ""  # the folder of images, if it is on this machine


class MachineCheck(Struct, frozen=True):
    """This machine. Sizes are bytes."""

    home: str  # the state folder
    home_trouble: str = ""
    home_free: int = 0  # free space for the state folder
    server_trouble: str = ""  # fault of the embedded server, if it runs
    system_trouble: str = ""  # why the environment `local` cannot run on this system
    engine: EngineCheck | None = None
    images_free: int | None = None  # free space for images; None: unknown
    wants_docker: bool = False  # `local` runs jobs in containers
    disk: DiskUse | None = None  # what the state folder takes, if it may be used
    has_venv: bool = True
    has_pip: bool = True  # Python's ensurepip, which makes environments without uv
    uv: str = ""  # the path of uv; empty if it is missing
    uv_cache: str = ""  # the user's cache, if it is on another file system than the environments
    python: str = ""
    has_plugin: bool = True  # session-manager-plugin


class AccountCheck(Struct, frozen=True):
    """The answers of AWS. None: not asked, because an earlier answer made the question needless.

    `now`: this machine's time when `identity` was asked for, in seconds since the epoch.
    """

    env: str
    environment: Environment
    now: float = 0.0
    identity: CallerIdentity | FailedQuestion | None = None
    region: str | FailedQuestion | None = None  # AWS's opt-in status; "": there is no such region
    verdicts: tuple[PermissionCheck, ...] | FailedQuestion | None = None  # simulated permissions
    probes: Mapping[str, FailedQuestion | None] = {}  # action that was tried -> None if allowed
    quotas: Mapping[str, Quota] | FailedQuestion | None = None
    compute: Mapping[str, Mapping[str, Any]] | FailedQuestion | None = None
    queues: Mapping[str, Mapping[str, Any]] | FailedQuestion | None = None
    reservations: ReservationTable = ReservationTable()
    vpcs: int | FailedQuestion | None = None
    addresses: int | FailedQuestion | None = None
    has_service_role: bool | FailedQuestion | None = None

    @property
    def is_set_up(self) -> bool:
        """Whether the environment has a queue in AWS."""
        if not isinstance(self.queues, Mapping):
            return False
        return any(name.startswith(f"batchml-{self.env}-") for name in self.queues)

    @property
    def flags(self) -> str:
        """The flags with which the AWS CLI uses the same account and region."""
        return aws_cli_flags(self.environment)


def aws_cli_flags(environment: Environment) -> str:
    """` --region NAME`, and ` --profile NAME` if the environment names one."""
    profile = f" --profile {environment.profile}" if environment.profile else ""
    return f" --region {environment.region}{profile}"


# --- questions ------------------------------------------------------------------------------


T = TypeVar("T")


def ask_account(
    home: Session, session: Session, env: str, environment: Environment, clock: Clock
) -> AccountCheck:
    """Ask AWS about the account.

    `home`: a session in a region that is always enabled; `session`: one in the environment's
    region. Without credentials, or in a region that is not enabled, the other calls are left out.
    """
    who = _ask(lambda: identity.get_caller_identity(home))
    account = AccountCheck(env, environment, clock.now(), who)
    if isinstance(who, FailedQuestion):
        return account
    region = _ask(lambda: identity.region_status(home, environment.region))
    account = replace(
        account,
        region=region,
        has_service_role=_ask(lambda: identity.has_service_role(home)),
        verdicts=_simulate_permissions(home, account, who),
    )
    if region in ("", "not-opted-in"):
        return account
    return _ask_region(session, account)


def _ask_region(session: Session, account: AccountCheck) -> AccountCheck:
    api = ComputeApi(session)
    account = replace(
        account,
        quotas=_ask(lambda: read_quotas(session)) if account.environment.compute else None,
        compute=_ask(api.environments),
        queues=_ask(api.queues),
        reservations=fetch_reservations(
            session, [each.reservation for each in account.environment.compute.values()]
        ),
    )
    if isinstance(account.verdicts, FailedQuestion):
        probes: dict[str, FailedQuestion | None] = {}
        for action in simulation.PROBES:
            answer = _ask(partial(simulation.probe, session, action))
            probes[action] = answer if isinstance(answer, FailedQuestion) else None
        account = replace(account, probes=probes)
    network = account.environment.network
    if network.is_given or account.is_set_up:
        return account  # the network exists
    nat = network.egress == "nat"
    return replace(
        account,
        vpcs=_ask(lambda: _count(session, "DescribeVpcs", "Vpcs")),
        addresses=_ask(lambda: _count(session, "DescribeAddresses", "Addresses")) if nat else None,
    )


def _simulate_permissions(
    home: Session, account: AccountCheck, who: CallerIdentity
) -> tuple[PermissionCheck, ...] | FailedQuestion | None:
    """Simulate the needed permissions; none for the root user, who has no policies."""
    if who.is_root:
        return ()
    environment = account.environment
    needed = needed_permissions(environment).values()
    wanted: Iterable[Permission] = {each for group in needed for each in group}
    principal = _ask(lambda: identity.principal_arn(home, who))
    if isinstance(principal, FailedQuestion):
        principal = who.role_arn  # right for a role without a path
    if not principal:
        return FailedQuestion(f"Policies of {who.arn} cannot be simulated.")
    scope = scope_of(who, environment.region, account.env)
    return _ask(lambda: simulation.simulate(home, principal, wanted, scope))


def _count(session: Session, operation: str, member: str) -> int:
    return len(call(session.client("ec2"), operation)[member])


def _ask(question: Callable[[], T]) -> T | FailedQuestion:
    try:
        return question()
    except BatchmlError as error:
        known = error.exit_code in (EXIT_ACCESS, EXIT_UNREACHABLE)
        return FailedQuestion(str(error), error.exit_code if known else EXIT_PROBLEM)


# --- findings -------------------------------------------------------------------------------


SOON = 3 * 86_400  # seconds: warn of a reservation that ends within this time
SKEW_TO_WARN = 60.0  # seconds by which the clock may be wrong

# AWS Batch User Guide, "Service quotas"; VPC User Guide and EC2 User Guide, defaults.
MAX_COMPUTE = MAX_QUEUES = 50
MAX_VPCS = MAX_ADDRESSES = 5


def check_account(account: AccountCheck) -> Iterator[Finding]:
    """Every finding about AWS, in the order in which users have to fix problems."""
    for check in CHECKS:
        yield from check(account)


def _failed(check: str, mark: Mark, failed: FailedQuestion, what: str = "") -> Finding:
    """The finding of a failed call: the first line of its error, and the other lines as the fix."""
    text, *fixes = f"{what}{failed.text}".replace(DOCTOR_HINT, "").splitlines()
    return Finding(check, mark, text, tuple(line.strip() for line in fixes), failed.exit_code)


def check_identity(account: AccountCheck) -> Iterator[Finding]:
    found = account.identity
    if isinstance(found, FailedQuestion):
        yield _failed("credentials", "problem", found)
    elif found is not None:
        text = f"{found.arn} in account {found.account}"
        if found.is_root:
            yield Finding(
                "credentials", "warning", f"you are the root user: {text}. The root user has every "
                "right, which batchml does not need",
                ("aws configure sso   # or use the keys of an IAM user",),
            )  # fmt: skip
        else:
            yield Finding("credentials", "ok", text)


def check_clock(account: AccountCheck) -> Iterator[Finding]:
    found = account.identity
    if not isinstance(found, CallerIdentity):
        return
    ahead = clock_skew(found.date, "", account.now)
    if ahead is not None and abs(ahead) > SKEW_TO_WARN:
        mark: Mark = "problem" if abs(ahead) > MAX_SKEW else "warning"
        yield _failed("clock", mark, FailedQuestion(explain_clock_skew(ahead)))
    elif ahead is not None:
        yield Finding("clock", "ok", "the clock is correct")


def check_region(account: AccountCheck) -> Iterator[Finding]:
    region, status = account.environment.region, account.region
    if isinstance(status, FailedQuestion):
        yield _failed("region", "warning", status, f"could not check whether {region} is enabled: ")
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


# --- permissions ----------------------------------------------------------------------------

_MOST_STATEMENTS = 5  # to print; for more, the command that prints policies is named

_OTHER_DENIALS = {
    "denied": "an explicit deny in your policies forbids them, and no statement can undo that",
    "organization": "a policy of the organization (SCP) forbids them: ask its administrator",
    "boundary": "your permissions boundary excludes them: ask your administrator",
}


def check_permissions(account: AccountCheck) -> Iterator[Finding]:
    if isinstance(account.verdicts, FailedQuestion):
        yield from _check_probes(account, account.verdicts)
    elif account.verdicts is not None:
        if not account.verdicts:
            yield Finding("permissions", "ok", "the root user has all permissions")
            return
        for command, needed in needed_permissions(account.environment).items():
            wanted = [each for each in account.verdicts if each.permission in needed]
            yield from _check_command(account, command, wanted)


def _check_command(
    account: AccountCheck, command: Command, verdicts: Sequence[PermissionCheck]
) -> Iterator[Finding]:
    name = f"permissions for {command}"
    missing = [each for each in verdicts if each.result == "missing"]
    if all(each.result in ("allowed", "conditional") for each in verdicts):
        conditional = _actions(each for each in verdicts if each.result == "conditional")
        if conditional:
            text = f"{name}: these depend on conditions in your policies: {', '.join(conditional)}"
            yield Finding("permissions", "warning", text)
        else:
            yield Finding("permissions", "ok", f"{name}: all {len(verdicts)}")
        return
    mark = _mark_of(account, command)
    if missing:
        text, fix = _missing(account, command, missing)
        yield Finding("permissions", mark, text, fix, EXIT_ACCESS)
    for result, why in _OTHER_DENIALS.items():
        denied = _actions(each for each in verdicts if each.result == result)
        if denied:
            text = f"{name}: {', '.join(denied)}: {why}"
            yield Finding("permissions", mark, text, exit_code=EXIT_ACCESS)


def _missing(
    account: AccountCheck, command: Command, missing: Iterable[PermissionCheck]
) -> tuple[str, tuple[str, ...]]:
    """The text and the fix: the statements to add, or the command that prints whole policies."""
    who = account.identity
    region = account.environment.region
    scope = (
        scope_of(who, region, account.env)
        if isinstance(who, CallerIdentity)
        else unknown_account(region, account.env)
    )
    permissions = {each.permission for each in missing}
    text = f"permissions for {command}: {len({each.action for each in permissions})} missing. "
    wanted = statements(permissions, scope)
    if len(wanted) > _MOST_STATEMENTS:
        command_line = f"batchml doctor --env {account.env} --policy {shlex.quote(command)}"
        return f"{text}This command prints the policies to ask for:", (command_line,)
    return f"{text}Add to one of your policies:", tuple(map(json.dumps, wanted))


def _mark_of(account: AccountCheck, command: Command) -> Mark:
    """A user who only submits jobs does not need the permissions of setup."""
    is_vital = command in ("submit", "logs") or (command == "setup" and not account.is_set_up)
    return "problem" if is_vital else "warning"


def _actions(verdicts: Iterable[PermissionCheck]) -> list[str]:
    return sorted({each.permission.action for each in verdicts})


def _check_probes(account: AccountCheck, why: FailedQuestion) -> Iterator[Finding]:
    """The findings if policies cannot be simulated: read calls were tried instead."""
    probes = {
        **account.probes,
        "batch:DescribeComputeEnvironments": account.compute,
        "batch:DescribeJobQueues": account.queues,
    }
    for answer in probes.values():
        if isinstance(answer, FailedQuestion):
            yield _failed("permissions", "problem" if answer.is_access else "warning", answer)
    allowed = sorted(
        action for action, answer in probes.items() if not isinstance(answer, FailedQuestion)
    )
    text = (
        "write permissions could not be checked, only read permissions "
        f"({', '.join(allowed) or 'none'} allowed). "
    )
    yield _failed("permissions", "warning", why, text)


# --- quotas ---------------------------------------------------------------------------------


def check_quotas(account: AccountCheck) -> Iterator[Finding]:
    if isinstance(account.quotas, FailedQuestion):
        yield _failed("quotas", "warning", account.quotas, "the quotas could not be read: ")
    elif account.quotas is not None:
        yield from quota_findings(
            needed_quotas(account.environment), account.quotas, flags=account.flags
        )


def quota_findings(
    needs: Iterable[QuotaNeed], quotas: Mapping[str, Quota], *, flags: str = ""
) -> Iterator[Finding]:
    """A finding for each need. `flags`: region and profile, for the AWS CLI.

    It is a problem if the quota is less than one instance of the smallest type or than min_vcpus,
    and a warning if max_vcpus cannot be reached.
    """
    for need in needs:
        quota = find_quota(need, quotas)
        where = ", ".join(f"compute.{name}" for name in need.compute)
        if quota is None:
            page = "https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
            text = f"no quota is named {need.quota!r}; {where} needs {need.most} vCPUs of it"
            yield Finding("quotas", "warning", text, (f"see {page}",))
            continue
        text = f"{quota.name} ({quota.code}) is {quota.value:g} vCPUs"
        fix = _quota_command(quota, need, flags)
        if quota.value < max(need.smallest, need.least):
            least = max(need.smallest, need.least)
            why = "its smallest instance needs" if least == need.smallest else "min_vcpus is"
            text += f": {where} cannot start, {why} {least}, and max_vcpus is {need.most}"
            yield Finding("quotas", "problem", text, (fix,))
        elif quota.value < need.most:
            text += f": {where} cannot reach max_vcpus, {need.most}"
            yield Finding("quotas", "warning", text, (fix,))
        else:
            yield Finding("quotas", "ok", f"{text}, {where} may use {need.most}")


def _quota_command(quota: Quota, need: QuotaNeed, flags: str) -> str:
    wanted = max(need.most, need.smallest)
    return (
        "aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {quota.code} --desired-value {wanted}{flags}"
    )


# --- counts ---------------------------------------------------------------------------------


def check_limits(account: AccountCheck) -> Iterator[Finding]:
    env, environment = account.env, account.environment
    ours = f"batchml-{env}-"
    yield from _check_count(
        "compute environments", account.compute, [ours + name for name in environment.compute],
        MAX_COMPUTE, "aws batch describe-compute-environments" + account.flags,
    )  # fmt: skip
    yield from _check_count(
        "job queues", account.queues, [ours + name for name in environment.queues],
        MAX_QUEUES, "aws batch describe-job-queues" + account.flags,
    )  # fmt: skip
    if isinstance(account.vpcs, int) and account.vpcs >= MAX_VPCS:
        text = f"the account has {account.vpcs} VPCs; the default quota is {MAX_VPCS}"
        fix = _vpc_quota_command("L-F678F1CE", "vpc", account.vpcs, account)
        yield Finding("limits", "warning", text, (fix, "or name existing subnets in [network]"))
    if isinstance(account.addresses, int) and account.addresses >= MAX_ADDRESSES:
        text = f"the account has {account.addresses} Elastic IPs, and the NAT gateway needs one "
        text += f"more; the default quota is {MAX_ADDRESSES}"
        fix = _vpc_quota_command("L-0263D0A3", "ec2", account.addresses, account)
        yield Finding("limits", "warning", text, (fix, 'or egress = "endpoints" in [network]'))


def _vpc_quota_command(code: str, service: str, count: int, account: AccountCheck) -> str:
    return (
        f"aws service-quotas request-service-quota-increase --service-code {service} "
        f"--quota-code {code} --desired-value {count + 5}{account.flags}"
    )


def _check_count(
    what: str,
    existing: Mapping[str, Mapping[str, Any]] | FailedQuestion | None,
    ours: Sequence[str],
    most: int,
    list_command: str,
) -> Iterator[Finding]:
    if isinstance(existing, FailedQuestion):
        if not existing.is_access:  # a denied call is a finding of `check_permissions`
            yield _failed("limits", "warning", existing, f"the {what} could not be counted: ")
    elif existing is not None:
        new = len(set(ours) - set(existing))
        if len(existing) + new > most:
            text = f"{len(existing)} {what} exist, setup adds {new}, and the quota is {most}"
            yield Finding("limits", "problem", text, (f"{list_command}   # then delete some",))
        else:
            text = f"{len(existing)} of {most} {what}, setup adds {new}"
            yield Finding("limits", "ok", text)
        for name in ours:
            detail = existing.get(name, {})
            if detail.get("status") == "INVALID":
                text = f"{name} is INVALID: {detail.get('statusReason', '')}"
                yield Finding("limits", "problem", text, ("batchml setup   # shows the fix",))


def check_service_role(account: AccountCheck) -> Iterator[Finding]:
    found = account.has_service_role
    if found is True:
        yield Finding("service-role", "ok", "AWSServiceRoleForBatch exists")
    elif found is False:
        text = "AWSServiceRoleForBatch does not exist yet: the first compute environment creates it"
        yield Finding("service-role", "ok", text)


def check_reservations(account: AccountCheck) -> Iterator[Finding]:
    """Findings on the capacity reservations and blocks that batchml.toml names."""
    known = account.reservations
    named = {each.reservation: name for name, each in account.environment.compute.items()}
    for each in known.found.values():
        text = f"compute {named.get(each.id, '')}: {describe_reservation(each, account.now)}"
        is_over = each.state in ("gone", *ENDED_STATES) or bool(
            each.last and each.last <= account.now
        )
        ends_soon = bool(each.last) and each.last - account.now < SOON
        mark: Mark = "problem" if is_over else "warning" if ends_soon else "ok"
        fix = ("change or remove it in batchml.toml, and run batchml setup",) if is_over else ()
        yield Finding("reservations", mark, text, fix)
    if known.why:
        yield Finding("reservations", "warning", f"unknown: {known.why}")


CHECKS: tuple[Callable[[AccountCheck], Iterator[Finding]], ...] = (
    check_identity,
    check_clock,
    check_region,
    check_permissions,
    check_quotas,
    check_limits,
    check_service_role,
    check_reservations,
)
