"""The Course of a sweep: what each of its trials must know, written once for all of them."""

from batchml.client.sweeping.freezing import Frozen
from batchml.runtime.protocol.rungs import rung_steps
from batchml.runtime.protocol.sweep_store import EVERY, LOOK, Course

# On `local`, where the board is a folder and a look at it costs nothing.
LOCAL_EVERY, LOCAL_LOOK = 2.0, 1.0

# Elsewhere wide sweeps speak less often: one controller hears them all, and a bucket's prefix takes
# 3,500 puts and 5,500 lists a second. Of all trials together, in a second:
_MESSAGES, _LOOKS = 20, 100


def course_of(frozen: Frozen, *, is_local: bool) -> Course:
    """What a trial of this sweep must know."""
    spec, job, width = frozen.spec, frozen.job_spec, frozen.spec.limits.parallel
    stop = spec.early_stop
    judged = stop.method in ("asha", "halving") or stop.resume
    return Course(
        key=frozen.key,
        goals=tuple((goal.metric, goal.direction) for goal in spec.goals),
        command=job.command,
        params=dict(job.params),
        patterns=dict(job.metrics),
        step=stop.step,
        method=stop.method,
        rungs=rung_steps(stop.min, stop.max, stop.eta) if judged else (),
        max=stop.max,
        eta=stop.eta,
        resume=stop.resume,
        shape=frozen.shaped.shape.value,
        grace=float(job.checkpoint.grace_seconds),
        every=LOCAL_EVERY if is_local else max(EVERY, width / _MESSAGES),
        look=LOCAL_LOOK if is_local else max(LOOK, width / _LOOKS),
        attempts=job.retry.attempts,
        retries=tuple(job.retry.on),
    )
