"""Describe a notebook for `show`: the command that returns to it, or why it ended."""

from typing import TYPE_CHECKING

from batchml.errors import BatchmlError
from batchml.model.group import HELD_TAG, NOTEBOOK

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.model.run import Run

_PREFIX = "batchml: "  # of the lines that the notebook's program logs


def describe_notebook(context: "Context", run: "Run") -> str:
    """Return the command that returns to a notebook, or its last message; "" for other runs.

    For a notebook that has ended, its log is read.
    """
    if run.tags.get(HELD_TAG) != NOTEBOOK:
        return ""
    if run.status.is_terminal:
        return last_message(context, run)
    return f"batchml notebook {run.job_id}{context.env_option}"


def last_message(context: "Context", run: "Run") -> str:
    """Return the last message of the notebook's program in the log; "" if there is none."""
    try:
        reader = context.open_log(run, run.attempts[-1].log_stream)
        lines = (
            line.message for line in reader.read_backwards() if line.message.startswith(_PREFIX)
        )
        return next(lines, "").removeprefix(_PREFIX)
    except (BatchmlError, IndexError):
        return ""
