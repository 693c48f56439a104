"""The resources that `teardown` leaves, their cost, and the commands that remove them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Stack
from batchml.aws.leftovers import RecoveryPoint, fetch_recovery_points, fetch_repositories
from batchml.aws.naming import stack_name
from batchml.aws.session import Session
from batchml.errors import BatchmlError
from batchml.setup.sharing import TAG_ENV

_MOST_COMMANDS = 3  # for one line


class Leftover(Struct, frozen=True):
    """A resource that stays. `commands`: each removes a part; empty if AWS removes it by itself."""

    what: str
    cost: str
    commands: tuple[str, ...] = ()


class LeftoverFacts(Struct, frozen=True):
    """The account after a teardown. None: AWS was asked, and did not answer.

    `file_system`: the id of an EFS file system that was deleted, or "". `by_commands`: queues and
    compute environments that single commands made, as `queue NAME`, `compute NAME`. `flags`: region
    and profile, for the AWS CLI.
    """

    env: str
    kept_stacks: tuple[str, ...] = ()
    deleted_keys: int = 0
    file_system: str = ""
    backups: tuple[RecoveryPoint, ...] | None = ()
    repositories: tuple[str, ...] | None = ()
    by_commands: tuple[str, ...] | None = ()
    flags: str = ""


Answer = TypeVar("Answer")


def fetch_leftovers(
    session: Session, compute: ComputeApi, env: str, before: Mapping[str, Stack],
    kept: Iterable[str], deletes_files: bool = False, flags: str = "",
) -> LeftoverFacts:  # fmt: skip
    """Ask AWS what is left: at most four calls, none of which fails the teardown.

    `before`: the stacks before the teardown. `kept`: the names of the stacks that it leaves.
    `deletes_files`: whether the file system of a stack that stays was deleted. `flags`: region and
    profile, for the AWS CLI.
    """
    kept = tuple(each for each in kept if each.endswith(("-storage", "-observability")))
    storage = before.get(stack_name(env, "storage"))
    deleted = ""
    has_efs = storage is not None and storage.parameters.get("Workspace") == "efs"
    if storage is not None and has_efs and (storage.name not in kept or deletes_files):
        deleted = storage.outputs.get("FileSystemId", "")
    backups: tuple[RecoveryPoint, ...] | None = ()
    if storage is not None and deleted:
        # arn:PARTITION:cloudformation:REGION:ACCOUNT:stack/...
        _, partition, _, region, account, *_ = storage.id.split(":")
        arn = f"arn:{partition}:elasticfilesystem:{region}:{account}:file-system/{deleted}"
        backups = _ask(lambda: tuple(fetch_recovery_points(session, arn)))
    return LeftoverFacts(
        env,
        kept_stacks=kept,
        deleted_keys=_deleted_keys(before, kept),
        file_system=deleted,
        backups=backups,
        flags=flags,
        repositories=_ask(lambda: tuple(fetch_repositories(session))),
        by_commands=_ask(lambda: tuple(_by_commands(compute, env))),
    )  # fmt: skip


def _deleted_keys(before: Mapping[str, Stack], kept: tuple[str, ...]) -> int:
    """The number of deleted keys. The network's key is deleted even if its subnets stay."""
    count = sum(
        name not in kept for name in before if name.endswith(("-storage", "-observability"))
    )
    return count + sum(
        name.endswith("-network") and stack.parameters.get("Egress") != "none"
        for name, stack in before.items()
    )


def _ask(question: Callable[[], Answer]) -> Answer | None:
    try:
        return question()
    except BatchmlError:
        return None


def _by_commands(compute: ComputeApi, env: str) -> Iterator[str]:
    for kind, found in (("queue", compute.queues()), ("compute", compute.environments())):
        for name, detail in sorted(found.items()):
            if (detail.get("tags") or {}).get(TAG_ENV) == env and not _is_going(detail):
                yield f"{kind} {name.removeprefix(f'batchml-{env}-')}"


def _is_going(detail: Mapping[str, Any]) -> bool:
    return detail.get("status") in ("DELETING", "DELETED")


def leftovers(facts: LeftoverFacts) -> Iterator[Leftover]:
    """The resources that are left, or may be left if AWS did not answer. Pure."""
    env = facts.env
    for each in facts.by_commands or ():
        kind, name = each.split()
        yield Leftover(
            f"{'job queue' if kind == 'queue' else 'compute environment'} {name}",
            "free without hosts", (f"batchml {kind} delete {name} --env {env}",),
        )  # fmt: skip
    if facts.kept_stacks:
        yield Leftover(
            f"data: {', '.join(facts.kept_stacks)}", "by the gigabyte, and $1 a month for each key",
            (f"batchml teardown --env {env} --delete-data",),
        )  # fmt: skip
    yield from _backups(facts)
    if facts.deleted_keys:
        yield Leftover(f"KMS keys ({facts.deleted_keys}), which AWS destroys after 30 days", "free")
    repositories = facts.repositories
    if repositories is None:
        repositories = ("batchml/...",)
        yield Leftover("perhaps images in ECR; AWS did not answer", "by the gigabyte")
    elif repositories:
        yield Leftover(
            f"images of all environments in ECR: {', '.join(repositories)}", "by the gigabyte",
            tuple(f"aws ecr delete-repository --force --repository-name {each}{facts.flags}"
                  for each in repositories),
        )  # fmt: skip
    if facts.by_commands is None:
        yield Leftover(
            "perhaps queues and compute environments of single commands; AWS did not answer",
            "by their hosts",
        )
    yield Leftover("job definitions", "free", (f"batchml jobdef gc --env {env} --older-than 0d",))


def _backups(facts: LeftoverFacts) -> Iterator[Leftover]:
    """AWS makes a backup of EFS each day, and deletes it 35 days later."""
    if facts.backups is None:
        yield Leftover(
            f"perhaps backups of the file system {facts.file_system}; AWS did not answer",
            "by the gigabyte, for 35 days at most",
            ("aws backup list-recovery-points-by-backup-vault --backup-vault-name "
             f"aws/efs/automatic-backup-vault{facts.flags}",),
        )  # fmt: skip
    elif facts.backups:
        size = sum(each.size for each in facts.backups)
        yield Leftover(
            f"{len(facts.backups)} backups of the file system {facts.file_system}, "
            f"{size / 1024**3:.1f} GiB; their vault's policy must allow the deletion",
            "by the gigabyte, for 35 days at most",
            tuple(
                f"aws backup delete-recovery-point --backup-vault-name {each.vault} "
                f"--recovery-point-arn {each.arn}{facts.flags}"
                for each in facts.backups
            ),
        )


def leftover_lines(found: Iterable[Leftover]) -> list[str]:
    """The list as text."""
    lines = []
    for each in found:
        lines.append(f"  - {each.what} ({each.cost})")
        lines += [f"      {command}" for command in each.commands[:_MOST_COMMANDS]]
        more = len(each.commands) - _MOST_COMMANDS
        lines += [f"      and {more} more: teardown --json lists them"] if more > 0 else []
    return ["Left in the account, with the commands that remove it:", *lines] if lines else []


def leftovers_json(found: Iterable[Leftover]) -> list[dict[str, Any]]:
    return [
        {"what": each.what, "cost": each.cost, "commands": list(each.commands)} for each in found
    ]
