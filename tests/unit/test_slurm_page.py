"""docs/slurm.md: its options and its script are what it says."""

import re
from pathlib import Path

from batchml.client.client import Client
from batchml.client.place import Place
from batchml.client.scripts import from_script
from batchml.model import slurm_options as options
from batchml.settings import load_settings
from tests.fakes import FakeClock

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "slurm.md").read_text("utf-8")


def rows(heading: str) -> list[tuple[str, str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(row[0], " | ".join(row[1:])) for row in cells[1:]]


def test_every_option_of_its_table_becomes_what_the_table_says() -> None:
    read = set[str]()
    for option, becomes in rows("Options of sbatch"):
        names = set(re.findall(r"--([a-z-]+)", option))
        names |= {options.SHORT[letter] for letter in re.findall(r"`-([A-Za-z])\b", option)}
        assert names
        if becomes.startswith("passed over"):
            assert names <= options.PASSED.keys()
        elif becomes.startswith("mistakes"):
            assert names <= options.REFUSED.keys()
        else:
            read |= names
    assert read == options.READ | options.READ_BARE


def test_its_script_is_what_it_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"```bash\n(#!.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.sh").write_text(script)
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    place = Place(load_settings(environ, tmp_path, None), FakeClock(), tmp_path)
    said: list[str] = []
    order = from_script(place, Client.order("train.sh", command=["0.1"]), said)
    assert (order.array, order.changes["image"], order.tags) == (3, "pytorch", {"team": "vision"})
    assert order.changes["resources"] == {"vcpus": 2, "memory": "4096 MiB", "gpus": None}
    assert order.changes["timeout"] == "3600s"
    assert said == re.findall(r"^(train\.sh, line .*)$", PAGE, re.MULTILINE)
