"""Ask AWS what `doctor` judges: about fifteen read-only calls, each failure kept as an answer."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from batchml.aws import iam as permissions
from batchml.aws import session as identity
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.capacity import Reservations, reservations
from batchml.aws.errors import translated
from batchml.aws.iam import Verdict, read_quotas
from batchml.aws.session import Identity, Session
from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError
from batchml.model.environment import Environment
from batchml.ops.doctor.facts import Account, Failed

T = TypeVar("T")


def ask(
    home: Session, session: Session, env: str, environment: Environment, clock: Clock
) -> Account:
    """Everything about the account. `home` is a session in a region that is always enabled, and
    `session` one in the environment's.

    Without credentials nothing else is asked, and in a region that is not enabled nothing there.
    """
    who = _try(lambda: identity.who_am_i(home))
    account = Account(env, environment, clock.now(), who)
    if isinstance(who, Failed):
        return account
    region = _try(lambda: identity.region_status(home, environment.region))
    account = msgspec.structs.replace(
        account,
        region=region,
        has_service_role=_try(lambda: identity.has_service_role(home)),
    )
    verdicts = _permissions(home, account, who)
    account = msgspec.structs.replace(account, verdicts=verdicts)
    if region in ("", "not-opted-in"):
        return account
    return _ask_region(session, account)


def _ask_region(session: Session, account: Account) -> Account:
    api = ComputeApi(session)
    account = msgspec.structs.replace(
        account,
        quotas=_try(lambda: read_quotas(session)) if account.environment.compute else None,
        compute=_try(api.environments),
        queues=_try(api.queues),
        reservations=_reservations(session, account.environment),
    )
    if isinstance(account.verdicts, Failed):
        probes = {action: _denied(session, action) for action in permissions.PROBES}
        account = msgspec.structs.replace(account, probes=probes)
    network = account.environment.network
    if network.is_given or account.is_set_up:
        return account  # the network is there
    nat = network.egress == "nat"
    return msgspec.structs.replace(
        account,
        vpcs=_try(lambda: _count(session, "describe_vpcs", "Vpcs")),
        addresses=_try(lambda: _count(session, "describe_addresses", "Addresses")) if nat else None,
    )


def _reservations(session: Session, environment: Environment) -> Reservations:
    """Those that the environment names; nothing is asked where it names none."""
    return reservations(session, [each.reservation for each in environment.compute.values()])


def _permissions(
    home: Session, account: Account, who: Identity
) -> tuple[Verdict, ...] | Failed | None:
    """Verdicts for whatever is needed; none for the root user, who has no policies."""
    if who.is_root:
        return ()
    environment = account.environment
    needed = permissions.needed_permissions(environment).values()
    wanted: Iterable[permissions.Permission] = {each for group in needed for each in group}
    principal = _try(lambda: identity.principal_arn(home, who))
    if isinstance(principal, Failed):
        principal = who.role_arn  # right for a role without a path
    if not principal:
        return Failed(f"Policies of {who.arn} cannot be simulated.")
    return _try(
        lambda: permissions.simulate(
            home, principal, wanted, who, environment.region, account.env
        )
    )  # fmt: skip


def _denied(session: Session, action: str) -> Failed | None:
    answer = _try(lambda: permissions.probe(session, action))
    return answer if isinstance(answer, Failed) else None


def _count(session: Session, method: str, member: str) -> int:
    with translated("".join(word.capitalize() for word in method.split("_"))):
        return len(getattr(session.client("ec2"), method)()[member])


def _try(question: Callable[[], T]) -> T | Failed:
    try:
        return question()
    except BatchmlError as error:
        return Failed(str(error), isinstance(error, AccessError))
