"""Each function of the server that refuses a request has its evidence in docs/behaviours.md."""

import ast
import re
from pathlib import Path

import batchml.local

LOCAL = Path(batchml.local.__file__).parent
DOCS = Path(__file__).parents[2] / "docs" / "behaviours.md"
_REFUSING = ("request_error", "client_error", "check_between")


def refusing(path: Path) -> set[str]:
    """The functions of a module that refuse by themselves, as `module.function`."""
    functions = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    return {
        f"{path.stem}.{function.name}"
        for function in functions
        if function.name not in _REFUSING
        and any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _REFUSING
            for node in ast.walk(function)
        )
    }


def test_every_refusal_is_in_the_table_with_its_evidence() -> None:
    text = DOCS.read_text().partition("## Checks that are stricter than botocore's")[2]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert all(cell.strip() for row in rows for cell in row)
    listed = {name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row[1])}
    modules = [*LOCAL.glob("batch/operations/*.py"), LOCAL / "batch" / "reads.py"]
    assert listed == set().union(*map(refusing, modules))
