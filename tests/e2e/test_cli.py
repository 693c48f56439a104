"""The everyday commands against a real server, by their output and exit codes."""

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchml.local import control
from batchml.local.home import Home
from tests.support.cli import Cli, read_rest, read_until, write_job
from tests.support.local_server import client_for, wait_for

SHELL = ("--", "sh", "-c")
RULE = "=" * 80


@pytest.mark.shared_home
@pytest.mark.journey
def test_submit_wait_prints_the_classic_text_and_exits_with_the_jobs_code(cli: Cli) -> None:
    shown = cli("submit", "--wait", "--name", "hello", *SHELL, "echo one; echo; echo two; exit 3")
    assert shown.code == 3
    pattern = (
        r"Submitted job \[hello - (?P<id>[0-9a-f-]{36})\] to the job queue \[default\]\n"
        r"Job \[hello - (?P=id)\] is RUNNING\.\n"
        r"Output \[hello/default/[0-9a-f]{32}\]:\n"
        rf"{RULE}\n"
        r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\] one\n"
        r"\[[^]]+\]  \n"
        r"\[[^]]+\] two\n"
        rf"{RULE}\n"
        r"Job \[hello - (?P=id)\] FAILED\n"
    )
    assert re.fullmatch(pattern, shown.out), shown.out
    assert "Log complete: 3 lines." in shown.err
    assert "app-error: the program ended with code 3" in shown.err


@pytest.mark.shared_home
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("exit 0", 0, ""),
        ("exit 200", 200, "app-error"),
        ("kill -SEGV $$", 139, "SIGSEGV"),
        ("kill -KILL $$", 137, "SIGKILL"),
    ],
)
@pytest.mark.journey
def test_the_exit_code_tells_the_truth(cli: Cli, script: str, code: int, said: str) -> None:
    shown = cli("submit", "--wait", *SHELL, script)
    assert shown.code == code
    assert said in shown.err


@pytest.mark.shared_home
@pytest.mark.journey
def test_a_command_that_does_not_exist_is_127_and_says_so(cli: Cli) -> None:
    shown = cli("submit", "--wait", "--", "no-such-program", "--flag")
    assert shown.code == 127
    assert "cannot run 'no-such-program'" in shown.out


@pytest.mark.shared_home
@pytest.mark.journey
def test_arguments_arrive_as_they_were_given(cli: Cli) -> None:
    words = ["a b", "$HOME", "`id`", '"quoted"', "--wait", "-p", "x=y", "*", "ünïcode"]
    program = "import json,sys; print(json.dumps(sys.argv[1:]))"
    shown = cli("submit", "--wait", "--", "python", "-c", program, *words)
    line = next(line for line in shown.out.splitlines() if "] [" in line)
    assert json.loads(line.split("] ", 1)[1]) == words


@pytest.mark.shared_home
@pytest.mark.journey
def test_json_is_one_document_and_the_log_goes_to_stderr(cli: Cli) -> None:
    shown = cli("submit", "--wait", "--json", *SHELL, "echo line; exit 5")
    assert shown.code == 5
    assert shown.json["class"] == "app-error"
    assert shown.json["exitCode"] == 5
    assert shown.json["status"] == "FAILED"
    assert shown.json["attempts"] == 1
    assert Path(shown.json["outputs"]).is_dir()
    assert "] line" in shown.err


@pytest.mark.journey
def test_detached_submission_is_followed_by_other_commands(cli: Cli) -> None:
    submitted = cli("submit", "--json", *SHELL, "echo begun; sleep 0.3; echo done; exit 4").json
    assert set(submitted) == {"jobId", "jobName", "jobQueue", "env", "project"}
    followed = cli("logs", "-f", "@last")
    assert followed.code == 4
    assert "] begun" in followed.out and "] done" in followed.out
    assert cli("wait", submitted["jobId"]).code == 4
    assert "] done" in cli("logs", submitted["jobId"][:8]).out
    assert [line["message"] for line in cli("logs", "--json", "sh").json] == ["begun", "done"]
    assert "app-error" in cli("show", "sh").out
    shown = cli("show", "@last", "--json").json
    assert (shown["class"], shown["exitCode"]) == ("app-error", 4)
    listed = cli("ls", "--json").json
    assert [run["jobId"] for run in listed] == [submitted["jobId"]]
    assert submitted["jobId"][:8] in cli("ls").out
    assert cli("ls", "--status", "RUNNING", "--json").json == []


@pytest.mark.shared_home
def test_waiting_for_several_gives_the_first_code_that_is_not_0(cli: Cli) -> None:
    codes = (0, 7, 9)
    ids = [cli("submit", "--json", *SHELL, f"exit {code}").json["jobId"] for code in codes]
    assert cli("wait", *ids).code == 7
    assert cli("wait", ids[2], ids[1]).code == 9
    assert cli("wait", ids[0]).code == 0


@pytest.mark.shared_home
@pytest.mark.journey
def test_cancel_stops_a_running_job_and_its_exit_code_is_143(cli: Cli) -> None:
    job_id = cli("submit", "--json", *SHELL, "echo begun; sleep 600").json["jobId"]
    wait_for(lambda: "begun" in cli("logs", job_id).out, "the job runs")
    assert cli("cancel", job_id, "--reason", "enough").code == 0
    waited = cli("wait", job_id)
    assert waited.code == 143
    assert "cancelled: the program was stopped: enough" in waited.err
    assert "had ended already" in cli("cancel", job_id).out


@pytest.mark.shared_home
def test_a_run_after_a_failed_one_does_not_run(cli: Cli) -> None:
    first = cli("submit", "--json", *SHELL, "sleep 0.2; exit 1").json["jobId"]
    shown = cli("submit", "--wait", "--after", first, *SHELL, "echo never")
    assert shown.code == 76
    assert "never" not in shown.out.replace(shown.out.splitlines()[0], "")


@pytest.mark.shared_home
@pytest.mark.journey
def test_a_job_runs_with_its_code_parameters_and_outputs(cli: Cli) -> None:
    program = (
        "import json, os, sys, pathlib, helper\n"
        "print('args', sys.argv[1:], helper.WORD)\n"
        "print('params', os.environ['BATCHML_PARAMS'], os.environ['GREETING'])\n"
        "print('accuracy=0.5'); print('accuracy=0.75 accuracy=...')\n"
        "pathlib.Path(os.environ['BATCHML_OUTPUT_DIR'], 'model.txt').write_text('weights')\n"
    )
    write_job(
        cli.folder,
        "mine",
        'image = "python"\n'
        'command = ["python", "train.py", "--lr", "{lr}", "--steps={steps}"]\n'
        "[params]\nlr = 0.05\nsteps = 3\n[env]\nGREETING = 'hi there'\n"
        "[metrics]\naccuracy = 'accuracy=([0-9.]+)'\nnever = 'never=(.*)'\n",
        train__py=program,
        helper__py="WORD = 'helped'\n",
    )
    shown = cli("submit", "--wait", "--json", "mine", "-p", "lr=0.5")
    assert shown.code == 0, shown.err
    assert "args ['--lr', '0.5', '--steps=3'] helped" in shown.err
    assert '{"lr": 0.5, "steps": 3} hi there' in shown.err
    assert Path(shown.json["outputs"], "model.txt").read_text() == "weights"
    assert shown.json["metrics"] == {"accuracy": 0.75}
    assert "Metrics: accuracy 0.75" in cli("submit", "--wait", "mine").err


@pytest.mark.journey
def test_dry_run_prints_the_requests_and_starts_nothing(cli: Cli) -> None:
    shown = cli("submit", "--dry-run", "--name", "x", "--", "awk", "{print}")
    assert shown.code == 0
    assert shown.json["SubmitJob"]["containerOverrides"]["command"] == ["awk", "{print}"]
    assert shown.json["RegisterJobDefinition"]["type"] == "container"
    assert not cli.home.is_held()
    assert not cli.home.code.exists()


@pytest.mark.journey
def test_every_mistake_of_a_job_file_is_reported_at_once(cli: Cli) -> None:
    write_job(
        cli.folder,
        "bad",
        'imge = "python"\ncommand = ["echo", "{who}"]\ntimeout = "5s"\n'
        '[resources]\nvcpus = "four"\nmemory = "lots"\n',
    )
    shown = cli("submit", "bad")
    assert shown.code == 78
    assert "jobs/bad/job.toml: 6 mistakes, nothing was sent." in shown.err
    for words in (
        "Did you mean 'image'?",
        "{who}",
        "60 seconds",
        "'four'",
        "'lots'",
        "image: miss",
    ):
        assert words in shown.err
    assert not cli.home.is_held()


@pytest.mark.journey
def test_unknown_names_are_errors_with_a_hint(cli: Cli) -> None:
    job = cli("submit", "lenett")
    assert (job.code, "Did you mean 'lenet'?" in job.err) == (78, True)
    image = cli("submit", "--image", "pytroch", "--", "true")
    assert (image.code, "Did you mean 'pytorch'?" in image.err) == (78, True)
    foreign = cli("submit", "--image", "nvidia/cuda", "--", "true")
    assert foreign.code == 78
    assert (
        "batchml local start --executor docker" in foreign.err and "--image python" in foreign.err
    )
    parameter = cli("submit", "lenet", "-p", "epoch=3")
    assert (parameter.code, "Did you mean 'epochs'?" in parameter.err) == (78, True)
    run = cli("show", "nothing-like-it")
    assert (run.code, "batchml ls" in run.err) == (1, True)
    environment = cli("ls", "--env", "prod")
    assert (environment.code, "'prod'" in environment.err) == (1, True)
    queue = cli("submit", "--queue", "nope", "--", "true")
    assert (queue.code, "Known: default" in queue.err) == (78, True)
    assert cli("submit").code == 2
    assert cli("submit", "-p", "novalue", "lenet").code == 2


@pytest.mark.shared_home
def test_a_job_larger_than_the_machine_is_fitted_and_said(cli: Cli) -> None:
    big = ("--vcpus", "4000", "--memory", "90 TiB", "--gpus", "64", "--", "true")
    fitted = cli("submit", "--wait", *big)
    assert fitted.code == 0
    assert "Fitted to this machine:" in fitted.err
    for part in ("vCPU", "instead of 4000", "of memory", "instead of 64"):
        assert part in fitted.err
    refused = cli("submit", "--strict-resources", *big)
    assert refused.code == 78
    assert "3 mistakes" in refused.err


@pytest.mark.shared_home
@pytest.mark.journey
def test_a_retried_attempt_is_shown_with_both_outputs(cli: Cli) -> None:
    script = 'if [ "$AWS_BATCH_JOB_ATTEMPT" = 1 ]; then echo first; exit 9; fi; echo second'
    write_job(
        cli.folder,
        "flaky",
        f"image = 'python'\ncommand = ['sh', '-c', '''{script}''']\n"
        "[retry]\nattempts = 2\non = ['app-error']\n",
    )
    shown = cli("submit", "--wait", "flaky")
    assert shown.code == 0
    assert shown.out.count("Output [flaky/default/") == 2
    assert shown.out.index("] first") < shown.out.index("] second")


@pytest.mark.shared_home
@pytest.mark.journey
def test_ctrl_c_detaches_and_the_job_goes_on(cli: Cli) -> None:
    watching = cli.watch("submit", "--wait", *SHELL, "echo begun; sleep 1; exit 6")
    read_until(watching, "] begun")
    watching.send_signal(signal.SIGINT)
    _, err = read_rest(watching, 30)
    assert watching.returncode == 130
    assert "Detached: the job goes on." in err
    assert "batchml logs -f" in err and "batchml cancel" in err
    assert "Traceback" not in err
    assert cli("wait", "@last").code == 6


@pytest.mark.shared_home
def test_cancel_on_interrupt_cancels(cli: Cli) -> None:
    script = "echo begun; sleep 600"
    watching = cli.watch("submit", "--wait", "--cancel-on-interrupt", *SHELL, script)
    read_until(watching, "] begun")
    watching.send_signal(signal.SIGINT)
    _, err = read_rest(watching, 30)
    assert watching.returncode == 143
    assert "Cancelled job" in err
    assert cli("wait", "@last").code == 143


@pytest.mark.journey
def test_the_server_may_die_while_someone_watches(cli: Cli) -> None:
    """The watcher starts another; the job never noticed; no line is lost or doubled."""
    count = "for i in $(seq 20); do echo n$i; sleep 0.1; done"
    watching = cli.watch("submit", "--wait", *SHELL, count)
    seen = read_until(watching, "] n5\n")
    pid = cli.home.holder()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    out, err = read_rest(watching, 60)
    assert watching.returncode == 0, err
    assert re.findall(r"\] n(\d+)\n", seen + out) == [str(i) for i in range(1, 21)]
    assert "Log complete: 20 lines." in err


@pytest.mark.shared_home
def test_a_closed_pipe_is_no_error(cli: Cli) -> None:
    cli("submit", "--wait", *SHELL, "seq 20000")
    piped = subprocess.run(
        ["sh", "-c", '"$@" | head -n 1', "sh", *cli.command("logs", "@last")],
        cwd=cli.folder, env=cli.environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert piped.stdout.endswith("] 1\n")
    assert piped.stderr == ""


@pytest.mark.journey
def test_on_a_terminal_there_is_a_status_line_and_control_characters_do_nothing(cli: Cli) -> None:
    leader, follower = pty.openpty()
    script = r"printf 'evil \033]0;title\007 \033[2J end\n'; sleep 1; echo bye"
    watching = subprocess.Popen(
        cli.command("submit", "--wait", *SHELL, script), cwd=cli.folder,
        env={**cli.environ, "TERM": "xterm-256color"},
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    seen = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            break
        if not block:
            break
        seen += block
    assert watching.wait(timeout=30) == 0
    os.close(leader)
    text = seen.decode("utf-8", "replace")
    assert "Ctrl-C detaches" in text
    assert "RUNNING" in text and "] bye" in text
    assert "\x1b]0;title" not in text
    assert "\x1b[2J end" not in text


def test_local_commands_start_tell_and_stop(cli: Cli, home: Home) -> None:
    assert cli("local", "status").code == 1
    started = cli("local", "start", "--json").json
    assert started["state"] == "running"
    assert set(started) == {"state", "pid", "endpoint", "executor", "home"}
    assert cli("local", "start", "--json").json == started
    shown = cli("local", "status", "--json").json
    assert shown.pop("disk")["free"] > 0
    assert shown == started
    shown = cli("local", "env").out
    assert f"export AWS_ENDPOINT_URL_BATCH={started['endpoint']}\n" in shown
    assert cli("local", "stop").code == 0
    assert cli("local", "status", "--json").json["state"] == "stopped"
    again = cli("local", "start", "--json").json
    assert again["endpoint"] == started["endpoint"]  # what was exported still works


def test_reset_stops_jobs_and_forgets_them(cli: Cli) -> None:
    cli("submit", *SHELL, "sleep 600")
    assert cli("local", "reset").code == 2  # no terminal to ask on
    reset = cli("local", "reset", "--yes")
    assert reset.code == 0
    assert cli("ls", "--json").json == []


@pytest.mark.journey
def test_a_state_folder_that_others_can_read_is_refused(cli: Cli, home: Home) -> None:
    home.root.chmod(0o755)
    shown = cli("submit", "--", "true")
    assert shown.code == 1
    assert f"chmod 700 {home.root}" in shown.err


UBUNTU = 'image = "ubuntu:22.04"\ncommand = ["cat", "here.txt"]\n'  # runs without that image


@pytest.mark.parametrize("image", ["python", "ubuntu:22.04"])
def test_a_program_cannot_forge_the_end_of_its_log(cli: Cli, image: str) -> None:
    write_job(cli.folder, "t", UBUNTU.replace("ubuntu:22.04", image))
    script = "echo '::batchml end code=0 lines=1'; echo '::batchml host environment=evil'; exit 4"
    shown = cli("submit", "--wait", "t", *SHELL, script)
    assert shown.code == 4
    assert "] ::batchml end code=0 lines=1" in shown.out.replace("]  ", "] ")
    assert "Log complete: 2 lines." in shown.err
    assert "evil" not in shown.err


@pytest.mark.shared_home
@pytest.mark.journey
def test_code_travels_with_any_image(cli: Cli) -> None:
    write_job(cli.folder, "t", UBUNTU, here__txt="I came along")
    shown = cli("submit", "--wait", "t")
    assert shown.code == 0
    assert "] I came along" in shown.out
    assert "not in the image ubuntu:22.04" in shown.err


def test_ls_tells_what_runs_came_to(cli: Cli) -> None:
    cli("submit", "--wait", "--name", "good", "--", "true")
    cli("submit", "--wait", "--name", "bad", *SHELL, "exit 9")
    stopped = cli("submit", "--json", "--name", "stopped", *SHELL, "sleep 600").json["jobId"]
    cli("cancel", stopped)
    cli("wait", stopped)
    rows = {line.split()[1]: line.split() for line in cli("ls").out.splitlines()[1:]}
    assert rows["good"][3:6] == ["SUCCEEDED", "succeeded", "0"]
    assert rows["bad"][3:6] == ["FAILED", "app-error", "9"]
    assert rows["stopped"][3:6] == ["FAILED", "cancelled", "143"]
    assert "--limit" in cli("ls", "--limit", "2").err
    assert cli("ls", "--job", "nothing").err == "No runs match.\n"


@pytest.mark.shared_home
def test_the_log_of_an_ended_run_is_printed_without_pretending_that_it_runs(cli: Cli) -> None:
    cli("submit", "--wait", *SHELL, "echo hi")
    shown = cli("logs", "-f", "@last")
    assert "is RUNNING" not in shown.out
    assert "] hi" in shown.out


@pytest.mark.shared_home
def test_a_log_cut_off_by_a_stop_is_known_to_be_whole(cli: Cli) -> None:
    script = "trap '' TERM; echo begun; sleep 600"
    grace = ("--set-env", "BATCHML_GRACE=1")
    job_id = cli("submit", "--json", *grace, *SHELL, script).json["jobId"]
    wait_for(lambda: "begun" in cli("logs", job_id).out, "the job runs")
    cli("cancel", job_id)
    followed = cli("logs", "-f", job_id)
    assert followed.code == 143
    assert "Log complete: 1 line." in followed.err


@pytest.mark.shared_home
def test_a_file_that_cannot_be_read_or_sent_is_named(cli: Cli) -> None:
    (cli.folder / "data").symlink_to("/etc")
    shown = cli("submit", "--wait", "--", "ls")
    assert "Not sent, because they are not files of this folder: data." in shown.err
    if os.geteuid() != 0:  # root reads everything
        (cli.folder / "secret").write_text("")
        (cli.folder / "secret").chmod(0)
        unreadable = cli("submit", "--", "true")
        assert unreadable.code == 78
        assert "secret cannot be read" in unreadable.err


@pytest.mark.shared_home
def test_output_that_the_terminal_cannot_show_does_not_change_the_exit_code(cli: Cli) -> None:
    shown = cli("submit", "--wait", *SHELL, "printf '\\342\\226\\210\\n'", PYTHONIOENCODING="ascii")
    assert shown.code == 0
    full = subprocess.run(
        ["sh", "-c", '"$@" > /dev/full', "sh", *cli.command("logs", "@last")],
        cwd=cli.folder, env=cli.environ, capture_output=True, text=True,
    )  # fmt: skip
    assert full.returncode == 1
    assert "No space left" in full.stderr and "Traceback" not in full.stderr


def test_a_folder_that_is_gone_or_is_no_job_is_said(cli: Cli) -> None:
    leave = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    gone = subprocess.run(
        ["sh", "-c", leave, "sh", *cli.command("ls")],
        cwd=cli.folder, env=cli.environ, capture_output=True, text=True,
    )  # fmt: skip
    assert gone.returncode == 2
    assert "does not exist any more" in gone.stderr
    assert f"The folder {cli.folder} has no job.toml." in cli("submit", ".").err


def test_what_the_server_was_started_with_is_not_changed_silently(cli: Cli) -> None:
    cli("local", "start")
    again = cli("local", "start", "--idle", "8h")
    assert again.code == 1
    assert "batchml local stop" in again.err


def test_local_does_not_depend_on_the_users_aws_configuration(cli: Cli) -> None:
    (cli.folder / "broken").write_text("[default\nnonsense")
    environ: dict[str, Any] = {
        "AWS_PROFILE": "nope",
        "AWS_CONFIG_FILE": str(cli.folder / "broken"),
        "AWS_SHARED_CREDENTIALS_FILE": str(cli.folder / "broken"),
        "AWS_DEFAULTS_MODE": "bogus",
    }
    assert cli("submit", "--wait", "--", "true", **environ).code == 0


@pytest.mark.shared_home
def test_braces_of_a_typed_command_are_the_shell_s_but_for_given_parameters(cli: Cli) -> None:
    ran = cli("submit", "--wait", "-p", "lr=0.5", "--", "sh", "-c", "A=x; echo ${A} {lr} {print}")
    assert ran.code == 0, ran.err
    assert "x 0.5 {print}" in ran.out + ran.err


def test_a_fair_share_queue_is_told_whose_run_it_is(cli: Cli) -> None:
    made = cli("queue", "create", "shared", "--compute", "this-machine", "--share", "ops=2")
    assert made.code == 0, made.err
    shares = []
    for flags in ((), ("--share", "ops")):
        shown = cli("submit", "--queue", "shared", *flags, "--wait", "--json", "--", "true")
        assert shown.code == 0, shown.err
        endpoint = control.find_server(cli.home)
        assert endpoint is not None
        batch = client_for(cli.home, endpoint, "batch")
        (job,) = batch.describe_jobs(jobs=[shown.json["jobId"]])["jobs"]
        shares.append(job["shareIdentifier"])
    assert shares[0].isalnum() and shares[0] != "ops"
    assert shares[1] == "ops"
    refused = cli("submit", "--queue", "default", "--share", "ops", "--", "true")
    assert (refused.code, "shareIdentifier" in refused.err) == (1, True)
