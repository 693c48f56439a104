"""From an order to a shell in what it holds, and to its end: what `alloc` does."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.cli.output import print_json, print_line, say
from batchml.errors import BatchmlError, NotRunning, UsageError

if TYPE_CHECKING:
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.client.submission import Prepared
    from batchml.model.run import Run

KIND = "alloc"
_CANCELLED = "Cancelled by the user while it waited"
_GONE = (signal.SIGTERM, signal.SIGHUP)  # of a client that is told to end


class Wish(Struct, frozen=True, kw_only=True):
    """What is wanted of the allocation; without a `command`, a shell. `idle_s` in seconds."""

    command: tuple[str, ...] = ()
    idle_s: int | None = None
    shell: bool = True
    dry_run: bool = False
    json_: bool = False


class Gone(KeyboardInterrupt):
    """SIGTERM, or the terminal was closed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def refuse(wish: Wish, *, has_shell_flag: bool = True) -> None:
    """Raises UsageError for what cannot be wanted together."""
    if wish.idle_s == 0:
        raise UsageError('--idle 0s: it would end at once. Give "10m", or "never".')
    if wish.command and not wish.shell:
        flag = "--json" if has_shell_flag else "--no-shell"
        raise UsageError(
            f"{flag} only holds, and the command after -- would not be run. Leave one out: hold "
            "it, and then run commands there with batchml shell RUN -- COMMAND."
        )


def allocate(place: "Place", order: "Order", wish: Wish) -> int:
    """Hold what the order asks for, be there, and give it back; the shell's exit code."""
    from batchml.client import holding, submission

    prepared = holding.ready(place, order, kind=KIND, idle_s=wish.idle_s, tell=say)
    for notice in prepared.notices:
        say(notice)
    if wish.dry_run:
        print_json(submission.shown(prepared))
        return 0
    if wish.shell:
        holding.check_here(place)
    with told_to_end():
        sent: list[str] = []
        try:
            run = _granted(place, prepared, sent)
        except KeyboardInterrupt as stop:
            return given_up(place, sent, stop)
        except BatchmlError as error:
            if sent and not isinstance(error, holding.Unheld):
                say(_still_held(place, sent[0], wish))
            raise
        try:
            say(_granted_words(run, wish))
            if wish.shell and not wish.command:
                say(_copy_words(place, has_code=order.changes.get("code") is not False))
            if wish.shell:
                return _use(place, run, wish)
            _say_how(place, run, submission.as_json(place, prepared, run.job_id), wish)
            return 0
        except KeyboardInterrupt as stop:
            _give_back(place, run.job_id, wish)
            return _code_of(stop)


def _granted(place: "Place", prepared: "Prepared", sent: list[str]) -> "Run":
    from batchml.cli.interrupt import submitting
    from batchml.cli.waitline import Waited, shown
    from batchml.client import holding, submission

    with submitting(sent):
        job_id = submission.send(place, prepared, say)
        sent.append(job_id)
        say(submission.announcement(prepared, job_id))
    waited = Waited(place.clock, list(place.describe([job_id]).values()), "Ctrl-C cancels")
    with shown(waited, place.clock, True):
        # Above the line that is kept at the bottom of a terminal.
        tell = print_line if sys.stdout.isatty() else say
        return holding.wait_until_running(place, job_id, tell, see=waited.see)


def _granted_words(run: "Run", wish: Wish) -> str:
    from batchml.cli.render import job_title

    gpus = f", {run.gpus} GPU{'s' if run.gpus > 1 else ''}" if run.gpus else ""
    how = " `exit` gives it back." if wish.shell and not wish.command else ""
    size = f"{run.vcpus} vCPU{'' if run.vcpus == 1 else 's'}{gpus}, {run.memory_mib} MiB"
    each = f"{run.nodes} nodes, each of " if run.nodes else ""
    return f"{job_title(run)} is granted {each}{size}.{how}"


def _copy_words(place: "Place", *, has_code: bool) -> str:
    """What becomes of what one does in there. Only the workspace outlives it as it is."""
    here = place.settings
    has_workspace = here.is_local or here.environment.storage.workspace != "none"
    kept = "$BATCHML_WORKSPACE" if has_workspace else "$BATCHML_OUTPUT_DIR"
    if not has_code:
        return f"What you write into its working folder is gone at the end; keep it in {kept}."
    return (
        f"This is a copy of the folder: what you change here is gone at the end; keep it in {kept}."
    )


def _use(place: "Place", run: "Run", wish: Wish) -> int:
    """Be in there; whatever comes of it, what was held is given back."""
    from batchml.client.doors import find_seat, run_inside
    from batchml.client.holding import wait_for_tools

    try:
        seat = find_seat(place, run.job_id)
        if run.nodes:
            wait_for_tools(place, seat)
        code = run_inside(place, seat, wish.command)
    except NotRunning as error:  # what ended the run ended the shell
        say(str(error))
        code = error.exit_code
    except Exception:  # whatever it is, nothing stays held for it
        _give_back(place, run.job_id, wish)
        raise
    return _code_after(_give_back(place, run.job_id, wish), code)


def _code_after(ended: "Run | None", code: int) -> int:
    """The shell's, unless the run did not end as done: what ended it ended the shell."""
    from batchml.model.run import classify

    return code if ended is None else classify(ended).exit_code or code


def _give_back(place: "Place", job_id: str, wish: Wish) -> "Run | None":
    """End it, and say what came of it; None where that is not known."""
    from batchml.cli.render import printable
    from batchml.client import holding
    from batchml.model.outcome import describe_outcome

    try:
        ended = holding.end(place, job_id, say)
    except BatchmlError as error:
        say(f"It could not be given back: {error}\n{_still_held(place, job_id, wish)}")
        return None
    words = holding.last_words(place, job_id)
    if ended is None:
        say(f"Job {job_id} is being stopped. {words}")
    elif ended.status.value == "SUCCEEDED":
        say(f"Given back. {words}")
    else:
        say(f"The run ended: {printable(describe_outcome(ended))}. {words}")
        say(f"  batchml logs {job_id}{place.option}")
    return ended


def _still_held(place: "Place", job_id: str, wish: Wish) -> str:
    return f"{_until(wish)} To end it: batchml cancel {job_id}{place.option}"


def _until(wish: Wish) -> str:
    from batchml.runtime.sessions.alloc import spelled

    if wish.idle_s is None:
        return "It is held until you end it."
    return f"It ends itself once nobody has been in for {spelled(wish.idle_s)}."


def given_up(place: "Place", sent: list[str], stop: KeyboardInterrupt) -> int:
    """Interrupted while it waited: nothing is left behind. A second Ctrl-C leaves at once."""
    from batchml.client import holding

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for job_id in sent:
        holding.cancel(place, job_id, _CANCELLED)
        say(f"\nCancelled job {job_id}: nothing is held.")
    return _code_of(stop)


def _code_of(stop: KeyboardInterrupt) -> int:
    return 128 + (stop.number if isinstance(stop, Gone) else int(signal.SIGINT))


def _say_how(place: "Place", run: "Run", known: dict[str, str], wish: Wish) -> None:
    if wish.json_:
        print_json({**known, "status": run.status.value})
    rest = place.option
    say(f"  shell:  batchml shell {run.job_id}{rest}")
    say(f"  end:    batchml cancel {run.job_id}{rest}")
    say(_until(wish))


@contextmanager
def told_to_end() -> Iterator[None]:
    """SIGTERM and a terminal that is closed are taken for Ctrl-C: what is held is given back."""

    def interrupt(number: int, _frame: object) -> None:
        for each in _GONE:
            signal.signal(each, signal.SIG_IGN)
        raise Gone(number)

    before = [signal.signal(number, interrupt) for number in _GONE]
    try:
        yield
    finally:
        for number, was in zip(_GONE, before, strict=True):
            signal.signal(number, was)
