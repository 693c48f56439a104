"""A wave of trials -> the requests of its job. Pure."""

from typing import Any

from batchml.aws.batch.requests import Submission, Travel, submission
from batchml.client.sweeping.freezing import Frozen
from batchml.model.names import to_name
from batchml.model.record import Record
from batchml.sweep.events import Wave

HELD = "batchml-"  # begins the name of the consumable resource that holds a sweep's width

# What a job's command is where the template of the trials' has too many words to be shown. The
# runtime takes the template from the board either way.
BY_TRIAL = "batchml-trial"
_LONGEST = 1024  # characters of a template that is shown


def held_name(key: str) -> str:
    return f"{HELD}{key}"


def wave_requests(
    frozen: Frozen, wave: Wave, size: int, width: int, *, after: str = "", is_held: bool = False
) -> Submission:
    """The requests of a wave's job: of an array, unless `size` is 1.

    `width`: bytes of a line of the manifest. `after`: the job that has to succeed first. `is_held`:
    each child needs one of the sweep's consumable resource. Raises ConfigError for a job whose
    variables are too long.
    """
    job = frozen.job_spec
    places = {
        "BATCHML_SWEEP": frozen.board,
        "BATCHML_WAVE": str(wave.number),
        "BATCHML_WAVE_WIDTH": str(width),
    }
    if wave.rung is not None:
        places["BATCHML_RUNG"] = str(wave.rung)
    travel = Travel(
        key=wave.key,
        name=wave_name(frozen, wave),
        code=frozen.code,
        store=f"{frozen.runs}/{wave.key}" if frozen.runs else "",
        documents=frozen.documents,
        env={**frozen.environ, **places},
        tags={**frozen.tags, "batchml:key": wave.key},
        depends_on=(after,) if after else (),
        array=size if size > 1 else None,
        consumables={held_name(frozen.key): 1} if is_held else {},
        command=_command(job.command),
    )
    return submission(
        job, image=frozen.image, queue=frozen.queue, travel=travel, platform=frozen.platform
    )


def wave_name(frozen: Frozen, wave: Wave) -> str:
    """What people see in `ls`: `lenet-w1`."""
    return to_name(f"{frozen.name}-w{wave.number}")


def wave_record(frozen: Frozen, wave: Wave, size: int, requests: Submission) -> Record:
    """What the history keeps of a wave's job on the machine that submits it."""
    job = frozen.job_spec
    return Record(
        key=wave.key,
        name=wave_name(frozen, wave),
        job_name=requests.submit["jobName"],
        env=frozen.env,
        queue=requests.submit["jobQueue"],
        folder=frozen.folder,
        command=job.command,
        tags=requests.submit["tags"],
        commit=frozen.commit,
        image=frozen.image,
        vcpus=job.resources.vcpus,
        memory_mib=job.resources.memory_mib,
        gpus=job.resources.gpus,
        array_size=size if size > 1 else 0,
        patterns=job.metrics,
        code=frozen.code,
    )


def first_requests(frozen: Frozen, size: int) -> dict[str, Any]:
    """The requests of the first wave as they are shown to people: nothing of it is sent."""
    wave = Wave(number=1, at=frozen.created_at, key=frozen.key, trials=())
    requests = wave_requests(frozen, wave, size, 0, is_held=size > frozen.spec.limits.parallel)
    return {"RegisterJobDefinition": requests.register, "SubmitJob": requests.submit}


def _command(template: tuple[str, ...]) -> tuple[str, ...]:
    """The template for people to see: a trial's own runtime fills it in."""
    return template if sum(map(len, template)) <= _LONGEST else (BY_TRIAL,)
