"""The exceptions that batchml raises, each with the exit code of the command that it ends.

BatchmlError                     1
├── UsageError                   2   the command line is wrong
│   ├── EmptyOption              2   an option has an empty value
│   └── OtherAccountOrRegion     2   `--after` names a run that AWS Batch cannot wait for
├── ConfigError                 78   a file has mistakes
│   └── SweepDamaged            78   the spec of a started sweep cannot be read
├── RecordingRefused            78   a file is not a complete recording of AWS calls
├── NotFound                     1   a job, run, queue or image that does not exist
│   ├── InputNotFound           78   the job, script or image of a submission does not exist
│   ├── NothingToRerun           1   a run has no checkpoints, or no known failed children
│   └── NoQueue                 78   the queue of a submission does not exist
├── NotRunning                  75   the run has no running container yet; 1 when it has ended
├── RunFailed                    1   a run of a function has no result; or the run's own code
├── HeldRunEnded                 1   a run of `alloc` or `notebook` ended too early; or its own code
├── ExecUnavailable              1   a running container cannot be entered
├── ImageError                   1   an image cannot be built or pushed
│   ├── NoImageEngine            1   no Docker engine answers
│   └── TagTaken                 1   the registry has an image of this tag already
├── TransferFailed               1   some files were not transferred; the same command continues
├── TransferWorkerFailed         1   the job that transfers files failed; or the job's own code
├── FsxTaskFailed                1   a data repository task of FSx for Lustre failed
├── AccessError                 77   credentials are missing, wrong or not allowed to do something
├── ServiceError                 1   AWS refused a request
├── ServiceUnreachable          74   AWS did not answer
│   ├── CallNotSent             74   a call was not sent, because the credentials did not come
│   └── SubmissionUnknown       74   the answer to a submission was lost
├── SetupFailed                  1   AWS could not create or change a resource
├── NotConverging                1   AWS changed a resource, and it still differs from batchml.toml
├── WouldLoseData                1   a step of `setup` would delete data
├── SweepStoreError              1   the store of a sweep cannot be read or written
├── LedgerDamaged                1   a part of a sweep's ledger is missing or cannot be read
├── SweepHasController           1   a sweep has a controller already
├── ControllerReplaced           1   another controller has taken over the sweep
└── LocalServerError             1   the embedded AWS Batch cannot start or continue
    ├── StateFolderBusy          1   another server uses the state folder
    ├── StateFolderUnsafe        1   other users can read or write the state folder
    ├── StateDamaged             1   the journal cannot be read
    ├── StateFolderGone         74   the folder was moved, deleted or replaced under its server
    ├── LogDamaged               1   a log is not the output of its run
    ├── DiskFull                 1   no space for the journal or a log
    │   └── DiskReadOnly         1   the file system is read-only
    └── JournalBusy              1   another program has locked the journal

A message says what is wrong, where, and what to do.
"""

from collections.abc import Iterable

INTERRUPTED = 130  # the command was interrupted; the run continues


class BatchmlError(Exception):
    """The base class. `exit_code` is the exit code of the command that the error ends."""

    exit_code = 1


# --- Input ----------------------------------------------------------------------------------------


class UsageError(BatchmlError):
    exit_code = 2


class EmptyOption(UsageError):
    """An option has an empty value, such as `--queue "$QUEUE"` without the variable."""

    def __init__(self, option: str) -> None:
        super().__init__(f"{option} is empty. Is a variable of the shell not set?")


class OtherAccountOrRegion(UsageError):
    """AWS Batch lets a job wait only for jobs of its own account and region."""


class ConfigError(BatchmlError):
    """All mistakes of one file, reported together."""

    exit_code = 78

    def __init__(self, where: str, mistakes: Iterable[str]) -> None:
        self.where = where
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        super().__init__(f"{where}: {count}, nothing was sent.\n{lines}")


class RecordingRefused(BatchmlError):
    """A file is not a recording, is cut off, or is of another version."""

    exit_code = 78


class NotFound(BatchmlError):
    """`known` are the names that exist; `where` is the file and line that has the wrong name.

    With `most`, the names keep their order, and at most so many are listed.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        hint: str,
        *,
        where: str = "",
        most: int | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.hint = hint
        names = sorted(set(known)) if most is None else list(dict.fromkeys(known))
        meant = did_you_mean(name, names)
        end = "." if len(names) == len(names[:most]) else ", ..."
        listed = f" Known: {', '.join(names[:most])}{end}" if names else ""
        quoted = f"{name!r} ({where})" if where else repr(name)
        super().__init__(f"{kind} {quoted} does not exist.{meant}{listed} {hint}".rstrip())


class InputNotFound(NotFound):
    """The job, script or image of a submission does not exist, so nothing was sent."""

    exit_code = 78


class NothingToRerun(NotFound):
    """The run has saved nothing to go on from, or its failed children are not known any more."""

    def __init__(self, message: str) -> None:
        BatchmlError.__init__(self, message)


class NoQueue(NotFound):
    """The job queue of a submission does not exist; `known` are the queues that do."""

    exit_code = 78

    def __init__(self, name: str, known: Iterable[str], hint: str, *, where: str = "") -> None:
        self.known = tuple(known)
        super().__init__("Job queue", name, self.known, hint, where=where)


# --- Runs -----------------------------------------------------------------------------------------


class NotRunning(BatchmlError):
    """The run waits, is ending, or (`over`) has ended, so it has no container to enter."""

    exit_code = 75

    def __init__(self, message: str, *, over: bool = False) -> None:
        self.over = over
        if over:
            self.exit_code = 1
        super().__init__(message)


class RunFailed(BatchmlError):
    """A run of a Python function ended without a result, or with an exception that is known only as
    text. `outcome` is the class of the run's outcome, `exit_code` that of `submit --wait`.
    """

    def __init__(self, message: str, exit_code: int, outcome: str = "app-error") -> None:
        self.exit_code = exit_code
        self.outcome = outcome
        super().__init__(message)


class HeldRunEnded(BatchmlError):
    """A run of `alloc` or `notebook` ended too early. `exit_code` is the exit code of the run."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class ExecUnavailable(BatchmlError):
    """A running container cannot be entered. `is_early`: a new try in a few seconds may succeed."""

    def __init__(self, message: str, *, is_early: bool = False) -> None:
        self.is_early = is_early
        super().__init__(message)


class ImageError(BatchmlError):
    pass


class NoImageEngine(ImageError):
    """No Docker engine answers, or this user may not use it."""


class TagTaken(ImageError):
    """Another push created the tag first. Tags are never overwritten."""


# --- Files ----------------------------------------------------------------------------------------


class TransferFailed(BatchmlError):
    pass


class TransferWorkerFailed(BatchmlError):
    """The job that copies files between S3 and the workspace failed."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class FsxTaskFailed(BatchmlError):
    """FSx for Lustre did not export, import or release all files."""


# --- AWS ------------------------------------------------------------------------------------------


class AccessError(BatchmlError):
    """`code` is AWS's error code, or the class name of the SDK's exception."""

    exit_code = 77

    def __init__(self, message: str, *, code: str = "") -> None:
        self.code = code
        super().__init__(message)


class ServiceError(BatchmlError):
    """The service refused a request. `code` is AWS's error code, `status` the HTTP status."""

    def __init__(self, operation: str, code: str, message: str, status: int) -> None:
        self.operation = operation
        self.code = code
        self.status = status
        self.message = message
        super().__init__(f"{operation} was refused ({code}): {message}")


class ServiceUnreachable(BatchmlError):
    exit_code = 74


class CallNotSent(ServiceUnreachable):
    """The source of the credentials did not answer, so the call was never sent."""


class SubmissionUnknown(ServiceUnreachable):
    """The answer to a submission was lost, and AWS Batch could not be asked for the run either."""

    def __init__(self, name: str, key: str, why: str) -> None:
        self.key = key
        super().__init__(
            f"It is not known yet whether {name!r} was submitted: {why}\n"
            f"  batchml reconcile {key}   # finds out once the service answers; until then, "
            "submitting it again could make a second run"
        )


# --- Setup ----------------------------------------------------------------------------------------


class SetupFailed(BatchmlError):
    """AWS could not create or change a resource: the first cause, and how to fix it."""

    def __init__(self, kind: str, name: str, cause: str, fix: str) -> None:
        super().__init__(f"{kind} {name}: {cause}\n  {fix}")


class NotConverging(BatchmlError):
    """AWS accepted a change, and the resource still differs from batchml.toml."""

    def __init__(self, resource: str, action: str, reasons: Iterable[str]) -> None:
        super().__init__(
            f"{resource}: AWS accepted the {action}, but the resource still differs from "
            f"batchml.toml: {'; '.join(reasons)}. Nothing more was done. To see the differences: "
            "batchml setup --plan"
        )


class WouldLoseData(BatchmlError):
    """A step of `setup` would delete data (`loses` names the data), and the user has not agreed."""

    def __init__(
        self, kind: str, name: str, action: str, loses: str, reasons: Iterable[str]
    ) -> None:
        super().__init__(
            f"{kind} {name}: to {action} it would delete {loses} ({'; '.join(reasons)}). "
            f"It was not changed. If you agree: batchml setup --allow-loss {name}"
        )


# --- Sweeps ---------------------------------------------------------------------------------------


class SweepDamaged(ConfigError):
    """`file` is the key of the damaged document in the sweep's store."""

    def __init__(self, key: str, file: str, why: str) -> None:
        super().__init__(file, [why])
        self.args = (
            f"The sweep {key or 'in this folder'} cannot be read: its {file} is damaged, or was "
            f"written by a later version of batchml ({why}). The reports of its trials are beside "
            "it, unharmed.",
        )


class SweepStoreError(BatchmlError, OSError):
    """The store of a sweep cannot be read or written.

    `temporary`: the same call may succeed later. `code` is S3's error code. It is an OSError, as
    the errors of the stores in `batchml.runtime` are.
    """

    def __init__(
        self, message: str, *, temporary: bool = False, code: str = "", exit_code: int = 1
    ) -> None:
        self.temporary = temporary
        self.code = code
        self.exit_code = exit_code
        super().__init__(message)


class LedgerDamaged(BatchmlError):
    def __init__(self, damage: str) -> None:
        super().__init__(
            f"The sweep's ledger is damaged: {damage}. Put the file back from a copy of the folder "
            "or bucket, or start a new sweep."
        )


class SweepHasController(BatchmlError):
    def __init__(self, holder: str, key: str) -> None:
        super().__init__(
            f"Another controller has this sweep: {holder}. Nothing was changed. To watch it: "
            f"batchml sweeps show --follow {key}. Once it has ended, repeat the command."
        )


class ControllerReplaced(BatchmlError):
    """Another controller has taken over this one's sweep. `by` describes the other controller."""

    def __init__(self, by: str = "") -> None:
        super().__init__(
            f"Another controller has taken over this sweep{f': {by}' if by else ''}. This one "
            "stops; nothing is lost, and running trials continue."
        )


# --- The embedded AWS Batch -----------------------------------------------------------------------


class LocalServerError(BatchmlError):
    pass


class StateFolderBusy(LocalServerError):
    def __init__(self, folder: str, pid: int | None) -> None:
        self.pid = pid
        holder = f"process {pid}" if pid else "another process"
        super().__init__(
            f"The state folder {folder} is in use: {holder} runs the embedded AWS Batch there. "
            f"Use that server, stop it with `batchml local stop`, or set BATCHML_HOME to another "
            f"folder."
        )


class StateFolderUnsafe(LocalServerError):
    pass


class StateDamaged(LocalServerError):
    pass


class StateFolderGone(LocalServerError):
    """The state folder was moved, deleted or replaced while its server ran."""

    exit_code = 74


class LogDamaged(LocalServerError):
    pass


class DiskFull(LocalServerError):
    pass


class DiskReadOnly(DiskFull):
    """The file system is read-only. The server waits for a change, as with a full disk."""


class JournalBusy(LocalServerError):
    pass


# --- Suggestions ----------------------------------------------------------------------------------


# The likeness of a misspelt name: `epoch` and `epochs` have it, `seed` and `sleep` do not.
SPELT_ALIKE = 0.75


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return `" Did you mean 'x'?"` for the closest known word, or the empty string.

    `likeness` from 0 to 1 is the least that counts, as in difflib.
    """
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=likeness)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
