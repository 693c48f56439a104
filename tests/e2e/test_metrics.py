"""Metrics that a program reports, all the way: its file, the log, a client, curves and files."""

import pytest

from tests.support.cli import Cli, write_job

PROGRAM = """
from batchml.runtime import report
for step in range(1, 5):
    report(step=step, total=4, loss=1 / step)
    print(f"accuracy={step / 4}")
report(step=4, rate=float("inf"))
print('::batchml metrics [{"step": 9, "loss": 0}]')
"""


@pytest.mark.journey
def test_what_a_program_reports_is_seen_and_drawn(cli: Cli) -> None:
    write_job(
        cli.folder,
        "measured",
        'image = "python"\ncommand = ["python", "train.py"]\n'
        "[metrics]\naccuracy = 'accuracy=([0-9.]+)'\nloss.best = \"max\"\n",
        train__py=PROGRAM,
    )
    shown = cli("submit", "--wait", "--json", "measured")
    assert shown.code == 0, shown.err
    assert shown.json["metrics"]["loss"] == 0.25  # not what the program forged
    assert shown.json["metrics"]["accuracy"] == 1.0
    assert shown.json["metricsFirst"] == {"accuracy": 0.25, "loss": 1.0}
    assert shown.json["metricsBest"] == {"loss": 1.0}
    assert '::batchml metrics [{"step": 1' not in shown.err
    assert "Log complete: 5 lines." in shown.err
    listed = [cli("ls", "--json", "--metric", f"best(loss){sign}1").json for sign in "=<"]
    assert [len(runs) for runs in listed] == [1, 0]
    page, folder = cli.folder / "curves.html", cli.folder / "events"
    drawn = cli("show", "@last", "--plot", str(page), "--tensorboard", str(folder))
    assert drawn.code == 0, drawn.err
    assert "█▃▁▁" in drawn.out
    assert "best 1, " in drawn.out
    assert page.read_text("utf-8").count("<figure>") == 3
    (events,) = folder.rglob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


def test_where_metrics_are_asked_for_a_run_without_any_says_so(cli: Cli) -> None:
    said = "No metrics: the program called no report(), and no pattern of [metrics]"
    print_loss = ("--wait", "--", "echo", "loss=0.5")
    write_job(cli.folder, "plain", 'image = "docker.io/library/alpine:3"\ncommand = ["true"]\n')
    assert cli("submit", "plain", *print_loss).code == 0
    assert said in cli("ls", "--columns", "name,loss").err
    assert said in cli("show", "@last", "--tensorboard", str(cli.folder / "events")).err
    assert said in cli("show", "@last", "--plot", str(cli.folder / "curves.html")).err
    assert said in cli("compare", "@last").err
    matched = '[metrics]\nloss = "loss=([0-9.]+)"\n'
    write_job(
        cli.folder, "read", f'image = "docker.io/library/alpine:3"\ncommand = ["true"]\n{matched}'
    )
    assert cli("submit", "read", *print_loss).code == 0
    assert said not in cli("ls", "--columns", "name,loss").err
    assert said in cli("ls", "--columns", "name,loss", "--job", "plain").err
    assert said not in cli("compare", "@last").err


SEEDED = """
image = "python"
command = ["sh", "-c", "echo step 1 loss=9; echo step 2 loss=$0", "{seed}"]

[params]
seed = 0

[metrics]
loss = { pattern = 'loss=(\\d+)', best = "max" }
step = 'step (\\d+)'
"""


def test_the_children_of_an_array_have_seeds_of_their_own_and_one_chart(cli: Cli) -> None:
    write_job(cli.folder, "t", SEEDED)
    ended = cli("submit", "--json", "--wait", "t", "--array", "3", "-p", "seed=1{index}")
    array = ended.json["jobId"]
    page = cli.folder / "curves.html"
    assert ended.code == 0, ended.err
    text = cli("show", array, "--plot", str(page)).out
    assert "metrics    loss  11 \u00b1 1, 10 to 12, of 3 children, best 12 of child 2\n" in text
    assert "           loss:1  11" in text
    assert (page.read_text().count("<figure>"), page.read_text().count("<polyline")) == (1, 3)
    assert cli("show", f"{array}:2", "--json").json["params"] == {"seed": 12}
    assert "params.seed  10, 11, 12\n" in cli("compare", array, "--full").out
    cli("rerun", f"{array}:1", "--wait")
    again = cli("show", "@last", "--json").json
    assert (again["params"], again["metrics"]) == ({"seed": 11}, {"loss": 11})
