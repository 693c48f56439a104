"""`secrets` of a job definition: names of variables, and where AWS finds their values. Pure."""

from batchml.aws.site import Platform
from batchml.errors import ConfigError
from batchml.model.environment import LOCAL
from batchml.model.job import JobSpec
from batchml.model.secret import Kept, arn_to_list, find_arn, parse_kept


def secrets(spec: JobSpec, platform: Platform) -> list[dict[str, str]]:
    """What the definition of a job says of its `[secrets]`.

    On `local` it says what the job.toml says; the server looks that up in its user's own file. In
    AWS the execution role may read what the environment lists, and no more.
    Raises ConfigError for all that is not listed there, with the line to add.
    """
    found, missing = list[dict[str, str]](), list[tuple[str, Kept]]()
    for name, text in spec.secrets.items():
        kept = parse_kept(text)
        assert kept is not None, "read_job refused it"
        if platform.env == LOCAL:
            told = kept.value_from(arn_to_list(kept, "", "")) if kept.scope else text
            found.append({"name": name, "valueFrom": told})
            continue
        arn = find_arn(kept, platform.secrets)
        if arn is None:
            missing.append((name, kept))
        else:
            found.append({"name": name, "valueFrom": kept.value_from(arn)})
    if missing:
        raise ConfigError(spec.name, _refused(missing, platform))
    return found


def _refused(missing: list[tuple[str, Kept]], platform: Platform) -> list[str]:
    """One mistake for each, and the whole line of the file in the last."""
    _, partition, _, _, account, *_ = [*platform.execution_role.split(":"), *[""] * 6]
    lines = [arn_to_list(kept, platform.region, account, partition or "aws") for _, kept in missing]
    listed = ", ".join(f'"{arn}"' for arn in dict.fromkeys([*platform.secrets, *lines]))
    told = [
        f"secrets.{name}: {arn} is not among what jobs of {platform.env} may be given."
        for (name, _), arn in zip(missing, lines, strict=True)
    ]
    told[-1] += (
        f" Write under [env.{platform.env}] of batchml.toml: secrets = [{listed}], then: "
        f"batchml setup --env {platform.env}"
    )
    return told
