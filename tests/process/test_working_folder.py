"""Files that a command writes to its working folder are kept with the run, and found by retries."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from batchml.runtime.checkpoint.resume import ResumeSource
from batchml.runtime.entry import working_folder
from batchml.runtime.entry.working_folder import (
    GIB,
    DiskRoom,
    KeepRule,
    KeptPlace,
    WorkingFolder,
    WorkingFolderKeeper,
    choose_files,
    watch_working_folder,
)
from batchml.runtime.protocol.variables import ARRAY_MAP, RuntimeEnv
from tests.process.test_runtime_run import JOB, run, start
from tests.support.fault_world import fill_disk
from tests.support.local_server import wait_for


def working(folder: Path, *kept: Path) -> WorkingFolder:
    return WorkingFolder(str(folder), [str(path) for path in kept])


def write(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)


def test_what_is_new_or_changed_is_named_the_largest_first(tmp_path: Path) -> None:
    write(tmp_path, code=9, model=3)
    before = working(tmp_path)
    assert before.describe_leftovers() == ""
    write(tmp_path, model=4096)
    assert before.describe_leftovers() == (
        "model (4.0 KiB) was written to the working folder, which is not kept: "
        "write it to BATCHML_OUTPUT_DIR"
    )
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs", a=5, b=6)
    write(tmp_path, c=1)
    told = before.describe_leftovers()
    assert told.startswith("model (4.0 KiB), logs/b (6 B), logs/a (5 B) and 1 more were written")
    write(tmp_path, d=1)
    assert "and 2 more were" in before.describe_leftovers()
    assert len(told.splitlines()) == 1


def test_caches_links_and_what_is_kept_are_not_missed(tmp_path: Path) -> None:
    kept = tmp_path / "out"
    before = working(tmp_path, kept)
    for name in ("__pycache__", "out", ".cache"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, file=1)
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path, **{".batchml-metrics": 1})
    assert before.describe_leftovers() == ""
    inside = working(kept, tmp_path)
    write(kept, more=1)
    assert inside.describe_leftovers() == ""


def test_of_a_folder_with_too_much_in_it_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_folder, "MAX_SCANNED", 5)
    before = working(tmp_path)
    write(tmp_path, **{f"n{number}": 1 for number in range(6)})
    assert before.describe_leftovers() == ""
    assert before.why_unread.startswith("the working folder has more than 5 files: write to ")
    assert working(tmp_path).describe_leftovers() == ""


def test_a_folder_that_was_moved_away_is_no_folder_with_too_much_in_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    before = working(tmp_path / "work")
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert before.changed() is None
    assert "the working folder cannot be read: " in before.why_unread


def test_outside_a_run_and_in_the_workspace_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert watch_working_folder(RuntimeEnv.read({}), {}, "", in_aws=False) is None
    for workspace, expected in ((str(tmp_path.parent), ""), ("", "new (1 B) was")):
        found = watch_working_folder(
            RuntimeEnv.read({"AWS_BATCH_JOB_ID": JOB, "BATCHML_WORKSPACE": workspace}),
            {}, "", in_aws=False,
        )  # fmt: skip
        assert found is not None
        write(tmp_path, new=1)
        assert found.describe_leftovers().startswith(expected) and bool(
            found.describe_leftovers()
        ) == bool(expected)
        (tmp_path / "new").unlink()


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def attempt(
    tmp_path: Path, script: str, number: int = 1, env: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The lines of one attempt in a fresh working folder with one file of code."""
    work = tmp_path / f"work{number}-{len(list(tmp_path.iterdir()))}"
    work.mkdir()
    write(work, code=1)
    variables = {"AWS_BATCH_JOB_ID": JOB, "AWS_BATCH_JOB_ATTEMPT": str(number)}
    folders = {"BATCHML_OUTPUT_DIR": str(tmp_path / "out")}
    _, lines = run(work, "sh", "-c", script, **{**folders, **variables, **env})
    return [line.decode() for line in lines]


def test_new_and_changed_files_become_outputs_of_the_run(tmp_path: Path) -> None:
    script = "mkdir -p runs/a .git; echo ab > runs/a/log; echo x >> code; touch .git/c"
    lines = attempt(tmp_path, f"{script}; ln -s runs/a/log latest; ln -s /etc/passwd far; exit 3")
    assert names_below(tmp_path / "out") == ["work/code", "work/latest", "work/runs/a/log"]
    assert lines[0] == (
        "batchml notice: code (3 B), latest (3 B) and runs/a/log (3 B) of the working folder are "
        f"kept: batchml get {JOB}"
    )
    assert lines[1].endswith("code=3 lines=1")


def test_a_child_that_runs_again_names_the_number_that_it_had(tmp_path: Path) -> None:
    env = {"AWS_BATCH_JOB_ID": f"{JOB}:1", "AWS_BATCH_JOB_ARRAY_INDEX": "1", ARRAY_MAP: "1-2 5"}
    lines = attempt(tmp_path, "touch new", env=env)
    assert lines[0].endswith(f"is kept: batchml get {JOB}:2")


def test_a_retry_finds_what_the_attempt_before_left(tmp_path: Path) -> None:
    attempt(tmp_path, "echo one > a; echo two > b; touch -d 2001-01-01 a")
    lines = attempt(tmp_path, "cat a b; stat -c %y a; rm b; echo three >> a", number=2)
    assert lines[0] == "batchml notice: from the attempt before: a (4 B) and b (4 B)"
    assert lines[1:3] == ["one", "two"] and lines[3].startswith("2001-01-01")
    assert names_below(tmp_path / "out") == ["work/a"]
    assert (tmp_path / "out" / "work" / "a").read_text() == "one\nthree\n"
    assert attempt(tmp_path, "cat a", number=3)[1:3] == ["one", "three"]


def test_a_run_that_resumes_another_starts_with_its_files(tmp_path: Path) -> None:
    """Its own retries find its own files; without any checkpoint or file it does not begin."""
    attempt(tmp_path, "echo one > a")
    (tmp_path / "out").rename(tmp_path / "other")
    stored = tmp_path / "stored" / "output"
    stored.mkdir(parents=True)
    (tmp_path / "other" / "work").rename(stored / "work")
    other = {"BATCHML_RESUME": ResumeSource("id", "n", store=str(stored.parent)).to_json()}
    other["BATCHML_CHECKPOINT_DIR"] = str(tmp_path / "checkpoints")
    lines = attempt(tmp_path, "cat a; echo two >> a", env=other)
    assert lines[:2] == ["batchml notice: from the run before: a (4 B)", "one"]
    assert attempt(tmp_path, "cat a", number=2, env=other)[1:3] == ["one", "two"]
    other["BATCHML_RESUME"] = ResumeSource("id", "n", store=str(tmp_path / "nowhere")).to_json()
    other["BATCHML_CHECKPOINT_DIR"] = str(tmp_path / "new")
    assert "has saved no checkpoint to go on from" in attempt(tmp_path, "true", env=other)[0]


def test_files_at_rest_outlive_an_attempt_that_is_killed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    env = {"BATCHML_OUTPUT_DIR": str(tmp_path / "out"), "BATCHML_KEEP_EVERY": "0.1"}
    script = "echo good > model; sleep 600"
    process = start(work, "sh", "-c", script, AWS_BATCH_JOB_ID=JOB, **env)
    kept = tmp_path / "out" / "work" / "model"
    wait_for(kept.exists, "the file is kept")
    process.kill()
    assert kept.stat().st_nlink == 1  # a link would change when the program saves again
    process.communicate()
    assert "good" in attempt(tmp_path, "cat model", number=2)


def test_half_a_file_does_not_replace_a_whole_one_after_a_kill(tmp_path: Path) -> None:
    kept = tmp_path / "out" / "work"
    script = f"""
    echo whole > model; touch -d 2001-01-01 model
    while [ ! -e {kept}/model ]; do sleep 0.05; done
    printf half > model; echo new > other; kill -9 $$"""
    attempt(tmp_path, script, env={"BATCHML_KEEP_EVERY": "0.1"})
    assert (kept / "model").read_text() == "whole\n" and (kept / "other").read_text() == "new\n"
    attempt(tmp_path, "echo more >> model", number=2)
    assert (kept / "model").read_text() == "whole\nmore\n"


def test_nodes_do_not_overwrite_the_files_of_each_other(tmp_path: Path) -> None:
    def node(index: str, script: str, number: int = 1) -> list[str]:
        of_node = {"AWS_BATCH_JOB_NODE_INDEX": index, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
        return attempt(tmp_path, script, number, of_node)

    node("0", "echo 0 > rank; echo all > snapshot")
    node("1", "echo 1 > rank")
    found = ["node-1/work/rank", "work/rank", "work/snapshot"]
    assert names_below(tmp_path / "out") == found
    assert node("1", "cat rank snapshot", number=2)[1:3] == ["1", "all"]
    assert names_below(tmp_path / "out") == found


def test_a_job_chooses_its_files_or_none(tmp_path: Path) -> None:
    script = "mkdir out data; touch a.pt a.log out/b out/c.pt data/d.pt"
    attempt(tmp_path, script, env={"BATCHML_KEEP": '["*.pt", "out/**", "!data/**"]'})
    assert names_below(tmp_path / "out") == ["work/a.pt", "work/out/b", "work/out/c.pt"]
    (line, _) = attempt(tmp_path, "echo > other", env={"BATCHML_KEEP": "false"})
    assert line.startswith(
        "batchml notice: other (1 B) was written to the working folder, which is"
    )


def test_where_nothing_keeps_files_they_are_named(tmp_path: Path) -> None:
    write(tmp_path, there=1)
    code, lines = run(tmp_path, "sh", "-c", "echo x > model.bin; exit 3", AWS_BATCH_JOB_ID=JOB)
    assert code == 3
    assert lines[0].startswith(b"batchml notice: model.bin (2 B) was written to the working folder")
    assert lines[1].endswith(b"code=3 lines=1")
    assert run(tmp_path, "sh", "-c", "echo x > other")[1] == []


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["*.pt"], ["a.pt", "x/y/b.pt"]),
        (["x/*.pt"], []),
        (["x/**/*.pt", "x/z"], ["x/y/b.pt", "x/z/c"]),
        (["x/"], ["x/y/b.pt", "x/z/c"]),
        (["**", "!*.pt"], ["x/z/c"]),
        (["[ab].pt"], ["a.pt", "x/y/b.pt"]),
        (["[z-a].pt", "?.pt"], ["a.pt", "x/y/b.pt"]),
    ],
)
def test_patterns_are_those_of_gitignore(patterns: list[str], kept: list[str]) -> None:
    rule = KeepRule(True, tuple(patterns))
    assert [name for name in ("a.pt", "x/y/b.pt", "x/z/c") if rule.includes(name)] == kept


def test_of_too_much_the_newest_files_are_kept() -> None:
    files = {"old": (2 * GIB, 1), "new": (4 * GIB, 3), "small": (GIB, 2)}
    chosen = choose_files(files, 5.0 * GIB)
    assert (list(chosen.kept), list(chosen.left_out)) == (["new", "small"], ["old"])
    assert list(choose_files(files, None).kept) == ["new", "small", "old"]


# --- a disk that is nearly full -------------------------------------------------------------------

MIB = 1 << 20


def test_a_copy_leaves_room_for_the_program_and_all_others() -> None:
    disk = DiskRoom(free=10 * GIB, total=100 * GIB)
    files = {"new": (4 * GIB, 3), "large": (5 * GIB, 2), "old": (2 * GIB, 1), "none": (0, 0)}
    assert disk.lacks_for(files) == ["large"]  # 1 GiB stays free, and a copy takes twice its size
    assert DiskRoom(11 * GIB, 100 * GIB).lacks_for(files, is_last=True) == []
    assert DiskRoom(8 * GIB, 100 * GIB).lacks_for(files, is_last=True) == ["large"]
    assert DiskRoom(10 * MIB, 100 * MIB).lacks_for({"a": (2 * MIB, 1), "b": (2 * MIB, 1)}) == ["b"]
    assert DiskRoom().lacks_for(files) == []


def test_files_are_not_copied_where_the_program_would_lack_the_space(small_disk: Path) -> None:
    """At the end they are linked, which takes none."""
    env = {"BATCHML_OUTPUT_DIR": str(small_disk / "out"), "BATCHML_KEEP_EVERY": "0.1"}
    (small_disk / "work").mkdir()
    script = "head -c 2500K /dev/zero > model; read line < go; exit 3"
    os.mkfifo(small_disk / "work" / "go")
    process = start(small_disk / "work", "sh", "-c", script, AWS_BATCH_JOB_ID=JOB, **env)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert line.startswith("batchml notice: model (2.5 MiB) is not kept before the end: the disk")
    assert names_below(small_disk / "out") == []
    (small_disk / "work" / "go").write_text("on")
    left = process.communicate()[0].decode()
    assert process.returncode == 3
    assert left.startswith("batchml notice: model (2.5 MiB) of the working folder is kept")
    assert (small_disk / "out" / "work" / "model").stat().st_nlink == 2


def test_a_full_disk_takes_files_but_not_the_exit_code(small_disk: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (small_disk / "out").mkdir()
    fill_disk(small_disk)
    env = {"BATCHML_OUTPUT_DIR": str(small_disk / "out"), "AWS_BATCH_JOB_ID": JOB}
    code, lines = run(work, "sh", "-c", "head -c 1M /dev/zero > model; exit 3", **env)
    assert code == 3
    assert [line.decode() for line in lines[:-1]] == [
        f"batchml notice: model (1.0 MiB) is not kept: the disk of {small_disk}/out has only 0 B "
        "left"
    ]
    assert lines[-1] == b"::batchml end code=3 lines=1"


def test_a_copy_that_fails_for_want_of_space_is_one_line(small_disk: Path, tmp_path: Path) -> None:
    """A quota, or another program that fills the disk meanwhile."""
    folder, said = tmp_path / "work", list[str]()
    folder.mkdir()
    before = WorkingFolder(str(folder), [])
    write(folder, small=9, model=MIB)
    fill_disk(small_disk)
    keeper = WorkingFolderKeeper(
        before, KeptPlace(str(small_disk), "work/", None, 60.0), {}, JOB, said.append, {},
        room=lambda _: DiskRoom(),
    )  # fmt: skip
    keeper.end(was_killed=False)
    (line,) = said
    assert line.startswith("batchml: 2 files of the working folder could not be kept: ")
    assert line.endswith("No space left on device")
