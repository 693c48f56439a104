"""Submit a prepared run exactly once: first its code and image, then the SubmitJob request."""

from collections.abc import Callable

from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.requests import SubmissionRequests
from batchml.clock import Clock
from batchml.context import Context, Notify, drop_cache
from batchml.errors import BatchmlError, NoQueue, SubmissionUnknown
from batchml.history import History
from batchml.model.run import Record
from batchml.runs.in_flight import InFlight, RateBucket
from batchml.runs.job_images import publish_image
from batchml.runs.options import DEFAULT_QUEUE
from batchml.runs.package import store_package
from batchml.runs.prepare import PreparedRun, no_queue
from batchml.runs.reconcile import settle_abandoned
from batchml.runs.send import send_intent, user_share


def submit_run(context: Context, prepared: PreparedRun, tell: Notify = lambda _: None) -> str:
    """Put code and image where the run finds them, and submit it; the job's id.

    `tell` gets messages about steps that take long. Raises what `submit` does.
    """
    context.connect()  # starting the embedded server makes the state folder, and checks it
    bucket = None
    if not context.settings.is_local:
        context.home.prepare()  # the run is remembered there
        bucket = RateBucket(context.home.root / "submits")
    publish_image(context, prepared.image_source, prepared.record.image)
    plan = prepared.plan and prepared.plan.about(prepared.record)
    if plan is not None:
        from batchml.runs.fallback.watch import plans_of, start_watching
    try:
        store_package(context, prepared.store, prepared.archive, prepared.requests.document, tell)
        if plan is not None:
            plans_of(context).keep(plan)
        job_id = _send(context, prepared, bucket, tell)
    except BatchmlError as error:
        if plan is not None and not isinstance(error, SubmissionUnknown):
            plans_of(context).drop(plan.key)
        if prepared.cache is not None:  # what is kept of the environment may be old
            drop_cache(context)
        if isinstance(error, NoQueue):
            given = prepared.spec.queue or DEFAULT_QUEUE
            raise no_queue(context, given, error.known, prepared.queue_at) from error
        raise
    if prepared.cache is not None:
        prepared.cache.save()
    if plan is not None:
        start_watching(context, plan, job_id, tell)
    return job_id


def _send(context: Context, prepared: PreparedRun, bucket: RateBucket | None, tell: Notify) -> str:
    record = replace(prepared.record, at=int(context.clock.now() * 1000))
    if prepared.workers:
        from batchml.runs.groups.submit import send_group_run

        for each in prepared.workers:
            if each.requests.document is not None:
                store_package(context, prepared.store, None, each.requests.document, tell)
        settle_abandoned(context.batch, context.history, record.env, context.clock, tell)
        return send_group_run(context, prepared.requests, record, prepared.workers, bucket, tell)
    return submit(
        context.batch,
        prepared.requests,
        context.history,
        record,
        clock=context.clock,
        bucket=bucket,
        share=user_share(),
        tell=tell,
    )


def submit(
    api: JobApi,
    requests: SubmissionRequests,
    history: History,
    record: Record,
    *,
    clock: Clock,
    bucket: RateBucket | None = None,
    share: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Send a run exactly once; its job id. One call, when AWS has the definition already.

    `record` has the key that is in the job name of `requests.submit`. It is on disk when the call
    leaves, and its outcome is on disk afterwards. A queue with fair-share scheduling takes only
    jobs with a share identifier: a job without one is sent again with `share`. `bucket` is the rate
    that all processes share, None where there is no limit. Submissions that killed clients left
    open are settled first.

    Raises ServiceError, AccessError, NoQueue or ServiceUnreachable when there is no run;
    SubmissionUnknown when nobody knows; Interrupted after Ctrl-C; OSError when the intent could not
    be kept, and then nothing was sent.
    """
    flights = InFlight.beside(history, record.env)
    settle_abandoned(api, history, record.env, clock, tell)
    with flights.flight(record.key):
        history.intend(record)
        return send_intent(
            api, requests, history, record,
            clock=clock, bucket=bucket, share=share, tell=tell,
        )  # fmt: skip


def announcement(prepared: PreparedRun, job_id: str) -> str:
    queue = prepared.requests.submit["jobQueue"]
    return f"Submitted job [{prepared.name} - {job_id}] to the job queue [{queue}]"


def submitted_json(context: Context, prepared: PreparedRun, job_id: str) -> dict[str, str]:
    request = prepared.requests.submit
    return {
        "jobId": job_id,
        "jobName": request["jobName"],
        "jobQueue": request["jobQueue"],
        "env": context.env,
    }
