"""Why a run ended: the verdict from its outcome, its log and AWS's reasons. Pure."""

import math
import re

from msgspec.structs import replace

from batchml.explain import clues, missing
from batchml.explain.missing import EndedRun, MissingItem
from batchml.explain.rank_logs import find_ended_rank, started_without_checkpoint
from batchml.explain.suggest import (
    LOCAL_FIXES,
    describe_memory,
    describe_time,
    is_out_of_reach,
    own_image,
)
from batchml.model.explanation import Explanation
from batchml.model.fallback import moved_to
from batchml.model.outcome import (
    MISSING_PACKAGE,
    UNREADABLE_LINE,
    describe_outcome,
    signal_name,
)
from batchml.model.run import NO_DEVICE, JobStatus, OutcomeClass, classify, is_out_of_budget
from batchml.model.tables import parse_size
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    IDLE,
    IDLE_END,
    LOG_TOO_LARGE,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import MEMORY_IS_FULL

_SHOWN = 3  # number of last lines that are shown
_LONG = 300  # characters of a line that are shown

_NO_COMMAND, _NOT_EXECUTABLE = 127, 126  # exit codes of a shell
_RUNTIME_PREFIX = "batchml: "  # of the log lines in which our runtime says why it ended a run

_OF_PIP = ("package-missing", "requirement-invalid")  # causes in a requirements.txt

_FINAL = (CRASH_LOOP, CONFIGURATION_ERROR)  # after these, another attempt would end the same way

_ALLOW_MORE_ATTEMPTS = (
    "Allow more attempts: each goes on from the checkpoints. With --resume this rerun does too."
)

# Why a process ends with a signal, apart from a `kill`.
_SIGNALS = {
    "SIGSEGV": "native code read or wrote memory that is not its own",
    "SIGABRT": "native code aborted: an assertion, or an uncaught C++ exception",
    "SIGILL": "native code is for another processor than the host's",
    "SIGBUS": "native code failed on a file or on shared memory: a full /dev/shm, for example",
    "SIGFPE": "native code divided by zero",
    "SIGKILL": "no program can catch it, and mostly the system sends it when memory runs out",
    "SIGTERM": "another process asked it to stop",
}


def items_to_search(ended: EndedRun) -> list[MissingItem]:
    """What the run may have missed, to be searched for in the folder of its files."""
    if classify(ended.run).outcome is not OutcomeClass.APP_ERROR:
        return []
    lines = ended.lines or ()
    return missing.possible_items(clues.match_log(lines), lines)


def why_ended(ended: EndedRun) -> Explanation:
    """The verdict on a run that has ended.

    The first line of evidence names the attempt and host.
    """
    run = ended.run
    found = _BY_OUTCOME.get(classify(run).outcome, _unknown)(ended)
    if run.status is JobStatus.SUCCEEDED:
        return found
    child = (f"child {run.array_index} of {ended.array.array_size}",) if ended.array else ()
    rank = find_ended_rank(ended.lines or ())
    # For a mistake in requirements.txt the outcome repeats the verdict.
    outcome = "" if found.cause in _OF_PIP else describe_outcome(run)
    # The outcome of a run that was not started contains AWS Batch's reason, and the last lines of a
    # run of several nodes contain its rank's end: leave out what is said already.
    said = (rank, *([outcome] if len(outcome) <= _LONG else []))
    own = ((each, each.removeprefix(_RUNTIME_PREFIX)) for each in found.evidence)
    more = tuple(each for each, text in own if text and not any(text in part for part in said))
    if any(rank in each for each in more):
        rank = ""
    evidence = (*child, *filter(None, (outcome, rank)), *more)
    fix = found.fix
    if ended.variables and found.command.startswith("batchml submit "):
        fix += f" Add its variables with --set-env: {', '.join(ended.variables)}."
    return Explanation(
        found.cause, found.verdict, tuple(dict.fromkeys(map(_shorten, evidence))), fix,
        found.command, found.is_problem,
    )  # fmt: skip


def _succeeded(ended: EndedRun) -> Explanation:
    return Explanation(
        "succeeded", "No problem: it succeeded.", (describe_outcome(ended.run),), is_problem=False,
    )  # fmt: skip


def _out_of_memory(ended: EndedRun) -> Explanation:
    run = ended.run
    size = f" than the {describe_memory(run.memory_mib)} that it had" if run.memory_mib else ""
    return Explanation(
        "out-of-memory", f"It needed more memory{size}.", (run.reason, *_last_lines(ended)),
        "Give it more memory.", _rerun_with_more_memory(ended),
    )  # fmt: skip


def _rerun_with_more_memory(ended: EndedRun) -> str:
    mib = max(1, ended.run.memory_mib) * 2
    return _rerun(ended, "--memory", describe_memory(mib))


def _rerun(ended: EndedRun, *flags: str) -> str:
    """The command that reruns it, with the same code, tags and parameters."""
    return ended.commands.rerun(ended.run, *flags, array=ended.array)


def _timed_out(ended: EndedRun) -> Explanation:
    run = ended.run
    limit = f" of {describe_time(run.timeout * 1000)}" if run.timeout else ""
    longer = f"{max(60, run.timeout * 2)}s" if run.timeout else "12h"
    return Explanation(
        "timed-out", f"It ran past its timeout{limit}, and was stopped.", _last_lines(ended),
        f"Give it more time; {ended.resuming}.",
        _rerun(ended, "--timeout", longer),
    )  # fmt: skip


def _cancelled(ended: EndedRun) -> Explanation:
    run, commands = ended.run, ended.commands
    if is_out_of_budget(run):
        budget = f" of ${ended.max_cost:.2f}" if ended.max_cost else ""
        return Explanation(
            "budget", f"Its budget{budget} was spent, so it was asked to save and stop.",
            _last_lines(ended), f"Run it again with a higher --max-cost; {ended.resuming}.",
            _rerun_with_higher_budget(ended), is_problem=False,
        )  # fmt: skip
    if moved_to(run):
        return Explanation(
            "moving",
            f"It left its queue to move to {moved_to(run)}, and is not in that queue yet.",
            (), "Wait for it: `wait` submits it to that queue, unless another process does.",
            commands.batchml("wait", run.job_id), is_problem=False,
        )  # fmt: skip
    if run.status_reason.startswith("JobQueue deleted"):
        verdict = f"Its queue {commands.bare(run.queue)} was deleted while the run was in it."
    else:
        verdict = f"A user stopped it: {run.status_reason or 'no reason was given'}."
    return Explanation(
        "cancelled", verdict, (),
        "Start it again."
        if not is_out_of_reach(run)
        else "Start it again with the program that started it.",
        commands.rerun(run), is_problem=False,
    )  # fmt: skip


def _rerun_with_higher_budget(ended: EndedRun) -> str:
    """The command that reruns it with twice the budget, or unchanged if the budget is unknown."""
    if not ended.max_cost:
        return _rerun(ended)
    return _rerun(ended, "--max-cost", f"{2 * ended.max_cost:.6g}")


def _host_lost(ended: EndedRun) -> Explanation:
    run, instance = ended.run, ended.instance
    if run.reason.startswith(NO_DEVICE):
        return _not_started(ended)
    if run.exit_code == TRY_ELSEWHERE and not run.status_reason.startswith("Host EC2"):
        return _explain_giving_up(ended)
    evidence = [run.status_reason]
    verdict = f"Its host was lost{f', {run.host}' if run.host else ''}, and no attempt was left."
    cause = "host-lost"
    if instance is not None:
        kind = "a spot instance" if instance.is_spot else "an on-demand instance"
        evidence.append(f"{instance.instance_id} was {kind}: {instance.reason or instance.state}")
    if instance is not None and instance.is_spot:
        cause = "spot"
        verdict = "EC2 took its spot instance back, and no attempt was left."
    return Explanation(
        cause, verdict, tuple(evidence), _ALLOW_MORE_ATTEMPTS, _rerun_with_more_attempts(ended)
    )


def _not_started(ended: EndedRun) -> Explanation:
    run = ended.run
    reason = run.reason or run.status_reason
    found = clues.match_reason(reason)
    if found is not None:
        explained = _explain_clue(ended, found)
        pip = re.search(MISSING_PACKAGE, reason) or re.search(UNREADABLE_LINE, reason)
        if found.cause not in _OF_PIP or pip is None:
            return explained
        # Leave out AWS's prefix, which looks like a failure of Docker.
        return replace(explained, evidence=(reason[pip.start() :].splitlines()[0],))
    if "Timeout" in reason.partition(":")[0]:
        verdict = "Its host was too slow to create the container, often because of a slow disk."
        fix, command = "Try again; use hosts with a faster disk.", _rerun(ended)
    else:
        verdict, fix = "Its container could not be started.", "Correct what AWS names."
        command = ""
    return Explanation("not-started", verdict, (reason,), fix, command)


def _dependency(ended: EndedRun) -> Explanation:
    failed = [each for each in ended.dependencies if each.status is JobStatus.FAILED]
    commands = ended.commands
    if failed:
        first = failed[0]
        if moved_to(first):
            return Explanation(
                "dependency-moved",
                f"The run that it depends on moved to the queue {moved_to(first)}. AWS Batch then "
                "fails the runs that wait for it.",
                (f"{first.job_id}: {describe_outcome(first)}",),
                "Let the shell wait for that run, then submit this run again.",
                f"{commands.batchml('wait', first.job_id)} && "
                f"{commands.batchml('rerun', ended.run.job_id)}",
            )
        return Explanation(
            "dependency-failed", f"A run that it depends on failed: {first.name} {first.job_id}.",
            (f"{first.job_id}: {describe_outcome(first)}",), "See why that run failed.",
            commands.batchml("explain", first.job_id),
        )  # fmt: skip
    known = ended.run.depends_on
    return Explanation(
        "dependency-failed", "A run that it depends on failed.",
        (f"it depends on {', '.join(known)}",) if known else (), "See why that run failed.",
        commands.batchml("explain", known[0]) if known else "",
    )  # fmt: skip


def _never_placed(ended: EndedRun) -> Explanation:
    run = ended.run
    if run.status_reason.startswith("Container Overrides"):
        return Explanation(
            "overrides-too-long", "Its command and variables are longer than AWS Batch accepts.",
            (run.status_reason,), "Put long values into a file in the job's folder.",
            _submit_changed_job(ended),
        )  # fmt: skip
    if "CAPACITY" in run.status_reason:
        verdict, fix = "AWS had no free instance for it for too long.", "Try again later."
        command = _rerun(ended)
    else:
        verdict = "It could never be placed, and its queue's time limit is over."
        fix, command = "Request less, or let the compute environment grow.", ""
    return Explanation("unschedulable", verdict, (run.status_reason,), fix, command)


def _program(ended: EndedRun) -> Explanation:
    run, commands = ended.run, ended.commands
    if run.children:
        return Explanation(
            "children-failed", "Some of its children failed.", (), "See which children.",
            commands.batchml("show", run.job_id),
        )  # fmt: skip
    if run.reason.startswith(LOG_TOO_LARGE):
        return Explanation(
            "log-too-large", "It was stopped because its log reached the limit of the file size.",
            (run.reason, *_last_lines(ended)),
            "Let it print less, or stop the server and start it in a shell with a higher limit "
            "(ulimit -f).", commands.batchml("local", "stop"),
        )  # fmt: skip
    line = _runtime_line(ended)
    if MEMORY_IS_FULL in line:  # of another node, whose end AWS Batch does not report
        return _out_of_memory(ended)
    found = clues.match_log(ended.lines or ())
    code = classify(run).exit_code
    if code == IDLE and line.startswith(IDLE_END):
        own = [each for each in ended.lines or () if not each.startswith(_RUNTIME_PREFIX)]
        return Explanation(
            "idle", f"It was {line.partition('. ')[0]}. idle_after has ended it.",
            _last_lines(replace(ended, lines=tuple(own))),
            f"See what it waited for before a rerun; {ended.resuming}.",
            commands.log(run),
        )  # fmt: skip
    if line and code in _FINAL:
        return _explain_final_end(ended, code, line)
    if line and code == TRY_ELSEWHERE:  # our image, but submitted by another program
        return _explain_giving_up(ended)
    if found is not None:
        better = missing.refine(found, ended) or _explain_allocation(found, ended)
        return _with_source_line(ended, better or _explain_clue(ended, found))
    if code == _NO_COMMAND and len(run.command) == 1 and " " in run.command[0]:
        return missing.explain_quoted_command(ended, "".join(_last_lines(ended)[-1:]))
    if code in (_NO_COMMAND, _NOT_EXECUTABLE):
        what = "was not found in the image" if code == _NO_COMMAND else "could not be executed"
        return Explanation(
            "missing-command" if code == _NO_COMMAND else "permission",
            f"The command {what}: a shell says so by exit code {code}.",
            (f"command: {' '.join(run.command)}", *_last_lines(ended)),
            "Name a command that the image has.", _submit_changed_job(ended),
        )  # fmt: skip
    signal = signal_name(code).removeprefix(", signal ")
    if signal:
        if signal == "SIGKILL" and _was_far_below_limit(ended):
            return Explanation(
                "signal",
                f"SIGKILL ended it from outside: it used {ended.memory:.0f} of {run.memory_mib} "
                "MiB, so its own memory is not the cause.",
                _last_lines(ended),
                "A user killed it, or the system did when the whole machine lacked memory. "
                "See its log.",
                commands.log(run),
            )  # fmt: skip
        meaning = _SIGNALS.get(signal, "a signal ended it")
        command = _rerun_with_more_memory(ended) if signal == "SIGKILL" else commands.log(run)
        is_kill = signal == "SIGKILL"
        fix = "Give it more memory, unless a user killed it." if is_kill else "See its log."
        return Explanation(
            "signal", f"{signal} ended it: {meaning}.", _last_lines(ended), fix, command
        )
    not_sent = missing.explain_guess(ended)
    if not_sent is not None:
        return _with_source_line(ended, not_sent)
    raised = clues.find_last_exception(ended.lines or ())
    if raised:
        return Explanation(
            "exception", f"The program raised {_shorten(raised)}",
            tuple(filter(None, (clues.find_raising_frame(ended.lines or ()), raised))),
            "Correct the program.", commands.log(run),
        )  # fmt: skip
    return Explanation(
        "exit-code", f"The program ended with code {code}, for a reason of its own.",
        _last_lines(ended), "See its log.", commands.log(run),
    )  # fmt: skip


_MOST_ADDED = 16  # times the memory that a run had: more than that is a mistake in the program


def _explain_allocation(found: clues.ClueMatch, ended: EndedRun) -> Explanation | None:
    """Explain an allocation that failed, if the log says its size; None for any other clue."""
    if found.cause != "python-memory" or not found.groups:
        return None
    number, unit = found.groups
    had = max(1, ended.run.memory_mib)
    size = parse_size(f"{number} {unit.replace('bytes', 'B')}")  # None: too large for any host
    asked = None if size is None else size / 1024**2  # MiB
    is_more = asked is None or asked > had
    limit = f" It had {describe_memory(had)}." if is_more and ended.run.memory_mib else ""
    verdict = f"{found.verdict}{limit}"
    if asked is None or asked > _MOST_ADDED * had:
        return Explanation(
            found.cause, verdict, (found.line,),
            "Correct the program: the shape of an array may be larger than you meant.",
            ended.commands.log(ended.run),
        )  # fmt: skip
    needed = math.ceil((had + asked) / 1024) * 1024
    return Explanation(
        found.cause, verdict, (found.line,), found.fix,
        _rerun(ended, "--memory", describe_memory(needed)),
    )  # fmt: skip


_FAR_BELOW = 0.8  # the part of the limit below which memory is no cause


def _was_far_below_limit(ended: EndedRun) -> bool:
    limit = ended.run.memory_mib
    return ended.memory is not None and bool(limit) and ended.memory < _FAR_BELOW * limit


_NODE_LOST = "One of its nodes was lost, and no attempt was left"

# Reasons for which our runtime ends an attempt, so that another host can try: a text in its log
# line, the cause, the verdict, the fix.
_REASONS_TO_GIVE_UP = (
    ("unfit", "unfit-host", "Its host was unfit, and no attempt was left",
     "Try again: another host may be fit. See docs/health.md for the checks."),
    ("spot", "spot", "EC2 reclaimed its spot instance, and no attempt was left",
     _ALLOW_MORE_ATTEMPTS),
    ("did not connect within", "nodes-missing", "Not all of its nodes connected in time",
     "Give them more time with start_within under [launch]; see if the queue has room for all."),
    ("did not connect again", "node-lost", _NODE_LOST, _ALLOW_MORE_ATTEMPTS),
    ("is gone", "node-lost", _NODE_LOST, _ALLOW_MORE_ATTEMPTS),
    ("does not answer", "node-lost", _NODE_LOST, _ALLOW_MORE_ATTEMPTS),
    ("sign of life", "hung", "It hung, and no attempt was left",
     "See where its ranks hung: their stacks are in its log and its outputs."),
    ("could not be ended", "not-ended", "Some of its processes could not be ended",
     "Try again on other hosts."),
    ("fit into this host's cache", "data-cache-full", "Its host had no room for its data",
     _ALLOW_MORE_ATTEMPTS),
)  # fmt: skip

_ONLY_HOST = (
    "This machine is the only host: repair what is named, then try again. See docs/health.md for "
    "the checks."
)


def _explain_giving_up(ended: EndedRun) -> Explanation:
    """Our runtime ended the last attempt with code 75, because of its host or another node."""
    run, line = ended.run, _runtime_line(ended)
    for text, cause, verdict, fix in _REASONS_TO_GIVE_UP:
        if text in line:
            verdict = f"{verdict}: {_shorten(line)}"
            setup = _explain_setup(ended, line, verdict) if cause == "unfit-host" else None
            if setup is not None:
                return replace(setup, cause="unfit-host")
            fix = _ONLY_HOST if cause == "unfit-host" and ended.commands.is_local else fix
            return Explanation(
                cause, verdict, _last_lines(ended), fix, _rerun_with_more_attempts(ended)
            )
    if not line:
        return Explanation(
            "host-lost", "It ended with code 75, which means that another host may succeed.",
            _last_lines(ended), "Allow more attempts.", _rerun_with_more_attempts(ended),
        )  # fmt: skip
    if run.nodes or "BATCHML_LAUNCH" in run.environment:
        return Explanation(
            "gave-up", f"It gave up, and no attempt was left: {_shorten(line)}",
            _last_lines(ended), _ALLOW_MORE_ATTEMPTS, _rerun_with_more_attempts(ended),
        )  # fmt: skip
    return Explanation(
        "store-unreachable", f"Its command was never run: {_shorten(line)}", _last_lines(ended),
        "Try again.", _rerun(ended),
    )  # fmt: skip


def _explain_final_end(ended: EndedRun, code: int, why: str) -> Explanation:
    """Our runtime ended the run, because another attempt would end the same way.

    `why`: its line in the log.
    """
    run, commands = ended.run, ended.commands
    if code == CRASH_LOOP:
        return Explanation(
            "crash-loop", f"It made no progress, however often it started: {_shorten(why)}",
            _last_lines(ended), _fix_of_crash_loop(ended, why), commands.log(run),
        )  # fmt: skip
    network = clues.find_clue(clues.NETWORK, (why,))
    if network is not None:
        return replace(_explain_clue(ended, network), evidence=_last_lines(ended))
    setup = _explain_setup(ended, why, f"No host was fit for it: {_shorten(why)}")
    if "unfit" in why and setup is not None:
        return replace(setup, cause="unfit-hosts")
    if "unfit" in why:
        who, fix = "No host was", "Check the image first: a bad image looks like bad hardware."
        if commands.is_local:
            who, fix = "This machine is not", _ONLY_HOST
        verdict = f"{who} fit for it: {_shorten(why)}"
        return Explanation("unfit-hosts", verdict, _last_lines(ended), fix, commands.log(run))
    fix = "Submit it again: its files are packed anew."
    if why.startswith("data."):
        fix = "Correct the data set under [data], or give another one with --data."
    verdict = f"Its command was never run: {_shorten(why)}"
    return Explanation("not-prepared", verdict, _last_lines(ended), fix, ended.submit())


# Causes of unfit hosts that the image or AMI has, so that another host does not help.
_OF_SETUP = ("cuda-mismatch", "no-gpu-driver", "fabric-manager")


def _explain_setup(ended: EndedRun, line: str, verdict: str) -> Explanation | None:
    """Explain a host that was refused for a fault of its GPUs' setup; None for other reasons."""
    found = clues.find_clue(clues.GPU, (line,))
    if found is None or found.cause not in _OF_SETUP:
        return None
    return replace(_explain_clue(ended, found), verdict=verdict, evidence=_last_lines(ended))


def _fix_of_crash_loop(ended: EndedRun, why: str) -> str:
    """The fix, by the end of the last start and by whether a checkpoint was saved."""
    if "was ended by SIGKILL" in why:
        fix = (
            "Another process killed them, mostly the kernel for lack of memory: see MEMORY "
            f"in {ended.commands.batchml('show', ended.run.job_id)}."
        )
    else:
        fix = "Correct the program; its log shows how each start ended."
    if started_without_checkpoint(ended.lines or ()):
        fix += (
            " It saves nothing in BATCHML_CHECKPOINT_DIR, so each start began anew: "
            "docs/checkpoints.md."
        )
    return fix


def _runtime_line(ended: EndedRun) -> str:
    """The last line in which our runtime says why it ended the run; empty without one."""
    lines = (line for line in reversed(ended.lines or ()) if line.startswith(_RUNTIME_PREFIX))
    return next(lines, "").removeprefix(_RUNTIME_PREFIX)


def _rerun_with_more_attempts(ended: EndedRun) -> str:
    tries = max(2, ended.run.max_attempts * 2)
    return _rerun(ended, "--attempts", str(min(10, tries)))


def _unknown(ended: EndedRun) -> Explanation:
    run = ended.run
    reason = run.status_reason or "AWS Batch gives no reason"
    return Explanation(
        "unknown", "AWS Batch ended it for a reason that is unknown here.",
        (reason, *_last_lines(ended)), "See its log." if run.attempts else "",
        ended.commands.log(run) if run.attempts else "",
    )  # fmt: skip


_BY_OUTCOME = {
    OutcomeClass.SUCCEEDED: _succeeded,
    OutcomeClass.OUT_OF_MEMORY: _out_of_memory,
    OutcomeClass.TIMED_OUT: _timed_out,
    OutcomeClass.CANCELLED: _cancelled,
    OutcomeClass.HOST_LOST: _host_lost,
    OutcomeClass.IMAGE_ERROR: _not_started,
    OutcomeClass.DEPENDENCY_FAILED: _dependency,
    OutcomeClass.UNSCHEDULABLE: _never_placed,
    OutcomeClass.APP_ERROR: _program,
}


def _explain_clue(ended: EndedRun, found: clues.ClueMatch) -> Explanation:
    evidence = (found.line,) if found.line else ()
    fix, command = found.fix, _command(ended, found)
    flag = found.groups[0] if found.cause == "unknown-flag" and found.groups else ""
    if "_" in flag and not ended.commands.job:  # no job.toml has a key for it
        right = flag.replace("_", "-")
        fix = f"If it writes flags with hyphens, write {right}."
        words = [word.replace(flag, right, 1) for word in ended.run.command]
        command = ended.submit(command=words) if words != list(ended.run.command) else ""
    if ended.commands.is_local and found.cause in LOCAL_FIXES:
        fix = LOCAL_FIXES[found.cause]
        is_disk = found.cause == "disk-full"
        command = ended.commands.batchml("local", "clean") if is_disk else ""
    return Explanation(found.cause, found.verdict, evidence, fix, command)


def _submit_changed_job(ended: EndedRun) -> str:
    """The command that submits the job again once its job.toml is changed.

    Empty for a command of the command line: the user has to type another command.
    """
    return ended.submit() if ended.commands.job else ""


def _command(ended: EndedRun, found: clues.ClueMatch) -> str:
    """The command that a clue suggests; "" if no command helps."""
    run, commands = ended.run, ended.commands
    image = own_image(run.image)
    match found.command:
        case "other":
            return commands.batchml("show", found.groups[0])
        case "memory":
            return _rerun_with_more_memory(ended)
        case "rerun":
            return _rerun_with_higher_budget(ended)
        case "attempts":
            return _rerun_with_more_attempts(ended)
        case "gpus":
            return "" if run.gpus else _rerun(ended, "--gpus", "1")
        case "launch":
            is_plain = "BATCHML_LAUNCH" not in run.environment and not ended.array
            return _rerun(ended, "--launch", "torchrun") if is_plain else commands.log(run)
        case "again":
            return ended.submit()
        case "submit":
            return _submit_changed_job(ended)
        case "image" if commands.is_local:
            return ended.submit() if image else ""  # it builds the image, too
        case "image":
            return commands.batchml("image", "push", image) if image else ""
        case "push":
            verb = "build" if commands.is_local else "push"
            return commands.batchml("image", verb, image) if image else ""
        case "setup" | "doctor":
            return commands.batchml(found.command)
        case "log":
            return commands.log(run)
    return ""


def _with_source_line(ended: EndedRun, found: Explanation) -> Explanation:
    """Add the program's line that raised the exception, from the traceback in the log."""
    where = clues.find_raising_frame(ended.lines or ())
    return replace(found, evidence=tuple(filter(None, (where, *found.evidence))))


def _last_lines(ended: EndedRun) -> tuple[str, ...]:
    """The last informative lines of the log."""
    return tuple(clues.informative_lines(ended.lines or ())[-_SHOWN:])


def _shorten(text: str) -> str:
    text = text.rpartition("\r")[2].strip() or text.strip()
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
