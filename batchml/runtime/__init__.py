"""The part of batchml that runs inside containers. It imports only Python's standard library (3.8).

A program need not call anything here. It may: `report(step=3, loss=0.5)` records metrics;
`progress(3, waited=0.02)` shows which of many ranks is slow; `should_stop()` is True once the run
is to save and stop; `checkpoint.save` and `checkpoint.newest` (batchml.runtime.checkpoint) save and
find checkpoints.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.stopping import should_stop
    from batchml.runtime.telemetry.heartbeat import progress
    from batchml.runtime.telemetry.metrics import report

__all__ = ["progress", "report", "should_stop"]

_MODULES = {
    "progress": "batchml.runtime.telemetry.heartbeat",
    "report": "batchml.runtime.telemetry.metrics",
    "should_stop": "batchml.runtime.entry.stopping",
}


def __getattr__(name: str) -> object:
    """Import a function when a program first uses it: importing this package loads nothing else."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not by `importlib`, which would load `warnings` as well.
    return getattr(__import__(_MODULES[name], fromlist=[name]), name)
