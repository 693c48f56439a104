"""Compare two reports of train.py: `python compare.py A B`, each a report.json or its folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from figures import compare


def read(name: str) -> dict[str, Any]:
    path = Path(name)
    file = path / "report.json" if path.is_dir() else path
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def main() -> int:
    if len(sys.argv) != 3:
        print("Usage: python compare.py A B (each a report.json, or its folder)", file=sys.stderr)
        return 2
    try:
        one, other = map(read, sys.argv[1:])
    except (OSError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(compare(one, other)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
