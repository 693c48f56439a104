"""`--after RUN`: which runs a new one waits for, also where they are of another environment.

AWS Batch's dependencies are by job id, whatever the queue: two environments of one account and
region can be one pipeline, as a CPU one that prepares and a GPU one that trains. Beyond that AWS
Batch knows nothing of the other job, and a client has to wait. Source: AWS Batch API Reference,
SubmitJob, dependsOn; that it is not bound to a queue is (U), docs/decisions/035-capacity.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.errors import BatchmlError, UsageError, did_you_mean
from batchml.model.environment import LOCAL

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.record import Name

_SURE = 8  # characters of an id that is looked for in the history of other environments


def resolve(place: "Place", words: Sequence[str], notices: list[str]) -> tuple[str, ...]:
    """The job ids of `--after`, in their order. A word is a run as everywhere, or `ENV:RUN`.

    `notices` is told of runs that may yet move to another queue. Raises NotFound, and UsageError
    for runs that AWS Batch cannot wait for here, all of them at once.
    """
    found, refused = [], []
    for word in words:
        unknown = unknown_env(place, word)
        if unknown:
            refused.append(unknown)
            continue
        env, rest = split(place, word)
        try:
            other = place if env == place.env else _other(place, env, word)
            job_id = _select(other, rest)
        except _Apart as error:
            refused.append(str(error))
            continue
        found.append(job_id)
        notices += _may_move(other, job_id)
    if refused:
        raise UsageError("\n".join(refused))
    return tuple(found)


class _Apart(UsageError):
    """A run that is out of AWS Batch's reach from here."""


def unknown_env(place: "Place", word: str) -> str:
    """What to say of `ENV:RUN` without such an environment; "" of any other word. No run is called
    so: what follows its colon is a number."""
    env, _, run = word.partition(":")
    known = place.settings.environments
    if not run or run.isdigit() or word.startswith("arn:") or env in known:
        return ""
    return (
        f"--after {word}: environment {env} does not exist in batchml.toml."
        f"{did_you_mean(env, known)} Known: {', '.join(sorted(known))}."
    )


def split(place: "Place", word: str) -> tuple[str, str]:
    """The environment that a word means, and the run: `cpu:prep`, `prep:3`, `3f2a1b0c`.

    A word without an environment is of this one, unless only another one's history knows it.
    """
    first, colon, rest = word.partition(":")
    if colon and rest and not rest.isdigit() and first in place.settings.environments:
        return first, rest
    whole = word.partition(":")[0].partition("#")[0]
    if whole.startswith("@") or _is_known(place.history.names(place.env), whole):
        return place.env, word
    others = [
        env
        for env in place.settings.environments
        if env != place.env and _is_known(place.history.names(env), whole)
    ]
    if len(others) > 1:
        said = " or ".join(f"--after {env}:{word}" for env in others)
        raise UsageError(f"--after {word}: several environments have such a run. Write {said}.")
    return (others[0] if others else place.env), word


def _is_known(names: "Sequence[Name]", word: str) -> bool:
    sure = len(word) >= _SURE
    return any(
        word in (name.key, name.name, name.job_name)
        or (sure and word.lower() in (name.job_id[: len(word)], name.moved[: len(word)]))
        for name in names
        if name.job_id
    )


def _other(place: "Place", env: str, word: str) -> "Place":
    """The other environment. Raises _Apart where jobs of here cannot wait for jobs of there."""
    from batchml.settings import Setting

    settings = place.settings
    settings.check(env)
    named = replace(settings, env=Setting(env, f"--after {word}"))
    other = place.with_settings(named)
    here, there = settings.environment, settings.environments[env]
    why = ""
    if LOCAL in (env, place.env) or here.region != there.region:
        why = f"{_where(place.env, here.region)}, and {_where(env, there.region)}"
    elif here.profile != there.profile:
        from batchml.aws.session import who_am_i

        accounts = [who_am_i(each.connect()).account for each in (place, other)]
        if accounts[0] != accounts[1]:
            why = f"{place.env} is in the account {accounts[0]}, and {env} in {accounts[1]}"
    if why:
        rest = word.removeprefix(f"{env}:")
        raise _Apart(
            f"--after {word}: {why}: AWS Batch waits for jobs of one account and region. Let the "
            f"shell wait: batchml wait --env {env} {rest} && batchml submit --env {place.env} ..."
        )
    return other


def _where(env: str, region: str) -> str:
    return f"{env} is this machine" if env == LOCAL else f"{env} is in {region}"


def _select(place: "Place", word: str) -> str:
    from batchml.client.runs import select

    (job_id,) = select(place, [word])
    return job_id


def _may_move(place: "Place", job_id: str) -> list[str]:
    """AWS Batch fails what waits for a job that is cancelled, as one that moves is."""
    from batchml.model.fallback import said_moves

    waiting = {
        name.job_id: name.fallback
        for name in place.history.names(place.env)
        if name.fallback and not name.moved
    }
    fallback = waiting.get(job_id, "")
    try:
        run = place.describe([job_id]).get(job_id) if fallback else None
    except BatchmlError:
        return []
    if run is None or run.status.is_terminal or run.started_at:
        return []
    return [
        f"--after {run.name}: it moves {said_moves(fallback)}, and AWS Batch then fails what waits "
        f"for it where it is. To be sure: batchml wait {job_id} && batchml submit ..."
    ]
