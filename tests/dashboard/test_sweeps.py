"""Pages of sweeps: what they say, what they let nobody break, and what they read again."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.client import Client
from batchml.context import Context
from batchml.dashboard.app import PageQuery
from batchml.dashboard.layout import static_file, static_name
from batchml.dashboard.sweeps.actions import actions_panel
from batchml.dashboard.sweeps.page import live_document, panels, sweep_page
from batchml.dashboard.sweeps.reading import SweepLine, SweepReader, SweepReading
from batchml.dashboard.sweeps.table import matches, sweeps_page, sweeps_rows
from batchml.errors import NotFound, UsageError
from batchml.model.sweep import EarlyStop, SweepLimits, TrialState
from batchml.sweeps.control.events import SweepEnded
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.stores import SweepStore
from tests.support.fakes import FakeClock
from tests.support.sweep_story import BEGAN, PARETO, SPEC, fill, started, story
from tests.support.sweep_story import context as context

NASTY = "</script><img src=x onerror=alert(1)>"
OTHER = "3bcdefgh2345abcde"
Fill = Callable[..., SweepStore]


class Rig:
    """A reader of sweeps that were written by events."""

    def __init__(self, context: Context) -> None:
        self.context, self.clock = context, FakeClock(BEGAN + 300)
        self.client = Client("local", clock=self.clock)
        self.reader = SweepReader(self.client, self.clock.monotonic, pace=0.5)

    def fill(self, count: int, sweep: StartedSweep | None = None, events: Any = None) -> SweepStore:
        sweep = sweep or started()
        events = story(count, sweep.spec) if events is None else events
        return fill(self.context, replace(sweep, env="local"), events)

    def read(self, key: str = "2bcdefgh2345abcde") -> SweepReading:
        found = self.reader.read(key)
        assert found is not None
        return found


@pytest.fixture
def rig(context: Context) -> Rig:
    return Rig(context)


def query(**params: str) -> PageQuery:
    return PageQuery("/", params=params)


def cells(html: object, column: int) -> list[str]:
    rows = re.findall(r"<tr.*?</tr>", str(html).partition("<tbody>")[2], re.S)
    found = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)[column] for row in rows]
    return [re.sub(r"<[^>]*>", "", cell).strip() for cell in found]


# --- the list -------------------------------------------------------------------------------------


def test_the_list_has_every_sweep_with_its_best_and_its_cost(rig: Rig) -> None:
    rig.fill(100)
    rig.fill(3, replace(started(PARETO, None), key=OTHER, name=NASTY, created_at=BEGAN - 60))
    lines, total = rig.reader.lines(10, 20.0)
    assert ([each.name for each in lines], total) == (["lenet-tune", NASTY], 2)
    made = sweeps_page(lines, total, rig.clock.now(), "local")
    assert cells(made, 1) == ["\u2713 ended", "\u2713 ended"]
    assert cells(made, 2) == ["100 of 100", "3 of 200"]
    assert cells(made, 8)[0].startswith("$") and cells(made, 8)[1] == "-"
    assert "<img" not in str(made) and "&lt;img" in str(made)
    assert 'href="/sweep/2bcdefgh2345abcde"' in str(made)


def test_the_search_looks_at_name_goal_method_and_parameters(rig: Rig) -> None:
    rig.fill(30)
    ((line,), _) = rig.reader.lines(10, 20.0)
    assert all(matches(line, words) for words in ("", "lenet ASHA", "val_acc", "momentum ended"))
    assert not matches(line, "lenet halving")
    assert "0 of 1 sweep" in str(sweeps_rows([line], 1, 0.0, "nothing like it"))


def test_a_list_without_sweeps_says_how_to_start_one(rig: Rig) -> None:
    assert "batchml sweep sweep.toml" in str(sweeps_page(*rig.reader.lines(10, 1.0), 0.0, "local"))


def test_a_sweep_that_cannot_be_read_says_why_and_leaves_the_others(rig: Rig) -> None:
    store = rig.fill(30)
    rig.fill(30, replace(started(), key=OTHER))
    store.put("log/000000001.jsonl", b"nothing <that> can be read\n")
    lines, _ = rig.reader.lines(10, 20.0)
    troubles = {each.key: each.trouble for each in lines}
    assert troubles[OTHER] == "" and troubles[store.key]
    made = str(sweeps_rows([SweepLine("k", "n", trouble="It is <damaged>.")], 1, 0.0))
    assert "It is &lt;damaged&gt;." in made


# --- one sweep ------------------------------------------------------------------------------------


def test_the_page_says_what_is_best_what_was_stopped_and_what_failed(rig: Rig) -> None:
    rig.fill(300)
    made = panels(rig.read(), query())
    best = rig.read().line.best
    assert best and f"trial {best[0]}" in str(made["summary"])
    assert "max val_accuracy" in str(made["summary"]) and "python train.py" in str(made["summary"])
    assert cells(made["rungs"], 0) == ["1", "3", "9"]
    assert cells(made["importances"], 0)[0] == "lr"
    assert "CUDA out of memory" in str(made["failures"])
    whole = str(sweep_page("2bcdefgh2345abcde", rig.read(), query(), "local"))
    assert "<img" not in whole and "&lt;img src=x onerror=alert(1)&gt;" in whole
    assert "style=" not in whole and "<script>" not in whole


def test_a_page_that_is_not_read_yet_has_its_panels_and_no_values() -> None:
    made = str(sweep_page("abc", None, query(), "local"))
    assert made.count("The sweep is being read") == 6 and 'id="plots"' in made


def test_trials_are_listed_best_first_sorted_searched_and_paged(rig: Rig) -> None:
    rig.fill(100)
    reading = rig.read()
    first = panels(reading, query())["trials"]
    values = [float(each) for each in cells(first, 2)[:5]]
    assert values == sorted(values, reverse=True) and len(cells(first, 0)) == 50
    assert "Page 1 of 2" in str(first) and "sort=trial" in str(first)
    rising = [float(each) for each in cells(panels(reading, query(sort="param.lr"))["trials"], 5)]
    falling = panels(reading, query(sort="-param.lr", page="2"))["trials"]
    assert rising == sorted(rising) and cells(falling, 5)[-1] == f"{rising[0]:.4g}"
    assert 'aria-sort="descending"' in str(falling)
    # Where a parameter is not active, the trial comes last in both directions.
    for sort in ("param.momentum", "-param.momentum"):
        assert cells(panels(reading, query(sort=sort, page="2"))["trials"], 7)[-1] == "-"
    failed = panels(reading, query(q="failed"))["trials"]
    assert set(cells(failed, 1)) == {"\u2715 FAILED"} and "of 100 trials" in str(failed)
    assert panels(reading, query(page="99"))["trials"] == panels(reading, query(page="2"))["trials"]


@pytest.mark.parametrize("given", [{"sort": "nothing"}, {"sort": "-"}, {"page": "-1"}])
def test_what_no_trial_has_is_refused(rig: Rig, given: dict[str, str]) -> None:
    rig.fill(3)
    with pytest.raises(UsageError):
        panels(rig.read(), query(**given))


def test_only_what_has_changed_is_sent_and_a_running_sweep_goes_on(rig: Rig) -> None:
    events = [each for each in story(60) if not isinstance(each, SweepEnded)]
    store = rig.fill(60, events=events[:400])
    first = live_document(rig.read(), query())
    assert first["document"]["head"]["trials"] == 60 and not first["over"]
    rig.clock.sleep(1)
    assert live_document(rig.read(), query(known=first["version"])) == {
        "version": first["version"], "over": False,
    }  # fmt: skip
    SweepLedger(store).append(events[400:])
    rig.clock.sleep(1)
    later = live_document(rig.read(), query(known=first["version"]))
    assert later["version"] != first["version"] and set(later["panels"]) == set(first["panels"])
    # Without an event the times are new after a while.
    before = rig.read().document["head"]["written"]
    rig.clock.sleep(10)
    assert rig.read().document["head"]["written"] > before


def test_a_sweep_is_read_once_for_many_tabs(rig: Rig) -> None:
    rig.fill(30)
    first = rig.read()
    assert rig.read() is first and rig.reader.read("lenet-tune") is first
    with pytest.raises(NotFound):
        rig.reader.read("other")


# --- acting ---------------------------------------------------------------------------------------


def labels(reading: SweepReading, **options: Any) -> list[str]:
    made = str(actions_panel(reading, "", read_only=False, **options))
    return re.findall(r'class="open-action"[^>]*>([^<]*)<', made)


def test_the_buttons_fit_the_state(rig: Rig) -> None:
    rig.fill(100)
    assert labels(rig.read()) == ["Top up", "Confirm", "Rerun failed"]
    events = [each for each in story(60) if not isinstance(each, SweepEnded)]
    rig.fill(60, replace(started(), key=OTHER), events[:400])
    assert labels(rig.read(OTHER))[:4] == ["Stop", "Resume", "Top up", "Confirm"]


def test_a_confirmation_names_the_sweep_its_cost_and_the_command(rig: Rig) -> None:
    rig.fill(100)
    made = str(actions_panel(rig.read(), " --env dev", read_only=False))
    assert "Change the limits of the sweep lenet-tune 2bcdefgh?" in made
    assert "batchml sweeps top-up 2bcdefgh --env dev --detach" in made
    assert "Its cost so far: $0.3" in made and "A run takes about $0.0" in made
    assert 'data-act="/act/sweep/2bcdefgh2345abcde/confirm"' in made


def test_halving_takes_no_more_trials(rig: Rig) -> None:
    stop = EarlyStop("halving", "epoch", 27, 1, 3)
    rig.fill(9, started(replace(SPEC, early_stop=stop, limits=SweepLimits(trials=9))))
    made = str(actions_panel(rig.read(), "", read_only=False))
    assert "Trials in all" not in made and "Trials at once" in made


def test_every_state_of_a_trial_has_a_mark_a_word_and_a_colour(rig: Rig) -> None:
    from batchml.dashboard.sweeps.table import MARKS

    assert set(MARKS) == set(TrialState)
    style = static_file(static_name("sweep.css").removeprefix("/static/"))[1].decode()
    assert style.count("--DONE:") == style.count("--LOST:") == 3
    for state in TrialState:
        assert f"--{state.value}: #" in style


def test_the_plots_are_those_of_the_report() -> None:
    kind, script = static_file(static_name("sweep_plots.js").removeprefix("/static/"))
    assert kind.startswith("text/javascript") and b"function parallel()" in script
    assert b'setAttribute("style"' not in script
