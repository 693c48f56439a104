"""The states of a Batch job, in the order in which it goes through them.

Source: AWS Batch User Guide, "Job states".
"""

from enum import StrEnum

# The status reason of jobs and compute environments begins with this while the embedded AWS Batch
# cannot start programs: its disk is read-only, or its installation is gone.
CANNOT_START = "Programs cannot be started on this machine now: "


class JobStatus(StrEnum):
    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    RUNNABLE = "RUNNABLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED)

    @property
    def holds_resources(self) -> bool:
        """True while an attempt occupies vCPUs, memory and GPUs."""
        return self in (JobStatus.STARTING, JobStatus.RUNNING)

    @property
    def order(self) -> int:
        return list(JobStatus).index(self)
