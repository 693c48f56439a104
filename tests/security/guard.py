"""CloudFormation Guard over templates, run by the Python of .venv-scan.

Reads {name: template} as JSON, writes {name: {"failed": [rule], "passed": [rule]}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

RULES = Path(__file__).with_name("rules.guard")


def judge(templates: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    rules = RULES.read_text("utf-8")
    return {name: _report(template, rules) for name, template in templates.items()}


def _report(template: dict[str, Any], rules: str) -> dict[str, list[str]]:
    from cfn_guard_rs import run_checks  # type: ignore[import-not-found]

    try:
        report = run_checks(template, rules)
    except json.JSONDecodeError:
        # Version 0.3.3 loses the beginning of a long answer, and only failures make it long.
        return {"failed": ["unreadable"], "passed": []}
    failed = [each.Rule.name for each in report.not_compliant]
    return {"failed": failed, "passed": list(report.compliant)}


if __name__ == "__main__":
    json.dump(judge(json.load(sys.stdin)), sys.stdout)
