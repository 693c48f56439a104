"""`explain` with a real server: what can really be made to wait or to fail on this machine."""

import os
import shlex
from typing import Any

import pytest

from batchml.local import control
from tests.support.cli import Cli, write_job
from tests.support.executor_rig import IMAGE as ENGINE_IMAGE
from tests.support.executor_rig import need_engine
from tests.support.fakes import FastClock
from tests.support.local_server import client_for, define

# Runs with this machine's programs.
JOB = 'image = "docker.io/library/alpine:3"\ncommand = ["true"]\n'
CPUS = str(os.cpu_count() or 1)


def explained(cli: Cli, word: str) -> dict[str, Any]:
    shown = cli("explain", word, "--json")
    assert shown.code == 0, shown.err
    found: dict[str, Any] = shown.json
    assert found["calls"] <= 6
    assert found["verdict"] and (found["command"] or found["fix"] or not found["isProblem"])
    return found


def cause(cli: Cli, word: str) -> tuple[str, bool]:
    found = explained(cli, word)
    return found["cause"], found["isProblem"]


def submit(cli: Cli, name: str, *flags: str, command: tuple[str, ...] = ("true",)) -> None:
    if not (cli.folder / "jobs" / "t").is_dir():
        write_job(cli.folder, "t", JOB)
    cli("submit", "t", "--name", name, *flags, "--", *command)


@pytest.mark.journey
def test_who_waits_is_told_for_whom_and_who_runs_that_it_runs(cli: Cli) -> None:
    submit(cli, "hog", "--vcpus", CPUS, command=("sh", "-c", "echo up; sleep 600"))
    hog = cli.watch("logs", "-f", "hog")
    assert hog.stdout is not None
    while "up" not in hog.stdout.readline():
        pass
    hog.kill()
    hog.communicate()
    submit(cli, "next", "--vcpus", CPUS)
    submit(cli, "third", "--vcpus", CPUS)
    submit(cli, "after", "--after", "hog")
    assert cause(cli, "hog") == ("running", False)
    assert cause(cli, "next") == ("full", False)
    assert cause(cli, "third") == ("queue-position", False)
    waits = explained(cli, "after")
    assert (waits["cause"], waits["isProblem"]) == ("dependency", False)
    assert "hog" in waits["evidence"][0]
    cli("cancel", "hog")
    assert cause(cli, "hog")[0] in ("cancelled", "running")
    text = cli("explain", "third").out
    assert text.startswith("Job [third - ")


def test_what_can_never_be_placed_and_a_place_that_is_closed(cli: Cli) -> None:
    cli("local", "start")
    endpoint = control.ensure_server(cli.home, FastClock())
    batch = client_for(cli.home, endpoint, "batch")
    huge = batch.submit_job(
        jobName="huge", jobQueue="default", jobDefinition=define(batch, ["true"]),
        containerOverrides={"resourceRequirements": [{"type": "VCPU", "value": "4096"}]},
    )["jobId"]  # fmt: skip
    assert cause(cli, huge) == ("too-large-for-hosts", True)
    submit(cli, "behind")
    assert explained(cli, "behind")["cause"] == "behind-stuck-run"
    cli("cancel", huge)
    cli("compute", "update", "this-machine", "--disable")
    submit(cli, "shut-out", "--array", "3")
    found = explained(cli, "shut-out")
    assert found["cause"] == "environment-disabled"
    assert found["evidence"][0] == "child 0 of 3, one of the waiting children"
    done = cli(*found["command"].split()[1:])
    assert done.code == 0, done.err
    assert cli("wait", "shut-out").code == 0
    assert cause(cli, "shut-out") == ("succeeded", False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("no-capacity=10m", "no-capacity"), ("oom", "out-of-memory"), ("host-lost", "host-lost")],
)
def test_what_a_rehearsal_makes_of_a_run(cli: Cli, words: str, expected: str) -> None:
    cli("local", "start", f"--chaos={words}")
    wait = ("--detach",) if expected == "no-capacity" else ("--wait", "--attempts", "1")
    submit(cli, "unlucky", *wait, command=("sleep", "60"))
    assert explained(cli, "unlucky")["cause"] == expected


FAILING: list[tuple[tuple[str, ...], str, str]] = [
    (("python3", "-c", "import nosuchmodule"), "missing-module", "nosuchmodule"),
    (("python3", "-c", "import ctypes; ctypes.CDLL('libnosuch.so.1')"), "missing-library",
     "libnosuch.so.1"),
    (("nosuchcommand",), "missing-command", "nosuchcommand"),
    (("sh", "-c", "nosuchcommand"), "missing-command", "nosuchcommand"),
    (("python3", "nosuchfile.py"), "missing-file", "nosuchfile.py"),
    (("sh", "-c", "kill -SEGV $$"), "signal", "SIGSEGV"),
    (("/dev/null",), "permission", "/dev/null"),
]  # fmt: skip


@pytest.mark.journey
def test_why_a_program_failed_is_read_from_what_it_really_prints(cli: Cli) -> None:
    names = [f"bad{number}" for number in range(len(FAILING))]
    for name, (command, _, _) in zip(names, FAILING, strict=True):
        submit(cli, name, command=command)
    cli("wait", *names)
    for name, (_, expected, said) in zip(names, FAILING, strict=True):
        found = explained(cli, name)
        assert (found["cause"], said in found["verdict"]) == (expected, True), found
        assert found["calls"] == 2


def test_what_stayed_behind_is_found_in_the_folder_and_children_are_told_together(
    cli: Cli,
) -> None:
    (cli.folder / ".git").mkdir()
    (cli.folder / ".gitignore").write_text("local_settings.py\n")
    write_job(
        cli.folder, "t", JOB, local_settings__py="", part__py="import local_settings\n"
    )  # fmt: skip
    sent = cli("submit", "t", "--name", "kept", "--", "python3", "part.py")
    assert "Ignored: local_settings.py." in sent.err
    submit(cli, "many", "--array", "2", command=("sh", "-c", "exit 3"))
    cli("wait", "kept", "many")
    found = explained(cli, "kept")
    assert (found["cause"], found["verdict"]) == (
        "missing-module",
        "The module local_settings was not sent: .gitignore excludes local_settings.py.",
    )
    assert "part.py, line 1: import local_settings" in found["evidence"]
    many = explained(cli, "many")
    assert many["verdict"].startswith("2 of its 2 children failed. The program ended with code 3")
    assert many["calls"] == 5


def test_what_an_engine_says_of_images_and_commands_is_understood(cli: Cli) -> None:
    need_engine()
    cli("local", "start", "--executor", "docker")
    flags = ("--wait", "--attempts", "1")
    cli("submit", "--image", ENGINE_IMAGE, "--name", "typo", *flags, "--", "nosuchcommand")
    assert explained(cli, "typo")["cause"] == "missing-command"
    nowhere = "registry.invalid/nosuch/image:v1"
    cli("submit", "--image", nowhere, "--name", "nowhere", *flags, "--", "true")
    found = explained(cli, "nowhere")
    assert found["class"] == "image-error"
    assert found["cause"] in ("image-network", "image-missing")


def test_a_package_of_the_folders_own_file_leads_to_an_image_of_it(cli: Cli) -> None:
    """The command that is named runs as it is: the folder's image, and only changed parameters."""
    folder = cli.folder / "jobs" / "own"
    write_job(cli.folder, "own", f'{JOB}[params]\nlr = 0.1\nn = 3\n[env]\nJOBS = "1"\n')
    (folder / "requirements.txt").write_text("nosuchmodule\n")
    program = ("python3", "-c", "import nosuchmodule")
    variables = ("--set-env", "DATA=secret")
    assert cli("submit", "own", "-p", "n=4", *variables, "--wait", "--", *program).code
    found = explained(cli, "@last")
    assert found["fix"] == (
        "requirements.txt has nosuchmodule: with --image the run gets an image of that file. Add "
        "its variables with --set-env: DATA."
    )
    assert found["command"] == f"batchml submit {folder} -p n=4 --image . -- {shlex.join(program)}"
    (cli.folder / "requirements.txt").write_text("")
    program = ("python3", "-c", "open('gone.csv')")
    assert cli("submit", "--image", ".", "--wait", "--", *program).code
    again = explained(cli, "@last")["command"]
    assert "--image . -- python3 -c" in again
