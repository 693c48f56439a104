"""How often a sweep's controller acts, and how long it waits; all in seconds."""

from msgspec import Struct


class ControllerIntervals(Struct, frozen=True):
    poll: float  # between two rounds
    poll_at_first: float  # the same, during the first `first_period` of a sweep
    first_period: float
    between_batches: float
    observe: float  # between two calls that ask for the states of jobs
    observe_failures: float  # between two calls that ask which children of an array failed
    silence: float  # from the end of a job until its missing messages are no longer waited for
    patience: float  # during which errors of an unreachable service are tolerated
    lease: float  # during which nobody else may take over from a controller that is silent


LOCAL = ControllerIntervals(
    poll=0.3, poll_at_first=0.3, first_period=0.0, between_batches=0.0,
    observe=1.0, observe_failures=2.0, silence=5.0, patience=60.0, lease=15.0,
)  # fmt: skip
AWS = ControllerIntervals(
    poll=15.0, poll_at_first=5.0, first_period=120.0, between_batches=20.0,
    observe=15.0, observe_failures=60.0, silence=300.0, patience=900.0, lease=90.0,
)  # fmt: skip
