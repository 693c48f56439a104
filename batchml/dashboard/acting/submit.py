"""Submit a job that batchml knows: the list of jobs, and a form of the parameters of each."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from batchml.client import Client
from batchml.dashboard.act import (
    ActionField,
    Body,
    PageAction,
    action_button,
    action_form,
    done,
    paragraphs,
    preview_body,
    read_text,
    read_texts,
    shell,
)
from batchml.dashboard.app import PageQuery
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.layout import command_line, facts, page
from batchml.errors import InputNotFound, UsageError
from batchml.handles import RunPreview
from batchml.jobs.find import KnownJob
from batchml.model.job import JobSpec, Scalar
from batchml.runs.options import SubmitOptions, option_rows
from batchml.runtime.protocol.variables import format_value

_OPTIONS = (
    "name", "queue", "vcpus", "memory", "gpus", "timeout", "attempts", "max_cost", "array",
)  # fmt: skip
_LABELS = {"vcpus": "vCPUs", "gpus": "GPUs", "max_cost": "Most cost, in USD", "array": "Copies"}
_SCRIPTS = ("theme.js", "app.js", "act.js")


# --- Fields, of this form and of others -----------------------------------------------------------


def param_fields(params: Mapping[str, object]) -> list[ActionField]:
    """A field for each parameter, with its value."""
    found = []
    for name, value in params.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_choice = isinstance(value, bool)
        known = isinstance(value, str | int | float)
        found.append(ActionField(
            name=name, label=name, flag="-p", prefix=f"{name}=", under="params",
            value=format_value(cast(Scalar, value)) if known else str(value),
            choices=(("true", "true"), ("false", "false")) if is_choice else (),
            is_number=is_number,
        ))  # fmt: skip
    return found


def option_fields(
    names: Iterable[str], present: Mapping[str, str], preset: Mapping[str, str] = {}
) -> list[ActionField]:
    """A field for each of these options of `submit`; `preset` replaces present values."""
    found = []
    for name in names:
        row, now = option_rows()[name], present.get(name, "")
        found.append(ActionField(
            name=name, label=_LABELS.get(name, name.capitalize()), value=preset.get(name, now),
            present=now, flag=row.flag, under="options", hint=row.option.help, is_more=True,
            is_number=row.type in (int, float) and not row.option.words,
        ))  # fmt: skip
    return found


def read_options(body: Body, names: Sequence[str]) -> SubmitOptions:
    """The parameters and these options of a body, which are texts. Raises UsageError."""
    found: dict[str, Any] = {"params": read_texts(body, "params")}
    for name, text in read_texts(body, "options").items():
        if name not in names:
            raise UsageError(f"{name}: cannot be set here. Options: {', '.join(names)}.")
        row, text = option_rows()[name], text.strip()
        if not text:
            continue
        found[name] = text
        if row.type in (int, float) or row.option.words:
            found[name] = row.read_number(text)
            if found[name] is None:
                raise UsageError(f"{row.flag} {text}: give {row.expected}.")
    return cast(SubmitOptions, found)


def preview_html(found: RunPreview) -> Html:
    """The notices and the price of a submission that was not sent."""
    return join((paragraphs(found.price, ""), paragraphs(found.notices)))


# --- The pages ------------------------------------------------------------------------------------


def jobs_page(
    jobs: Sequence[KnownJob], folder: Path, env: str, notebook: PageAction, *, read_only: bool
) -> Html:
    """The list of jobs, and the button of `notebook`."""
    heading = ("Job", "Image", "Command", "Asks for", "Folder")
    rows = [tag("tr", *(tag("th", name, scope="col") for name in heading))]
    rows += [tag("tr", *(tag("td", cell) for cell in _cells(job, folder))) for job in jobs]
    table = tag("table", tag("caption", "Jobs that can be submitted", class_="unseen"), *rows)
    region = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Jobs")
    more = command_line("batchml init", "Make a job of your own in a terminal")
    other = action_button(notebook, read_only=read_only)
    return page("Submit", tag("h1", "Submit a job"), region, tag("p", other), more, env=env,
                current="/submit", view="submit", scripts=_SCRIPTS)  # fmt: skip


def _cells(job: KnownJob, folder: Path) -> tuple[Html | str, ...]:
    where = "here" if job.folder == folder else str(job.folder)
    if job.folder.is_relative_to(folder) and job.folder != folder:
        where = str(job.folder.relative_to(folder))
    link = tag("a", job.name, href=f"/submit/{quote(job.name, safe='')}")
    if job.spec is None:
        return job.name, tag("span", *job.mistakes[:1], class_="problem"), "", "", where
    spec = job.spec
    return link, spec.image, " ".join(spec.command), _resources(spec), where


def _resources(spec: JobSpec) -> str:
    asked = spec.resources
    gpus = f", {asked.gpus} GPU" if asked.gpus else ""
    gpus = ", a GPU if there is one" if asked.gpus == "auto" else gpus
    nodes = f", {spec.nodes} nodes" if spec.nodes > 1 else ""
    return f"{asked.vcpus} vCPU, {asked.memory}{gpus}{nodes}"


def job_page(job: KnownJob, env: str, env_option: str, *, read_only: bool) -> Html:
    """The form of one job. Raises UsageError if its file has mistakes."""
    spec = job.spec
    if spec is None:
        raise UsageError("\n".join([f"{job.folder}/job.toml has mistakes:", *job.mistakes]))
    about = facts([
        ("Image", spec.image),
        ("Command", tag("code", " ".join(spec.command))),
        ("Asks for", _resources(spec)),
        ("Folder", str(job.folder)),
    ])  # fmt: skip
    form = action_form(submit_action(job, spec, env_option), read_only=read_only)
    return page(
        f"Submit {job.name}", tag("h1", f"Submit {job.name}"),
        tag("div", tag("section", form, class_="card"),
            tag("section", tag("h2", "Job"), about, class_="card"), class_="cards"),
        tag("p", tag("a", "All jobs", href="/submit")),
        env=env, current="/submit", view="submit", scripts=_SCRIPTS,
    )  # fmt: skip


def submit_action(job: KnownJob, spec: JobSpec, env_option: str) -> PageAction:
    present = {
        "name": spec.name, "queue": spec.queue, "vcpus": str(spec.resources.vcpus),
        "memory": str(spec.resources.memory), "gpus": str(spec.resources.gpus),
        "timeout": str(spec.timeout or ""), "attempts": str(spec.retry.attempts),
    }  # fmt: skip
    return PageAction(
        label="Submit", question="Parameters" if spec.params else "It has no parameters",
        path="/act/submit", body={"job": job.name}, preview="/preview/submit",
        command=shell("batchml", "submit", job.name) + env_option,
        fields=(*param_fields(spec.params), *option_fields(_OPTIONS, present)),
    )  # fmt: skip


# --- Routes ---------------------------------------------------------------------------------------


def find_known_job(client: Client, name: str) -> KnownJob:
    """The job of a name in a request: one of the list, never a path. Raises NotFound."""
    jobs = {each.name: each for each in client.jobs()}
    if name not in jobs:
        raise InputNotFound("Job", name, jobs, "The page Submit has all of them.")
    return jobs[name]


def submit(client: Client, query: PageQuery) -> dict[str, Any]:
    """The route /act/submit: `job`, `params`, `options`."""
    job = find_known_job(client, read_text(query.body, "job"))
    run = client.submit(job.folder, **read_options(query.body, _OPTIONS))
    return done(f"Submitted {run.name}.", f"/run/{run.job_id}")


def preview_submit(client: Client, query: PageQuery) -> Html:
    """The route /preview/submit, with the body of /act/submit."""
    body = preview_body(query).body
    job = find_known_job(client, read_text(body, "job"))
    return preview_html(client.preview(job.folder, **read_options(body, _OPTIONS)))
