"""Why a run waits: all causes in their order, the next question to AWS, causes in other runs.

Pure. A cause is a function that returns its explanation; or None, if it is not the cause or more
answers are needed. Source: AWS Batch User Guide, "Jobs stuck in RUNNABLE".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec.structs import replace

from batchml.cluster.snapshot import describe_coming_move
from batchml.explain import compute
from batchml.explain.compute import SOON, AwsQuestion, WaitingRun
from batchml.explain.suggest import CommandWriter, count, describe_time, join_numbers, name_and_id
from batchml.model.environment import is_neuron_type
from batchml.model.explanation import Explanation
from batchml.model.fallback import FALLBACK_TAG
from batchml.model.group import HELD_TAG
from batchml.model.names import short_id
from batchml.model.outcome import describe_children
from batchml.model.run import CANNOT_START, JobStatus, Run, class_of, times_of, with_failures

# --- workers of a group run -----------------------------------------------------------------

RUNS = "running"  # `Explanation.cause` of a run that does not wait

_WAITING = (JobStatus.SUBMITTED, JobStatus.PENDING, JobStatus.RUNNABLE)


def add_waiting_workers(
    head: Explanation, workers: Mapping[str, Run], commands: CommandWriter
) -> Explanation:
    """Add the workers, by group, that wait while their head runs."""
    waiting_groups = {group: run for group, run in workers.items() if _count_waiting(run)}
    if head.cause != RUNS or not waiting_groups:
        return head
    lines = [
        f"group {group}: {_count_waiting(run)} of {run.array_size or 1} wait, {run.job_id}"
        for group, run in waiting_groups.items()
    ]
    first = next(iter(waiting_groups.values()))
    return replace(
        head,
        verdict=f"{head.verdict} Some of its workers wait.",
        evidence=(*head.evidence, *lines),
        fix="See why they wait.",
        command=commands.batchml("explain", first.job_id),
    )


def _count_waiting(run: Run) -> int:
    """The number of a group's workers that wait. Several workers are the children of an array."""
    if run.children:
        return sum(run.children.get(status.value, 0) for status in _WAITING)
    return int(run.status in _WAITING)


# --- a run that does nothing -----------------------------------------------------------------


def explain_idleness(
    running: Explanation, run: Run, seconds: float, waits: Sequence[str], commands: CommandWriter
) -> Explanation:
    """The explanation of a run that runs but has done nothing for `seconds`.

    `waits`: what its nodes use and wait for. A notebook or `alloc` that nobody uses is no problem.
    """
    if not seconds:
        return running
    idle = describe_time(seconds * 1000)
    if HELD_TAG in run.tags:
        return replace(running, evidence=(f"nobody has used it for {idle}", *running.evidence))
    return Explanation(
        "idle",
        f"It runs, and has done nothing for {idle}: no CPU, network, disk or GPU use, no output, "
        "no progress.",
        (*waits, *running.evidence),
        f"Look inside ({commands.batchml('shell', run.job_id)}), or end it. idle_after in "
        "job.toml ends such a run by itself.",
        commands.batchml("cancel", run.job_id.partition("#")[0]),
    )


# --- held runs and fallback -----------------------------------------------------------------


def add_held_runs(
    found: Explanation, held_runs: Sequence[Run], commands: CommandWriter
) -> Explanation:
    """Add the notebooks and `alloc`s that hold what the run waits for, until a user ends them.

    The command ends the largest.
    """
    if not held_runs:
        return found
    ordered = sorted(held_runs, key=lambda run: (-run.gpus, -_vcpus(run), run.job_id))
    lines = [_describe_held_run(run) for run in ordered]
    more = f"; {count(len(lines) - 1, 'other run')} like it" if len(lines) > 1 else ""
    return replace(
        found,
        verdict=f"It is next. What it needs is in use: {lines[0]}{more}.",
        evidence=(*lines, *found.evidence),
        fix="End it if nobody uses it.",
        command=_command_to_end(ordered[0], commands),
    )


def add_fallback(found: Explanation, waiting: WaitingRun) -> Explanation:
    """Add when a run with a fallback moves to its other queue."""
    move = describe_coming_move(waiting.run, waiting.now)
    if not move:
        return found
    queue = waiting.run.tags[FALLBACK_TAG].rpartition(":")[0]
    sentence = move.replace(queue, f"the queue {waiting.commands.bare(queue)}", 1)
    return replace(found, evidence=(*found.evidence, f"it {sentence}"))


def _describe_held_run(run: Run) -> str:
    gpus = f", {count(run.gpus, 'GPU')}" if run.gpus else ""
    who = f"{run.tags[HELD_TAG]} {short_id(run.job_id)}"
    return f"{who} holds {count(_vcpus(run), 'vCPU')}{gpus}"


def _vcpus(run: Run) -> int:
    return run.vcpus * max(1, run.nodes)


def _command_to_end(run: Run, commands: CommandWriter) -> str:
    if run.tags[HELD_TAG] == "notebook":
        return commands.batchml("notebook", short_id(run.job_id), "--end")
    return commands.batchml("cancel", short_id(run.job_id))


# --- children of an array -------------------------------------------------------------------

_EXAMINED = 3  # the most children to examine: each may take a call for its log


def choose_children(failed: Sequence[Run]) -> list[Run]:
    """Up to three children to examine, with different outcomes or exit codes if possible."""
    ends: dict[object, Run] = {}
    for child in failed:
        outcome = class_of(
            child.status_reason, child.reason, child.exit_code, is_ours=bool(child.key)
        )
        ends.setdefault((outcome, child.exit_code), child)
    different = list(ends.values())
    chosen = [*different, *(child for child in failed if child not in different)][:_EXAMINED]
    return sorted(chosen, key=_index)


def explain_children(
    array: Run, failed: Sequence[Run], examined: Sequence[tuple[Run, Explanation]]
) -> Explanation:
    """The cause of most of the `examined` children; other causes are evidence."""
    if len(failed) <= 1:
        return examined[0][1]
    by_cause = sorted(examined, key=lambda each: (each[1].cause, each[1].verdict, _index(each[0])))
    groups = [list(g) for _, g in groupby(by_cause, key=lambda e: (e[1].cause, e[1].verdict))]
    groups.sort(key=lambda group: (-len(group), _index(group[0][0])))
    found = groups[0][0][1]
    number = array.children.get("FAILED", len(failed))
    some = ""
    if len(examined) != number:
        some = f"; {join_numbers([_index(run) for run, _ in examined])} examined"
    which = "" if len(groups) == 1 else f" {_name_children(groups[0])}:"
    others = tuple(f"{_name_children(group)}: {group[0][1].verdict}" for group in groups[1:])
    numbers = join_numbers([_index(child) for child in failed])
    more = f" and {number - len(failed)} more" if number > len(failed) else ""
    return replace(
        found,
        verdict=f"{number} of its {array.array_size} children failed.{which} {found.verdict}",
        evidence=(
            f"failed: {numbers}{more}{some}",
            f"children: {describe_children(array)}",
            *others,
            *found.evidence,
        ),
    )


def add_children(array: Run, failed: Sequence[Run], found: Explanation) -> Explanation:
    """Add the progress of an array to the explanation of why it waits."""
    progress = describe_children(with_failures(array, failed))
    numbers = join_numbers([_index(child) for child in failed])
    more = (f"failed so far: {numbers}; `explain {failed[0].job_id}` says why",) if failed else ()
    first, *others = found.evidence or ("",)
    evidence = tuple(filter(None, (first, f"children: {progress}", *more, *others)))
    return replace(found, evidence=evidence)


def _name_children(group: Sequence[tuple[Run, Explanation]]) -> str:
    numbers = join_numbers([_index(run) for run, _ in group])
    return f"{'Child' if len(group) == 1 else 'Children'} {numbers}"


def _index(run: Run) -> int:
    return run.array_index or 0


# --- dependencies ---------------------------------------------------------------------------

_SHOWN = 3  # the most dependencies to list


def explain_pending(waiting: WaitingRun) -> Explanation | None:
    """A PENDING run: it waits for other runs, or it is an array whose children are at work."""
    run = waiting.run
    if run.is_cancelled or run.is_terminated:
        return Explanation(
            "being-cancelled", "It was cancelled, and ends when what it waits for has ended.",
            (f"reason given: {run.status_reason or 'none'}",), is_problem=False,
        )  # fmt: skip
    if _waits_for_dependencies(run):
        return _explain_dependencies(waiting) if AwsQuestion.DEPENDENCIES in waiting.asked else None
    if run.children:
        return _explain_array(waiting)
    if run.is_sequential or run.array_index is not None:
        return Explanation(
            "dependency", "It waits for another child of its array, or for its array.",
            is_problem=False,
            command=waiting.commands.batchml("explain", run.job_id.partition(":")[0]),
        )  # fmt: skip
    return Explanation(
        "dependency", "AWS Batch says that it waits for other runs, and names none.",
    )  # fmt: skip


def _waits_for_dependencies(run: Run) -> bool:
    """AWS Batch names the dependencies of an array also when they have ended: then children run."""
    return bool(run.depends_on) and set(run.children) <= {"PENDING"}


def _explain_dependencies(waiting: WaitingRun) -> Explanation:
    run, commands = waiting.run, waiting.commands
    known = {each.job_id: each for each in waiting.dependencies}
    circle = [each for each in waiting.dependencies if run.job_id in each.depends_on]
    if run.job_id in run.depends_on or circle:
        other = circle[0].job_id if circle else run.job_id
        return Explanation(
            "dependency-cycle", "It waits for a run that waits for it: neither can ever start.",
            (f"{run.job_id} waits for {other}, and {other} waits for {run.job_id}",),
            "Cancel it, and submit it again without that --after.",
            commands.batchml("cancel", run.job_id),
        )  # fmt: skip
    failed = [each for each in waiting.dependencies if each.status is JobStatus.FAILED]
    if failed:
        return Explanation(
            "dependency-failed", f"A run that it depends on has failed: {name_and_id(failed[0])}.",
            ("AWS Batch fails runs that depend on a failed run",),
            "See why that run failed.",
            commands.for_run(failed[0]).batchml("explain", failed[0].job_id),
        )  # fmt: skip
    left = [each for each in waiting.dependencies if not each.status.is_terminal]
    lost = [job_id for job_id in run.depends_on if job_id not in known]
    evidence = [f"{name_and_id(each)} is {each.status}" for each in left[:_SHOWN]]
    evidence += [f"{job_id}: AWS Batch does not know it" for job_id in lost[:_SHOWN]]
    waits = count(len(left) + len(lost), "run that has", "runs that have")
    if left:
        slow = next((each for each in left if each.status is not JobStatus.RUNNING), left[0])
        return Explanation(
            "dependency", f"It waits for {waits} not ended.", tuple(evidence), is_problem=False,
            command=commands.for_run(slow).batchml("explain", slow.job_id),
        )  # fmt: skip
    if lost:
        return Explanation(
            "dependency-forgotten", f"It waits for {waits} been forgotten by AWS Batch.",
            tuple(evidence), "Cancel it, and submit it again without that --after.",
            commands.batchml("cancel", run.job_id),
        )  # fmt: skip
    return Explanation(
        "released", "All runs that it depends on have succeeded: it is about to become RUNNABLE.",
        is_problem=False,
    )  # fmt: skip


def _explain_array(waiting: WaitingRun) -> Explanation | None:
    """An array is PENDING for as long as its children are at work."""
    run = waiting.run
    if run.children.get("FAILED") and AwsQuestion.FAILED not in waiting.asked:
        return None
    if run.children.get("RUNNABLE") and AwsQuestion.CHILD not in waiting.asked:
        return None
    found = Explanation(
        "array-at-work", "Its children are at work; AWS Batch calls an array PENDING meanwhile.",
        is_problem=False, command=waiting.commands.batchml("logs", "-f", run.job_id),
    )  # fmt: skip
    if waiting.failed:
        first = waiting.failed[0].job_id
        found = replace(
            found, fix=f"See why child {waiting.failed[0].array_index} failed.",
            command=waiting.commands.batchml("explain", first), is_problem=True,
        )  # fmt: skip
    return add_children(run, waiting.failed, found)


# --- the queue ------------------------------------------------------------------------------

_MOST_SHARES = 500  # active shares of a queue; AWS Batch User Guide, "Service quotas"
_FRONT = 100  # runs in a snapshot of a queue: AWS Batch API reference, GetJobQueueSnapshot


def queue_gone(waiting: WaitingRun) -> Explanation | None:
    """The queue was deleted, or cannot be used."""
    commands = waiting.commands
    if waiting.queue is None:
        return None
    if waiting.queue.status in ("DELETING", "DELETED"):
        return Explanation(
            "queue-gone", f"Its queue {waiting.queue.name} does not exist any more.",
            (), "Submit it again to another queue.", commands.batchml("queue", "list"),
        )  # fmt: skip
    if waiting.queue.status == "INVALID":
        return Explanation(
            "queue-invalid", f"Its queue {waiting.queue.name} is INVALID.",
            (f"AWS Batch says: {waiting.queue.status_reason or 'nothing'}",),
            "Let setup repair it.", commands.batchml("setup"),
        )  # fmt: skip
    return None


def queue_disabled(waiting: WaitingRun) -> Explanation | None:
    """The queue is DISABLED. Other causes come first: AWS may still start runs in the queue."""
    if waiting.queue is None or waiting.queue.is_enabled:
        return None
    name = waiting.commands.bare(waiting.queue.name)
    return Explanation(
        "queue-disabled", f"Its queue {name} is DISABLED.", (f"state of {name}: DISABLED",),
        "Enable the queue.", waiting.commands.batchml("queue", "update", name, "--enable"),
    )  # fmt: skip


def behind_stuck_run(waiting: WaitingRun) -> Explanation | None:
    """The head of the queue cannot start, and blocks all other runs: first in, first out."""
    head = waiting.head
    if head is None or not head.status_reason or head.status is not JobStatus.RUNNABLE:
        return None
    if head.status_reason.startswith("CAPACITY") or (
        waiting.is_early and "JOB_RESOURCE" in head.status_reason
    ):
        return None
    return Explanation(
        "behind-stuck-run", f"The run at the head of its queue cannot start: {name_and_id(head)}.",
        (f"AWS Batch says of that run: {head.status_reason}", _describe_position(waiting)),
        "See what that run needs, or cancel it.", waiting.commands.batchml("explain", head.job_id),
    )  # fmt: skip


def queue_position(waiting: WaitingRun) -> Explanation | None:
    """Other runs are before it."""
    snapshot = waiting.snapshot
    if snapshot is None or waiting.reason:
        return None
    is_far_behind = len(snapshot.front) >= _FRONT and waiting.runs_before is None
    if not is_far_behind and not waiting.runs_before:
        return None
    if waiting.runs_before and AwsQuestion.HEAD not in waiting.asked:
        return None
    evidence = [_describe_position(waiting)]
    if waiting.head is not None:
        evidence.append(f"at the head: {name_and_id(waiting.head)}, {waiting.head.status}")
    evidence += [compute.describe_use(waiting)] if waiting.usable else []
    if waiting.run.share:
        used = snapshot.shares.get(waiting.run.share)
        use = f"{used:g} vCPUs in use" if used is not None else "not among the largest shares"
        evidence.append(
            f"its share {waiting.run.share}: {use}; {snapshot.active_shares} are active"
        )
    if waiting.queue and waiting.queue.policy:
        cause = "share-waits"
        verdict = "It waits for its share's turn: shares that have used less go first."
    else:
        before, cause = waiting.runs_before, "queue-position"
        runs = "at least 100 runs are" if before is None else count(before, "run is", "runs are")
        verdict = f"It waits for its turn: {runs} before it in queue {waiting.queue_name}."
    return Explanation(
        cause, verdict, tuple(evidence), is_problem=False,
        command=waiting.commands.batchml("ls", "--queue", waiting.queue_name),
    )  # fmt: skip


def share_limit(waiting: WaitingRun) -> Explanation | None:
    """A queue serves 500 shares at a time; other shares wait until one of them has no runs."""
    snapshot = waiting.snapshot
    if snapshot is None or not waiting.run.share or snapshot.active_shares < _MOST_SHARES:
        return None
    if waiting.runs_before is not None or waiting.run.share in snapshot.shares:
        return None
    return Explanation(
        "share-limit",
        f"Its queue serves {_MOST_SHARES} shares at a time, but {waiting.run.share} is not active.",
        (f"active shares: {snapshot.active_shares}",), "Submit it under an active share.",
        waiting.commands.batchml("ls", "--queue", waiting.queue_name),
    )  # fmt: skip


def consumable(waiting: WaitingRun) -> Explanation | None:
    """A consumable resource, such as a licence, is used up. AWS's count may lag half a minute."""
    stock = waiting.stock
    if stock is None:
        return None
    wanted = waiting.run.consumables.get(stock.name, 1)
    free = stock.total - stock.in_use
    if free >= wanted:
        return None
    never = stock.total < wanted
    end = "it has too few in all" if never else "runs that hold it have to end first"
    return Explanation(
        "consumable",
        f"It needs {wanted} of the consumable resource {stock.name}; free: {max(0, free)}.",
        (f"{stock.name}: {stock.in_use} of {stock.total} in use",),
        f"Raise its total quantity, or wait: {end}.",
        waiting.commands.batchml("ls", "--queue", waiting.queue_name, "--status", "RUNNING")
        if waiting.commands.is_local
        else f"aws batch list-jobs-by-consumable-resource --consumable-resource {stock.name}",
        is_problem=never,
    )  # fmt: skip


def _describe_position(waiting: WaitingRun) -> str:
    if waiting.runs_before is None:
        return f"not among the first {_FRONT} of queue {waiting.queue_name}"
    waited = describe_time(waiting.waited)
    return f"position {waiting.runs_before + 1} in queue {waiting.queue_name}, for {waited}"


# --- Neuron chips ---------------------------------------------------------------------------


def no_neurons(waiting: WaitingRun) -> Explanation | None:
    """Its hosts have no Neuron chips, which AWS Batch does not count: on one of them it fails."""
    names = sorted({name for each in waiting.usable for name in each.instance_types})
    chips, is_known = waiting.run.neurons, all(each.instance_types for each in waiting.usable)
    if not chips or not names or not is_known or waiting.commands.is_local:
        return None
    without = [name for name in names if not is_neuron_type(name)]
    if not without:
        return None
    lacking = "no host" if without == names else "not every host"
    return Explanation(
        "no-neurons",
        f"It needs {count(chips, 'Neuron chip')}, and {lacking} of its queue has some. AWS Batch "
        "does not see that, and on a host without them it cannot start.",
        (f"hosts of its queue: {', '.join(without)}",),
        "Submit it to a queue whose hosts are trn1, trn2 or inf2.",
        waiting.commands.batchml("compute", "list"),
    )


# --- the causes, in order -------------------------------------------------------------------


Cause = Callable[[WaitingRun], Explanation | None]

# A problem that never passes by itself comes before a state that does.
_CERTAIN: tuple[Cause, ...] = (
    queue_gone,
    compute.no_compute,
    compute.bootstrap_failed,
    compute.environment_invalid,
    compute.environment_disabled,
    consumable,
    compute.too_large_for_compute,
    no_neurons,
    compute.too_large_for_hosts,
    behind_stuck_run,
    share_limit,
    queue_position,
    compute.service_role,
    compute.instance_configuration,
    compute.quota,
    compute.full,
)
_LIKELY: tuple[Cause, ...] = (
    compute.no_capacity,
    compute.launch_failed,
    compute.hosts_not_joining,
    compute.host_starting,
    compute.no_hosts,
    queue_disabled,
)


def next_question(waiting: WaitingRun) -> AwsQuestion | None:
    """The next question; None if no answer would change the verdict."""
    if explain_by_status(waiting) is not None or _first(_CERTAIN, waiting) is not None:
        return None
    return next((each for each in _plan(waiting) if each not in waiting.asked), None)


def _plan(waiting: WaitingRun) -> Iterator[AwsQuestion]:
    """The questions, the most informative first."""
    run = waiting.run
    if run.status is JobStatus.PENDING:
        if _waits_for_dependencies(run):
            yield AwsQuestion.DEPENDENCIES
            return
        if run.children.get("FAILED"):
            yield AwsQuestion.FAILED
        if run.children.get("RUNNABLE"):
            yield AwsQuestion.CHILD
        return
    if run.status not in (JobStatus.SUBMITTED, JobStatus.RUNNABLE):
        return
    yield AwsQuestion.QUEUE
    if waiting.queue is not None and waiting.queue.environments:
        yield AwsQuestion.ENVIRONMENTS
    if run.consumables:
        yield AwsQuestion.STOCK
    if not waiting.reason or waiting.reason.startswith(("CAPACITY", "UNDETERMINED")):
        yield AwsQuestion.SNAPSHOT
    if waiting.runs_before and not waiting.reason:
        yield AwsQuestion.HEAD
    if not waiting.commands.is_local:
        yield from _plan_in_aws(waiting)


def _plan_in_aws(waiting: WaitingRun) -> Iterator[AwsQuestion]:
    reason = waiting.reason
    if waiting.scripted:
        yield AwsQuestion.BOOTSTRAP
    if reason.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"):
        yield AwsQuestion.TYPES
        yield AwsQuestion.SNAPSHOT
        if not waiting.is_early:
            yield AwsQuestion.AGAIN
        return
    if reason.startswith("MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION"):
        yield AwsQuestion.TYPES
        if any(each.ami for each in waiting.environments):
            yield AwsQuestion.IMAGE
        yield AwsQuestion.AGAIN
        return
    if reason.startswith(("MISCONFIGURATION", "ACTION_REQUIRED")):
        yield AwsQuestion.AGAIN
        return
    if waiting.usable:
        yield AwsQuestion.ACTIVITIES
        yield AwsQuestion.HOSTS


def why_waits(waiting: WaitingRun) -> Explanation:
    """The verdict on a run that has not ended, from the answers so far."""
    return (
        explain_by_status(waiting)
        or _first(_CERTAIN, waiting)
        or _first(_LIKELY, waiting)
        or compute.undetermined(waiting)
    )


def _first(causes: tuple[Cause, ...], waiting: WaitingRun) -> Explanation | None:
    return next((found for cause in causes if (found := cause(waiting)) is not None), None)


def explain_by_status(waiting: WaitingRun) -> Explanation | None:
    """The explanation by the run's status alone: it runs, it starts, or it waits for other runs."""
    run, commands = waiting.run, waiting.commands
    ago = describe_time(waiting.now - (run.created_at or waiting.now))
    ran = describe_time(1000 * (times_of(run, waiting.now).ran or 0.0))
    match run.status:
        case JobStatus.RUNNING:
            return Explanation(
                "running", f"It is not waiting: it has run for {ran}.", is_problem=False,
                command=commands.batchml("logs", "-f", run.job_id),
            )  # fmt: skip
        case JobStatus.STARTING:
            if run.status_reason.startswith(CANNOT_START):
                return compute.machine_cannot_start(run.status_reason)
            doing = run.status_reason or "its image is pulled and its container created"
            return Explanation(
                "starting", f"It has a host and is being started: {doing}.", is_problem=False,
                evidence=(f"submitted {ago} ago",),
                command=commands.batchml("logs", "-f", run.job_id),
            )  # fmt: skip
        case JobStatus.PENDING:
            return explain_pending(waiting)
        case JobStatus.SUBMITTED if waiting.waited < SOON:
            return Explanation(
                "submitted", f"It was submitted {ago} ago; AWS Batch has not examined it yet.",
                is_problem=False,
            )  # fmt: skip
    return None
