"""docs/slurm.md: its options and its script are what it says."""

import re
from pathlib import Path

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.jobs import slurm
from batchml.runs.options import to_request
from batchml.runs.scripts import apply_script
from tests.support.fakes import FakeClock

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
        names |= {slurm.SHORT[letter] for letter in re.findall(r"`-([A-Za-z])\b", option)}
        assert names
        if becomes.startswith("passed over"):
            assert names <= slurm.PASSED_OVER.keys()
        elif becomes.startswith("mistakes"):
            assert names <= slurm.REFUSED.keys()
        else:
            read |= names
    assert read == slurm.READ | slurm.READ_BARE


def test_its_script_is_what_it_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"```bash\n(#!.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.sh").write_text(script)
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    context = Context(load_settings(environ, tmp_path, None), FakeClock(), tmp_path)
    said: list[str] = []
    order = apply_script(context, to_request("train.sh", {"command": ["0.1"]}), said)
    assert (order.array, order.changes["image"], order.tags) == (3, "pytorch", {"team": "vision"})
    assert order.changes["resources"] == {"vcpus": 2, "memory": "4096 MiB"}
    assert order.changes["timeout"] == "3600s"
    assert said == re.findall(r"^(train\.sh, line .*)$", PAGE, re.MULTILINE)
