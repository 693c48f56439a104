"""How often a sweep's controller looks at what; all in seconds."""

from msgspec import Struct


class Pace(Struct, frozen=True):
    poll: float  # between two rounds
    young: float  # the same, while the sweep is younger than `youth`
    youth: float
    apart: float  # between two waves
    looks: float  # between two calls that look at jobs
    failures: float  # between two that ask which children of an array failed
    silence: float  # from the end of a job until what it never said is no longer waited for
    patience: float  # for which a service that does not answer is borne
    lease: float  # for which nobody else may take over a controller that is silent


LOCAL = Pace(
    poll=0.3, young=0.3, youth=0.0,
    apart=0.0, looks=1.0, failures=2.0, silence=5.0, patience=60.0, lease=15.0,
)  # fmt: skip
AWS = Pace(
    poll=15.0, young=5.0, youth=120.0,
    apart=20.0, looks=15.0, failures=60.0, silence=300.0, patience=900.0, lease=90.0,
)  # fmt: skip
