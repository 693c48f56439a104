"""What Batch and batchml tell a program through its environment, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional

DEFAULT_GRACE = 30  # seconds from TERM to KILL: ECS_CONTAINER_STOP_TIMEOUT's default


class RuntimeEnv(NamedTuple):
    """The attempt that this process belongs to. Paths are empty where nothing was set."""

    code: str
    output_dir: str
    checkpoint_dir: str
    grace: float  # seconds from the stop signal to the kill
    log_marks: bool

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RuntimeEnv:
        """From `os.environ`, or any mapping like it."""
        return cls(
            code=environ.get("BATCHML_CODE", ""),
            output_dir=environ.get("BATCHML_OUTPUT_DIR", ""),
            checkpoint_dir=environ.get("BATCHML_CHECKPOINT_DIR", ""),
            grace=float(_number(environ.get("BATCHML_GRACE"), DEFAULT_GRACE)),
            # Outside a run the output is for a person.
            log_marks="AWS_BATCH_JOB_ID" in environ,
        )


def _number(text: Optional[str], default: int) -> int:
    """A whole number of few digits; anything else, which a user may have set, is the default."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else default
