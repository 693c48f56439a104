"""The scanners, which live in an environment of their own: `make .venv-scan/installed`."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.security.cloudformation import ROOT, Template
from tests.security.guard import RULES
from tests.support.needs import unavailable

SCANNERS = ROOT / ".venv-scan"


def need_scanners() -> None:
    """Skip, visibly, without the scanners; fail where they are required."""
    if not (SCANNERS / "installed").exists():
        unavailable("no scanners: make .venv-scan/installed")


def cfn_lint(*files: Path) -> list[str]:
    """What cfn-lint says, warnings included: `W3037 roles.yaml: ...`."""
    done = _run("cfn-lint", "--format", "json", "--non-zero-exit-code", "warning", *files)
    found = json.loads(done.stdout or "[]")
    assert found or done.returncode == 0, done.stderr
    return [
        f"{each['Rule']['Id']} {Path(each['Filename']).name}: {each['Message']}" for each in found
    ]


def checkov(files: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """{"passed", "failed", "skipped", "unread"} of one run over all files, offline."""
    paths = [part for file in files for part in ("-f", file)]
    done = _run(
        "checkov", "--skip-download", "--framework", "cloudformation", "--output", "json", *paths,
        env={"PATH": "/usr/bin:/bin", "LOG_LEVEL": "ERROR", "HOME": str(SCANNERS)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    results = json.loads(done.stdout)["results"]
    return {
        "passed": results["passed_checks"],
        "failed": results["failed_checks"],
        "skipped": results["skipped_checks"],
        "unread": results["parsing_errors"],
    }


def guard(templates: Mapping[str, Template]) -> dict[str, dict[str, list[str]]]:
    """The rules of `rules.guard` that each template failed and passed."""
    script = RULES.with_name("guard.py")
    done = _run("python", script, stdin=json.dumps(templates))
    assert done.returncode == 0, f"CloudFormation Guard has wheels up to 3.12. {done.stderr}"
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def _run(
    program: str, *arguments: str | Path, stdin: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCANNERS / "bin" / program, *arguments],
        input=stdin, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
