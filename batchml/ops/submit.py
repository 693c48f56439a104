"""Submit one job: fit it, make its requests, send them."""

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch import BatchApi
from batchml.aws.requests import Submission, registration
from batchml.errors import ConfigError, NotFound, ServiceError
from batchml.model.job import JobSpec
from batchml.model.names import bare_name


class Capacity(Struct, frozen=True):
    """What a single machine has. Memory in MiB."""

    vcpus: int
    memory_mib: int
    gpus: int


class Fitted(Struct, frozen=True):
    """A job that fits, and what had to be cut for it, in words."""

    spec: JobSpec
    cuts: tuple[str, ...]


def fit(spec: JobSpec, capacity: Capacity) -> Fitted:
    """Cut what a job asks for down to what the machine has."""
    wanted = spec.resources
    cuts: list[str] = []
    vcpus = min(wanted.vcpus, capacity.vcpus)
    if vcpus < wanted.vcpus:
        cuts.append(f"{_count(vcpus, 'vCPU')} instead of {wanted.vcpus}")
    memory: str | int = wanted.memory
    if wanted.memory_mib > capacity.memory_mib:
        memory = capacity.memory_mib
        cuts.append(f"{_gib(capacity.memory_mib)} of memory instead of {_gib(wanted.memory_mib)}")
    gpus = min(wanted.gpus, capacity.gpus)
    if gpus < wanted.gpus:
        cuts.append(f"{_count(gpus, 'GPU') if gpus else 'no GPU'} instead of {wanted.gpus}")
    resources = replace(wanted, vcpus=vcpus, memory=memory, gpus=gpus)
    return Fitted(replace(spec, resources=resources), tuple(cuts))


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def refuse_cuts(fitted: Fitted) -> None:
    """Raise ConfigError when anything had to be cut (`--strict-resources`)."""
    if fitted.cuts:
        name = fitted.spec.name
        raise ConfigError(
            name, [f"resources: this machine would give {cut}." for cut in fitted.cuts]
        )


def submit(api: BatchApi, requests: Submission, now: float, share: str = "") -> str:
    """Send the run; its job id. One call, when AWS has the definition already.

    A queue with fair share takes only runs that say whose they are: what names none is then sent
    again for `share`. `now` in seconds since the epoch. Raises ServiceError when AWS refuses.
    """
    try:
        return _submit(api, requests, now)
    except ServiceError as error:
        if not share or "shareIdentifier" in requests.submit or not _asks_for_share(error):
            raise
    named = {**requests.submit, "shareIdentifier": share}
    return _submit(api, replace(requests, submit=named), now)


def _asks_for_share(error: ServiceError) -> bool:
    text = error.message.lower()
    return "shareidentifier" in text or "share identifier" in text


def _submit(api: BatchApi, requests: Submission, now: float) -> str:
    try:
        return api.submit(requests.submit)
    except ServiceError as error:
        name, queue = requests.register["jobDefinitionName"], requests.submit["jobQueue"]
        if error.code != "ClientException":
            raise
        if api.has_definition(name):
            queues = api.queues()
            if bare_name(queue) not in queues:
                hint = "Choose one with --queue, or make it: batchml queue create."
                raise NotFound("Job queue", queue, queues, hint) from error
            raise
    api.register(registration(requests.register, now))
    return api.submit(requests.submit)
