"""Why a run ended: the verdict from its outcome, its log and AWS's reasons. Pure."""

from msgspec import Struct
from msgspec.structs import replace

from batchml.explain import clues, missing
from batchml.explain.clues import has_no_checkpoint, rank_that_ended
from batchml.explain.missing import LocalFindings, MissingItem
from batchml.explain.suggest import (
    CommandWriter,
    describe_memory,
    describe_time,
    is_out_of_reach,
    own_image,
)
from batchml.model.explanation import Explanation, InstanceState
from batchml.model.fallback import moved_to
from batchml.model.outcome import MISSING_PACKAGE, describe_outcome, signal_name
from batchml.model.run import JobStatus, OutcomeClass, Run, classify, is_out_of_budget
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    LOG_TOO_LARGE,
    TRY_ELSEWHERE,
)

_SHOWN = 3  # last lines
_LONG = 300  # characters of a line that are shown

_NO_COMMAND, _NOT_EXECUTABLE = 127, 126  # exit codes of a shell
_OURS = "batchml: "  # prefix of the log lines in which our runtime says why it ended a run

_FINAL = (CRASH_LOOP, CONFIGURATION_ERROR)  # another attempt would end the same way

_MORE = "Allow more attempts: each goes on from the checkpoints. With --resume this rerun does too."

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


class EndedRun(Struct, frozen=True):
    """A run that has ended, and the answers about it. Of an array, `run` is a failed child."""

    run: Run
    words: CommandWriter = CommandWriter()
    array: Run | None = None
    lines: tuple[str, ...] | None = None  # the last page of its log, without marks
    dependencies: tuple[Run, ...] = ()
    machine: InstanceState | None = None
    here: LocalFindings = LocalFindings()  # about the file or module that it missed
    max_cost: float | None = None  # USD

    @property
    def size(self) -> int:
        """The size of the array; 0 without one."""
        return self.array.array_size if self.array else 0


def item_to_search(ended: EndedRun) -> MissingItem | None:
    """The file or module that the run missed, to be searched for in the folder of its files."""
    if classify(ended.run).outcome is not OutcomeClass.APP_ERROR:
        return None
    found = clues.match_log(ended.lines or ())
    return missing.missing_item(found) if found is not None else None


def why_ended(ended: EndedRun) -> Explanation:
    """The verdict on a run that has ended.

    The first line of evidence names the attempt and host.
    """
    run = ended.run
    found = _why(ended)
    if run.status is JobStatus.SUCCEEDED:
        return found
    child = (f"child {run.array_index} of {ended.array.array_size}",) if ended.array else ()
    rank = rank_that_ended(ended.lines or ())
    # For a missing package the outcome repeats the verdict.
    outcome = "" if found.cause == "package-missing" else describe_outcome(run)
    # The outcome of a run that was not started contains AWS Batch's reason: leave that out.
    is_whole = len(outcome) <= _LONG
    more = tuple(each for each in found.evidence if not (is_whole and each and each in outcome))
    evidence = (*child, *filter(None, (outcome, rank)), *more)
    return Explanation(
        found.cause, found.verdict, tuple(dict.fromkeys(map(_short, evidence))), found.fix,
        found.command, found.is_problem,
    )  # fmt: skip


def _why(ended: EndedRun) -> Explanation:
    match classify(ended.run).outcome:
        case OutcomeClass.SUCCEEDED:
            return _succeeded(ended)
        case OutcomeClass.OUT_OF_MEMORY:
            return _out_of_memory(ended)
        case OutcomeClass.TIMED_OUT:
            return _timed_out(ended)
        case OutcomeClass.CANCELLED:
            return _cancelled(ended)
        case OutcomeClass.HOST_LOST:
            return _host_lost(ended)
        case OutcomeClass.IMAGE_ERROR:
            return _not_started(ended)
        case OutcomeClass.DEPENDENCY_FAILED:
            return _dependency(ended)
        case OutcomeClass.UNSCHEDULABLE:
            return _never_placed(ended)
        case OutcomeClass.APP_ERROR:
            return _program(ended)
        case _:
            return _unknown(ended)


def _succeeded(ended: EndedRun) -> Explanation:
    return Explanation(
        "succeeded", "No problem: it succeeded.", (describe_outcome(ended.run),),
        command=ended.words.batchml("show", ended.run.job_id), is_problem=False,
    )  # fmt: skip


def _out_of_memory(ended: EndedRun) -> Explanation:
    run = ended.run
    had = f" than the {describe_memory(run.memory_mib)} that it had" if run.memory_mib else ""
    return Explanation(
        "out-of-memory", f"It needed more memory{had}.", (run.reason, *_last(ended)),
        "Give it more memory.", _more_memory(ended),
    )  # fmt: skip


def _more_memory(ended: EndedRun) -> str:
    mib = max(1, ended.run.memory_mib) * 2
    return _rerun(ended, "--memory", describe_memory(mib))


def _rerun(ended: EndedRun, *flags: str) -> str:
    """Rerun it, with the same code, tags and parameters."""
    return ended.words.rerun(ended.run, *flags, array=ended.array)


def _timed_out(ended: EndedRun) -> Explanation:
    run = ended.run
    limit = f" of {describe_time(run.timeout * 1000)}" if run.timeout else ""
    longer = f"{max(60, run.timeout * 2)}s" if run.timeout else "12h"
    return Explanation(
        "timed-out", f"It ran past its timeout{limit}, and was stopped.", _last(ended),
        "Give it more time; with --resume it goes on from its checkpoint.",
        _rerun(ended, "--timeout", longer),
    )  # fmt: skip


def _cancelled(ended: EndedRun) -> Explanation:
    run, words = ended.run, ended.words
    if is_out_of_budget(run):
        had = f" of ${ended.max_cost:.2f}" if ended.max_cost else ""
        return Explanation(
            "budget", f"Its budget{had} was spent, so it was asked to save and stop.",
            _last(ended), _HIGHER, _richer(ended), is_problem=False,
        )  # fmt: skip
    if moved_to(run):
        return Explanation(
            "moving",
            f"It left its queue to move to {moved_to(run)}, and is not there yet.",
            (), "Wait for it: `wait` submits it there, unless another process does.",
            words.batchml("wait", run.job_id), is_problem=False,
        )  # fmt: skip
    if run.status_reason.startswith("JobQueue deleted"):
        verdict = f"Its queue {words.bare(run.queue)} was deleted while the run was in it."
    else:
        verdict = f"A user stopped it: {run.status_reason or 'no reason was given'}."
    return Explanation(
        "cancelled", verdict, (),
        "Start it again."
        if not is_out_of_reach(run)
        else "Start it again with the program that started it.",
        words.rerun(run), is_problem=False,
    )  # fmt: skip


_HIGHER = "Run it again with a higher --max-cost; with --resume it goes on from its checkpoint."


def _richer(ended: EndedRun) -> str:
    """Rerun it with twice the budget; unchanged, if the budget is unknown."""
    if not ended.max_cost:
        return _rerun(ended)
    return _rerun(ended, "--max-cost", f"{2 * ended.max_cost:.6g}")


def _host_lost(ended: EndedRun) -> Explanation:
    run, machine = ended.run, ended.machine
    if run.exit_code == TRY_ELSEWHERE and not run.status_reason.startswith("Host EC2"):
        return _gave_up(ended)
    evidence = [run.status_reason]
    verdict = f"Its host was lost{f', {run.host}' if run.host else ''}, and no attempt was left."
    cause = "host-lost"
    if machine is not None:
        kind = "a spot instance" if machine.is_spot else "an on-demand instance"
        evidence.append(f"{machine.instance_id} was {kind}: {machine.reason or machine.state}")
    if machine is not None and machine.is_spot:
        cause = "spot"
        verdict = "EC2 took its spot instance back, and no attempt was left."
    return Explanation(
        cause, verdict, tuple(evidence), _MORE,
        _more_tries(ended),
    )  # fmt: skip


def _not_started(ended: EndedRun) -> Explanation:
    run = ended.run
    reason = run.reason or run.status_reason
    found = clues.match_reason(reason)
    if found is not None:
        explained = _of_clue(ended, found)
        pip = MISSING_PACKAGE.search(reason)
        if found.cause != "package-missing" or pip is None:
            return explained
        # Leave out AWS's prefix, which looks like a failure of Docker.
        return replace(explained, evidence=(f"pip says: {reason[pip.start() :].splitlines()[0]}",))
    kind = reason.partition(":")[0]
    slow = "Timeout" in kind
    verdict = (
        "Its host was too slow to create the container, often because of a slow disk."
        if slow
        else "Its container could not be started."
    )
    fix = "Try again; use hosts with a faster disk." if slow else "Correct what AWS names."
    return Explanation(
        "not-started", verdict, (reason,), fix, ended.words.batchml("show", run.job_id)
    )


def _dependency(ended: EndedRun) -> Explanation:
    failed = [each for each in ended.dependencies if each.status is JobStatus.FAILED]
    words = ended.words
    if failed:
        first = failed[0]
        if moved_to(first):
            return Explanation(
                "dependency-moved",
                f"The run that it depends on moved to the queue {moved_to(first)}. AWS Batch then "
                "fails the runs that wait for it.",
                (f"{first.job_id}: {describe_outcome(first)}",),
                "Let the shell wait for that run, then submit this run again.",
                f"{words.batchml('wait', first.job_id)} && "
                f"{words.batchml('rerun', ended.run.job_id)}",
            )
        return Explanation(
            "dependency-failed", f"A run that it depends on failed: {first.name} {first.job_id}.",
            (f"{first.job_id}: {describe_outcome(first)}",), "See why that run failed.",
            words.batchml("explain", first.job_id),
        )  # fmt: skip
    known = ", ".join(ended.run.depends_on)
    other = ended.run.depends_on[0] if ended.run.depends_on else ended.run.job_id
    return Explanation(
        "dependency-failed", "A run that it depends on failed.",
        (f"it depends on {known}",) if known else (), "See why that run failed.",
        words.batchml("explain" if known else "show", other),
    )  # fmt: skip


def _never_placed(ended: EndedRun) -> Explanation:
    run, words = ended.run, ended.words
    if run.status_reason.startswith("Container Overrides"):
        return Explanation(
            "overrides-too-long", "Its command and variables are longer than AWS Batch accepts.",
            (run.status_reason,), "Put long values into a file in the job's folder.",
            words.submit(run, "--dry-run"),
        )  # fmt: skip
    if "CAPACITY" in run.status_reason:
        verdict, fix = "AWS had no free instance for it for too long.", "Try again later."
    else:
        verdict = "It could never be placed, and its queue's time limit is over."
        fix = "Request less, or let the compute environment grow."
    return Explanation(
        "unschedulable", verdict, (run.status_reason,), fix,
        words.batchml("compute", "list"),
    )  # fmt: skip


def _program(ended: EndedRun) -> Explanation:
    run, words = ended.run, ended.words
    if run.children:
        return Explanation(
            "children-failed", "Some of its children failed.", (), "See which children.",
            words.batchml("show", run.job_id),
        )  # fmt: skip
    if run.reason.startswith(LOG_TOO_LARGE):
        return Explanation(
            "log-too-large", "It was stopped because its log reached the limit of the file size.",
            (run.reason, *_last(ended)),
            "Let it print less, or stop the server and start it in a shell with a higher limit "
            "(ulimit -f).", words.batchml("local", "stop"),
        )  # fmt: skip
    found = clues.match_log(ended.lines or ())
    code = classify(run).exit_code
    own = _own_line(ended)
    if found is not None and not (own and code in _FINAL):
        known = missing.refine(found, run, words, ended.here, ended.size)
        return _with_source_line(ended, known or _of_clue(ended, found))
    if own and code in _FINAL:
        return _final(ended, code, own)
    if own and code == TRY_ELSEWHERE:  # our image, but submitted by another program
        return _gave_up(ended)
    if code == _NO_COMMAND and len(run.command) == 1 and " " in run.command[0]:
        return missing.explain_quoted_command(run, words, ended.size, "".join(_last(ended)[-1:]))
    if code in (_NO_COMMAND, _NOT_EXECUTABLE):
        what = "was not found in the image" if code == _NO_COMMAND else "could not be executed"
        return Explanation(
            "missing-command" if code == _NO_COMMAND else "permission",
            f"The command {what}: a shell says so by exit code {code}.",
            (f"command: {' '.join(run.command)}", *_last(ended)),
            "Name a command that the image has.", _dry_run(ended),
        )  # fmt: skip
    signal = signal_name(code).removeprefix(", signal ")
    if signal:
        meaning = _SIGNALS.get(signal, "a signal ended it")
        command = _more_memory(ended) if signal == "SIGKILL" else words.log(run)
        is_kill = signal == "SIGKILL"
        fix = "Give it more memory, unless a user killed it." if is_kill else "See its log."
        return Explanation("signal", f"{signal} ended it: {meaning}.", _last(ended), fix, command)
    raised = clues.last_exception(ended.lines or ())
    if raised:
        return Explanation(
            "exception", f"The program raised {_short(raised)}",
            tuple(filter(None, (clues.raised_at(ended.lines or ()), raised))),
            "Correct the program.", words.log(run),
        )  # fmt: skip
    return Explanation(
        "exit-code", f"The program ended with code {code}, for a reason of its own.",
        _last(ended), "See its log.", words.log(run),
    )  # fmt: skip


_NODE_LOST = "One of its nodes was lost, and no attempt was left"

# Ends that another host may not have: text in the runtime's line, cause, verdict, fix.
_GAVE_UP = (
    ("unfit", "unfit-host", "Its host was unfit, and no attempt was left",
     "Try again: another host may be fit. See docs/health.md for the checks."),
    ("spot", "spot", "EC2 reclaimed its spot instance, and no attempt was left",
     _MORE),
    ("did not come within", "nodes-missing", "Not all of its nodes came in time",
     "Give them more time with start_within under [launch]; see if the queue has room for all."),
    ("did not come back", "node-lost", _NODE_LOST, _MORE),
    ("is gone", "node-lost", _NODE_LOST, _MORE),
    ("does not answer", "node-lost", _NODE_LOST, _MORE),
    ("sign of life", "hung", "It hung, and no attempt was left",
     "See where its ranks hung: their stacks are in its log and its outputs."),
    ("could not be ended", "not-ended", "Some of its processes could not be ended",
     "Try again on other hosts."),
)  # fmt: skip

_ONLY_HOST = (
    "This machine is the only host: repair what is named, then try again. See docs/health.md for "
    "the checks."
)


def _gave_up(ended: EndedRun) -> Explanation:
    """Our runtime ended the last attempt with code 75, because of its host or another node."""
    run, own = ended.run, _own_line(ended)
    for text, cause, verdict, fix in _GAVE_UP:
        if text in own:
            fix = _ONLY_HOST if cause == "unfit-host" and ended.words.is_local else fix
            return Explanation(
                cause, f"{verdict}: {_short(own)}", _last(ended), fix, _more_tries(ended)
            )
    if not own:
        return Explanation(
            "host-lost", "It ended with code 75, which means that another host may succeed.",
            _last(ended), "Allow more attempts.", _more_tries(ended),
        )  # fmt: skip
    if run.nodes or "BATCHML_LAUNCH" in run.environment:
        return Explanation(
            "gave-up", f"It gave up, and no attempt was left: {_short(own)}", _last(ended),
            _MORE, _more_tries(ended),
        )  # fmt: skip
    return Explanation(
        "store-unreachable", f"Its command was never run: {_short(own)}", _last(ended),
        "Try again.", _rerun(ended),
    )  # fmt: skip


def _final(ended: EndedRun, code: int, why: str) -> Explanation:
    """Our runtime ended the run, because another attempt would end the same way."""
    run, words = ended.run, ended.words
    if code == CRASH_LOOP:
        return Explanation(
            "crash-loop", f"It made no progress, however often it started: {_short(why)}",
            _last(ended), _of_crash_loop(ended, why), words.log(run),
        )  # fmt: skip
    if "unfit" in why and words.is_local:
        return Explanation(
            "unfit-hosts", f"This machine is not fit for it: {_short(why)}", _last(ended),
            _ONLY_HOST, words.log(run),
        )  # fmt: skip
    if "unfit" in why:
        return Explanation(
            "unfit-hosts", f"No host was fit for it: {_short(why)}", _last(ended),
            "Check the image first: a bad image looks like bad hardware.", words.log(run),
        )  # fmt: skip
    return Explanation(
        "not-prepared", f"Its command was never run: {_short(why)}", _last(ended),
        "Submit it again: its files are packed anew.",
        words.submit(run, array=ended.size),
    )  # fmt: skip


def _of_crash_loop(ended: EndedRun, why: str) -> str:
    """The fix, by the end of the last start and by whether a checkpoint was saved."""
    if "was ended by SIGKILL" in why:
        fix = (
            "Another process killed them, mostly the kernel for lack of memory: see MEMORY "
            f"in {ended.words.batchml('show', ended.run.job_id)}."
        )
    else:
        fix = "Correct the program; its log shows how each start ended."
    if has_no_checkpoint(ended.lines or ()):
        fix += (
            " It saves nothing in BATCHML_CHECKPOINT_DIR, so each start began anew: "
            "docs/checkpoints.md."
        )
    return fix


def _own_line(ended: EndedRun) -> str:
    """The last line in which our runtime says why it ended the run; empty without one."""
    own = next((line for line in reversed(ended.lines or ()) if line.startswith(_OURS)), "")
    return own.removeprefix(_OURS)


def _more_tries(ended: EndedRun) -> str:
    tries = max(2, ended.run.max_attempts * 2)
    return _rerun(ended, "--attempts", str(min(10, tries)))


def _unknown(ended: EndedRun) -> Explanation:
    run = ended.run
    reason = run.status_reason or "AWS Batch gives no reason"
    return Explanation(
        "unknown", "AWS Batch ended it for a reason that is unknown here.",
        (reason, *_last(ended)), "See all details.", ended.words.batchml("show", run.job_id),
    )  # fmt: skip


def _of_clue(ended: EndedRun, found: clues.ClueMatch) -> Explanation:
    evidence = (found.line,) if found.line else ()
    if found.command == "other":
        command = ended.words.batchml("show", found.groups[0])
    else:
        command = _command(ended, found.command)
    return Explanation(found.cause, found.verdict, evidence, found.fix, command)


def _command(ended: EndedRun, word: str) -> str:
    """The command that a clue suggests."""
    run, words = ended.run, ended.words
    image = own_image(run.image)
    match word:
        case "memory":
            return _more_memory(ended)
        case "rerun":
            return _richer(ended)
        case "gpus":
            return _rerun(ended, "--gpus", str(max(1, run.gpus)))
        case "again":
            return words.submit(run, array=ended.size)
        case "submit" | "dry-run" | "job":
            return _dry_run(ended)
        case "image" | "push":
            verb = "push" if word == "push" and not words.is_local else "build"
            return words.batchml("image", verb, image) if image else words.batchml("image", "list")
        case "setup" | "doctor":
            return words.batchml("doctor") if words.is_local else words.batchml(word)
        case "compute":
            return words.batchml("compute", "list")
    return words.log(run)


def _dry_run(ended: EndedRun) -> str:
    return ended.words.submit(ended.run, "--dry-run", array=ended.size)


def _with_source_line(ended: EndedRun, found: Explanation) -> Explanation:
    """Add the line of the program that a traceback names."""
    where = clues.raised_at(ended.lines or ())
    first, *more = found.evidence or ("",)
    return replace(found, evidence=tuple(filter(None, (where, first, *more))))


def _last(ended: EndedRun) -> tuple[str, ...]:
    """The last informative lines of the log."""
    return tuple(clues.telling_lines(ended.lines or ())[-_SHOWN:])


def _short(text: str) -> str:
    text = text.rpartition("\r")[2].strip() or text.strip()
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
