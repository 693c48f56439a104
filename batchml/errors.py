"""Every exception that batchml raises on purpose, each with the exit code a shell sees.

BatchmlError                     1
├── UsageError                   2   the command line is wrong
├── ConfigError                 78   a file says something that cannot be
├── NotFound                     1   a job, run, queue or image that does not exist
│   └── NoQueue                 78   the queue that a run is to go to
├── NotRunning                  75   a run that nobody can be in now; 1 when it has ended
├── NoDoor                       1   there is no way into a run that runs
├── ImageError                   1   an image cannot be built or pushed from here
├── TransferFailed               1   files that did not all arrive; the same command goes on
├── AccessError                 77   credentials or permissions
├── ServiceError                 1   the service refused a request
├── ServiceUnreachable          74   no answer from the service, or not the service's answer
│   └── Unsettled               74   nobody knows yet whether a run was submitted
└── LocalServerError             1   the embedded AWS Batch cannot start or go on
    ├── StateFolderBusy          1   another server holds the state folder
    ├── StateFolderUnsafe        1   others can read or write the state folder
    ├── StateDamaged             1   the journal cannot be read
    ├── StateFolderGone         74   it was moved, deleted or replaced while its server ran
    ├── LogDamaged               1   a log is not what its run wrote
    ├── DiskFull                 1   no space for what must be kept
    │   └── DiskReadOnly         1   the file system takes no writes
    └── JournalBusy              1   another program holds the journal

A message says what is wrong, where, and what to do next.
"""

from collections.abc import Iterable

INTERRUPTED = 130  # the client was interrupted; the run goes on


class BatchmlError(Exception):
    """The root of the tree. `exit_code` is what the command exits with."""

    exit_code = 1


class UsageError(BatchmlError):
    exit_code = 2


class ConfigError(BatchmlError):
    """All the mistakes of one input, reported together."""

    exit_code = 78

    def __init__(self, where: str, mistakes: Iterable[str]) -> None:
        self.where = where
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        super().__init__(f"{where}: {count}, nothing was sent.\n{lines}")


class NotFound(BatchmlError):
    """`where` is the line of a file that names it."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], hint: str, *, where: str = ""
    ) -> None:
        self.kind = kind
        self.name = name
        names = sorted(set(known))
        meant = did_you_mean(name, names)
        there = f" Known: {', '.join(names)}." if names else ""
        said = f"{name!r} ({where})" if where else repr(name)
        super().__init__(f"{kind} {said} does not exist.{meant}{there} {hint}".rstrip())


class NoQueue(NotFound):
    """A run is to go to a queue that is not there; `known` are those that are."""

    exit_code = 78

    def __init__(self, name: str, known: Iterable[str], hint: str, *, where: str = "") -> None:
        self.known = tuple(known)
        super().__init__("Job queue", name, self.known, hint, where=where)


class NotRunning(BatchmlError):
    """It waits, is ending, or (`over`) has ended before anybody was in."""

    exit_code = 75

    def __init__(self, message: str, *, over: bool = False) -> None:
        self.over = over
        if over:
            self.exit_code = 1
        super().__init__(message)


class NoDoor(BatchmlError):
    """There is no way into the run; `is_early`: none yet, as it has only started."""

    def __init__(self, message: str, *, is_early: bool = False) -> None:
        self.is_early = is_early
        super().__init__(message)


class ImageError(BatchmlError):
    pass


class TransferFailed(BatchmlError):
    pass


class AccessError(BatchmlError):
    """`code` is AWS's error code, or the name of what the SDK raised."""

    exit_code = 77

    def __init__(self, message: str, *, code: str = "") -> None:
        self.code = code
        super().__init__(message)


class ServiceError(BatchmlError):
    """The service answered no. `code` is AWS's error code, `status` the HTTP status."""

    def __init__(self, operation: str, code: str, message: str, status: int) -> None:
        self.operation = operation
        self.code = code
        self.status = status
        self.message = message
        super().__init__(f"{operation} was refused ({code}): {message}")


class ServiceUnreachable(BatchmlError):
    exit_code = 74


class Unsettled(ServiceUnreachable):
    """The answer to a submission was lost, and so was what should have told what became of it."""

    def __init__(self, name: str, key: str, why: str) -> None:
        self.key = key
        super().__init__(
            f"Nobody knows yet whether {name!r} was submitted: {why}\n"
            f"  batchml reconcile {key}   # says so as soon as the service answers; until then "
            "submitting it again could make a second run"
        )


class LocalServerError(BatchmlError):
    pass


class StateFolderBusy(LocalServerError):
    def __init__(self, folder: str, pid: int | None) -> None:
        self.pid = pid
        holder = f"process {pid}" if pid else "another process"
        super().__init__(
            f"The state folder {folder} is in use: {holder} runs the embedded AWS Batch there. "
            f"Use it as it is, stop it with `batchml local stop`, or set BATCHML_HOME to another "
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
    """The file system takes no writes now: it is waited for, as space on a full disk is."""


class JournalBusy(LocalServerError):
    pass


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known word, or the empty string."""
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
