"""`batchml prove`: test batchml's claims by running its commands, and write a report."""

import json
import os
import secrets
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from msgspec import Struct

from batchml import __version__
from batchml.aws.recording import AWS, EMBEDDED, RECORDING_VARIABLE
from batchml.aws.session import known_regions
from batchml.cli.app import app
from batchml.cli.options import Json
from batchml.cli.output import confirm, print_json, print_line, say
from batchml.cli.render import printable, timestamp
from batchml.clock import SystemClock
from batchml.config.environments import read_environments
from batchml.config.settings import CONFIG_NAME, Settings, load_settings
from batchml.errors import (
    BatchmlError,
    ConfigError,
    NotFound,
    RecordingRefused,
    UsageError,
    did_you_mean,
)
from batchml.local.home import Home
from batchml.model.environment import LOCAL
from batchml.prove.children import Commands
from batchml.prove.claims import BY_ID, World
from batchml.prove.everyday import ask_teardown, end_runs
from batchml.prove.folder import (
    FOLDER,
    ProofFolder,
    aws_config,
    find_leftovers,
    local_config,
    make_folder,
    read_records,
    reopen_folder,
)
from batchml.prove.page import make_document, render_page
from batchml.prove.proof import Proof
from batchml.prove.recording import Recording, make_header, read_call_log, write_recording
from batchml.prove.replay import render, replay_file
from batchml.prove.sanitizing import sanitize
from batchml.prove.service import ProofResult, StepResult, prove
from batchml.prove.steps import ProofStep, estimate, exit_code, steps_of
from batchml.resources import shipped_folder
from batchml.setup.commands.shared import Yes

_MOST_USD = 1000.0
# Variables that choose an environment, a project or a state folder for the user's own commands.
_CHOICES = ("BATCHML_ENV", "BATCHML_CONFIG", "BATCHML_PROJECT", "BATCHML_HOME")


class ProofSubject(Struct, frozen=True):
    """The environment to test. `env` is empty for a temporary environment in AWS."""

    world: World
    env: str
    region: str = ""
    profile: str = ""
    endpoint: str = ""

    @property
    def is_throw_away(self) -> bool:
        return self.world == "local" or not self.env


@app.command("prove", epilog="Example: batchml prove --region us-east-1 --max-cost 1")
def prove_command(
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="NAME", help="Test this environment as it is."),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(metavar="REGION", help="Test AWS in this region, in a temporary environment."),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Also test claims that need a GPU.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="Also test a job on two nodes.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not delete the environment at the end.")
    ] = False,
    max_cost: Annotated[
        float, typer.Option(metavar="USD", help="Stop before it costs more.")
    ] = 2.0,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Test an AWS-compatible server, such as moto's."),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare a recording with batchml's assumptions."),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(metavar="PROOF", help="Only remove what an earlier proof has left."),
    ] = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Test batchml's claims by running its commands, and write a report.

    It sets up a temporary environment, runs the commands of every day, checks each claim, and
    deletes the environment. Without options it tests the embedded AWS Batch, or AWS if the folder's
    default environment is in AWS. Exit code 0: every tested claim held.
    """
    if replay is not None:
        other = gpu or nodes or keep or remove is not None
        _check_replay_alone(env, region, endpoint, other=other)
        _replay(Path(replay), json_=json_)
        return
    if remove is not None:
        settings = load_settings(os.environ, Path.cwd(), None)
        _remove(Home(Path(settings.home.value)).root, remove)
        return
    _check_options(env, region, endpoint, max_cost)
    settings = load_settings(os.environ, Path.cwd(), env)
    subject = choose_subject(settings, env, region, endpoint, os.environ)
    options = tuple(name for name, given in (("gpu", gpu), ("nodes", nodes)) if given)
    name = f"prove-{secrets.token_hex(3)}"
    config = _make_config(subject, name, options)
    home = Home(Path(settings.home.value))
    home.prepare()
    _look_after_leftovers(home.root)
    _confirm_cost(subject, name, options, max_cost, yes=yes)
    clock = SystemClock()
    folder = make_folder(
        home.root, name, config, began=clock.now(), world=subject.world,
        env=subject.env or name, throw_away=subject.is_throw_away, endpoint=subject.endpoint,
        config_path="" if subject.is_throw_away else settings.config or "",
        images=() if subject.world == "local" else _image_folders(settings.config),
    )  # fmt: skip
    printer = StepPrinter()

    def finish(result: ProofResult) -> None:
        printer.flush()
        _write_page(folder, result, json_=json_)

    try:
        commands = Commands(child_environ(os.environ, folder), Path(folder.record.work), clock)
        proof = Proof(
            subject.world, folder.record.env, folder, commands, options,
            throw_away=subject.is_throw_away,
        )  # fmt: skip
        result = prove(
            proof, clock, max_cost=max_cost, keep=keep, say=say,
            begin=_show_step if sys.stderr.isatty() else (lambda _: None),
            tell=(lambda _: None) if json_ else printer.print, finish=finish,
        )  # fmt: skip
    finally:
        folder.close()
    code = exit_code(
        list(result.answers.values()), commands.codes, interrupted=result.is_interrupted
    )
    if code:
        raise typer.Exit(code)


def _image_folders(config: str | None) -> tuple[Path, ...]:
    """The folder of the project's images, if there is a project, and that of batchml's."""
    own = (Path(config).parent / "images",) if config else ()
    return (*own, shipped_folder("images"))


def _check_replay_alone(
    env: str | None, region: str | None, endpoint: str | None, *, other: bool
) -> None:
    """Raise UsageError for options that choose what is proven."""
    if other or env is not None or region is not None or endpoint is not None:
        raise UsageError("--replay only reads a file: give it alone, or with --json.")


def _replay(path: Path, *, json_: bool) -> None:
    """Print what differs from a recording. Raises RecordingRefused; typer.Exit with 1."""
    result = replay_file(path, SystemClock())
    if json_:
        print_json(result.to_json())
    else:
        for line in render(result):
            print_line(printable(line))
    if result.differences:
        raise typer.Exit(1)


def _check_options(
    env: str | None, region: str | None, endpoint: str | None, max_cost: float
) -> None:
    """Raise UsageError with every mistake."""
    mistakes = []
    if env is not None and region is not None:
        mistakes.append("--env and --region exclude each other: an environment has its region.")
    if not 0 <= max_cost <= _MOST_USD:  # also refuses nan
        mistakes.append(f"--max-cost {max_cost:g}: write dollars from 0 to {_MOST_USD:g}.")
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            mistakes.append(f"--endpoint {endpoint}: write a URL such as http://127.0.0.1:5000.")
        if env == LOCAL:
            mistakes.append("--endpoint is for AWS; --env local is the embedded AWS Batch.")
    if mistakes:
        raise UsageError("\n".join(mistakes))


def choose_subject(
    settings: Settings, env: str | None, region: str | None, endpoint: str | None,
    environ: Mapping[str, str],
) -> ProofSubject:  # fmt: skip
    """What to prove: the environment of --env as it is, else a throw-away environment.

    That is in AWS with --region, with --endpoint, or if the default environment is in AWS; else
    the embedded server has one.
    """
    world: World = "endpoint" if endpoint else "aws"
    default = settings.environment
    if env is not None and env != LOCAL:
        return ProofSubject(world, env, default.region, default.profile, endpoint or "")
    if env is None and (region or endpoint or not settings.is_local):
        usual = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        found = region or default.region or usual
        return ProofSubject(world, "", found, default.profile, endpoint or "")
    return ProofSubject("local", LOCAL)


def _make_config(subject: ProofSubject, name: str, options: tuple[str, ...]) -> str:
    """The batchml.toml of a throw-away environment. Raises UsageError for an unknown region."""
    if subject.world == "local":
        return local_config(name)
    text = aws_config(name, subject.region, subject.profile, options)
    try:
        read_environments(tomllib.loads(text), CONFIG_NAME)
    except (ConfigError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"--region {subject.region!r}: write a region such as us-east-1."
        ) from error
    regions = known_regions("batch") if subject.world == "aws" else [subject.region]
    if subject.region not in regions:
        raise UsageError(
            f"--region {subject.region}: AWS Batch is in no such region, as far as the installed "
            f"botocore knows.{did_you_mean(subject.region, regions)}"
        )
    return text


def child_environ(environ: Mapping[str, str], folder: ProofFolder) -> dict[str, str]:
    """The variables of the proof's commands, which know nothing of the user's own runs."""
    record = folder.record
    return {
        **{name: text for name, text in environ.items() if name not in _CHOICES},
        "BATCHML_HOME": record.home,
        "BATCHML_CONFIG": record.config,
        "BATCHML_PROJECT": record.id,
        RECORDING_VARIABLE: str(folder.call_log),
        "NO_COLOR": "1",
        **({"AWS_ENDPOINT_URL": record.endpoint} if record.endpoint else {}),
    }


def _look_after_leftovers(state: Path) -> None:
    """Take away what killed proofs of the embedded server have left; name what is left in AWS."""
    for record in find_leftovers(state):
        folder = reopen_folder(state, record)
        if folder is None:
            continue
        if record.world == "local" and not os.path.isdir(record.work):
            folder.update(made=False)  # the user has taken it away
        elif not record.made:
            pass  # `close` deletes the folder of its jobs
        elif record.world == "local":
            say(f"Removing what the killed proof {record.id} has left.")
            why = _take_away(folder)
            if why:
                say(f"It could not be removed: {why}. To remove it: {record.removal()}")
        else:
            say(f"The proof {record.id} has left something in AWS. To remove it: "
                f"{record.removal()}")  # fmt: skip
        folder.close()


def _remove(state: Path, name: str) -> None:
    """Remove what a proof has left. Raises NotFound, UsageError, and BatchmlError if it cannot."""
    record = next((each for each in read_records(state) if each.id == name), None)
    if record is None:
        hint = f"The proofs of this machine are in {state / FOLDER}."
        raise NotFound("Proof", name, [each.id for each in read_records(state)], hint)
    folder = reopen_folder(state, record)
    if folder is None:
        raise UsageError(f"The proof {name} is still running. Stop it first.")
    try:
        why = _take_away(folder) if record.made else ""
    finally:
        folder.close()
    if why:
        raise BatchmlError(f"{name} could not be removed: {why}")
    print_line(f"Nothing is left of {name}.")


def _take_away(folder: ProofFolder) -> str:
    """Remove what a proof has made; why that was not possible, or ""."""
    record = folder.record
    Path(record.work).mkdir(parents=True, exist_ok=True)
    commands = Commands(child_environ(os.environ, folder), Path(record.work), SystemClock())
    proof = Proof(record.world, record.env, folder, commands, (), throw_away=record.throw_away)
    if not record.throw_away:
        if not end_runs(proof):
            return "its runs or roles are still there"
        folder.update(made=False)
        return ""
    return "; ".join(answer.why for answer in ask_teardown(proof) if not answer.held)


def _confirm_cost(
    subject: ProofSubject, name: str, options: tuple[str, ...], max_cost: float, *, yes: bool
) -> None:
    """Ask before anything that costs. Raises typer.Exit if the user does not agree."""
    if subject.world != "aws":
        return
    steps = steps_of("aws", options, throw_away=subject.is_throw_away)
    usd = sum(estimate(step, "aws") for step in steps)
    minutes = round(sum(step.seconds for step in steps) / 60)
    if usd > max_cost:
        raise UsageError(
            f"--max-cost {max_cost:g}: this proof is estimated to cost ${usd:.2f}. Allow at least "
            "that much; without --gpu and --nodes it costs less."
        )
    what = f"This runs jobs in {subject.env}"
    if subject.is_throw_away:
        what = f"This makes the environment {name} in {subject.region} and deletes it at the end"
    question = (
        f"{what}. It takes about {minutes} minutes and costs about ${usd:.2f} at the prices of "
        f"us-east-1, at most ${max_cost:.2f}. Go on? [y/N]"
    )
    if not confirm(question, "--yes", yes=yes):
        say("Nothing was done.")
        raise typer.Exit(1)


class StepPrinter:
    """Prints a line for each step; steps that are skipped for the same reason share a line."""

    def __init__(self) -> None:
        self._skipped: list[str] = []
        self._why = ""

    def print(self, result: StepResult) -> None:
        if any(each.held is not None for each in result.answers):
            self.flush()
            _print_step(result)
            return
        why = result.why or result.answers[0].why
        if why != self._why:
            self.flush()
        self._skipped.append(result.step.name)
        self._why = why

    def flush(self) -> None:
        """Print what waits for a step with the same reason."""
        if self._skipped:
            print_line(f"{'not tested':<12} {', '.join(self._skipped)}: {self._why}")
        self._skipped = []


def _show_step(step: ProofStep) -> None:
    """Say on a terminal which step is running: some take minutes in AWS."""
    say(f"{step.name:<12} {step.title} ...")


def _print_step(result: StepResult) -> None:
    held = sum(each.held is True for each in result.answers)
    asked = sum(each.held is not None for each in result.answers)
    name = result.step.name
    figures = f"{held} of {asked} held {result.seconds:>6.1f} s  ${result.usd:.2f}"
    print_line(f"{name:<12} {figures}  {result.step.title}")
    for each in result.answers:
        if each.held is False:
            print_line(f"{'':<12} does not hold: {BY_ID[each.claim].text}")
            print_line(f"{'':<12}   {printable(each.why)}")


_MADE_BY: Mapping[World, str] = {"local": EMBEDDED, "endpoint": "moto", "aws": AWS}


def _write_recording(folder: ProofFolder) -> str | None:
    """Write the recording of the commands' AWS calls, without names, and delete their log.

    Returns its path; None if there was no call.
    """
    try:
        calls, damaged = read_call_log(folder.call_log)
    except RecordingRefused:
        return None
    if damaged:
        say(f"{damaged} recorded calls are incomplete, because their commands were killed.")
    record = folder.record
    try:
        clean = sanitize(calls)
    except Exception as error:  # an answer of a form that AWS never gave before: the page counts
        why = f"{type(error).__name__}: {error}"
        say(f"The recording could not be made: {why}. The calls, with all names, are in "
            f"{folder.call_log}.")  # fmt: skip
        return None
    date = timestamp(int(record.began * 1000))[:10]
    header = make_header(clean, _MADE_BY[record.world], date, __version__)
    write_recording(folder.recording, Recording(header, tuple(clean)))
    folder.call_log.unlink()
    return str(folder.recording)


def _write_page(folder: ProofFolder, result: ProofResult, *, json_: bool) -> None:
    """Write both files of the results, and print where they are."""
    document = make_document(folder.record, result)
    page, data = folder.root / "proof.html", folder.root / "proof.json"
    document["page"] = str(page)
    document["recording"] = _write_recording(folder)
    data.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    page.write_text(render_page(document), "utf-8")
    if json_:
        print_json(document)
        return
    print_line(
        f"{result.count(True)} claims held, {result.count(False)} did not hold, "
        f"{result.count(None)} were not tested; {result.seconds:.0f} s, ${result.usd:.2f}."
    )
    if result.left:
        why = "Kept" if folder.record.kept else "Something is left"
        print_line(f"{why}. To remove it: {result.left}")
    print_line(f"Page: {page}")
    if document["recording"]:
        print_line(f"Recording: {document['recording']}")
