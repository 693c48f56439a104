"""A Dockerfile in a job's folder: what it copies decides the image, and what is added to it."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.jobs.image_files import CONDA_DOCKERFILE as OF_CONDA
from batchml.jobs.image_files import add_runtime, copy_sources, instructions, runtime_mistakes
from batchml.jobs.own_image import collect

LIKE = r"""# syntax=docker/dockerfile:1
FROM python:3.12 AS build
ARG WHEELS=wheels
COPY --chown=1:1 pyproject.toml src/ \
    # a word on the way

    other.txt /build/
RUN <<END
COPY not/this /
END
copy ["a b.txt", "./c/*.py", "/x/"]
ADD https://x.org/y.tar.gz git@x.org:z.git /z/
FROM debian:12
COPY --from=build /build /app
ENTRYPOINT ["tini", "--"]
"""


def test_instructions_are_read_as_docker_reads_them() -> None:
    assert [(each.number, each.word) for each in instructions(LIKE)] == [
        (2, "FROM"), (3, "ARG"), (4, "COPY"), (8, "RUN"), (11, "COPY"), (12, "ADD"), (13, "FROM"),
        (14, "COPY"), (15, "ENTRYPOINT"),
    ]  # fmt: skip


def test_what_comes_from_the_folder_is_known() -> None:
    found, mistakes = copy_sources(LIKE)
    assert [each.path for each in found] == [
        "pyproject.toml", "src", "other.txt", "a b.txt", "c/*.py",
    ]  # fmt: skip
    assert mistakes == []


def test_another_escape_is_one() -> None:
    text = "# escape=`\nFROM x:1\nCOPY a `\n  b /\n"
    assert [each.path for each in copy_sources(text)[0]] == ["a", "b"]
    assert "`\n" in add_runtime(text)
    assert "\\\n" not in add_runtime(text)


ODD = """\
FROM x:1
RUN cat <<<$A && echo $((1 << n)) --network x
copy\ta /
COPY --chown=a:b ["b c", "/"]
# a path \\
"""


def test_what_only_looks_like_more_hides_no_file() -> None:
    assert [each.path for each in copy_sources(ODD)[0]] == ["a", "b c"]
    assert list(runtime_mistakes(ODD)) == []


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    return folder


def taken(folder: Path, text: str) -> list[str]:
    context = collect(folder, "Dockerfile", text)
    assert context.mistakes == ()
    return sorted(context.files)


def test_only_what_is_copied_travels(tmp_path: Path) -> None:
    put(
        tmp_path, "a.txt", "src/m.py", "src/__pycache__/m.pyc", "src/deep/n.py", "data/big", "b.txt"
    )
    (tmp_path / "src" / "out").symlink_to("/etc/hostname")
    (tmp_path / "src" / "in").symlink_to("m.py")
    assert taken(tmp_path, "COPY a.txt /\nCOPY src /src\n") == [
        "a.txt", "src/deep/n.py", "src/in", "src/m.py",
    ]  # fmt: skip
    put(tmp_path, ".shown", ".git/config")
    assert taken(tmp_path, "COPY *.txt /\n") == ["a.txt", "b.txt"]
    assert taken(tmp_path, "COPY * /\n")[:2] == [".shown", "a.txt"]
    assert taken(tmp_path, "RUN true\n") == []


def test_dockerignore_counts_from_the_top_and_its_last_line_wins(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", "src/m.py", "src/a.txt", "data/big", "data/small")
    (tmp_path / ".dockerignore").write_text("# words\na.txt\ndata\n!data/small\n")
    assert taken(tmp_path, "COPY . /app\n") == ["data/small", "src/a.txt", "src/m.py"]


def test_what_cannot_be_copied_is_told_with_its_line_all_at_once(tmp_path: Path) -> None:
    put(tmp_path, ".env", "keys/id_rsa", "a.txt")
    text = "FROM x:1\nCOPY none.txt /\nCOPY $FILES /\nCOPY ../up /\nCOPY .env keys /\n"
    told = collect(tmp_path, "Dockerfile", text).mistakes
    assert [each.split(":")[1].strip() for each in told[:3]] == ["line 3", "line 4", "line 2"]
    assert told[3].startswith("Dockerfile: copies .env, keys/id_rsa, named like secrets")


def test_the_runtime_is_there_to_be_copy_sources(tmp_path: Path) -> None:
    assert taken(tmp_path, "COPY batchml /opt/batchml/batchml\n") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FROM x:1\nRUN true \\\n\n# a word\n", "its last line is continued"),
        ("FROM x:1\nENTRYPOINT python train.py\n", "line 2: ENTRYPOINT as a shell command"),
    ],
)
def test_what_could_not_start_a_run(text: str, says: str) -> None:
    (told,) = runtime_mistakes(text)
    assert says in told


@pytest.mark.parametrize(
    "text",
    [
        "RUN true\n",
        "FROM x:1\nRUN --mount=type=cache,target=/c make\n",
        "FROM x:1\nCOPY --chown=1 --chmod=755 a /\n",
        "FROM x:1\nRUN <<'END'\nmake\nEND\n",
    ],
)
def test_the_engine_judges_all_else(text: str) -> None:
    assert list(runtime_mistakes(text)) == []


def test_what_starts_a_run_is_added_and_starts_their_entry_point() -> None:
    text = add_runtime(LIKE)
    assert text.startswith(LIKE.rstrip())
    assert text.endswith(
        "USER 1000:1000\nWORKDIR /job\n"
        'ENTRYPOINT ["python3", "-m", "batchml.runtime.run", "tini", "--"]\n'
    )
    assert "WORKDIR /job" not in add_runtime("FROM x:1\nWORKDIR /app\n")
    assert "WORKDIR /job" in add_runtime("FROM x:1\nWORKDIR /app\nFROM y:1\n"), "of the last stage"
    ours = 'FROM x:1\nENTRYPOINT ["python", "-m", "batchml.runtime.run"]\n'
    assert add_runtime(ours) == ours


def test_what_is_made_of_them_is_a_good_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(OF_CONDA)
    (tmp_path / "Dockerfile.added").write_text(add_runtime("FROM debian:12\nUSER 1000\n"))
    hadolint = Path(sys.executable).with_name("hadolint")
    files = map(str, sorted(tmp_path.iterdir()))
    command = [str(hadolint), "--no-color", "--ignore", "DL3002", *files]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


WORDS = st.sampled_from(
    ["FROM x:1", "COPY", "ADD", "RUN", "<<E", "E", "\\", "\n", " ", "a", "./b/*", "[", '"a",',
     '"b"]',
     "--from=c", "$A", "#", "ENTRYPOINT", '["d"]', "..", "WORKDIR /w"]
)  # fmt: skip


@given(st.lists(WORDS, max_size=25).map("".join))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    found, _ = copy_sources(text)
    assert not any(".." in each.path.split("/") for each in found)
    completed = add_runtime(text)
    last = instructions(completed)[-1]
    if not any("is continued" in each for each in runtime_mistakes(text)):
        assert last.word == "ENTRYPOINT"
        assert "batchml.runtime.run" in last.rest
