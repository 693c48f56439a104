"""The files that differ between the code packages of two runs."""

import subprocess
from pathlib import Path

import pytest

from batchml.jobs.code import pack
from batchml.jobs.code_diff import (
    MAX_TEXT,
    CodeFile,
    FileDifference,
    compare_packages,
    diff_text,
    read_package,
)


def differences(left: dict[str, bytes], right: dict[str, bytes]) -> dict[str, FileDifference]:
    packages = ({name: CodeFile(data) for name, data in each.items()} for each in (left, right))
    return {each.name: each for each in compare_packages(*packages)}


def test_a_changed_line_is_shown_with_its_neighbours() -> None:
    found = differences({"a.py": b"x\nlr = 1\ny\n"}, {"a.py": b"x\nlr = 2\ny\n"})["a.py"]
    assert found.change == "changed"
    assert found.lines == (
        "--- a/a.py", "+++ b/a.py", "@@ -1,3 +1,3 @@", " x", "-lr = 1", "+lr = 2", " y",
    )  # fmt: skip


def test_files_that_came_or_went_are_shown_and_the_others_are_not() -> None:
    found = differences(
        {"same": b"1", "old": b"1\n", "gone": b""}, {"same": b"1", "new": b"1\n", "": b""}
    )
    assert {name: each.change for name, each in found.items()} == {
        "": "added", "gone": "removed", "new": "added", "old": "removed",
    }  # fmt: skip
    assert found["new"].lines[:2] == ("--- /dev/null", "+++ b/new")
    assert found["gone"].lines == ("--- a/gone", "+++ /dev/null")


@pytest.mark.parametrize(
    ("left", "right", "why"),
    [
        (b"\0", b"\0\0", "binary, 1 B and 2 B"),
        (b"\xff", b"text", "binary, 1 B and 4 B"),
        (b"x" * (MAX_TEXT + 1), b"y", "too large to compare, 513 KiB and 1 B"),
        (b"\n" * 20_001, b"y", "too large to compare, 20 KiB and 1 B"),
    ],
)
def test_files_that_no_line_diff_can_show_are_named(left: bytes, right: bytes, why: str) -> None:
    found = differences({"f": left}, {"f": right})["f"]
    assert (found.lines, found.why) == ((), why)
    assert diff_text([found]) == [f"f: changed ({why})"]


def test_a_program_that_became_executable_is_named() -> None:
    (found,) = compare_packages({"run": CodeFile(b"x")}, {"run": CodeFile(b"x", True)})
    assert diff_text([found]) == ["run: mode (executable now)"]


def test_a_long_diff_is_cut_and_says_how_much_is_missing() -> None:
    found = list(differences({}, {"f": b"line\n" * 100}).values())
    assert len(diff_text(found)) == 103
    assert diff_text(found, 10)[10:] == ["... 93 more lines of 1 files"]
    assert diff_text(found, 103) == diff_text(found)


def test_patch_turns_the_one_code_into_the_other(tmp_path: Path) -> None:
    """Also for a last line without an end, and for the separators that str.splitlines knows."""
    texts = ["a\nb\nc", "a\nB\nc", "a\x0cb\u2028c\r\nd\n", "a\x0cb\u2028C\r\nd"]
    for before in texts:
        for after in texts:
            folder = tmp_path / f"{texts.index(before)}-{texts.index(after)}"
            folder.mkdir()
            (folder / "f").write_bytes(before.encode())
            lines = diff_text(
                list(differences({"f": before.encode()}, {"f": after.encode()}).values())
            )
            text = "".join(f"{line}\n" for line in lines).encode()
            subprocess.run(
                ["git", "apply", "--allow-empty", "-"], cwd=folder, input=text, check=True
            )
            assert (folder / "f").read_bytes() == after.encode()


def test_an_archive_is_read_as_it_was_packed(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "sub").mkdir(parents=True)
    (code / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (code / "sub" / "run.sh").chmod(0o755)
    (code / "a.py").write_text("x\n")
    (tmp_path / "1.tar.gz").write_bytes(pack(code).data)
    assert read_package(tmp_path / "1.tar.gz") == {
        "a.py": CodeFile(b"x\n"), "sub/run.sh": CodeFile(b"#!/bin/sh\n", True),
    }  # fmt: skip
