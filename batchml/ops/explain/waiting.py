"""Why a run waits: the causes, in the order in which they are looked for. Pure.

Each cause is a function that returns its explanation, or None when it is not the cause or cannot be
told yet. Source: AWS Batch User Guide, "Jobs stuck in RUNNABLE".
"""

from collections.abc import Callable, Iterator

from batchml.model.explanation import Explanation
from batchml.model.run import CANNOT_START, JobStatus
from batchml.ops.explain import dependencies, hosts, queues
from batchml.ops.explain.seen import SOON, Look, Seen
from batchml.ops.explain.words import minutes

Cause = Callable[[Seen], Explanation | None]

# Whatever comes first explains the most: what never ends by itself stands before what does.
_CERTAIN: tuple[Cause, ...] = (
    queues.gone,
    queues.environments_gone,
    queues.environments_invalid,
    queues.environments_disabled,
    queues.stock_exhausted,
    queues.too_large_for_environments,
    queues.too_large_for_hosts,
    queues.stuck_head,
    queues.too_many_shares,
    queues.not_its_turn,
    hosts.service_role,
    hosts.configuration,
    hosts.quota,
    queues.full,
)
_LIKELY: tuple[Cause, ...] = (
    hosts.no_capacity,
    hosts.launch_failed,
    hosts.not_joining,
    hosts.starting,
    hosts.none_asked_for,
    queues.disabled,
    hosts.undetermined,
)


def next_look(seen: Seen) -> Look | None:
    """What to ask next; None once more would not change the verdict."""
    if at_rest(seen) is not None or _first(_CERTAIN, seen) is not None:
        return None
    return next((look for look in _plan(seen) if look not in seen.asked), None)


def _plan(seen: Seen) -> Iterator[Look]:
    """The questions, those that tell most first."""
    run = seen.run
    if run.status is JobStatus.PENDING:
        if run.depends_on:
            yield Look.DEPENDENCIES
        elif run.children.get("RUNNABLE") or run.children.get("FAILED"):
            if run.children.get("FAILED"):
                yield Look.FAILED
            if run.children.get("RUNNABLE"):
                yield Look.CHILD
        return
    if run.status not in (JobStatus.SUBMITTED, JobStatus.RUNNABLE):
        return
    yield Look.QUEUE
    if seen.queue is not None and seen.queue.environments:
        yield Look.ENVIRONMENTS
    if run.consumables:
        yield Look.STOCK
    if not seen.text or seen.text.startswith(("CAPACITY", "UNDETERMINED")):
        yield Look.SNAPSHOT
    if seen.place and not seen.text:
        yield Look.HEAD
    if not seen.words.is_local:
        yield from _plan_in_aws(seen)


def _plan_in_aws(seen: Seen) -> Iterator[Look]:
    text = seen.text
    if text.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"):
        yield Look.TYPES
        yield Look.SNAPSHOT
        if not seen.is_early:
            yield Look.AGAIN
        return
    if text.startswith("MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION"):
        yield Look.TYPES
        if any(each.ami for each in seen.environments):
            yield Look.IMAGE
        yield Look.AGAIN
        return
    if text.startswith(("MISCONFIGURATION", "ACTION_REQUIRED")):
        yield Look.AGAIN
        return
    if seen.usable:
        yield Look.ACTIVITIES
        yield Look.HOSTS


def why_waits(seen: Seen) -> Explanation:
    """The verdict on a run that has not ended, from what has been seen."""
    return (
        at_rest(seen) or _first(_CERTAIN, seen) or _first(_LIKELY, seen) or hosts.undetermined(seen)
    )


def _first(causes: tuple[Cause, ...], seen: Seen) -> Explanation | None:
    return next((found for cause in causes if (found := cause(seen)) is not None), None)


def at_rest(seen: Seen) -> Explanation | None:
    """What a run's own record explains: it runs, it starts, or it waits for other runs."""
    run, words = seen.run, seen.words
    ago = minutes(seen.now - (run.started_at or run.created_at or seen.now))
    match run.status:
        case JobStatus.RUNNING:
            return Explanation(
                "running", f"It is not waiting: it has run for {ago}.", is_problem=False,
                command=words.batchml("logs", "-f", run.job_id),
            )  # fmt: skip
        case JobStatus.STARTING:
            if run.status_reason.startswith(CANNOT_START):
                return queues.machine_cannot_start(words, run.status_reason)
            doing = run.status_reason or "its image is pulled and its container made"
            return Explanation(
                "starting", f"It has a host and is being started: {doing}.", is_problem=False,
                evidence=(f"submitted {ago} ago",),
                command=words.batchml("logs", "-f", run.job_id),
            )  # fmt: skip
        case JobStatus.PENDING:
            return dependencies.pending(seen)
        case JobStatus.SUBMITTED if seen.waited < SOON:
            return Explanation(
                "submitted", f"It was submitted {ago} ago; AWS Batch has not looked at it yet.",
                is_problem=False, command=words.batchml("explain", run.job_id),
            )  # fmt: skip
    return None
