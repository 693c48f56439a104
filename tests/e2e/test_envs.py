"""env list, show, use."""

import tomllib
from pathlib import Path

import pytest

from batchml.config.environments import with_default
from tests.support.cli import Cli

FILE = """# Ours.
default = "dev"   # the usual one
[env.dev]
region = "us-east-1"
[env.dev.compute.gpu]
instance_types = ["g5"]
max_vcpus = 8
[env.prod]
region = "eu-central-1"
profile = "research"
"""


@pytest.mark.parametrize(
    "text",
    [
        FILE,
        FILE.replace('default = "dev"   # the usual one\n', ""),
        "  default='dev'\n" + FILE.partition("\n")[2].partition("\n")[2],
        "",
        '[env.dev]\nregion = "x"\ndefault = "not the file\'s"\n',
    ],
    ids=["as usual", "none", "other quotes", "empty", "in a table"],
)
def test_only_the_default_of_the_file_changes(text: str) -> None:
    changed = with_default(text, "prod")
    before, after = tomllib.loads(text), tomllib.loads(changed)
    assert after == {**before, "default": "prod"}
    assert set(text.splitlines()) - set(changed.splitlines()) <= {
        line for line in text.splitlines() if "default" in line
    }
    assert ("# the usual one" in changed) == ("# the usual one" in text)


def test_environments_are_listed_shown_and_chosen(cli: Cli) -> None:
    path = cli.folder / "batchml.toml"
    path.write_text(FILE)
    found = {each["env"]: each for each in cli("env", "list", "--json").json}
    assert {name for name, each in found.items() if each["isDefault"]} == {"dev"}
    assert found["dev"]["compute"] == ["gpu"]
    shown = {each["key"]: each for each in cli("env", "show", "--json").json}
    assert shown["region"] == {"key": "region", "value": "us-east-1", "source": str(path)}
    assert shown["profile"]["source"] == "default"
    assert shown["env"]["source"] == str(path)
    assert cli("env", "show", "--env", "prod", "--json").json[0]["source"] == "flag --env"
    done = cli("env", "use", "prod")
    assert (done.code, "prod is the default now" in done.out) == (0, True)
    assert cli("env", "show", "--json").json[0]["value"] == "prod"
    assert "# the usual one" in path.read_text()
    unknown = cli("env", "use", "nope")
    assert (unknown.code, "'nope' does not exist" in unknown.err) == (1, True)
    assert "prod" in cli("env", "list").out


def test_without_a_file_there_is_nothing_to_write_it_in(cli: Cli, tmp_path: Path) -> None:
    done = cli("env", "use", "local")
    assert (done.code, "batchml init" in done.err) == (2, True)
    assert cli("env", "list").code == 0
