"""What Tab offers: commands and flags from the help, names from files, and never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.cli.completion import SCRIPTS, CompletionSources, complete, main, parse_help, read_help
from batchml.config.project import folder_project
from batchml.model.job import Launch, read_job
from batchml.model.run import JobStatus, OutcomeClass

ROOT = Path(__file__).parents[2]
TOML = """
default = "dev"
project = "ours"
[env.dev]
region = "us-east-1"
[env.dev.compute.gpu-spot]
instance_types = ["g5"]
[env.dev.queues.urgent]
priority = 100
"""


@pytest.fixture
def sources(tmp_path: Path) -> CompletionSources:
    (tmp_path / "batchml.toml").write_text(TOML)
    job = tmp_path / "jobs" / "mine"
    job.mkdir(parents=True)
    (job / "job.toml").write_text("[params]\nepochs = 1\nlr = 0.1\n")
    (job / "sweep.toml").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "job.toml").touch()
    lines: list[dict[str, Any]] = [
        {"key": "2a", "name": "old", "env": "dev", "queue": "spot"},
        {"key": "2a", "job_id": "aaaa0000-1", "outcome": "succeeded"},
        {"key": "2b", "job_id": "bbbb0000-1", "name": "new", "env": "dev", "queue": "q"},
        {"key": "2c", "job_id": "cccc0000-1", "name": "elsewhere", "env": "local"},
        {"key": "2d", "name": "never-sent", "env": "dev"},
        {"key": "2e", "name": "mistyped", "env": "dev", "queue": "no", "refused": "No such job"},
        {"key": "2f", "job_id": "ffff0000-1", "name": "tiny-w1", "env": "dev", "at": 1,
         "tags": {"batchml:sweep": "2bcdefgh2345abcde"}},
    ]  # fmt: skip
    lines = [{**line, "project": "ours"} if "name" in line else line for line in lines]
    lines.insert(3, {"key": "2g", "job_id": "dddd0000-1", "name": "theirs", "env": "dev",
                     "project": "theirs.1a2b3c4d"})  # fmt: skip
    home = tmp_path / "home"
    home.mkdir()
    for age, key, name in ((9, "2bcdefgh2345abcde", "tiny"), (5, "3bcdefgh2345abcde", "lenet")):
        store = home / "sweeps" / key
        store.mkdir(parents=True)
        (store / "spec.json").write_text(
            f'{{"key":"{key}","name":"{name}","env":"local","project":"ours"}}'
        )
        os.utime(store / "spec.json", (1e9 - age, 1e9 - age))
    (home / "sweeps" / "4bcdefgh2345abcde").mkdir()  # removed, or not written yet
    text = "\n".join(map(json.dumps, lines)) + '\n{"torn'
    (home / "history.jsonl").write_text(text)
    return CompletionSources({"BATCHML_HOME": str(home)}, str(tmp_path))


def test_the_last_run_is_no_trial(sources: CompletionSources) -> None:
    last = complete(["show", "@l"], sources).words[0]
    named = complete(["show", "ne"], sources).words[0]
    assert (last.text, named.text) == ("@last", "new") and last.about == named.about


def offered(sources: CompletionSources, line: str) -> list[str]:
    return [word.text for word in complete(line.split(" "), sources).words]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sub", ["submit"]),
        ("queue up", ["update"]),
        ("nonsense x", []),
        ("submit --cancel", ["--cancel-on-interrupt"]),
        ("show ", ["@last", "new", "old", "bbbb0000", "aaaa0000"]),
        ("show bb", ["bbbb0000"]),
        ("show --env local ", ["@last", "elsewhere", "cccc0000"]),
        ("show --env=l", ["--env=local"]),
        ("show --env ", ["local", "dev"]),
        ("show new ", []),
        ("wait new ", ["@last", "old", "bbbb0000", "aaaa0000"]),
        ("submit m", ["mine"]),
        ("submit ./", ["./here"]),
        ("ls --job m", ["mine"]),
        ("submit mine -p ", ["epochs=", "lr="]),
        ("submit mine --param e", ["epochs="]),
        ("show --project theirs ", ["@last", "theirs", "dddd0000"]),
        ("show --project t", ["theirs"]),
        ("submit mine --queue ", ["default", "urgent", "q", "spot"]),
        ("submit --queue=u", ["--queue=urgent"]),
        ("submit --after n", ["new"]),
        ("compute delete ", ["gpu-spot"]),
        ("queue update u", ["urgent"]),
        ("env use d", ["dev"]),
        ("image build l", []),
        ("ls --status RUN", ["RUNNABLE", "RUNNING"]),
        ("ls --status out", ["out-of-memory"]),
        ("submit mine -- show ", []),
        ("sweeps show ", []),  # of dev they lie in AWS
        ("sweeps show --env local ", ["@last", "lenet", "tiny", "3bcdefgh", "2bcdefgh"]),
        ("sweeps best --env local t", ["tiny"]),
        ("sweeps stop --env=local 3", ["3bcdefgh"]),
        ("sweeps sh", ["show"]),
        ("sweep ", ["check", "mine", "lenet", "lenet-mxnet"]),
        ("sweep check m", ["mine"]),
        ("sweep mine ", []),
        ("show --env dev ti", []),  # a sweep's waves are not offered
        ("ls --env dev --job ti", []),
    ],
)
def test_each_word_is_offered_where_it_fits(
    sources: CompletionSources, line: str, words: list[str]
) -> None:
    assert offered(sources, line) == words


def test_states_and_classes_are_those_of_the_commands(sources: CompletionSources) -> None:
    classes = [each.value for each in OutcomeClass if each is not OutcomeClass.SUCCEEDED]
    states = offered(sources, "ls --status ")
    assert sorted(states) == sorted([*(each.value for each in JobStatus), *classes])
    for name in offered(sources, "submit --retry-on "):
        retry = {"attempts": 2, "on": [name]}
        assert read_job({"image": "i", "command": ["c"], "retry": retry}, "job").retry.on == (name,)
    assert offered(sources, "submit --launch ") == list(get_args(Launch.__annotations__["kind"]))


def test_a_forgotten_environment_has_no_runs(sources: CompletionSources) -> None:
    with open(Path(sources.environ["BATCHML_HOME"]) / "history.jsonl", "a") as file:
        file.write('\n{"forgotten": "dev"}\n')
    assert offered(sources, "show ") == []
    assert offered(sources, "show --env local ") == ["@last", "elsewhere", "cccc0000"]


def test_files_are_offered_where_files_fit(sources: CompletionSources) -> None:
    assert complete(["submit", "x"], sources).files
    assert complete(["submit", "--", "x"], sources).files
    assert not complete(["show", "x"], sources).files


def test_a_name_says_what_it_is(sources: CompletionSources) -> None:
    (word,) = complete(["show", "aaaa"], sources).words
    assert word.about == "old, succeeded, spot"


def test_shipped_jobs_and_images_are_offered(sources: CompletionSources) -> None:
    assert "lenet" in offered(sources, "submit ")
    assert "pytorch" in offered(sources, "image build ")


def test_every_stored_help_is_understood() -> None:
    for path in (ROOT / "batchml" / "cli" / "help").iterdir():
        words = path.stem.split("-")
        found = read_help(words)
        assert found is not None
        assert "--help" in found.flags, path
        usage = path.read_text().splitlines()[0].removesuffix(" [-- COMMAND...]")
        assert found.commands or "COMMAND" not in usage, path


def test_arguments_are_read_from_the_usage() -> None:
    assert parse_help(["Usage: batchml diff [OPTIONS] {RUN} {RUN}"], 2).arguments == ["RUN", "RUN"]
    assert parse_help(["Usage: batchml wait [OPTIONS] {RUN...}"], 2).arguments == ["RUN..."]
    assert parse_help(["Usage: batchml x y [OPTIONS] [NAME]..."], 3).arguments == ["NAME..."]


@given(st.lists(st.text(max_size=12), min_size=1, max_size=5))
def test_whatever_is_typed_there_is_an_answer(words: list[str]) -> None:
    sources = CompletionSources(
        {"BATCHML_HOME": "/nonexistent", "BATCHML_CONFIG": "/nonexistent"}, "/"
    )
    for word in complete(words, sources).words:
        assert isinstance(word.text, str)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[env", b"env = 3", b"[env.dev]\nqueues = 4"])
def test_a_file_that_cannot_be_read_has_no_names(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batchml.toml").write_bytes(content)
    (tmp_path / "history.jsonl").write_bytes(b'\xff\n[]\n{"key": [1]}\nnull\n')
    sources = CompletionSources(
        {"BATCHML_HOME": str(tmp_path), "BATCHML_ENV": "dev"}, str(tmp_path)
    )
    assert offered(sources, "submit --queue ") == ["default"]
    assert offered(sources, "show ") == []


def test_names_cannot_write_to_the_terminal(
    sources: CompletionSources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Path(sources.environ["BATCHML_HOME"])
    bad = {"key": "2e", "job_id": "d", "name": "\x1b]0;x\x07\nb", "env": "local"}
    bad["project"] = folder_project(os.getcwd())
    (home / "history.jsonl").write_text(json.dumps(bad))
    monkeypatch.setenv("BATCHML_HOME", str(home))
    monkeypatch.setenv("BATCHML_ENV", "local")
    assert main(["show", ""]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 3


def test_nothing_heavy_is_imported_for_a_tab(sources: CompletionSources) -> None:
    """The time is measured beside; what makes it is what is imported."""
    program = (
        "import sys; sys.argv = ['batchml', '__complete', 'show', ''];"
        "from batchml.__main__ import main; main();"
        "heavy = {'typer', 'click', 'rich', 'boto3', 'botocore', 'msgspec'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    env = {**os.environ, **sources.environ}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env=env, cwd=sources.folder,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"
    assert "@last\t" in done.stdout


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_the_scripts_are_printed_at_once(shell: str) -> None:
    command = [sys.executable, "-m", "batchml", "completion", shell]
    assert subprocess.run(command, capture_output=True, text=True).stdout == SCRIPTS[shell]


def test_bash_offers_what_we_do(sources: CompletionSources) -> None:
    """The function is called as Tab calls it; other shells were looked at by hand."""
    (Path(sources.folder) / "bin").mkdir()
    start = Path(sources.folder) / "bin" / "batchml"
    start.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m batchml "$@"\n')
    start.chmod(0o755)

    def replies(line: str) -> list[str]:
        script = (
            f"{SCRIPTS['bash']}\ncompopt() {{ :; }}\n"
            f'COMP_LINE="{line}"; COMP_POINT={len(line)}; _batchml\n'
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        env = {**os.environ, **sources.environ, "PATH": f"{start.parent}:{os.environ['PATH']}"}
        env["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, env=env, cwd=sources.folder
        )
        assert not done.stderr
        return done.stdout.split()

    assert replies("batchml show b") == ["bbbb0000"]
    assert replies("batchml show @l") == ["@last"]
    assert replies("batchml submit --queue=u") == ["urgent"]
