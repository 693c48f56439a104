"""Children of an array, by their state."""

from batchml.aws.failures import translated
from batchml.aws.responses import to_summary
from batchml.aws.session import Session
from batchml.errors import BatchmlError
from batchml.model.run import OutcomeClass, Run, classify, with_failures
from batchml.model.status import JobStatus


def indices(session: Session, array_id: str, status: JobStatus) -> list[int]:
    """The numbers of the children that are in a state, rising; a thousand a call.

    Source: AWS Batch API Reference, ListJobs (`arrayJobId` with `jobStatus`).
    """
    found: set[int] = set()
    with translated("ListJobs"):
        pages = session.client("batch").get_paginator("list_jobs")
        for page in pages.paginate(arrayJobId=array_id, jobStatus=status.value):
            for summary in page["jobSummaryList"]:
                found.add(int(summary["arrayProperties"]["index"]))
    return sorted(found)


def failed(session: Session, array_id: str) -> list[Run]:
    """The children that FAILED, as ListJobs tells of them, by rising number; a thousand a call."""
    found: dict[str, Run] = {}
    with translated("ListJobs"):
        pages = session.client("batch").get_paginator("list_jobs")
        for page in pages.paginate(arrayJobId=array_id, jobStatus=JobStatus.FAILED.value):
            for summary in page["jobSummaryList"]:
                found[summary["jobId"]] = to_summary(summary, "")
    return sorted(found.values(), key=lambda run: run.array_index or 0)


def judged(session: Session, run: Run) -> Run:
    """A run; an array that failed knows afterwards how its children did. One call, for that alone.

    It stays as it was where they are more than a page of 1,000, or where AWS does not tell.
    """
    if not run.children or run.failures or classify(run).outcome is not OutcomeClass.APP_ERROR:
        return run
    failed = JobStatus.FAILED.value
    try:
        with translated("ListJobs"):
            page = session.client("batch").list_jobs(arrayJobId=run.job_id, jobStatus=failed)
    except BatchmlError:
        return run
    return with_failures(run, [to_summary(each, run.queue) for each in page["jobSummaryList"]])
