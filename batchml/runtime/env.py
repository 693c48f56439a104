"""What Batch and batchml tell a program through its environment, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional

DEFAULT_GRACE = 30  # seconds from TERM to KILL: ECS_CONTAINER_STOP_TIMEOUT's default


class RuntimeEnv(NamedTuple):
    """The attempt that this process belongs to. Paths are empty where nothing was set."""

    run: str  # the job's id, with `:INDEX` for the child of an array
    attempt: int  # from 1
    key: str  # of the submission; empty for jobs that other clients submitted
    code: str  # the archive: a path or an s3:// address
    order: str  # what to run, where it is too long for Batch: a path or an s3:// address
    store: str  # what outlives the run: a folder or an s3:// prefix
    array_index: Optional[int]
    array_size: int  # 0 unless the run is the child of an array
    output_dir: str
    checkpoint_dir: str
    workspace: str
    metrics: str  # the file that `report` appends to
    stop_file: str  # appears when the run should save and stop
    grace: float  # seconds from the stop signal to the kill
    max_seconds: float  # of all attempts together; 0: no limit
    is_run: bool  # False for a person who tries an image out
    sweep: str = ""  # the sweep's board, if this is a trial: a folder or an s3:// prefix
    wave: int = 0  # of the sweep, from 1
    wave_width: int = 0  # bytes of a line of the wave's manifest
    rung: int = 0  # from 0; above it the trial is found by rank, not by index
    moved: str = ""  # the job that it follows, which was cancelled in another queue

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RuntimeEnv:
        """From `os.environ`, or any mapping like it."""
        index = environ.get("AWS_BATCH_JOB_ARRAY_INDEX", "")
        return cls(
            run=environ.get("AWS_BATCH_JOB_ID", environ.get("BATCHML_RUN", "")),
            attempt=_number(environ.get("AWS_BATCH_JOB_ATTEMPT"), 1),
            key=environ.get("BATCHML_KEY", ""),
            order=environ.get("BATCHML_ORDER", ""),
            store=environ.get("BATCHML_STORE", ""),
            array_index=_number(index, 0) if index else None,
            array_size=_number(
                environ.get("BATCHML_ARRAY_SIZE") or environ.get("AWS_BATCH_JOB_ARRAY_SIZE"), 0
            ),
            workspace=environ.get("BATCHML_WORKSPACE", ""),
            metrics=environ.get("BATCHML_METRICS", ""),
            stop_file=environ.get("BATCHML_STOP_FILE", ""),
            max_seconds=float(_number(environ.get("BATCHML_MAX_SECONDS"), 0)),
            code=environ.get("BATCHML_CODE", ""),
            output_dir=environ.get("BATCHML_OUTPUT_DIR", ""),
            checkpoint_dir=environ.get("BATCHML_CHECKPOINT_DIR", ""),
            grace=float(_number(environ.get("BATCHML_GRACE"), DEFAULT_GRACE)),
            is_run="AWS_BATCH_JOB_ID" in environ,
            sweep=environ.get("BATCHML_SWEEP", ""),
            wave=_number(environ.get("BATCHML_WAVE"), 0),
            wave_width=_number(environ.get("BATCHML_WAVE_WIDTH"), 0),
            rung=_number(environ.get("BATCHML_RUNG"), 0),
            moved=environ.get("BATCHML_MOVED", ""),
        )


def _number(text: Optional[str], default: int) -> int:
    """A whole number of few digits; anything else, which a user may have set, is the default."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else default
