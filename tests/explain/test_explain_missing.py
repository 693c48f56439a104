"""What a run did not find: by what its folder and the images here tell, and by how it was asked."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.explain import clues
from batchml.explain.ask import cause_in_log, refused_submission
from batchml.explain.failing import items_to_search, why_ended
from batchml.explain.missing import (
    EndedRun,
    FileState,
    LocalFindings,
    MissingItem,
    images_with,
    names_package,
    search_folder,
    with_findings,
)
from batchml.explain.resumed import SavedFile
from batchml.explain.suggest import CommandWriter
from batchml.history import History
from batchml.jobs.code import DEFAULT, find_files
from batchml.model.explanation import Explanation
from batchml.model.run import Attempt, JobStatus, Record, Run
from batchml.runtime.protocol.function import MODULE
from batchml.runtime.protocol.launch import PACKED, SCRIPT_RUNNER

WORK = "/home/me/.batchml/local/attempts/0123456789abcdef0123456789abcdef/work"
NO_MODULE = "ModuleNotFoundError: No module named '{}'"
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
CANNOT = "batchml: cannot run {}: no such command in this image."


def ended(*lines: str, command: tuple[str, ...] = ("python", "t.py"), **more: Any) -> EndedRun:
    code = more.pop("code", 1)
    run = Run("1234", "t", "q", JobStatus.FAILED, exit_code=code, image="python", command=command,
              status_reason="Essential container in task exited",
              attempts=(Attempt(exit_code=code),))  # fmt: skip
    return EndedRun(run, lines=lines, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "p"
    for name in ("data/train.csv", "secret_cfg.py", "mine.py", "old.py", "train.py", ".git/HEAD",
                 "../shared/__init__.py"):  # fmt: skip
        path = found / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (found / ".gitignore").write_text("data/\nsecret_cfg.py\n")
    (found / ".batchmlignore").write_text("old.py\n")
    return found


@pytest.mark.parametrize(
    ("name", "is_module", "state", "path", "ignored_by"),
    [
        ("secret_cfg", True, FileState.IGNORED, "secret_cfg.py", ".gitignore"),
        ("old", True, FileState.IGNORED, "old.py", ".batchmlignore"),
        ("data/train.csv", False, FileState.IGNORED, "data/", ".gitignore"),
        ("mine.sub", True, FileState.SENT, "mine.py", ""),
        ("train.py", False, FileState.SENT, "train.py", ""),
        ("shared", True, FileState.ABOVE, "shared/__init__.py", ""),
        ("shared", False, FileState.ABSENT, "", ""),
        ("../shared/__init__.py", False, FileState.OUTSIDE, "", ""),
        ("../shared/absent.csv", False, FileState.ABSENT, "", ""),
        ("/etc/passwd", False, FileState.OUTSIDE, "", ""),
        (".git/HEAD", False, FileState.IGNORED, ".git/", DEFAULT),
        ("numpy", True, FileState.ABSENT, "", ""),
    ],
)
def test_the_folder_tells_what_became_of_a_file(
    folder: Path, name: str, is_module: bool, state: FileState, path: str, ignored_by: str
) -> None:
    here = search_folder(folder, MissingItem(name, is_module))
    assert (here.state, here.path, here.ignored_by) == (state, path, ignored_by)


def test_a_name_that_is_nearly_a_files_is_asked_about(folder: Path) -> None:
    assert search_folder(folder, MissingItem("trian.py")).suggestion == " Did you mean 'train.py'?"
    assert search_folder(folder / "gone", MissingItem("x")).state is FileState.UNKNOWN
    assert search_folder(None, MissingItem("x")).state is FileState.UNKNOWN


def test_images_with_a_package_are_known_by_their_requirements(tmp_path: Path) -> None:
    for image, text in (
        ("a", "scikit_learn==1\n"),
        ("b", "# numpy\n"),
        ("pytorch", "Scikit-Learn\n"),
    ):
        (tmp_path / image).mkdir()
        (tmp_path / image / "requirements.txt").write_text(text)
    assert images_with([tmp_path], "sklearn.svm") == ("pytorch", "a")
    assert images_with([tmp_path], "numpy") == ()


IGNORED = LocalFindings(FileState.IGNORED, "/p", "data/", ".gitignore")
# line of the log, findings here, in the verdict, in the fix, in the command
MISSING: list[tuple[str, LocalFindings, str, str, str]] = [
    (
        NO_MODULE.format("cfg"),
        LocalFindings(FileState.IGNORED, "/p", "cfg.py", ".gitignore"),
        ".gitignore excludes cfg.py",
        "`!cfg.py` to /p/.batchmlignore",
        "submit --name t",
    ),
    (
        NO_MODULE.format("cfg"),
        LocalFindings(FileState.IGNORED, "/p", "cfg.py", ".batchmlignore"),
        ".batchmlignore excludes cfg.py",
        "Remove its line from .batchmlignore",
        "submit",
    ),
    (
        NO_MODULE.format("lib"),
        LocalFindings(FileState.ABOVE, "/w/p", "lib"),
        "only the folder itself is sent",
        "Submit from /w",
        "submit",
    ),
    (
        NO_MODULE.format("lib"),
        LocalFindings(FileState.SENT, "/p", "lib.py"),
        "not where Python looks",
        "search the run's folder",
        "--set-env PYTHONPATH=.",
    ),
    (
        NO_MODULE.format("cv2"),
        LocalFindings(FileState.ABSENT, requirements="images/python/requirements.txt"),
        "image python has no",
        "Add opencv-python-headless to images/python/requirements.txt",
        "submit",
    ),
    (
        NO_MODULE.format("numpy"),
        LocalFindings(FileState.ABSENT, images=("python", "pytorch")),
        "numpy",
        "The image pytorch has numpy",
        "--image pytorch",
    ),
    (
        NO_MODULE.format("einops"),
        LocalFindings(),
        "einops",
        "Add einops to requirements.txt: with --image",
        "--image . -- python t.py",
    ),
    (
        NO_MODULE.format("numpy"),
        LocalFindings(
            FileState.ABSENT, images=("pytorch",), own_file="requirements.txt", is_listed=True
        ),
        "numpy",
        "requirements.txt has numpy: with --image",
        "--image . -- python t.py",
    ),
    (
        NO_MODULE.format("yaml"),
        LocalFindings(FileState.ABSENT, images=("pytorch",), own_file="environment.yml"),
        "yaml",
        "Add pyyaml to environment.yml: with --image",
        "--image ./environment.yml -- python t.py",
    ),
    (
        NO_FILE.format("data/a.csv"),
        IGNORED,
        ".gitignore excludes data/",
        "BATCHML_DATA_DIR",
        "submit",
    ),
    (
        "FileNotFoundError: data/a.csv not found.",
        IGNORED,
        ".gitignore excludes data/",
        "`!data/` to /p/.batchmlignore",
        "submit",
    ),
    (
        NO_FILE.format("a.csv"),
        LocalFindings(FileState.ABSENT, "/p"),
        "a.csv is not in /p",
        "BATCHML_DATA_DIR",
        "-- python t.py",
    ),
    (
        f"python: can't open file '{WORK}/nofile.py': [Errno 2] No such file or directory",
        LocalFindings(FileState.ABSENT, "/p", suggestion=" Did you mean 'file.py'?"),
        "nofile.py is not in /p",
        "Did you mean 'file.py'?",
        "-- python file.py",
    ),
    (
        CANNOT.format("'./train.sh'"),
        LocalFindings(FileState.ABSENT, "/p"),
        "train.sh is not in /p",
        "name",
        "submit",
    ),
    (
        "batchml: cannot run './a.sh': Permission denied",
        LocalFindings(FileState.SENT, "/p", "a.sh"),
        "may not be executed",
        "chmod +x a.sh",
        "-- bash ./a.sh",
    ),
]


@pytest.mark.parametrize(("line", "findings", "said", "fix", "command"), MISSING)
def test_what_is_known_here_says_what_to_do(
    line: str, findings: LocalFindings, said: str, fix: str, command: str
) -> None:
    words = (
        ("./a.sh",) if "a.sh" in line else ("python", "nofile.py" if "nofile" in line else "t.py")
    )
    end = ended(line, command=words, findings=findings)
    assert items_to_search(end)
    found = why_ended(end)
    assert said in found.verdict
    assert fix in found.fix
    assert command in found.command
    assert WORK not in "".join(found.evidence)


@pytest.mark.parametrize(
    ("command", "line", "says", "better"),
    [
        (("pyton", "a b.py"), CANNOT.format("'pyton'"), "Did you mean 'python'?",
         "-- python 'a b.py'"),
        (("python oom.py",), CANNOT.format("'python oom.py'"), "one word", "-- python oom.py"),
        (("echo 'a b'",), CANNOT.format('''"echo 'a b'"'''), "one word", "-- echo 'a b'"),
        (("for i in 1 2; do echo $i; done",), CANNOT.format("'for i in 1 2; do echo $i; done'"),
         "one word", "-- bash -c 'for i in 1 2; do echo $i; done'"),
        (("xyzzy",), CANNOT.format("'xyzzy'"), "no command xyzzy", ""),
    ],
)  # fmt: skip
def test_a_command_that_was_mistyped_is_corrected(
    command: tuple[str, ...], line: str, says: str, better: str
) -> None:
    found = why_ended(ended(line, command=command, code=127))
    assert found.cause == "missing-command"
    assert says in found.verdict
    assert better in found.command


REQUIREMENTS = LocalFindings(FileState.ABSENT, own_file="requirements.txt")


@pytest.mark.parametrize(
    ("findings", "fix"),
    [
        (REQUIREMENTS,
         'Add numpy to requirements.txt. In Python: client.submit(score, ..., image=".").'),
        (replace(REQUIREMENTS, is_listed=True),
         'requirements.txt has numpy. In Python: client.submit(score, ..., image=".").'),
        (LocalFindings(FileState.ABSENT, images=("pytorch",)),
         'The image pytorch has numpy. In Python: client.submit(score, ..., image="pytorch").'),
        (LocalFindings(FileState.ABSENT, requirements="images/python/requirements.txt"),
         "Add numpy to images/python/requirements.txt. Submit the function again."),
    ],
)  # fmt: skip
def test_a_function_without_its_package_is_submitted_again_in_python(
    findings: LocalFindings, fix: str
) -> None:
    command = ("python3", "-m", MODULE, "score")
    found = why_ended(ended(NO_MODULE.format("numpy"), command=command, findings=findings))
    assert (found.fix, found.command) == (fix, "")


def test_a_package_that_the_recipe_has_by_now_is_not_to_be_added_again() -> None:
    findings = LocalFindings(FileState.ABSENT, requirements="requirements.txt", is_newer=True)
    commands = CommandWriter("dev", job=".")
    found = why_ended(ended(NO_MODULE.format("tqdm"), findings=findings, commands=commands))
    assert "requirements.txt has tqdm now, but the run used the image of before" in found.fix
    assert found.command == "batchml submit . --env dev"


def test_a_package_is_found_in_the_lists_of_an_environment_yml(tmp_path: Path) -> None:
    file = tmp_path / "environment.yml"
    file.write_text("dependencies:\n  - python=3.11\n  - pip:\n    - scikit_learn==1\n")
    assert names_package(file, "sklearn") and not names_package(file, "numpy")


SAVED = SavedFile("77", "a", "{checkpoints}/m.pt", params={"n": 1})


@pytest.mark.parametrize(
    ("saved", "params", "command", "again"),
    [
        (SAVED, {"n": 2, "from": "./x/m.pt"}, ("python", "t.py"),
         "rerun --resume 77 -p n=2 -p 'from={checkpoints}/m.pt'"),
        (replace(SAVED, params=None), {"n": 2, "from": "x/m.pt"}, ("python", "t.py"),
         "rerun --resume 77 -p 'from={checkpoints}/m.pt'"),
        (replace(SAVED, is_partial=True), {"n": 1}, ("python", "t.py"),
         "rerun --resume 77 --failed --code"),
        (SAVED, {"n": 2}, ("python", "t.py", "x/m.pt"), "submit . -p n=2"),
        (replace(SAVED, has_resumed=False), {"n": 1}, ("python", "t.py"), "rerun --resume 77"),
    ],
)  # fmt: skip
def test_a_file_that_another_run_has_saved_is_named_as_it_is_after_resume(
    saved: SavedFile, params: dict[str, Any], command: tuple[str, ...], again: str
) -> None:
    findings = LocalFindings(FileState.ABSENT, "/p", saved=saved)
    end = ended(NO_FILE.format("x/m.pt"), command=command, findings=findings,
                commands=CommandWriter(job="."))  # fmt: skip
    found = why_ended(replace(end, run=replace(end.run, params=params)))
    assert "{checkpoints}/m.pt" in found.verdict
    assert found.command == f"batchml {again}"


def test_an_item_of_map_without_its_package_is_mapped_again() -> None:
    command = ("python3", "-m", MODULE, "<lambda>")
    end = ended(NO_MODULE.format("numpy"), command=command, findings=REQUIREMENTS,
                array=Run("a", "t", "q", JobStatus.FAILED, array_size=2))  # fmt: skip
    assert 'client.map(function, ..., image=".")' in why_ended(end).fix


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (("t.py",), "batchml submit --image . t.py"),
        (("sub/t.sh", "a b"), "batchml submit --image . sub/t.sh -- 'a b'"),
        (("mf.py",), "batchml submit --name t --image . mf.py"),
        ((PACKED, "eJwr", "stdin"), ""),
    ],
)
def test_a_script_is_submitted_again_by_its_name(words: tuple[str, ...], again: str) -> None:
    command = (*SCRIPT_RUNNER, *words)
    end = ended(NO_MODULE.format("numpy"), command=command, findings=REQUIREMENTS)
    assert why_ended(end).command == again


TRACEBACK = f"""Traceback (most recent call last):
  File "{WORK}/a.py", line 6, in <module>
    first()
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "{WORK}/train.py", line 11, in go
    raise ValueError(x)
          ^^^^^^^^^^^^^
  File "/usr/lib/python3/json/decoder.py", line 355, in raw_decode
    raise JSONDecodeError(x)
ValueError: lr""".splitlines()


def test_an_exception_is_told_with_its_place_in_the_runs_own_folder() -> None:
    found = why_ended(ended(*TRACEBACK, "cleaning up"))
    assert found.evidence[1:] == ("train.py, line 11, in go: raise ValueError(x)", "ValueError: lr")
    syntax = [f'  File "{WORK}/s.py", line 3', "    x = (", "        ^",
              "SyntaxError: '(' was never closed"]  # fmt: skip
    assert clues.find_raising_frame(syntax) == "s.py, line 3: x = ("
    assert clues.find_raising_frame(["ValueError: lr"]) == ""
    assert clues.find_raising_frame(TRACEBACK[:2]) == ""
    module = [*TRACEBACK[:3], NO_MODULE.format("x")]
    assert "a.py, line 6: first()" in why_ended(ended(*module)).evidence


def test_a_file_that_was_looked_for_in_vain_is_no_cause_of_another_exception() -> None:
    found = why_ended(ended(NO_FILE.format("cache.bin"), "ValueError: lr"))
    assert found.cause == "exception"
    assert why_ended(ended("ok", NO_FILE.format("a.csv"))).cause == "missing-file"


def test_the_end_of_a_run_names_the_ignore_file_that_excludes_what_it_missed(folder: Path) -> None:
    place: Any = SimpleNamespace(home=SimpleNamespace(root=folder / "state"))
    record, run = Record(folder=str(folder)), ended().run
    bad = "RuntimeError: bad data/train.csv"
    assert ".gitignore excludes data/. Add the line" in cause_in_log(place, record, run, [bad])
    for line in (NO_FILE.format("data/train.csv"), "FileNotFoundError: data/train.csv not found."):
        said = cause_in_log(place, record, run, ["epoch 1", line])
        assert said == (
            "data/train.csv was not sent: .gitignore excludes data/. Add the line `!data/` to "
            f"{folder}/.batchmlignore. Put large data into BATCHML_DATA_DIR instead."
        )
        assert cause_in_log(place, None, run, [line]) == "data/train.csv does not exist."
    gone = cause_in_log(place, record, run, [NO_FILE.format("gone.csv")])
    assert gone == "gone.csv does not exist."
    assert cause_in_log(place, record, run, ["epoch 1"]) == ""


def test_on_this_machine_nobody_speaks_of_aws_batch() -> None:
    because = "Job attempt duration exceeded timeout"
    run = Run("1", "t", "q", JobStatus.FAILED, status_reason=because,
              timeout=60)  # fmt: skip
    assert (
        why_ended(EndedRun(run, CommandWriter())).verdict
        == "It ran past its timeout of 60 s, and was stopped."
    )


def test_after_a_refused_submission_last_says_that_it_means_the_run_before(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.intend(Record(key="2a", name="first", env="local"))
    history.add_job_id("2a", "1234")
    place: Any = SimpleNamespace(history=history, env="local", project="")
    assert refused_submission(place, "@last") == ""
    history.intend(Record(key="2b", name="second", env="local"))
    history.add_refusal("2b", "ClientException: no")
    assert refused_submission(place, "@last") == (
        "The submission after it, second, was refused: ClientException: no"
    )
    assert refused_submission(place, "first") == ""


OF_LIGHTGBM = "lightgbm.basic.LightGBMError: Could not open base/work/m.txt"


@pytest.mark.parametrize(
    "lines",
    [
        [OF_LIGHTGBM],
        ["t.py: error: argument --model: can't open 'base/work/m.txt': No such file"],
        ["terminate: cannot read base/work/m.txt.", "Aborted."],
        ["OSError: no weights in /job/base/work/m.txt"],
    ],
)
def test_an_error_in_any_words_that_names_a_file_which_was_not_sent_is_explained(
    tmp_path: Path, lines: list[str]
) -> None:
    inner = tmp_path / "base" / "work"
    inner.mkdir(parents=True)
    (inner / "m.txt").write_text("")
    (inner / ".gitignore").write_text("*.txt\n")
    (tmp_path / ".gitignore").write_text("work/\n")
    (tmp_path / ".git").mkdir()
    found = explained(tmp_path, *lines)
    assert found.verdict == (
        "base/work/m.txt was not sent: .gitignore excludes base/work/ and base/work/m.txt."
    )
    rules = re.findall("`(!.*?)`", found.fix)
    (tmp_path / ".batchmlignore").write_text("\n".join(rules))
    assert "base/work/m.txt" in find_files(tmp_path).files
    assert "was not sent" not in explained(tmp_path, *lines).verdict


@pytest.mark.parametrize(
    "line", ["RuntimeError: no {}", NO_FILE.format("{}"), "Error: cannot read {}"]
)
def test_a_file_outside_of_the_folder_is_not_called_a_wrong_name(folder: Path, line: str) -> None:
    found = explained(folder, line.format("../shared/__init__.py"))
    assert found.cause == "missing-file"
    assert f"it is not in {folder}, and a run gets only that folder" in found.verdict
    assert "BATCHML_DATA_DIR" in found.fix
    assert "name" not in found.fix


def test_files_that_an_error_names_and_that_were_sent_or_are_unknown_are_no_cause(
    folder: Path,
) -> None:
    for line in ("ValueError: train.py 1.5 a/b /etc/passwd", "saved data/train.csv"):
        assert explained(folder, line).cause in ("exception", "exit-code")


def explained(folder: Path, *lines: str) -> Explanation:
    end = ended(*lines)
    return why_ended(
        with_findings(end, items_to_search(end), lambda _, item: search_folder(folder, item))
    )
