"""How runs, sweeps and comparisons show themselves in a notebook.

The dashboard renders them, which stands above their rooms: it is looked up when a notebook first
asks.
"""

from importlib import import_module

_RENDERER = "batchml.dashboard.notebook.cells"


def to_html(value: object) -> str:
    """The value as HTML that needs no script and no style sheet."""
    made: str = import_module(_RENDERER).to_html(value)
    return made
