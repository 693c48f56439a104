"""What `submit` does between its flags and its output."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batchml.aws.requests import Submission, Travel, definition, params_variable, submission
from batchml.aws.site import Platform, make_platform, owner_tags
from batchml.client.luggage import Depot, code_folder, find_depot, pack_code, put
from batchml.client.order import Order, Ordered, fit_here, read_order
from batchml.client.place import Place
from batchml.client.runs import select
from batchml.errors import BatchmlError
from batchml.model.gang import GROUP_TAG
from batchml.model.job import JobSpec
from batchml.model.names import new_key, new_token, to_name
from batchml.model.record import Record
from batchml.ops.code import CodeArchive
from batchml.ops.delivery import check_words
from batchml.ops.jobs import find_image, find_job, load_job
from batchml.ops.submit import submit

if TYPE_CHECKING:
    from batchml.client.commit import Commit, Question
    from batchml.client.known import Known
    from batchml.model.gang import Member
    from batchml.ops.gang import Intent

DEFAULT_QUEUE = "default"

Tell = Callable[[str], None]  # hears something, in words


class Prepared(Struct, frozen=True):
    """What is sent, and what the user should know before it is."""

    spec: JobSpec
    requests: Submission
    record: Record
    archive: CodeArchive | None
    image_folder: Path | None
    depot: Depot
    notices: tuple[str, ...] = ()
    known: "Known | None" = None  # of an environment in AWS
    workers: "tuple[Intent, ...]" = ()  # of a gang: its other jobs

    @property
    def name(self) -> str:
        """The name that people see."""
        return to_name(self.spec.name)


class Job(Struct, frozen=True):
    """A job and the reference of its image, which is all that its definition is made of."""

    spec: JobSpec
    image: str
    image_folder: Path | None

    def request(self, platform: Platform) -> dict[str, Any]:
        """The RegisterJobDefinition request."""
        return definition(self.spec, self.image, platform)


def prepare(
    place: Place, order: Order, *, dry_run: bool, images: Mapping[str, str] = {}
) -> Prepared:
    """Work out the requests; nothing is sent and nothing kept.

    `images` are references of groups of a gang whose image is not the one of the job.
    Raises ConfigError, NotFound or UsageError, each with all the mistakes of its input.
    """
    ordered = read_order(place, order)
    question = ask_commit(ordered.folder)
    spec, notices, known = ordered.spec, list[str](), None
    if place.settings.is_local:
        spec = fit_here(place, spec, order.strict, notices)
    else:
        from batchml.client.known import open_known

        known = open_known(place)
    image_folder = find_image(spec.image, place.image_folders)
    depot = find_depot(place, known, spec.image, image_folder)
    if spec.nodes > 1 or spec.launch.kind != "plain":
        from batchml.client.nodeplace import check_nodes

        queue, asks = spec.queue or DEFAULT_QUEUE, not (dry_run or place.settings.is_local)
        check_nodes(place, spec, queue, has_runtime=depot.is_read, asks=asks)
    archive = pack_code(place, order, ordered, depot, notices)
    if spec.retry.attempts > 1:
        notices.append(f"Up to {spec.retry.attempts} attempts, after: {', '.join(spec.retry.on)}.")
    elif spec.nodes > 1:
        notices.append("One attempt: a lost node ends the run. [retry] attempts = 5 lets it go on.")
    commit = question.read() if question else None
    key = new_key(os.urandom)
    travel = Travel(
        key=key,
        code=depot.address(archive),
        store=depot.store(key),
        documents=depot.documents,
        env=place_variables(place) | _budget(place, spec, order, notices),
        tags=_tags(place, order, ordered, key, commit.id if commit else ""),
        share=order.share,
        depends_on=order.after if dry_run else tuple(select(place, order.after)),
        array=order.array,
        token=new_token(os.urandom),
    )
    outputs = known.outputs() if known else {}
    platform = make_platform(place.env, place.settings.environment, outputs)
    run = spec
    workers: list[tuple[Member, Travel]] = []
    if spec.groups:
        from batchml.client.gang import split

        (head, travel), *workers = split(place, order, spec, travel, depot, platform)
        run = head.spec

    def make(spec: JobSpec, travel: Travel) -> tuple[Submission, str]:
        image = images.get(travel.tags.get(GROUP_TAG, ""), "")
        image = image or image_reference(place, spec, image_folder, known)
        queue = place.queue(spec.queue or DEFAULT_QUEUE)
        made = submission(spec, image=image, queue=queue, travel=travel, platform=platform)
        return made, image

    requests, image = make(run, travel)
    if requests.document is not None:
        variables = {name: str(each) for name, each in spec.env.items()}
        check_words(spec.name, spec.argv(), {**params_variable(spec), **variables})
    record = _record(place, order, ordered, run, requests, travel, image, commit)
    intents: list[Intent] = []
    if workers:
        from batchml.client.gang import with_workers

        record, intents = with_workers(record, workers, make)
    return Prepared(
        spec,
        requests,
        record,
        archive,
        image_folder,
        depot,
        tuple(notices),
        known,
        tuple(intents),
    )


def resolve(place: Place, names: Sequence[str]) -> list[Job]:
    """The jobs of these names or folders, with the references of their images.

    Raises ConfigError for a job.toml that is wrong, NotFound for a job, or for an image that was
    not pushed.
    """
    jobs = [find_job(name, place.job_folders, place.here) for name in names]
    specs = [load_job(folder, place.image_folders) for folder in jobs]
    folders = [find_image(spec.image, place.image_folders) for spec in specs]
    return [
        Job(spec, image_reference(place, spec, folder), folder)
        for spec, folder in zip(specs, folders, strict=True)
    ]


def read_platform(place: Place) -> Platform:
    """What the stacks of an environment in AWS give to its job definitions; empty on `local`."""
    outputs: dict[str, str] = {}
    if not place.settings.is_local:
        from batchml.client.known import read_outputs

        outputs = read_outputs(place)
    return make_platform(place.env, place.settings.environment, outputs)


def publish(place: Place, image_folder: Path | None, reference: str = "") -> None:
    """Put an image where the embedded server finds it; one for AWS was pushed before.

    A `reference` that was worked out already saves doing so again.
    """
    if place.settings.is_local and image_folder is not None:
        from batchml.local import images

        if images.find(place.home.images, reference) is None:
            images.publish(place.home.images, image_folder)


def send(place: Place, prepared: Prepared, tell: Tell = lambda _: None) -> str:
    """Put code and image where the run finds them, and submit it, exactly once; the job's id.

    `tell` hears what takes long, in words. Raises what `batchml.ops.submit.submit` does.
    """
    place.connect()  # starting the embedded server makes the state folder, and checks it
    bucket = None
    if not place.settings.is_local:
        from batchml.ops.ratelimit import Bucket

        place.home.prepare()  # the run is remembered there
        bucket = Bucket(place.home.root / "submits")
    publish(place, prepared.image_folder, prepared.record.image)
    try:
        put(place, prepared.depot, prepared.archive, prepared.requests.document, tell)
        record = msgspec.structs.replace(prepared.record, at=int(place.clock.now() * 1000))
        if prepared.workers:
            from batchml.client.gang import send_gang

            job_id = send_gang(place, prepared, record, bucket, tell)
        else:
            job_id = submit(
                place.batch,
                prepared.requests,
                place.history,
                record,
                clock=place.clock,
                bucket=bucket,
                share=own_share(),
                tell=tell,
            )
    except BatchmlError:
        if prepared.known is not None:  # what we know of the environment may be old
            from batchml.client.known import forget

            forget(place)
        raise
    if prepared.known is not None:
        prepared.known.save()
    return job_id


def user_name() -> str:
    """Who works here; empty where the system does not say."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return ""


def own_share() -> str:
    """Whose runs these are where a queue asks for it: the user's name, as AWS Batch takes one."""
    return "".join(char for char in user_name() if char.isascii() and char.isalnum()) or "default"


def announcement(prepared: Prepared, job_id: str) -> str:
    queue = prepared.requests.submit["jobQueue"]
    return f"Submitted job [{prepared.name} - {job_id}] to the job queue [{queue}]"


def as_json(place: Place, prepared: Prepared, job_id: str) -> dict[str, str]:
    request = prepared.requests.submit
    return {
        "jobId": job_id,
        "jobName": request["jobName"],
        "jobQueue": request["jobQueue"],
        "env": place.env,
    }


def shown(prepared: Prepared) -> dict[str, Any]:
    """What `--dry-run` prints: the requests, and the document that one of them names."""
    requests = prepared.requests
    found = {"RegisterJobDefinition": requests.register, "SubmitJob": requests.submit}
    if requests.document is not None:
        found["order"] = msgspec.json.decode(requests.document.data)
    if prepared.workers:
        from batchml.client.gang import shown_workers

        found["groups"] = shown_workers(prepared.workers)
    return found


def ask_commit(folder: Path) -> "Question | None":
    """The commit of the folder; None, and nothing asked or imported, outside a repository."""
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    from batchml.client.commit import Question

    return Question(folder)


def _record(
    place: Place,
    order: Order,
    ordered: Ordered,
    spec: JobSpec,
    requests: Submission,
    travel: Travel,
    image: str,
    commit: "Commit | None",
) -> Record:
    """What is kept of the run on this machine before it is sent."""
    request = requests.submit
    return Record(
        key=travel.key,
        name=to_name(spec.name),
        job_name=request["jobName"],
        env=place.env,
        queue=request["jobQueue"],
        job=str(ordered.folder) if ordered.job else "",
        folder=str(code_folder(ordered) or ""),
        command=tuple(spec.argv()),
        params=dict(spec.params),
        tags=travel.tags,
        commit=commit.id if commit else "",
        dirty=commit.is_dirty if commit else None,
        image=image,
        vcpus=spec.resources.vcpus,
        memory_mib=spec.resources.memory_mib,
        gpus=spec.resources.gpus,
        array_size=travel.array or 0,
        patterns=spec.metrics,
        max_cost=order.max_cost,
        code=travel.code,
        spec=msgspec.to_builtins(ordered.said),
        other=ordered.is_other,
    )


def _tags(place: Place, order: Order, ordered: Ordered, key: str, commit: str) -> dict[str, str]:
    """The user's, and those by which a run is found and known again."""
    ours = {"batchml:key": key, "batchml:commit": commit, "batchml:job": ordered.job}
    if not place.settings.is_local:
        ours |= owner_tags(place.env)
    return {**order.tags, **{name: value for name, value in ours.items() if value}}


def place_variables(place: Place) -> dict[str, str]:
    data = place.settings.data_dir
    return {"BATCHML_DATA_DIR": data.value} if data and place.settings.is_local else {}


def _budget(place: Place, spec: JobSpec, order: Order, notices: list[str]) -> dict[str, str]:
    """What `--max-cost` comes to, as variables of the run."""
    if order.max_cost is None:
        return {}
    from batchml.client.costs import budget_of

    variables, words = budget_of(place, spec, order.max_cost, order.array or 0)
    notices.append(words)
    return variables


def image_reference(
    place: Place, spec: JobSpec, folder: Path | None, known: "Known | None" = None
) -> str:
    if folder is None:
        return spec.image
    if not place.settings.is_local:
        from batchml.model.image import flavor_for
        from batchml.ops.images import pinned, read_recipe

        flavor = flavor_for(spec.resources.gpus)
        if known is None:
            return pinned(place.connect(), folder, flavor)
        tag = read_recipe(folder, flavor).reference
        return known.image(tag, lambda: pinned(place.connect(), folder, flavor))
    from batchml.local import images

    return images.reference(folder)
