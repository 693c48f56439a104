"""What `submit` does between its flags and its output."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import Submission, Travel, definition, params_variable, submission
from batchml.aws.naming import Platform, make_platform, owner_tags
from batchml.client.luggage import Depot, code_folder, find_depot, pack_code, put
from batchml.client.order import DEFAULT_IMAGE, Order, Ordered, fit_here, read_order
from batchml.client.place import Place
from batchml.client.scripts import from_script, true_sizes
from batchml.errors import BatchmlError, ConfigError, NoQueue, Unsettled
from batchml.model.group import GROUP_TAG
from batchml.model.job import JobSpec
from batchml.model.names import new_key, new_token, to_name
from batchml.model.record import Record
from batchml.ops.code import CodeArchive
from batchml.ops.delivery import check_words
from batchml.ops.jobs import find_job, load_job
from batchml.ops.sources import ImageSource, beside, find_source, unused
from batchml.ops.submit import submit

if TYPE_CHECKING:
    from batchml.client.commit import Commit, Question
    from batchml.client.known import Known
    from batchml.model.group import Member
    from batchml.ops.fallback import Plan
    from batchml.ops.gang import Intent

DEFAULT_QUEUE = "default"

Tell = Callable[[str], None]  # hears something, in words


class Prepared(Struct, frozen=True):
    """What is sent, and what the user should know before it is."""

    spec: JobSpec
    requests: Submission
    record: Record
    archive: CodeArchive | None
    image_source: ImageSource | None
    depot: Depot
    notices: tuple[str, ...] = ()
    known: "Known | None" = None  # of an environment in AWS
    workers: "tuple[Intent, ...]" = ()  # of a gang: its other jobs
    plan: "Plan | None" = None  # of a run that may move to another queue
    queue_at: str = ""  # the line of a script that names the queue

    @property
    def name(self) -> str:
        """The name that people see."""
        return to_name(self.spec.name)


class Job(Struct, frozen=True):
    """A job and the reference of its image, which is all that its definition is made of."""

    spec: JobSpec
    image: str
    image_source: ImageSource | None

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
    notices: list[str] = []
    order = from_script(place, order, notices)
    ordered = read_order(place, order)
    question = ask_commit(ordered.folder)
    known = None
    if place.settings.is_local:
        ordered = replace(ordered, spec=fit_here(place, ordered.spec, order.strict, notices))
    else:
        from batchml.client.known import open_known

        known = open_known(place)
    ordered = replace(ordered, spec=true_sizes(ordered.spec))
    spec = ordered.spec
    if place.settings.is_local and spec.queue:  # in AWS, its refusal tells
        from batchml.client.goals import check_queue

        check_queue(place, spec.queue, order.queue_at)
    source = find_source(spec.image, place.image_folders, ordered.folder)
    notices += own_image_notices(ordered)
    depot = find_depot(place, known, spec.image, source)
    _check_nodes(place, spec, depot, dry_run=dry_run)
    archive = pack_code(place, order, ordered, depot, notices)
    notices += _attempts(spec)
    commit = question.read() if question else None
    travel = _travel(place, order, ordered, depot, archive, commit, notices, dry_run=dry_run)
    outputs = known.outputs() if known else {}
    platform = make_platform(place.env, place.settings.environment, outputs)
    workers: list[tuple[Member, Travel]] = []
    run = spec
    if spec.groups:
        from batchml.client.gang import split

        (head, travel), *workers = split(place, order, spec, travel, depot, platform)
        run = head.spec

    def make(spec: JobSpec, travel: Travel) -> tuple[Submission, str]:
        image = images.get(travel.tags.get(GROUP_TAG, ""), "")
        image = image or image_reference(place, spec, source, known)
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
    plan: Plan | None = None
    if spec.fallback.queue:
        from batchml.client.fallback import check_goal, make_plan

        if place.settings.is_local or not dry_run:
            check_goal(place, spec.fallback.queue)
        budget = _budget(place, replace(spec, queue=spec.fallback.queue), order, [])
        record, plan = make_plan(spec, travel, budget, record, make, notices)
    return Prepared(
        spec, requests, record, archive, source, depot, tuple(notices), known, tuple(intents), plan,
        order.queue_at,
    )  # fmt: skip


def _check_nodes(place: Place, spec: JobSpec, depot: Depot, *, dry_run: bool) -> None:
    if spec.nodes > 1 or spec.launch.kind != "plain":
        from batchml.client.nodeplace import check_nodes

        queue, asks = spec.queue or DEFAULT_QUEUE, not (dry_run or place.settings.is_local)
        check_nodes(place, spec, queue, has_runtime=depot.is_read, asks=asks)


def _attempts(spec: JobSpec) -> list[str]:
    if spec.retry.attempts > 1:
        return [f"Up to {spec.retry.attempts} attempts, after: {', '.join(spec.retry.on)}."]
    if spec.nodes > 1:
        return ["One attempt: a lost node ends the run. [retry] attempts = 5 lets it go on."]
    return []


def _travel(
    place: Place,
    order: Order,
    ordered: Ordered,
    depot: Depot,
    archive: CodeArchive | None,
    commit: "Commit | None",
    notices: list[str],
    *,
    dry_run: bool,
) -> Travel:
    """What the run takes along, under a key of its own."""
    spec, key = ordered.spec, new_key(os.urandom)
    travel = Travel(
        key=key,
        code=depot.address(archive),
        store=depot.store(key),
        documents=depot.documents,
        env=place_variables(place) | _budget(place, spec, order, notices),
        tags=_tags(place, order, ordered, key, commit.id if commit else ""),
        share=order.share,
        depends_on=order.after if dry_run or not order.after else _after(place, order, notices),
        array=order.array,
        token=new_token(os.urandom),
    )
    if spec.fallback.queue:
        from batchml.client.fallback import may_move

        travel = may_move(place, order, spec, travel)
    return travel


def _after(place: Place, order: Order, notices: list[str]) -> tuple[str, ...]:
    from batchml.client.after import resolve

    return resolve(place, order.after, notices)


def resolve(place: Place, names: Sequence[str]) -> list[Job]:
    """The jobs of these names or folders, with the references of their images.

    Raises ConfigError for a job.toml that is wrong, NotFound for a job, or for an image that was
    not pushed.
    """
    jobs = [find_job(name, place.job_folders, place.here) for name in names]
    specs = [load_job(folder, place.image_folders) for folder in jobs]
    sources = [
        find_source(spec.image, place.image_folders, folder)
        for spec, folder in zip(specs, jobs, strict=True)
    ]
    return [
        Job(spec, image_reference(place, spec, source), source)
        for spec, source in zip(specs, sources, strict=True)
    ]


def read_platform(place: Place) -> Platform:
    """What the stacks of an environment in AWS give to its job definitions; empty on `local`."""
    outputs: dict[str, str] = {}
    if not place.settings.is_local:
        from batchml.client.known import read_outputs

        outputs = read_outputs(place)
    return make_platform(place.env, place.settings.environment, outputs)


def publish(place: Place, source: ImageSource | None, reference: str = "") -> None:
    """Put an image where the embedded server finds it; one for AWS was pushed before.

    A `reference` that was worked out already saves doing so again.
    """
    if place.settings.is_local and source is not None:
        from batchml.local import images

        if images.find(place.home.images, reference) is None:
            made = images.keep(place.home.images, source.recipe())
            if reference and made != reference:
                raise ConfigError(
                    str(source.folder), ["changed while it was submitted. Submit it again."]
                )


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
    publish(place, prepared.image_source, prepared.record.image)
    plan = prepared.plan and prepared.plan.about(prepared.record)
    if plan is not None:
        from batchml.client.fallback import look_after, plans_of
    try:
        put(place, prepared.depot, prepared.archive, prepared.requests.document, tell)
        record = msgspec.structs.replace(prepared.record, at=int(place.clock.now() * 1000))
        if prepared.workers:
            from batchml.client.gang import send_gang

            job_id = send_gang(place, prepared, record, bucket, tell)
        else:
            if plan is not None:
                plans_of(place).keep(plan)
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
    except BatchmlError as error:
        if plan is not None and not isinstance(error, Unsettled):
            plans_of(place).drop(plan.key)
        if prepared.known is not None:  # what we know of the environment may be old
            from batchml.client.known import forget

            forget(place)
        if isinstance(error, NoQueue):
            from batchml.client.goals import no_queue

            given = prepared.spec.queue or DEFAULT_QUEUE
            raise no_queue(place, given, error.known, prepared.queue_at) from error
        raise
    if prepared.known is not None:
        prepared.known.save()
    if plan is not None:
        look_after(place, plan, job_id, tell)
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
    if prepared.plan is not None:
        moved = prepared.plan
        found["fallback"] = {
            "after": moved.after,
            "SubmitJob": moved.requests.submit,
            "variablesOfTheFirstJob": list(moved.lent),
        }
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
    ours |= order.own_tags
    return {**order.tags, **{name: value for name, value in ours.items() if value}}


def place_variables(place: Place) -> dict[str, str]:
    data = place.settings.data_dir
    return {"BATCHML_DATA_DIR": data.value} if data and place.settings.is_local else {}


def own_image_notices(ordered: Ordered) -> list[str]:
    """What is said where a folder's requirements may be thought to be in the image."""
    if ordered.job:
        told = unused(ordered.spec.image, ordered.folder)
        return [told] if told else []
    found = beside(ordered.folder)
    if ordered.spec.image != DEFAULT_IMAGE or not found:
        return []
    return [f"{' and '.join(found)} here: not used; --image . makes the image of it."]


def _budget(place: Place, spec: JobSpec, order: Order, notices: list[str]) -> dict[str, str]:
    """What `--max-cost` comes to, as variables of the run."""
    if order.max_cost is None:
        return {}
    from batchml.client.costs import budget_of

    variables, words = budget_of(place, spec, order.max_cost, order.array or 0)
    notices.append(words)
    return variables


def image_reference(
    place: Place, spec: JobSpec, source: ImageSource | None, known: "Known | None" = None
) -> str:
    """The reference of a job's image. Raises ConfigError for what it is made from, and NotFound,
    with the command that pushes it, for one that is not in the registry."""
    if source is None:
        return spec.image
    if place.settings.is_local:
        return source.recipe().reference
    from batchml.model.image import flavor_for
    from batchml.ops.images import pinned_recipe

    wanted = source.recipe(flavor_for(spec.resources.gpus))
    said = source.said(place.here)
    if known is None:
        return pinned_recipe(place.connect(), wanted, said)
    return known.image(wanted.reference, lambda: pinned_recipe(place.connect(), wanted, said))
