"""batchml doctor and init: check this machine and the account; write the first files."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from batchml.aws.iam import COMMANDS, PROOFS, permissions_of, policy_documents, unknown_account
from batchml.aws.session import Access, CallerIdentity, Session, home_region
from batchml.cli.app import app
from batchml.cli.options import Json
from batchml.cli.output import print_json, print_line
from batchml.cli.render import printable
from batchml.clock import SystemClock
from batchml.config.settings import Settings, load_settings
from batchml.context import Context
from batchml.errors import ConfigError, LocalServerError, NotFound, UsageError, did_you_mean
from batchml.local import control
from batchml.local.control import describe_silence, is_answering
from batchml.local.executors.choice import DOCKER, read_choice
from batchml.local.home import Home
from batchml.model.environment import LOCAL, Environment
from batchml.setup.doctor import ConfigCheck, Finding, ask_account, check_account, exit_code
from batchml.setup.fabric import FabricCheck, ask_fabric, check_fabric
from batchml.setup.images import ask_images, check_images
from batchml.setup.init import FIRST_JOB, first_files, write_files
from batchml.setup.machine import check_config, check_machine, check_plugin, examine_machine

_INDENT = " " * 10


@app.command(epilog="Example: batchml doctor --env dev")
def doctor(
    env: Annotated[
        str | None, typer.Option("--env", metavar="NAME", help="Check this environment.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="COMMAND",
            help="Only print the IAM policies that this command needs, such as setup, image, "
            "submit, teardown or prove; do not call AWS. May be repeated.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Check this machine and the account: a line for each check, and the fix below a problem.

    Exit code 0 without problems, 77 for problems with credentials or permissions, 74 if AWS does
    not answer, else 1. Nothing in AWS is changed.
    """
    if policy:
        _print_policies(load_settings(os.environ, Path.cwd(), env), policy, json_=json_)
        return
    settings, config = _read_settings(env)
    findings = []
    for finding in _examine(settings, config):
        findings.append(finding)
        if not json_:
            for line in _lines(finding):
                print_line(line)
    code = exit_code(findings)
    if json_:
        findings_json = [_to_json(finding) for finding in findings]
        print_json({"env": config.env, "ok": code == 0, "findings": findings_json})
    if code:
        raise typer.Exit(code)


def _print_policies(settings: Settings, commands: Sequence[str], *, json_: bool) -> None:
    """Print policy documents, one a line, or as a JSON array. Raises UsageError."""
    if settings.is_local:
        raise UsageError("--policy: local needs no permissions. Add --env with an environment.")
    known = {*COMMANDS, *(name.partition(" ")[0] for name in COMMANDS)}
    unknown = [f"{name!r}.{did_you_mean(name, known)}" for name in commands if name not in known]
    if unknown:
        raise UsageError(f"--policy: no such command: {' '.join(unknown)}")
    environment = settings.environment
    wanted = permissions_of(environment, commands)
    if not wanted:
        raise UsageError(f"--policy {', '.join(commands)}: no permissions in AWS are needed.")
    scope = unknown_account(environment.region, settings.env.value)
    documents = policy_documents(wanted, scope)
    if "prove" in commands:
        temporary = Environment(region=environment.region)
        documents += policy_documents(
            permissions_of(temporary, ["prove"]), unknown_account(environment.region, PROOFS)
        )
    if json_:
        print_json(documents)
        return
    for document in documents:
        print_line(json.dumps(document, separators=(",", ":")))


def _read_settings(env: str | None) -> tuple[Settings, ConfigCheck]:
    """The settings, or those of `local` if they have mistakes, with the configuration check."""
    here = Path.cwd()
    try:
        settings = load_settings(os.environ, here, env)
    except (ConfigError, NotFound) as error:
        # Ignore the file, and check only this machine.
        ignored = ("BATCHML_CONFIG", "BATCHML_ENV")
        environ = {name: text for name, text in os.environ.items() if name not in ignored}
        settings = load_settings(environ, Path(os.sep), LOCAL)
        if isinstance(error, ConfigError):
            return settings, ConfigCheck(error.where, error.mistakes, env or "")
        return settings, ConfigCheck(None, (str(error),), env or "")
    others = settings.content.mistakes_of(*settings.environments)
    return settings, ConfigCheck(settings.config, tuple(others), settings.env.value)


def _examine(settings: Settings, config: ConfigCheck) -> Iterator[Finding]:
    yield from check_config(config)
    machine = _examine_machine(settings)
    yield from check_machine(machine)
    if settings.is_local:
        return
    yield from check_plugin(machine)
    yield from _examine_account(settings)


def _examine_machine(settings: Settings) -> Any:
    home = Home(Path(settings.home.value))

    def check() -> None:
        home.check_owner()
        if home.root.is_dir() and any(home.root.iterdir()):
            home.prepare()  # an empty folder needs no check

    wants = settings.is_local and read_choice(home).executor == DOCKER
    trouble = _server_trouble(settings, home) if settings.is_local else ""
    return examine_machine(
        os.environ, home, check, wants_docker=wants, server_trouble=trouble,
        system_trouble=_system_trouble() if settings.is_local else "",
    )  # fmt: skip


def _system_trouble() -> str:
    """Why the environment `local` cannot run on this system, or ""."""
    try:
        control.check_system()
    except LocalServerError as error:
        return str(error)
    return ""


def _server_trouble(settings: Settings, home: Home) -> str:
    """The fault of the embedded server, if it runs; else empty."""
    server = control.find_server(home)
    if server is None:
        return ""
    if not is_answering(server):
        return describe_silence(home)
    return server.read_only or Context(settings, SystemClock(), Path.cwd()).find_start_obstacle()


def _examine_account(settings: Settings) -> Iterator[Finding]:
    environment = settings.environment
    home = Session(Access(home_region(environment.region), environment.profile))
    session = Session(Access(environment.region, environment.profile))
    account = ask_account(home, session, settings.env.value, environment, SystemClock())
    yield from check_account(account)
    yield from check_images(ask_images(session, account))
    is_known = isinstance(account.identity, CallerIdentity)
    yield from check_fabric(
        ask_fabric(session, environment) if is_known else FabricCheck(environment)
    )


def _lines(finding: Finding) -> Sequence[str]:
    first = f"{finding.mark:<9} {printable(finding.text)}"
    return [first, *(f"{_INDENT}{printable(line)}" for line in finding.fix)]


def _to_json(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "mark": finding.mark,
        "text": finding.text,
        "fix": list(finding.fix),
    }


@app.command(epilog="Example: batchml init --env dev --region eu-west-1")
def init(
    env: Annotated[
        str,
        typer.Option(
            "--env", metavar="NAME", help="Give this name to the first environment in AWS."
        ),
    ] = "dev",
    region: Annotated[
        str | None,
        typer.Option(metavar="REGION", help="Set its region; default: AWS_REGION, or us-east-1."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    json_: Json = False,
) -> None:
    """Write a commented batchml.toml and a first job here."""
    environ = os.environ
    chosen = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    here = Path.cwd()
    written = write_files(here, first_files(env, chosen or "us-east-1"), force=force)
    names = [str(path.relative_to(here)) for path in written]
    next_commands = [f"batchml submit --wait {FIRST_JOB}", f"batchml setup --env {env} --plan"]
    if json_:
        print_json({"files": names, "next": next_commands})
        return
    print_line(f"Wrote {', '.join(names)}.")
    print_line(f"Run the job on this machine:      {next_commands[0]}")
    print_line(f"See what setup would make in AWS: {next_commands[1]}")
