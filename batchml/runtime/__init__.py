"""What runs inside the container of a run: the standard library only, Python 3.8 and later.

A program needs none of it. For programs that want more, `report(step=3, loss=0.5)` records metrics;
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


def __getattr__(name: str) -> object:
    if name == "report":
        from batchml.runtime.telemetry.metrics import report

        return report
    if name == "progress":
        from batchml.runtime.telemetry.heartbeat import progress

        return progress
    if name == "should_stop":
        from batchml.runtime.entry.stopping import should_stop

        return should_stop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
