"""A notebook, which is a run with JupyterLab: its resources, its port and token, its port forward.

The run makes the token (`runtime/sessions/notebook.py`), and a command inside the run fetches it.
So no request, log, history or argument contains the token.
"""

import html
import json
import os
import webbrowser
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batchml.cli.output import say
from batchml.errors import (
    BatchmlError,
    ExecUnavailable,
    HeldRunEnded,
    NotRunning,
    ServiceUnreachable,
    UsageError,
)
from batchml.jobs.find import find_image
from batchml.model.group import HELD_TAG, NOTEBOOK
from batchml.model.job import AUTO, Gpus, JobSpec, Resources
from batchml.model.run import Record, Run, classify
from batchml.model.tables import parse_size
from batchml.runs.find import describe_runs, select
from batchml.runs.held import last_message
from batchml.runs.options import SubmitOptions
from batchml.runtime.storage.files import write_atomically
from batchml.sessions.exec.backends import capture_output, open_port_forward
from batchml.sessions.exec.session_manager import find_plugin
from batchml.sessions.exec.target import ExecTarget, describe_end
from batchml.sessions.forward.listener import PortForward
from batchml.sessions.held import describe_run_cost

if TYPE_CHECKING:
    from batchml.context import Context, Notify

IMAGE = "notebook"
IDLE = 3600.0  # seconds without use after which a notebook ends itself by default
PROGRAM = ("python", "-m", "batchml.runtime.sessions.notebook")

_WAIT = 45  # seconds for which `PROGRAM where` waits for JupyterLab; less than OUTPUT_LIMIT
_TRIES = 8  # calls of `PROGRAM where`
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between attempts to reopen a forward
_MAX_DESCRIBED = 3  # earlier notebooks that are described
_MAX_UNFINISHED = 100  # notebooks that are looked up, in one call


class NotebookAddress(Struct, frozen=True):
    """JupyterLab's port inside the run, its token, and the folder that it shows."""

    port: int
    token: str
    root: str = ""

    def __repr__(self) -> str:  # without the token: a traceback may show this
        return f"NotebookAddress(port={self.port}, root={self.root!r})"


# --- Resources and checks -------------------------------------------------------------------------


class NotebookLimits(Struct, frozen=True):
    """Limits of the resources that a notebook gets by default."""

    vcpus: int
    memory_mib: int


def default_limits(context: "Context") -> NotebookLimits | None:
    """Return half of this machine on `local`, so that other runs find room; None in AWS."""
    if not context.settings.is_local:
        return None
    from batchml.local.executors.choice import server_vcpus
    from batchml.local.machine import memory_mib

    return NotebookLimits(max(1, server_vcpus(context.home) // 2), memory_mib() // 2)


def notebook_resources(
    gpus: Gpus | None = None,
    vcpus: int | None = None,
    memory: str | None = None,
    limits: NotebookLimits | None = None,
    neurons: int | None = None,
) -> Resources:
    """Fill in defaults: 2 vCPUs and 7 GiB; with GPUs 4 vCPUs and 14 GiB for each GPU.

    That fits hosts with 8 GiB, or with 16 GiB for each GPU: ECS needs a part of a host's memory.
    With "auto" it is the size without GPUs, which fits both.
    """
    gpus = gpus or 0
    known = 0 if gpus == AUTO else int(gpus)
    default_vcpus, default_mib = 4 * known or 2, (14 * known or 7) * 1024
    if limits is not None:
        default_vcpus = min(default_vcpus, limits.vcpus)
        default_mib = min(default_mib, limits.memory_mib)
    if memory is None:
        memory = f"{default_mib} MiB" if default_mib % 1024 else f"{default_mib // 1024} GiB"
    return Resources(default_vcpus if vcpus is None else vcpus, memory, gpus, neurons or 0)


def notebook_job(image: str | None, resources: Resources) -> JobSpec:
    """Describe the job. It gets no code package: JupyterLab shows the workspace."""
    return JobSpec(
        image=image or IMAGE, command=PROGRAM, name=NOTEBOOK, code=False, resources=resources
    )


def check_image(context: "Context", image: str) -> None:
    """Raise UsageError in AWS for an image without batchml's runtime, which starts JupyterLab."""
    if context.settings.is_local or find_image(image, context.image_folders) is not None:
        return
    raise UsageError(
        f"--image {image} was not built by batchml and lacks its runtime, which starts JupyterLab. "
        "Make a folder below images/ with this image as its base: docs/images.md"
    )


def check_reachable(context: "Context", definition: Mapping[str, Any]) -> None:
    """Raise ExecUnavailable, before the notebook costs anything, if it could not be reached.

    `definition` is the request that registers its job definition.
    """
    if context.settings.is_local:
        return
    find_plugin(os.environ)
    if not definition.get("containerProperties", {}).get("enableExecuteCommand"):
        raise ExecUnavailable(
            f"ECS Exec, which reaches JupyterLab, needs a job role, and {context.env} has none. "
            "Nothing was started. Update the environment: "
            f"batchml setup --env {context.env}"
        )


# --- Finding a notebook ---------------------------------------------------------------------------


def check_is_notebook(context: "Context", run: Run, word: str) -> None:
    """Raise UsageError for a run that `notebook` did not start."""
    if run.tags.get(HELD_TAG) != NOTEBOOK:
        hints = "".join(
            f"\nYour notebook that is {each.status.value}: "
            f"batchml notebook {each.job_id}{context.env_option}"
            for each in unfinished_notebooks(context)
        )
        raise UsageError(
            f"{word} is not a notebook: `batchml notebook` did not start it. To enter any other "
            f"run: batchml shell {word}{context.env_option}, "
            f"batchml forward {word} PORT{context.env_option}{hints}"
        )


def find_notebook(context: "Context", word: str) -> Run:
    """Find the notebook that a word names; an unfinished one first. Raises UsageError, NotFound."""
    named = [run for run in unfinished_notebooks(context) if word == run.name] if word else []
    if named:
        return named[0]
    (job_id,) = select(context, [word])
    run = describe_runs(context, [job_id])[job_id]
    check_is_notebook(context, run, word)
    return run


def sole_notebook(context: "Context") -> Run:
    """Return the only unfinished notebook. Raises UsageError if there is none, or are several."""
    runs = unfinished_notebooks(context)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise UsageError(
            "--end: none of your notebooks runs in this project. To start a notebook that ends "
            "together with the command: batchml notebook --new --end"
        )
    lines = [f"  batchml notebook {run.job_id}{context.env_option} --end" for run in runs]
    raise UsageError("\n".join(["--end: several of your notebooks run. Name one:", *lines]))


def unfinished_notebooks(context: "Context") -> list[Run]:
    """Return the unfinished notebooks of the project that were started from this machine.

    Running notebooks come first, then the newest. AWS gets one call, or none if the history has no
    notebook.
    """
    records = notebook_records(context.history.recent(context.env), context.project)
    ids = [each.job_id for each in records if not each.has_ended][:_MAX_UNFINISHED]
    found = context.describe(ids) if ids else {}
    runs = [found[job_id] for job_id in ids if job_id in found]
    alive = [run for run in runs if not run.status.is_terminal]
    return sorted(alive, key=lambda run: run.status.value != "RUNNING")


def notebook_records(records: Iterable[Record], project: str = "") -> list[Record]:
    """Return the notebooks of a project and of none, or all, the newest first. Pure."""
    found = [
        each
        for each in records
        if each.job_id
        and each.tags.get(HELD_TAG) == NOTEBOOK
        and (not project or each.project in ("", project))
    ]
    return sorted(found, key=lambda each: each.at, reverse=True)


def match_notebook(
    runs: Iterable[Run], options: SubmitOptions, records: Iterable[Record]
) -> Run | None:
    """Return the first notebook that was started with these options. Pure.

    None if they set variables or tags, which cannot be compared.
    """
    if options.get("set_env") or options.get("tags"):
        return None
    by_id = {each.job_id: each for each in records}
    return next((run for run in runs if _matches(by_id.get(run.job_id), options)), None)


def _matches(record: Record | None, options: SubmitOptions) -> bool:
    if record is None:
        return False
    memory, gpus = options.get("memory"), options.get("gpus")
    pairs = (
        (None if gpus == AUTO else gpus, record.gpus), (options.get("vcpus"), record.vcpus),
        (None if memory is None else (parse_size(memory) or 0) // 1024**2, record.memory_mib),
        (options.get("neurons"), record.neurons),
        (options.get("queue"), record.queue), (options.get("name"), record.name),
        (options.get("image"), record.spec.get("image", IMAGE)),
    )  # fmt: skip
    return all(option is None or option == value for option, value in pairs)


def describe_earlier(context: "Context") -> list[str]:
    """Describe notebooks that still run, or that ended since the user left, with their cost.

    AWS gets no call if the history has no such notebook.
    """
    records = notebook_records(context.history.recent(context.env), context.project)
    unseen = [each for each in records if not each.has_ended][:_MAX_DESCRIBED]
    if not unseen:
        return []
    try:
        found = context.describe([each.job_id for each in unseen])
        return [
            text for each in unseen for text in _describe(context, each, found.get(each.job_id))
        ]
    except BatchmlError:  # the user did not ask for this description
        return []


def _describe(context: "Context", record: Record, run: Run | None) -> list[str]:
    if run is None:
        return []
    cost = describe_run_cost(context, run.job_id)
    if run.status.is_terminal:
        context.history.add_ends([run])
        if run.started_at is None and (run.is_cancelled or run.is_terminated):
            return []  # the user cancelled it before it ran
        return [f"Your notebook {record.job_id} has ended since you left it. {cost}"]
    return [
        f"Your notebook {record.job_id} is {run.status.value}. {cost} "
        f"To return to it instead: batchml notebook {record.job_id}{context.env_option}"
    ]


# --- Port and token -------------------------------------------------------------------------------


def fetch_address(context: "Context", target: ExecTarget) -> NotebookAddress:
    """Wait until JupyterLab answers, and fetch its port and token.

    Raises HeldRunEnded with the run's last message if the run ends, NotRunning, ExecUnavailable,
    and BatchmlError if JupyterLab does not answer within six minutes.
    """
    for _ in range(_TRIES):
        try:
            result = capture_output(context, target, (*PROGRAM, "where", str(_WAIT)))
        except NotRunning as error:
            raise_if_ended(context, target.run.job_id, error)
            raise
        if result.code == 0:
            return parse_address(result.out)
    raise BatchmlError(
        f"JupyterLab of {target.run.name} does not answer. For its output: "
        f"batchml logs {target.run.job_id}{context.env_option}"
    )


def parse_address(output: bytes) -> NotebookAddress:
    """Parse the output of `PROGRAM where`, which may contain other lines. Raises BatchmlError."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            return msgspec.json.decode(line.strip().encode(), type=NotebookAddress)
        except msgspec.DecodeError:
            continue
    raise BatchmlError("JupyterLab's port could not be read from the run's answer.")


def raise_if_ended(context: "Context", job_id: str, error: NotRunning) -> None:
    """Raise HeldRunEnded for a run that ended before JupyterLab answered."""
    run = context.describe([job_id]).get(job_id)
    if run is not None and run.status.is_terminal:
        raise end_error(context, run) from error


def end_error(context: "Context", run: Run, otherwise: str = "") -> HeldRunEnded:
    """Make the error for a notebook that has ended, with its last message and exit code.

    `otherwise` is the text for a notebook without a last message.
    """
    message = last_message(context, run)
    text = f"{run.name} has ended: {describe_end(run)}."
    if message:
        text = f"{text} Its last message: {message}"
    elif otherwise:
        return HeldRunEnded(otherwise, classify(run).exit_code or 1)
    return HeldRunEnded(
        f"{text}\n  batchml logs {run.job_id}{context.env_option}", classify(run).exit_code or 1
    )


# --- The port forward -----------------------------------------------------------------------------


def keep_forwarding(
    context: "Context",
    target: ExecTarget,
    address: NotebookAddress,
    first: PortForward,
    notify: "Notify",
) -> str:
    """Keep a forward open on the port of `first` until the run ends; return the reason.

    A forward that was cut, because a laptop slept or AWS ended the session, is reopened.
    """
    forward: PortForward | None = first
    while forward is not None:
        with forward:
            reason = forward.wait()
        text = f"The connection was cut, and is opened again. ({reason})"
        report = partial(notify, text)
        forward = _reopen(context, target, address, first.local_port, report)
    return reason


def _reopen(
    context: "Context",
    target: ExecTarget,
    address: NotebookAddress,
    local_port: int,
    report: Callable[[], None],
) -> PortForward | None:
    """Reopen the forward, with any number of tries; None if the run has ended."""
    pauses, job_id, is_reported = iter(_PAUSES), target.run.job_id, False
    while True:
        try:
            run = context.describe([job_id]).get(job_id)
            if run is None or run.status.value != "RUNNING":
                return None
            if not is_reported:
                is_reported = True
                report()
            return open_port_forward(context, target, address.port, local_port)
        except (ServiceUnreachable, NotRunning):
            context.renew()
            context.clock.sleep(next(pauses, _PAUSES[-1]))


# --- The browser ----------------------------------------------------------------------------------


def open_browser(context: "Context", url: str, title: str) -> None:
    """Open `url`, which contains a token, in the browser.

    A local page leads to it, because every user of this machine can read the browser's arguments.
    """
    path = context.home.root / f"{title.lower()}.html"
    write_atomically(str(path), redirect_page(url, title))
    if not webbrowser.open(path.as_uri()):
        say("This machine has no browser. Open the URL yourself.")


def redirect_page(url: str, title: str) -> bytes:
    return (
        f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title>'
        f"<script>location.replace({json.dumps(url)})</script>"
        f'<a href="{html.escape(url)}">{title}</a>\n'
    ).encode()
