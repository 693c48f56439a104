"""A report's three files."""

from pathlib import Path

from batchml.clock import Clock, SystemClock
from batchml.sweep.report.page import page
from batchml.sweep.report.subject import Subject
from batchml.sweep.report.tables import to_csv, to_json
from batchml.sweep.state import SweepState


def write_report(
    subject: Subject, state: SweepState, path: Path, clock: Clock | None = None
) -> Path:
    """Write the page to `path`, and beside it the same name as `.csv` and `.json`; the page's path.

    Each replaces an older one whole. Raises OSError.
    """
    from batchml.runtime.storage.files import write_atomically

    now = (clock or SystemClock()).now()
    path.parent.mkdir(parents=True, exist_ok=True)
    table, document = beside(path)
    write_atomically(str(table), to_csv(subject, state, now).encode(), 0o644)
    write_atomically(str(document), to_json(subject, state, now).encode(), 0o644)
    text = page(subject, state, now, (table.name, document.name))
    write_atomically(str(path), text.encode(), 0o644)
    return path


def beside(path: Path) -> tuple[Path, Path]:
    """Where the CSV and the JSON file of a report lie."""
    return path.with_suffix(".csv"), path.with_suffix(".json")
