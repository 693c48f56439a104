"""Submit a prepared run exactly once: first its code and image, then the SubmitJob request."""

from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionRequests
from batchml.context import Context, Notify, drop_cache
from batchml.errors import BatchmlError, NoQueue, SubmissionUnknown
from batchml.model.run import Record
from batchml.runs.in_flight import InFlight
from batchml.runs.job_images import publish_image
from batchml.runs.package import store_package
from batchml.runs.prepare import PreparedRun, no_queue
from batchml.runs.rate_limit import RateBucket
from batchml.runs.reconcile import settle_abandoned
from batchml.runs.send import Submitter, make_submitter, send_intent


def submit_run(context: Context, prepared: PreparedRun, tell: Notify = lambda _: None) -> str:
    """Store code and image where the run finds them, and submit it; the job's id.

    `tell` gets messages about steps that take long. Raises what `submit` raises.
    """
    context.connect()  # the start of the embedded server creates and checks the state folder
    bucket = None
    if not context.settings.is_local:
        context.home.prepare()  # for the history
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
        if prepared.cache is not None:  # the error may come from outdated values
            drop_cache(context)
        if isinstance(error, NoQueue):
            context.forget_queues()
            spec = prepared.spec
            given = context.choose_queue(spec.queue, spec.resources.gpus)
            raise no_queue(context, given, error.known, prepared.queue_at) from error
        raise
    if prepared.cache is not None:
        prepared.cache.save()
    if plan is not None:
        start_watching(context, plan, job_id, tell)
    return job_id


def _send(context: Context, prepared: PreparedRun, bucket: RateBucket | None, tell: Notify) -> str:
    submitter = make_submitter(context, tell, bucket)
    record = replace(prepared.record, at=int(context.clock.now() * 1000))
    if not prepared.workers:
        return submit(submitter, prepared.requests, record)
    from batchml.runs.groups.submit import SubmitIntent, submit_group_run

    for each in prepared.workers:
        if each.requests.document is not None:
            store_package(context, prepared.store, None, each.requests.document, tell)
    settle_abandoned(submitter, record.env)
    workers = [
        replace(each, record=replace(each.record, at=record.at)) for each in prepared.workers
    ]
    return submit_group_run(submitter, SubmitIntent(prepared.requests, record), workers)


def submit(submitter: Submitter, requests: SubmissionRequests, record: Record) -> str:
    """Send a run exactly once; its job id. One call, if AWS has the job definition already.

    The key of `record` is part of the job name in `requests.submit`. The record is written to disk
    before the call, and its outcome after it. Submissions that killed clients left open are settled
    first.

    Raises ServiceError, AccessError, NoQueue or ServiceUnreachable when there is no run;
    SubmissionUnknown when it is unknown whether there is one; Interrupted after Ctrl-C; OSError
    when the record could not be written, and then nothing was sent.
    """
    settle_abandoned(submitter, record.env)
    with InFlight.beside(submitter.history, record.env).mark(record.key):
        submitter.history.intend(record)
        return send_intent(submitter, requests, record)


def announcement(context: Context, prepared: PreparedRun, job_id: str) -> str:
    queue = context.resource_label(prepared.requests.submit["jobQueue"])
    return f"Submitted job [{prepared.name} - {job_id}] to the job queue [{queue}]"


def submitted_json(context: Context, prepared: PreparedRun, job_id: str) -> dict[str, str]:
    request = prepared.requests.submit
    return {
        "jobId": job_id,
        "jobName": request["jobName"],
        "jobQueue": request["jobQueue"],
        "env": context.env,
        "project": prepared.record.project or None,
    }
