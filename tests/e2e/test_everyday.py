"""Looking at runs, getting what they left, and running them again: against a real server."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from batchml.cli.app import run
from batchml.local.home import Home
from tests.support.cli import Cli, Shown, write_job
from tests.support.local_server import wait_for

JOB = """
image = "python"
command = ["sh", "train.sh", "{lr}"]
[params]
lr = 0.1
[metrics]
loss = "loss=([0-9.]+)"
"""
TRAIN = 'for i in 1 2 4; do echo "loss=$(python -c "print($1/$i)")"; done; echo "X=$X"'
SOME_FAIL = """
echo "child $AWS_BATCH_JOB_ARRAY_INDEX of $BATCHML_ARRAY_SIZE loss=0.$AWS_BATCH_JOB_ARRAY_INDEX"
echo "$AWS_BATCH_JOB_ARRAY_INDEX" > "$BATCHML_OUTPUT_DIR/number"
case $AWS_BATCH_JOB_ARRAY_INDEX in 1|3|4) [ -e "$BATCHML_DATA_DIR/fixed" ] || exit 4;; esac
"""


class Inside(Cli):
    """The same commands in this process, which spares each the start of a Python."""

    def __init__(self, folder: Path, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, home)
        self._capsys = capsys

    def __call__(self, *arguments: str, timeout: float = 120, **environ: str) -> Shown:
        self._capsys.readouterr()
        code = run(arguments)
        return Shown(code, *self._capsys.readouterr())


@pytest.fixture
def cli(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    made = Inside(tmp_path / "work", home, capsys)
    made.folder.mkdir()
    monkeypatch.chdir(made.folder)
    for name in [name for name in os.environ if name.startswith(("AWS_", "BATCHML_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHML_HOME", str(home.root))
    return made


def submitted(cli: Cli, *words: str, wait: bool = True) -> str:
    """The job id of a run that has ended, or has been submitted."""
    options = ("--wait",) if wait else ()
    return str(cli("submit", *options, "--json", *words).json["jobId"])


def ids(cli: Cli, *words: str) -> list[str]:
    return [run["jobId"] for run in cli("ls", "--json", *words).json]


@pytest.mark.journey
def test_runs_are_found_by_what_was_asked_for_and_what_came_of_it(cli: Cli) -> None:
    write_job(cli.folder, "t", JOB, train__sh=TRAIN)
    one = submitted(cli, "t", "--tag", "team=vision")
    two = submitted(cli, "t", "-p", "lr=0.8", wait=False)
    assert cli("wait", two).code == 0  # nobody has read its log
    assert ids(cli) == [two, one]
    assert ids(cli, "--tag", "team=vision") == [one]
    assert ids(cli, "--param", "lr=8e-1") == [two]
    assert ids(cli, "--metric", "loss>0.1") == [two]
    assert ids(cli, "--status", "FAILED") == []
    table = cli("ls", "--metric", "loss<1", "--param", "lr=0.1").out.splitlines()
    assert table[0].split()[-2:] == ["loss", "lr"]
    assert table[1].split()[-2:] == ["0.025", "0.1"]
    assert ids(cli, "--sort", "loss") == [one, two]
    assert ids(cli, "--sort=-max(loss)", "--limit", "1") == [two]
    table = cli("ls", "--columns", "lr,min(loss)", "--sort", "lr").out.split()
    assert table == ["lr", "min(loss)", "0.1", "0.025", "0.8", "0.2"]
    shown = cli("show", two, "--json").json
    assert (shown["metrics"], shown["params"], shown["class"]) == (
        {"loss": 0.2}, {"lr": 0.8}, "succeeded",
    )  # fmt: skip
    text = cli("show", two, "--plot", "curves.html").out
    assert "0.2 to 0.8, 3 values" in text
    ways = ("get", "logs", "rerun")  # what to do next, as it is typed
    assert [f"batchml {way} {two[:8]}\n" in text for way in ways] == [True] * 3
    nowhere = cli("ls", "--queue", "nowhere")
    assert (nowhere.code, "Known: default." in nowhere.err) == (1, True)
    assert cli("top", "--queue", "nowhere").err == nowhere.err
    assert ids(cli, "--since", "36500d") == [two, one]
    assert "loss" in (cli.folder / "curves.html").read_text()
    found = {each["what"]: each for each in cli("diff", one, two, "--json").json["differences"]}
    assert (found["params.lr"]["left"], found["params.lr"]["right"]) == (0.1, 0.8)
    assert "code" not in found
    assert "+0.7" in cli("diff", one, two).out
    assert cli("ls", "--metric", "loss").code == 2
    shown = cli("compare", one, two, "--plot", "compared.html")
    rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines()}
    assert (rows["params.lr"], rows["loss"]) == (["0.1", "0.8"], ["0.025", "0.2"])
    assert (cli.folder / "compared.html").read_text().count("<polyline") == 2


def test_what_the_service_has_forgotten_is_still_known_here(cli: Cli) -> None:
    write_job(cli.folder, "t", JOB, train__sh="echo loss=0.5; exit 3")
    job_id = submitted(cli, "t")
    open_ = submitted(cli, "--", "true", wait=False)
    assert cli("local", "stop").code == 0
    shutil.rmtree(cli.home.local)
    forgotten, ended = cli("ls", "--json").json
    assert (forgotten["jobId"], forgotten["status"]) == (open_, None)
    assert ended.keys() - forgotten.keys() == {"class"}
    assert (ended["jobId"], ended["class"], ended["exitCode"]) == (job_id, "app-error", 3)
    assert ended["metrics"] == {"loss": 0.5}
    assert "not known to the server" in cli("ls").out
    assert "the program ended with code 3" in cli("show", "t").out
    assert "not known to the server" in cli("show", open_).out
    assert cli("wait", "t").code == 3
    assert cli("wait", open_).code == 74
    for command in ("wait", "cancel", "logs", "explain", "shell"):
        shown = cli(command, open_)
        assert "not known to the server" in shown.out + shown.err, command
    assert [each["status"] for each in cli("cancel", open_, "t", "--json").json] == [None, "FAILED"]
    unsure = cli("rerun", open_, "--failed")
    assert (unsure.code, "the history does not say whether it failed" in unsure.err) == (2, True)
    assert cli("local", "reset", "--yes").code == 0
    assert cli("ls", "--json").json == []


@pytest.mark.journey
def test_a_run_again_has_the_code_and_the_variables_it_had(cli: Cli) -> None:
    job = write_job(cli.folder, "t", JOB, train__sh=TRAIN)
    submitted(cli, "t", "--set-env", "X=hush", "--tag", "team=vision")
    (job / "train.sh").write_text("echo changed")
    again = cli("rerun", "@last", "-p", "lr=0.4", "--wait", "--json")
    assert again.code == 0
    assert f"; {job} has changed since: --code sends it." in again.err
    assert "] X=hush" in again.err and "] changed" not in again.err
    shown = cli("show", "@last", "--json").json
    assert (shown["params"], shown["metrics"]) == ({"lr": 0.4}, {"loss": 0.1})
    assert shown["tags"]["team"] == "vision"
    assert shown["job"] == str(job)
    history = (cli.home.root / "history.jsonl").read_text()
    assert "hush" not in history
    assert cli("rerun", "@last", "-p", "rate=1").code == 78
    assert "nothing was submitted" in cli("rerun", "@last", "--failed").err
    changed = ("--memory", "600 MiB", "--timeout", "2h", "--name", "more", "--tag", "team=audio")
    request = cli("rerun", "@last~1", "--dry-run", *changed, "--attempts", "2").json["SubmitJob"]
    overrides = request["containerOverrides"]
    assert overrides["command"] == ["sh", "train.sh", "0.1"]
    assert {"type": "MEMORY", "value": "600"} in overrides["resourceRequirements"]
    assert (request["timeout"]["attemptDurationSeconds"], request["tags"]["team"]) == (
        7200,
        "audio",
    )
    assert request["jobName"].startswith("more-")
    assert request["retryStrategy"]["attempts"] == 2
    assert cli("rerun", "@last", "--memory", "some", "--dry-run").code == 78
    corrected = cli("rerun", "@last", "--code", "--wait", "--json")
    assert (corrected.code, "] changed" in corrected.err) == (0, True)
    code = cli("show", "@last", "--json").json["code"]
    assert (code["files"], code["folder"], code["uncommitted"]) == (2, str(job), None)
    assert f"code       {code['sha256'][:8]}, 2 files\n" in cli("show", "@last").out
    assert "-for i in 1 2 4;" in (text := cli("diff", "@last~1", "@last").out)
    assert "+echo changed" in text
    files = cli("diff", "@last~1", "@last", "--json").json["files"]
    assert [(each["name"], each["change"]) for each in files] == [("train.sh", "changed")]
    assert "The code is the same" in cli("rerun", "@last", "--code", "--dry-run").err
    assert cli("rerun", "@last", "--include-secrets").code == 2
    job.rename(cli.folder / "moved")
    gone = cli("rerun", "@last", "--code")
    assert (gone.code, f"--code: {job}, the folder of the run's code, does not" in gone.err) == (
        2, True,
    )  # fmt: skip
    (cli.home.code / f"{code['sha256']}.tar.gz").unlink()
    assert "cannot be compared" in cli("diff", "@last~1", "@last").err


@pytest.mark.journey
def test_only_the_children_that_failed_run_again_under_their_own_numbers(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = cli.folder / "data"
    data.mkdir()
    monkeypatch.setenv("BATCHML_DATA_DIR", str(data))
    write_job(cli.folder, "t", JOB, train__sh=SOME_FAIL)
    first = submitted(cli, "t", "--array", "5")
    assert cli("show", first, "--json").json["children"] == {"SUCCEEDED": 2, "FAILED": 3}
    text = cli("show", first).out
    assert "failed     1 3-4\n" in text
    assert f"batchml rerun {first[:8]} --failed\n" in text
    assert cli("show", first, "--json").json["failedChildren"] == [1, 3, 4]
    done = cli("get", first, "results", "--json").json
    assert (done["copied"], done["leftOut"]) == (5, [])
    assert (cli.folder / "results" / "3" / "number").read_text() == "3\n"
    assert cli("get", first, "results", "--json").json["unchanged"] == 5
    again = cli("rerun", first, "--failed", "--json")
    assert "Children 1 3-4 of 5" in again.err
    assert cli("wait", again.json["jobId"]).code != 0
    (data / "fixed").touch()
    third = cli("rerun", again.json["jobId"], "--failed", "--wait", "--json")
    assert (third.code, third.json["class"]) == (0, "succeeded")
    lines = cli("logs", third.json["jobId"], "--json").json
    assert sorted((line["child"], line["message"]) for line in lines) == [
        (f"{n}", f"child {n} of 5 loss=0.{n}") for n in (1, 3, 4)
    ]
    assert third.json["metrics"] == {f"loss:{n}": n / 10 for n in (1, 3, 4)}
    assert "4 | " in third.err and "0 | " not in third.err and "2 | " not in third.err
    assert "child 4 of 5" in cli("logs", "@last:4").out
    assert "It runs these children of the first array again: 1 3-4." in cli("logs", "@last:0").err
    assert "reruns     children 1 3-4 of a larger array" in cli("show", "@last").out
    assert "0.266667\n" in cli("ls", "--columns", "id,loss").out, "the mean of its children"
    own = third.json["jobId"]
    for command in ("show", "explain", "cost", "wait"):
        assert f"{own}:4" in cli(command, "@last:4").out, command
    compared = cli("compare", "@last:3", "@last:4").out
    assert f"{own[:8]}:3" in compared and f"{own[:8]}:4" in compared
    assert f"{own[:8]}:1" in cli("diff", "@last:1", "@last:4", "--full").out
    rows = [line.split()[0] for line in cli("cost", "@last").out.splitlines()]
    assert {"1/1", "3/1", "4/1"} <= {*rows} and not {"0/1", "2/1"} & {*rows}
    why = cli("explain", again.json["jobId"])
    assert "child 1\n" in why.out and f"{again.json['jobId']}:1" in why.out
    assert "failed     1 3-4\n" in cli("show", again.json["jobId"]).out
    assert cli("get", "@last", "results", "--json").json["copied"] == 3
    for n in (0, 1, 2, 3, 4):  # each child's own were not overwritten by another's
        assert (cli.folder / "results" / f"{n}" / "number").read_text() == f"{n}\n"
    differ = [each["what"] for each in cli("diff", first, "@last", "--json").json["differences"]]
    assert "command" not in differ and "metrics.loss:1" not in differ
    one = cli("rerun", f"{first}:3", "--wait", "--json", "--name", "third", "--max-cost", "5")
    assert one.code == 0
    assert "child 3 of 5" in one.err
    assert cli("get", "third:3", "alone", "--json").json["copied"] == 1
    assert (cli.folder / "alone" / "3" / "number").exists()


def test_cancelling_several_stops_all_and_says_so_once(cli: Cli) -> None:
    sleeping = ("--", "sleep", "600")
    array = submitted(cli, "--array", "3", *sleeping, wait=False)
    single = submitted(cli, *sleeping, wait=False)
    child = f"{array}:1"
    wait_for(lambda: "RUNNING" in cli("show", array).out, "a child runs")
    assert f"batchml logs -f {array[:8]}\n" in cli("show", array).out
    assert "RUNNING, 0/3 done" in cli("ls").out
    assert cli("cancel", child).code == 0
    wait_for(lambda: cli("show", child, "--json").json["status"] == "FAILED", "the child ended")
    assert cli("show", array, "--json").json["status"] != "FAILED"
    gave_up = cli("wait", single, "--timeout", "1s")
    assert (gave_up.code, "The runs go on" in gave_up.err) == (1, True)
    shown = cli("cancel", array, single, f"{array}:0", "--json")
    assert shown.code == 0
    assert [each["left"] for each in shown.json] == [None] * 3
    assert cli("wait", array, single).code == 143
    assert cli("cancel", array, single).out.count("had ended already") == 2


def test_top_shows_once_what_runs_where_nobody_can_watch(cli: Cli) -> None:
    job_id = submitted(cli, "--name", "busy", "--", "sleep", "600", wait=False)
    wait_for(lambda: cli("show", job_id, "--json").json["status"] == "RUNNING", "it runs")
    shown = cli("top", "--json").json
    assert shown["queues"][0]["counts"]["RUNNING"] == 1
    assert shown["queues"][0]["held"]["vcpus"] == 1
    assert [run["jobId"] for run in shown["runs"]] == [job_id]
    assert "busy" in cli("top").out
    cli("cancel", job_id)


def test_outputs_lie_where_the_user_is_and_links_stay_behind(cli: Cli) -> None:
    out = "$BATCHML_OUTPUT_DIR"
    script = f"mkdir {out}/a; echo 1 > {out}/a/model; ln -s /etc {out}/etc"
    job_id = submitted(cli, "--name", "made", "--", "sh", "-c", script)
    shown = cli("get", "@last")
    assert shown.code == 0
    folder = cli.folder / f"made-{job_id[:8]}"
    assert sorted(path.name for path in folder.iterdir()) == [".batchmlignore", "a"]
    assert "Left out: etc" in shown.err
    assert json.loads(cli("get", "@last", "--json").out)["unchanged"] == 1
    (cli.folder / "old").mkdir()
    assert cli("get", "@last", "old").code == 0
    sent = cli("submit", "--wait", "--", "sh", "-c", "ls -A; echo x > model.bin")
    assert f"made-{job_id[:8]}" not in sent.out  # what was got is no code of the next run
    assert "] old" not in sent.out
    assert "model.bin (2 B) of the working folder is kept: batchml get" in sent.out
    assert cli("get", "@last", "left").code == 0
    assert (cli.folder / "left" / "work" / "model.bin").read_text() == "x\n"
    cli("submit", "--wait", "--", "true")
    assert "\noutputs " not in cli("show", "@last").out
    nothing = cli("get", "@last")
    assert (nothing.code, "The run has no outputs" in nothing.err) == (0, True)
    assert sorted(path.name for path in cli.folder.iterdir()) == sorted(
        ["left", "old", folder.name]
    )


# It reads the model at --model, and writes one to --out.
PROGRAM = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--out", default="results")
options = parser.parse_args()
print("begins with", pathlib.Path(options.model).read_text() if options.model else "nothing")
pathlib.Path(options.out).mkdir(exist_ok=True)
pathlib.Path(options.out, "model.txt").write_text("the model of " + pathlib.Path(__file__).stem)
"""


def test_the_model_of_another_run_is_used_in_the_three_ways_of_the_page(cli: Cli) -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text("utf-8")
    section = page.partition("## The model of another run\n")[2].partition("\n## ")[0]
    for name in ("first.py", "next.py"):
        (cli.folder / name).write_text(PROGRAM)
    first, second = re.findall(r"^\$ batchml (.*)$", section, re.MULTILINE)
    get, resume = re.findall(r"`batchml (.*?)`", section)
    (rule,) = re.findall(r"`(!.*?)`", section)
    assert cli(*shlex.split(first)).code == 0
    assert "begins with the model of first" in cli(*shlex.split(second)).out
    assert cli(*shlex.split(get.replace("RUN", "next"))).code == 0
    (cli.folder / ".batchmlignore").write_text(rule)
    model = "model/work/results/model.txt"
    assert "the model of next" in cli("submit", "--wait", "next.py", "--", "--model", model).out
    head = 'image = "python"\ncommand = ["python", "next.py", "{params}"]\n'
    job = f'{head}[params]\nmodel = "/dev/null"\n'
    write_job(cli.folder, "tune", job, next__py=PROGRAM)
    assert cli("submit", "--wait", "tune").code == 0
    again = cli(*shlex.split(resume.replace("RUN", "@last")), "--wait")
    assert "begins with the model of next" in again.out


def test_a_rerun_in_another_shell_reads_the_same_data(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cli.folder / "data").mkdir()
    (cli.folder / "data" / "points").write_text("1 2 3")
    monkeypatch.setenv("BATCHML_DATA_DIR", "data")
    assert cli("submit", "--wait", "--", "sh", "-c", 'cat "$BATCHML_DATA_DIR/points"').code == 0
    monkeypatch.delenv("BATCHML_DATA_DIR")
    again = cli("rerun", "@last", "--wait")
    assert again.code == 0 and "1 2 3" in again.out
    assert f"data       {cli.folder / 'data'}\n" in cli("show", "@last").out
    monkeypatch.setenv("BATCHML_DATA_DIR", "/elsewhere")
    third = cli("rerun", "@last", "--wait")
    assert third.code == 0 and "as then, and not /elsewhere of this shell" in third.err
    cli("submit", "--wait", "--", "sh", "-c", 'cat "$BATCHML_DATA_DIR/points"')
    assert "/elsewhere" in cli("diff", "@last~1", "@last").out
