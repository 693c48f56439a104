"""Ignore files mean what they mean to git, which is asked; and names that look like secrets."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchml.jobs.code import find_files
from batchml.jobs.ignore import looks_secret, parse_rule


def git(folder: Path, *words: str, given: bytes = b"") -> bytes:
    env = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(folder)}
    return subprocess.run(
        ["git", *words], cwd=folder, input=given, capture_output=True, env=env, check=True
    ).stdout


_NAME = st.sampled_from(["a", "b", "ab", "a.txt", "b.py", "data", "x y", "[a]", "!n", "#h", "ä"])
_PATH = st.lists(_NAME, min_size=1, max_size=3).map("/".join)
_WORD = st.sampled_from(
    ["a", "b", "*", "**", "?", "*.txt", "data", "[ab]", "[!a]", "a*", "\\!n", "\\#h", "[a-c]b",
     "x y", "***", "[[:alpha:]]", "\\[a\\]", "ä", "*b*", "*a*b*", "*?*", "*[ab]*b", "[]a]", "[a",
     "a\\"]
)  # fmt: skip
_LINE = st.builds(
    lambda no, start, words, end: no + start + "/".join(words) + end,
    st.sampled_from(["", "", "", "!"]), st.sampled_from(["", "", "/"]),
    st.lists(_WORD, min_size=1, max_size=3), st.sampled_from(["", "", "/", " ", "/ "]),
)  # fmt: skip


@settings(
    max_examples=2000 if os.environ.get("BATCHML_TORTURE") else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    paths=st.sets(_PATH, max_size=8),
    lines=st.lists(_LINE, max_size=5),
    below=st.lists(_LINE, max_size=3),
)
def test_what_travels_is_what_git_would_take(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str], lines: list[str], below: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    for path in paths:
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text("x")
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue  # a file stands where a folder would
    (folder / ".gitignore").write_text("\n".join(lines))
    if (folder / "a").is_dir():
        (folder / "a" / ".gitignore").write_text("\n".join(below))
    listed = git(folder, "ls-files", "-z", "--others", "--exclude-standard").decode()
    assert sorted(find_files(folder).files) == sorted(listed.split("\0")[:-1])


@pytest.mark.parametrize("line", ["", "   ", "# comment", "/", "!", "a[", "a\\"])
def test_lines_that_say_nothing_are_passed_over(line: str) -> None:
    assert parse_rule(line) is None


@pytest.mark.parametrize(
    "path",
    [
        ".env", "deep/.env", ".env.production", "server.pem", "tls/site.KEY", "id_rsa",
        "id_ed25519", "credentials", "aws-credentials.json", ".aws/config",
        "home/.ssh/config", ".netrc",
        "service-account-prod.json", "secrets.yaml", ".git-credentials", "terraform.tfstate",
        "kaggle.json",
    ],
)  # fmt: skip
def test_names_of_secrets(path: str) -> None:
    assert looks_secret(path)


@pytest.mark.parametrize(
    "path",
    [
        "train.py", "keys.py", "tokenizer.json", ".env.example", "id_rsa.pub", "monkey.jpg",
        "credentials_test.py", "environment.yml", "secrets.py", "data/key/file", "public.keys",
        "model.keras",
    ],
)  # fmt: skip
def test_names_that_are_none(path: str) -> None:
    assert not looks_secret(path)


@pytest.mark.parametrize("line", ["*a" * 60 + "b", "/" + "**/" * 40 + "z", "?*" * 60 + "b"])
def test_many_stars_do_not_take_for_ever(line: str) -> None:
    rule = parse_rule(line)
    assert rule is not None
    assert not rule.matches("/".join(["a" * 200] * 40), is_folder=False)
