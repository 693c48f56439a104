"""`--after RUN`: the runs that a new run waits for, also in another environment.

AWS Batch identifies dependencies by job id, whatever the queue: two environments of one account and
region can form one pipeline, for example CPU preparation and GPU training. In another account or
region AWS Batch does not find the job, so a client has to wait. Source: AWS Batch API Reference,
SubmitJob, dependsOn. That the queue does not matter is not documented:
docs/decisions/035-capacity.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.config.settings import Setting
from batchml.errors import BatchmlError, OtherAccountOrRegion, UsageError, did_you_mean
from batchml.model.environment import LOCAL
from batchml.runs.find import select
from batchml.runs.names import KnownRuns, bare_id

if TYPE_CHECKING:
    from batchml.context import Context

_MIN_ID_PREFIX = 8  # characters: a shorter start of a job id is not searched for in the history


def resolve_dependencies(
    context: "Context", words: Sequence[str], notices: list[str]
) -> tuple[str, ...]:
    """The job ids of `--after`, in the order of `words`, each of which is RUN or ENV:RUN.

    `notices` gets messages about runs that may move to another queue. Raises NotFound, and
    UsageError with all runs that AWS Batch cannot wait for.
    """
    found, refused = [], []
    for word in words:
        unknown = unknown_env(context, word)
        if unknown:
            refused.append(unknown)
            continue
        env, rest = split_env(context, word)
        try:
            other = context if env == context.env else _open_other(context, env, word)
            (job_id,) = select(other, [rest])
        except OtherAccountOrRegion as error:
            refused.append(str(error))
            continue
        found.append(job_id)
        notices += _move_notices(other, job_id)
    if refused:
        raise UsageError("\n".join(refused))
    return tuple(found)


def unknown_env(context: "Context", word: str) -> str:
    """The error for `ENV:RUN` if the environment does not exist; "" for any other word.

    No run has a name like ENV:RUN: only a number follows the colon in `NAME:3`.
    """
    env, _, run = word.partition(":")
    known = context.settings.environments
    if not run or run.isdigit() or word.startswith("arn:") or env in known:
        return ""
    return (
        f"--after {word}: environment {env} does not exist in batchml.toml."
        f"{did_you_mean(env, known)} Known: {', '.join(sorted(known))}."
    )


def split_env(context: "Context", word: str) -> tuple[str, str]:
    """The environment and the run of a word: `cpu:prep`, `prep:3`, `3f2a1b0c`.

    A word without an environment belongs to the current one, unless only the history of another
    environment has such a run.
    """
    first, colon, rest = word.partition(":")
    if colon and rest and not rest.isdigit() and first in context.settings.environments:
        return first, rest
    run = bare_id(word)
    if run.startswith("@") or _has_run(context.history.names(context.env), run, context.project):
        return context.env, word
    others = [
        env
        for env in context.settings.environments
        if env != context.env and _has_run(context.history.names(env), run, context.project)
    ]
    if len(others) > 1:
        choices = " or ".join(f"--after {env}:{word}" for env in others)
        raise UsageError(f"--after {word}: several environments have such a run. Write {choices}.")
    return (others[0] if others else context.env), word


def _has_run(names: KnownRuns, word: str, project: str) -> bool:
    is_prefix = len(word) >= _MIN_ID_PREFIX
    return any(
        word in (name.key, name.job_name)
        or (word == name.name and name.project in ("", project))
        or (is_prefix and word.lower() in (name.job_id[: len(word)], name.moved[: len(word)]))
        for name in names.named(word, project)
        if name.job_id
    )


def _open_other(context: "Context", env: str, word: str) -> "Context":
    """The context of the environment `env`.

    Raises OtherAccountOrRegion if jobs of `context` cannot wait for jobs of `env`.
    """
    settings = context.settings
    settings.check(env)
    named = replace(settings, env=Setting(env, f"--after {word}"))
    other = context.with_settings(named)
    here, there = settings.environment, settings.environments[env]
    why = ""
    if LOCAL in (env, context.env) or here.region != there.region:
        why = f"{_region_text(context.env, here.region)}, and {_region_text(env, there.region)}"
    elif here.profile != there.profile:
        from batchml.aws.session import get_caller_identity

        accounts = [get_caller_identity(each.connect()).account for each in (context, other)]
        if accounts[0] != accounts[1]:
            why = f"{context.env} is in the account {accounts[0]}, and {env} in {accounts[1]}"
    if why:
        rest = word.removeprefix(f"{env}:")
        raise OtherAccountOrRegion(
            f"--after {word}: {why}: AWS Batch waits for jobs of one account and region. Let the "
            f"shell wait: batchml wait --env {env} {rest} && batchml submit --env {context.env} ..."
        )
    return other


def _region_text(env: str, region: str) -> str:
    return f"{env} is this machine" if env == LOCAL else f"{env} is in {region}"


def _move_notices(context: "Context", job_id: str) -> list[str]:
    """Notices: a move cancels the job, and AWS Batch fails jobs that depend on a cancelled job."""
    from batchml.model.fallback import describe_fallback

    fallbacks = {
        name.job_id: name.fallback
        for name in context.history.names(context.env).named(job_id)
        if name.fallback and not name.moved
    }
    fallback = fallbacks.get(job_id, "")
    try:
        run = context.describe([job_id]).get(job_id) if fallback else None
    except BatchmlError:
        return []
    if run is None or run.status.is_terminal or run.started_at:
        return []
    return [
        f"--after {run.name}: it moves {describe_fallback(fallback)}, and AWS Batch then fails "
        f"the jobs that depend on it. To be sure: batchml wait {job_id} && batchml submit ..."
    ]
