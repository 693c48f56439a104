"""Causes that lie in the queue and in its compute environments. Pure."""

from batchml.model.explanation import Explanation
from batchml.model.run import CANNOT_START, JobStatus
from batchml.ops.explain.seen import Look, Seen, is_well
from batchml.ops.explain.words import Words, count, memory, minutes, named, needs

_MOST_SHARES = 500  # active ones of a queue; AWS Batch User Guide, "Service quotas"
_FRONT = 100  # runs of a snapshot

# Why hosts of an environment that is INVALID never joined; AWS Batch User Guide, "INVALID compute
# environment".
_NO_HOST_JOINED = "none of the instances joined"


# --- the queue --------------------------------------------------------------------------------


def gone(seen: Seen) -> Explanation | None:
    """The queue was deleted, or cannot be used."""
    words = seen.words
    if seen.queue is None:
        return None
    if seen.queue.status in ("DELETING", "DELETED"):
        return Explanation(
            "queue-gone", f"Its queue {seen.queue.name} is not there any more.",
            (), "Submit it again to a queue that is.", words.batchml("queue", "list"),
        )  # fmt: skip
    if seen.queue.status == "INVALID":
        return Explanation(
            "queue-invalid", f"Its queue {seen.queue.name} is INVALID.",
            (f"AWS Batch says: {seen.queue.status_reason or 'nothing'}",),
            "Let setup put it right.", words.batchml("setup", "--plan"),
        )  # fmt: skip
    return None


def disabled(seen: Seen) -> Explanation | None:
    """Said last: what is in a queue that takes no more may go on, AWS says."""
    if seen.queue is None or seen.queue.is_enabled:
        return None
    name = seen.words.bare(seen.queue.name)
    return Explanation(
        "queue-disabled", f"Its queue {name} is DISABLED.", (f"state of {name}: DISABLED",),
        "Enable the queue.", seen.words.batchml("queue", "update", name, "--enable"),
    )  # fmt: skip


def stuck_head(seen: Seen) -> Explanation | None:
    """Queues are first in, first out: the head holds up all others when it cannot start."""
    head = seen.head
    if head is None or not head.status_reason or head.status is not JobStatus.RUNNABLE:
        return None
    if head.status_reason.startswith("CAPACITY") or (
        seen.is_early and "JOB_RESOURCE" in head.status_reason
    ):
        return None
    return Explanation(
        "behind-stuck-run", f"The run at the head of its queue cannot start: {named(head)}.",
        (f"AWS Batch says of that: {head.status_reason}", _place(seen)),
        "See what that one needs, or cancel it.", seen.words.batchml("explain", head.job_id),
    )  # fmt: skip


def not_its_turn(seen: Seen) -> Explanation | None:
    """Others are before it."""
    snapshot = seen.snapshot
    if snapshot is None or seen.text:
        return None
    far = len(snapshot.front) >= _FRONT and seen.place is None
    if not far and not seen.place:
        return None
    if seen.place and Look.HEAD not in seen.asked:
        return None
    evidence = [_place(seen)]
    if seen.head is not None:
        evidence.append(f"at the head: {named(seen.head)}, {seen.head.status}")
    evidence += [_use(seen)] if seen.usable else []
    if seen.run.share:
        used = snapshot.shares.get(seen.run.share)
        had = f"{used:g} vCPUs in use" if used is not None else "not among those that use most"
        evidence.append(f"its share {seen.run.share}: {had}; {snapshot.active_shares} are active")
    share = bool(seen.queue and seen.queue.policy)
    verdict = (
        "It waits for its share's turn: shares that have used less go first."
        if share
        else f"It waits for its turn: {_before(seen)} before it in queue {_queue(seen)}."
    )
    return Explanation(
        "share-waits" if share else "queue-position", verdict, tuple(evidence), is_problem=False,
        command=seen.words.batchml("ls", "--queue", _queue(seen)),
    )  # fmt: skip


def too_many_shares(seen: Seen) -> Explanation | None:
    """A queue serves 500 shares at a time; those beyond wait for one of them to have no runs."""
    snapshot = seen.snapshot
    if snapshot is None or not seen.run.share or snapshot.active_shares < _MOST_SHARES:
        return None
    if seen.place is not None or seen.run.share in snapshot.shares:
        return None
    return Explanation(
        "share-limit",
        f"Its queue serves {_MOST_SHARES} shares at a time, and {seen.run.share} is not in them.",
        (f"active shares: {snapshot.active_shares}",), "Submit it under a share that is active.",
        seen.words.batchml("ls", "--queue", _queue(seen)),
    )  # fmt: skip


def stock_exhausted(seen: Seen) -> Explanation | None:
    """A consumable resource: a licence, a token. Its count may lag half a minute."""
    stock = seen.stock
    if stock is None:
        return None
    wanted = seen.run.consumables.get(stock.name, 1)
    free = stock.total - stock.in_use
    if free >= wanted:
        return None
    never = stock.total < wanted
    end = "there are not so many in all" if never else "runs that hold them have to end first"
    return Explanation(
        "consumable",
        f"It needs {wanted} of the consumable resource {stock.name}; free: {max(0, free)}.",
        (f"{stock.name}: {stock.in_use} of {stock.total} in use",), f"Wait, or add to it: {end}.",
        seen.words.batchml("ls", "--queue", _queue(seen), "--status", "RUNNING")
        if seen.words.is_local
        else f"aws batch list-jobs-by-consumable-resource --consumable-resource {stock.name}",
        is_problem=never,
    )  # fmt: skip


# --- its compute environments -----------------------------------------------------------------


def environments_gone(seen: Seen) -> Explanation | None:
    if seen.queue is None or seen.queue.environments:
        return None
    return Explanation(
        "no-compute", f"Its queue {_queue(seen)} has no compute environment.", (),
        "Give it one.", seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def machine_cannot_start(words: Words, reason: str) -> Explanation:
    """The embedded AWS Batch cannot start programs, and holds its queues until it can."""
    return Explanation(
        "machine-cannot-start", "This machine cannot start programs now, so its queues wait.",
        (reason,), "Remove this cause. Waiting jobs then start by themselves.",
        words.batchml("local", "status"),
    )  # fmt: skip


def environments_invalid(seen: Seen) -> Explanation | None:
    """ACTION_REQUIRED: no environment of the queue can be used."""
    enabled = [each for each in seen.environments if each.is_enabled]
    bad = [each for each in enabled if not is_well(each)]
    if not bad or len(bad) < len(enabled):
        return None
    reason = bad[0].status_reason
    evidence = [f"{each.name} is {each.status}: {each.status_reason}" for each in bad]
    if reason.startswith(CANNOT_START):
        return machine_cannot_start(seen.words, reason)
    if _NO_HOST_JOINED in reason:
        return Explanation(
            "hosts-not-joining",
            f"Hosts of {seen.words.bare(bad[0].name)} started and never joined its cluster, so "
            "AWS Batch gave it up.",
            tuple(evidence),
            "Hosts need a way out (NAT or VPC endpoints for ecs, ecr, s3, logs), the ECS policy "
            "on their role, and an AMI with the ECS agent.",
            seen.words.batchml("setup", "--plan"),
        )  # fmt: skip
    return Explanation(
        "environment-invalid",
        f"No compute environment of queue {_queue(seen)} can be used: "
        f"{seen.words.bare(bad[0].name)} is {bad[0].status}.",
        tuple(evidence), "Let setup put it right.", seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def environments_disabled(seen: Seen) -> Explanation | None:
    if not seen.environments or any(each.is_enabled for each in seen.environments):
        return None
    name = seen.words.bare(seen.environments[0].name)
    listed = tuple(f"state of {seen.words.bare(e.name)}: DISABLED" for e in seen.environments)
    return Explanation(
        "environment-disabled", f"Every compute environment of queue {_queue(seen)} is DISABLED.",
        listed, "Enable it.", seen.words.batchml("compute", "update", name, "--enable"),
    )  # fmt: skip


def too_large_for_environments(seen: Seen) -> Explanation | None:
    """MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE, or plain arithmetic."""
    managed = [each for each in seen.usable if each.is_managed and each.max_vcpus]
    most = max((each.max_vcpus for each in managed), default=0)
    said = seen.text.startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    if not said and (not managed or seen.vcpus <= most or len(managed) < len(seen.usable)):
        return None
    if not managed:
        return None
    largest = max(managed, key=lambda each: each.max_vcpus)
    name = seen.words.bare(largest.name)
    evidence = [f"it needs {needs(seen.run)}: {seen.vcpus} vCPUs"]
    evidence += [f"{seen.words.bare(e.name)}: at most {e.max_vcpus} vCPUs" for e in managed]
    evidence += [f"AWS Batch says: {seen.text}"] if seen.text else []
    return Explanation(
        "too-large-for-compute",
        f"It needs {seen.vcpus} vCPUs, and no compute environment of its queue may have more than "
        f"{most}.",
        tuple(evidence), "Let the compute environment grow, or ask for less.",
        seen.words.batchml("compute", "update", name, "--max-vcpus", str(max(seen.vcpus, most + 1)))
        if not seen.words.is_local
        else seen.words.submit(seen.run, "--vcpus", str(most)),
    )  # fmt: skip


def too_large_for_hosts(seen: Seen) -> Explanation | None:
    """MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT: no host is large enough.

    AWS Batch says so as well while a first host boots. So it counts where arithmetic agrees, here
    on this machine, or when it stood long enough and was seen twice.
    """
    run = seen.run
    said = seen.text.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    evidence = [f"it needs {needs(run)}"]
    evidence += [f"AWS Batch says: {seen.text}"] if said else []
    if seen.types:
        fits = [
            each for each in seen.types
            if each.vcpus >= run.vcpus and each.gpus >= run.gpus
            and each.memory_mib > run.memory_mib
        ]  # fmt: skip
        big = max(seen.types, key=lambda each: (each.gpus, each.vcpus, each.memory_mib))
        evidence.append(
            f"the largest host, {big.name}, has {big.vcpus} vCPU, {memory(big.memory_mib)}, "
            f"{big.gpus} GPU, less what the system and the ECS agent keep"
        )
        if fits:
            return None
        lacking = _lacking(seen, big.gpus)
    elif said and (seen.words.is_local or Look.AGAIN in seen.asked):
        lacking = "no host of its queue has so much"
    else:
        return None
    if seen.words.is_local:
        fix, command = "Ask for less than this machine has.", seen.words.batchml("doctor")
    else:
        fix = "Ask for less, or name larger instance types in batchml.toml and run setup."
        command = seen.words.batchml("compute", "list")
    return Explanation(
        "too-large-for-hosts", f"It can never be placed: {lacking}.", tuple(evidence), fix, command
    )


def _lacking(seen: Seen, gpus: int) -> str:
    if seen.run.gpus > gpus:
        return f"it needs {seen.run.gpus} GPU, and no host of its queue has more than {gpus}"
    return "no host of its queue has so much (a host gives its runs less than its memory)"


def full(seen: Seen) -> Explanation | None:
    """At the head, and what it needs is in use by runs that go on."""
    if seen.snapshot is None or not seen.usable or seen.place not in (0, None) or seen.text:
        return None
    total = sum(each.max_vcpus for each in seen.usable)
    grown = sum(each.desired_vcpus for each in seen.usable) + seen.vcpus > total
    is_full = seen.snapshot.used_vcpus + seen.vcpus > total
    if not (is_full or seen.words.is_local or (grown and seen.hosts)):
        return None
    return Explanation(
        "full", "It is next. What it needs is in use by runs that go on.",
        (f"it needs {needs(seen.run)}", _use(seen), f"next for {minutes(seen.waited)}"),
        is_problem=False,
        command=seen.words.batchml("ls", "--queue", _queue(seen), "--status", "RUNNING"),
    )  # fmt: skip


def _use(seen: Seen) -> str:
    total = sum(each.max_vcpus for each in seen.usable)
    used = seen.snapshot.used_vcpus if seen.snapshot else 0
    return f"in use by runs of the queue: {used:g} of at most {total} vCPUs"


def _before(seen: Seen) -> str:
    place = seen.place
    return "at least 100 runs are" if place is None else f"{count(place, 'run is', 'runs are')}"


def _place(seen: Seen) -> str:
    if seen.place is None:
        return f"not among the first {_FRONT} of queue {_queue(seen)}"
    return f"place {seen.place + 1} in queue {_queue(seen)}, for {minutes(seen.waited)}"


def _queue(seen: Seen) -> str:
    return seen.words.bare(seen.run.queue)
