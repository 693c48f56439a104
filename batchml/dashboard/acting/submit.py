"""Submit a job that batchml knows: the list of jobs, and a form of the parameters of each."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from msgspec import Struct

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
# A name below images/, or a file of the job's folder: no path, no reference.
_IMAGE = re.compile(r"\.|[a-z0-9][a-z0-9_-]*( \+ requirements\.txt)?")
_PLAIN = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)


# --- Fields, of this form and of others -----------------------------------------------------------


def param_fields(
    params: Mapping[str, object], given: Mapping[str, str] = {}, hints: Mapping[str, str] = {}
) -> list[ActionField]:
    """A field for each parameter, with its value, or with a `given` one in its place."""
    found = []
    for name, value in params.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_choice = isinstance(value, bool)
        known = isinstance(value, str | int | float)
        present = format_value(cast(Scalar, value)) if known else str(value)
        found.append(ActionField(
            name=name, label=name, flag="-p", prefix=f"{name}=", under="params",
            value=given.get(name, present), present=present, hint=hints.get(name, ""),
            choices=(("true", "true"), ("false", "false")) if is_choice else (),
            is_number=is_number, is_first=name in hints,
        ))  # fmt: skip
    return found


def command_field(
    present: Sequence[str], given: Sequence[str] | None = None, *, is_more: bool = True,
    suspect: str | None = None, hint: str = "Run this in place of the job's command.",
) -> ActionField:  # fmt: skip
    """A field for the command; `given` in place of the `present` one. `suspect`: the part of a word
    that is selected, as it seems to be wrong."""
    is_first = given is not None or suspect is not None
    return ActionField(
        name="command", label="Command", value=typed_command(present if given is None else given),
        present=typed_command(present), flag="--", is_more=is_more and not is_first,
        is_first=is_first, selected=suspect or "", hint=hint,
    )  # fmt: skip


def typed_command(words: Sequence[str]) -> str:
    """A command as people type it. Braces of parameters need no quotes, as no shell reads it."""
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def image_field(given: str = "") -> ActionField:
    """A field for the image of a job; empty is the job's own."""
    return ActionField(
        name="image", label="Image", value=given, present="", flag="--image", is_more=not given,
        hint="A name; or . for an image made of the job's requirements.txt or Dockerfile.",
    )  # fmt: skip


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
            is_number=row.type in (int, float) and not row.option.words, is_first=name in preset,
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


class SubmitPreset(Struct, frozen=True):
    """What a form of a job is filled in with: texts, as the command line has them."""

    params: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    command: Sequence[str] | None = None
    image: str = ""
    hints: Mapping[str, str] = {}  # of parameters


def read_flags(words: Sequence[str]) -> SubmitPreset | None:
    """The flags of `batchml submit`, as a preset; None if the form has no field for one."""
    params: dict[str, str] = {}
    options: dict[str, str] = {}
    rest, command, image = list(words), None, ""
    while rest:
        word = rest.pop(0)
        if word == "--":
            command, rest = rest, []
            continue
        if not word.startswith("-") or not rest:
            return None
        name, value = word.removeprefix("--").replace("-", "_"), rest.pop(0)
        if word == "-p":
            key, _, params_value = value.partition("=")
            params[key] = params_value
        elif name == "image":
            image = value
        elif name in _OPTIONS:
            options[name] = value
        else:
            return None
    if image and not _IMAGE.fullmatch(image):
        return None
    return SubmitPreset(params, options, command, image)


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
    return link, spec.image, typed_command(spec.command), _resources(spec), where


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
        ("Command", tag("code", typed_command(spec.command))),
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


def submit_action(
    job: KnownJob, spec: JobSpec, env_option: str, preset: "SubmitPreset | None" = None
) -> PageAction:
    """The form of a job; `preset` fills it in."""
    given = preset or SubmitPreset()
    present = {
        "name": spec.name, "queue": spec.queue, "vcpus": str(spec.resources.vcpus),
        "memory": str(spec.resources.memory), "gpus": str(spec.resources.gpus),
        "timeout": str(spec.timeout or ""), "attempts": str(spec.retry.attempts),
    }  # fmt: skip
    return PageAction(
        label="Submit", question="Parameters" if spec.params else "It has no parameters",
        path="/act/submit", body={"job": job.name}, preview="/preview/submit",
        command=shell("batchml", "submit", job.name) + env_option,
        fields=(
            *param_fields(spec.params, given.params, given.hints),
            command_field(spec.command, given.command), image_field(given.image),
            *option_fields(_OPTIONS, present, given.options),
        ),
    )  # fmt: skip


# --- Routes ---------------------------------------------------------------------------------------


def find_known_job(client: Client, name: str) -> KnownJob:
    """The job of a name in a request: one of the list, never a path. Raises NotFound."""
    jobs = {each.name: each for each in client.jobs()}
    if name not in jobs:
        raise InputNotFound("Job", name, jobs, "The page Submit has all of them.")
    return jobs[name]


def submit(client: Client, query: PageQuery) -> dict[str, Any]:
    """The route /act/submit: `job`, `params`, `options`, `command`, `image`."""
    job = find_known_job(client, read_text(query.body, "job"))
    run = client.submit(job.folder, **_read_submit(query.body))
    return done(f"Submitted {run.name}.", f"/run/{run.job_id}")


def _read_submit(body: Body) -> SubmitOptions:
    """The options of /act/submit. Raises UsageError."""
    return read_command_and_image(body, read_options(body, _OPTIONS))


def read_command_and_image(body: Body, found: SubmitOptions) -> SubmitOptions:
    """The options with the `command` and `image` of a body. Raises UsageError."""
    command, image = read_text(body, "command", "").strip(), read_text(body, "image", "").strip()
    if command:
        try:
            found["command"] = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"command: {command}: a quotation mark is missing.") from error
    if image:
        found["image"] = read_image(image)
    return found


def is_image_name(given: str) -> bool:
    """Whether it is the name of an image, or `.`: no path, no reference."""
    return _IMAGE.fullmatch(given) is not None


def read_image(given: str) -> str:
    """The name of an image in a request: never a path. Raises UsageError."""
    image = given.strip()
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"image: {image}: give the name of an image, or . for the job's own.")
    return image


def preview_submit(client: Client, query: PageQuery) -> Html:
    """The route /preview/submit, with the body of /act/submit."""
    body = preview_body(query).body
    job = find_known_job(client, read_text(body, "job"))
    return preview_html(client.preview(job.folder, **_read_submit(body)))
