"""From an order to JupyterLab in the browser here, and back again: what `notebook` does."""

import signal
import sys
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.cli.output import print_json, print_line, say
from batchml.errors import BatchmlError

if TYPE_CHECKING:
    from batchml.client.doors import Seat
    from batchml.client.notebook import Door
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.model.run import Run


class Wish(Struct, frozen=True, kw_only=True):
    """What is wanted of the command, beside the run."""

    port: int | None = None
    open_: bool = False
    end: bool = False
    detach: bool = False
    dry_run: bool = False
    json_: bool = False


def begin(place: "Place", order: "Order", idle_s: float | None, wish: Wish) -> int:
    """Begin a notebook, and lead there; the exit code."""
    from batchml.cli.allocating import given_up, told_to_end
    from batchml.cli.interrupt import submitting
    from batchml.client import holding, submission
    from batchml.client.notebook import KIND, check_way, earlier
    from batchml.client.tunnel import listen

    if not wish.dry_run:
        for words in earlier(place):
            say(words)
    prepared = holding.ready(place, order, kind=KIND, idle_s=idle_s, tell=say)
    for notice in prepared.notices:
        say(notice)
    if wish.dry_run:
        print_json(submission.shown(prepared))
        return 0
    check_way(place, prepared.requests.register)
    if wish.port is not None:
        listen(wish.port, wish.port).close()  # one that is taken is told before anything is paid
    sent: list[str] = []
    try:
        with told_to_end():
            with submitting(sent):
                job_id = submission.send(place, prepared, say)
                sent.append(job_id)
                say(submission.announcement(prepared, job_id))
            known = submission.as_json(place, prepared, job_id)
            if not wish.detach:
                run = _wait(place, job_id, "Ctrl-C cancels")
    except KeyboardInterrupt as stop:
        return given_up(place, sent, stop)
    except holding.Unheld:
        raise
    except BatchmlError:
        for job_id in sent:
            say("The notebook was begun, and is not lost:")
            _say_ways(place, job_id)
        raise
    if wish.detach:
        return _detached(place, known, wish)
    return _lead(place, run, known, wish)


def come_back(place: "Place", run: "Run", wish: Wish) -> int:
    """Lead to a notebook that runs, or with `end` end it; the exit code."""
    from batchml.client.notebook import ended

    known = {"jobId": run.job_id, "jobName": run.job_name, "jobQueue": run.queue, "env": place.env}
    if wish.end:
        return _end(place, run, known, wish)
    if run.status.is_terminal:
        raise ended(place, run)
    if wish.detach:
        return _detached(place, known, wish)
    if run.status.value != "RUNNING":
        try:
            run = _wait(place, run.job_id)
        except KeyboardInterrupt:
            say("\nThe notebook waits on.")
            _say_ways(place, run.job_id)
            raise
    return _lead(place, run, known, wish)


def _detached(place: "Place", known: dict[str, str], wish: Wish) -> int:
    _say_ways(place, known["jobId"])
    if wish.json_:
        print_json(known)
    return 0


def _wait(place: "Place", job_id: str, hint: str = "Ctrl-C leaves") -> "Run":
    from batchml.cli.waitline import Waited, shown
    from batchml.client import holding
    from batchml.client.notebook import ended

    waited = Waited(place.clock, list(place.describe([job_id]).values()), hint)
    try:
        with shown(waited, place.clock, True):
            # Above the line that is kept at the bottom of a terminal.
            tell = print_line if sys.stdout.isatty() else say
            return holding.wait_until_running(place, job_id, tell, see=waited.see)
    except holding.Unheld as error:  # so soon that nobody saw it run, or it never did
        raise ended(place, place.describe([job_id])[job_id], str(error)) from error


# --- the tunnel -----------------------------------------------------------------------------------


def _lead(place: "Place", run: "Run", known: dict[str, str], wish: Wish) -> int:
    """Keep the way to JupyterLab open until the run ends, or Ctrl-C."""
    from batchml.client.doors import find_seat, open_tunnel
    from batchml.client.holding import Unheld
    from batchml.client.notebook import check_ended, find_door, keep_open
    from batchml.errors import NotRunning

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        seat = find_seat(place, run.job_id)
        door = find_door(place, seat)
        tunnel = open_tunnel(place, seat, door.port, wish.port)
        _show(place, seat, door, tunnel.url, known, wish)
        say(keep_open(place, seat, door, tunnel, say))
    except KeyboardInterrupt:
        return _left(place, run, wish)
    except NotRunning as error:
        check_ended(place, run.job_id, error)
        raise
    except Unheld:
        raise
    except BatchmlError:
        _not_left_unsaid(place, run.job_id, wish)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return _code(place, run.job_id)


def _not_left_unsaid(place: "Place", job_id: str, wish: Wish) -> None:
    """There is no way to it, and it runs and costs all the same."""
    if wish.end:
        _give_back(place, job_id)
    else:
        say("The notebook runs.")
        _say_ways(place, job_id)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _show(
    place: "Place", seat: "Seat", door: "Door", address: str, known: dict[str, str], wish: Wish
) -> None:
    """The URL: with its token on a terminal, and nowhere else."""
    from batchml.client.notebook import PROGRAM
    from batchml.runtime.sessions.notebook import PORT

    url = f"{address}/lab"
    if wish.json_:
        print_json({**known, "status": "RUNNING", "url": url, "folder": door.root})
        sys.stdout.flush()
    elif sys.stdout.isatty():
        print_line(f"\n  {url}?token={door.token}\n")
    else:
        print_line(url)
    if wish.json_ or not sys.stdout.isatty():
        words = " ".join((*PROGRAM, "where"))
        say(f"Its token is shown on a terminal alone. A program gets it by: "
            f"batchml shell {seat.run.job_id}{place.option} -- {words}")  # fmt: skip
    if wish.open_:
        from batchml.cli.opening import open_browser

        open_browser(place, f"{url}?token={door.token}", "JupyterLab")
    local = address.rpartition(":")[2]
    if wish.port is None and local != str(PORT):
        say(f"Port {PORT} is taken: it is {local} instead.")
    say(f"JupyterLab shows {door.root}.")
    if wish.end:
        say("Ctrl-C ends the notebook.")
    else:
        say("Ctrl-C leaves it running.")
        _say_ways(place, seat.run.job_id)


def _say_ways(place: "Place", job_id: str) -> None:
    say(f"  back to it:  batchml notebook {job_id}{place.option}")
    say(f"  end it:      batchml notebook {job_id}{place.option} --end")


# --- how it ends ----------------------------------------------------------------------------------


def _left(place: "Place", run: "Run", wish: Wish) -> int:
    """Ctrl-C, which is how one leaves: the notebook goes on, unless it was to end with this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one leaves at once
    if wish.end:
        say("")
        return _give_back(place, run.job_id)
    say("\nThe notebook runs on, and ends itself when it is left idle.")
    _say_ways(place, run.job_id)
    return 0


def _end(place: "Place", run: "Run", known: dict[str, str], wish: Wish) -> int:
    if run.status.is_terminal:
        from batchml.client.doors import ending

        say(f"It has ended already: {ending(run)}.")
    code = 0 if run.status.is_terminal else _give_back(place, run.job_id)
    if wish.json_:
        from batchml.cli.render import run_json

        print_json({**known, **run_json(place.describe([run.job_id])[run.job_id])})
    return code


def _give_back(place: "Place", job_id: str) -> int:
    from batchml.cli.render import printable
    from batchml.client import holding
    from batchml.model.outcome import describe_outcome
    from batchml.model.run import classify

    ended = holding.end(place, job_id, say)
    words = holding.last_words(place, job_id)
    if ended is None:
        say(f"The notebook is being stopped. {words}")
        return 0
    how = "is ended" if ended.status.value == "SUCCEEDED" else printable(describe_outcome(ended))
    say(f"The notebook {how}. {words}")
    return 0 if ended.is_terminated or ended.is_cancelled else classify(ended).exit_code


def _code(place: "Place", job_id: str) -> int:
    """The run's own, once it has ended beneath the tunnel; with what it cost."""
    from batchml.cli.render import printable
    from batchml.client.holding import last_words
    from batchml.client.notebook import said_last
    from batchml.client.waiting import wait_and_keep
    from batchml.model.run import classify

    (run,) = wait_and_keep(place, [job_id])
    said = said_last(place, run)
    if said:
        say(f"It said: {printable(said)}")
    say(f"{last_words(place, job_id)} All of it: batchml logs {job_id}{place.option}".strip())
    return classify(run).exit_code
