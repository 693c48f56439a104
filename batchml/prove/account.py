"""The steps of a proof that only AWS, or another implementation of it, can answer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from batchml.prove.children import CommandResult
from batchml.prove.proof import Asker, Proof, answer, read_facts
from batchml.prove.steps import ClaimAnswer

CONTROLLER_IMAGE, GPU_IMAGE = "controller", "pytorch"
ROLES = ("submitter", "doctor")
SAVED = 900.0  # seconds in which a run has started and saved its checkpoint
# Another program's AWS runs a job at once or never: it has no host to start.
PATIENCE = 20.0
_POLL = 1.0


def call_aws(proof: Proof, verb: str, *words: str) -> CommandResult:
    """Run `batchml.prove.calls` in the proof's environment."""
    return proof.commands.run(verb, proof.env, *words, module="batchml.prove.calls")


def ask_image(proof: Proof) -> Iterator[ClaimAnswer]:
    """Push the image of the probe, and compare the processor in its manifest with the hosts'."""
    pushed, reference = push_image(proof, proof.token)
    yield answer("image-pushed", bool(reference), pushed.describe(), image=reference)
    if not reference:
        return
    asked = call_aws(proof, "processors", reference)
    there, wanted = asked.document.get("processors", []), asked.document.get("hosts", [])
    why = f"the image is for {', '.join(there)}, the hosts are {', '.join(wanted)}"
    why = asked.describe() if asked.code else why
    held = bool(set(there) & set(wanted))
    yield answer("image-processor", held, why, processors=there)


def push_image(proof: Proof, name: str) -> tuple[CommandResult, str]:
    """Push an image; its reference with the digest in ECR, "" if that failed."""
    pushed = proof.ask("image", "push", name, "--json")
    rows = pushed.document if isinstance(pushed.document, list) else []
    found = next((str(row["reference"]) for row in rows if row.get("digest")), "")
    return pushed, "" if pushed.code else found


def ask_submitter(proof: Proof) -> Iterator[ClaimAnswer]:
    """Submit the probe with a role that has the stack's policy for submitters, and nothing else."""
    yield _submit_as(proof, "submitter", "as-submitter")


def ask_doctor_role(proof: Proof) -> Iterator[ClaimAnswer]:
    """Submit the probe with a role that has exactly the statements that doctor prints."""
    yield _submit_as(proof, "doctor", "as-doctor")


def _submit_as(proof: Proof, role: str, claim: str) -> ClaimAnswer:
    """The answer to a claim: whether a new role with these policies can submit, and cancel."""
    policies: list[object] = []
    if role == "doctor":
        printed = proof.ask("doctor", "--policy", "submit", "--json")
        policies = printed.document if isinstance(printed.document, list) else []
        if not policies:
            return answer(claim, False, printed.describe())
    keys = Path(proof.folder.record.work) / f"keys-{role}"
    proof.folder.update(made=True)
    made = call_aws(proof, "role", role, json.dumps(policies), str(keys))
    if made.code:
        # It is not the policy that fails: this caller may not make roles.
        return ClaimAnswer(claim, None, made.describe())
    try:
        return _judge_role(proof, claim, keys, made)
    finally:
        keys.unlink(missing_ok=True)
        if proof.folder.record.made:
            call_aws(proof, "remove-roles", role)


def _judge_role(proof: Proof, claim: str, keys: Path, made: CommandResult) -> ClaimAnswer:
    profile = str(made.document.get("profile") or "default")
    environ = {
        "AWS_SHARED_CREDENTIALS_FILE": str(keys), "AWS_CONFIG_FILE": "/dev/null",
        "AWS_PROFILE": profile, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
        "AWS_SESSION_TOKEN": "",
    }  # fmt: skip
    run = proof.submit("again", wait=False, environ=environ)
    job = str(run.document.get("jobId", ""))
    if run.code or not job:
        return answer(claim, False, run.describe())
    seen = proof.ask("ls", "--json", environ=environ)
    stopped = proof.ask("cancel", job, "--json", environ=environ)
    wrong = next((each for each in (seen, stopped) if each.code), None)
    return answer(
        claim, wrong is None, wrong.describe() if wrong else "", role=made.document["role"]
    )


def ask_search(proof: Proof) -> Iterator[ClaimAnswer]:
    """Search by the tag `batchml:env` of the proof; only what AWS itself removes may be left."""
    found = call_aws(proof, "left")
    left = found.document.get("left", [])
    why = found.describe() if found.code else f"resources left: {', '.join(left)}"
    going = len(found.document.get("going", []))
    yield answer("nothing-left", not (found.code or left), why, removedByAws=going)


def terminate_host(proof: Proof, job: str) -> ClaimAnswer | None:
    """Wait until `job` has saved its checkpoint, and terminate the instance on which it runs.

    Returns the answer to `host-lost` if that is impossible.
    """
    ended: list[CommandResult] = []

    def watch(line: str) -> None:
        if read_facts(line).find("saved") and not ended:
            words = ("terminate", proof.env, job)
            ended.append(proof.commands.beside().run(*words, module="batchml.prove.calls"))

    followed = proof.ask("logs", job, "--follow", watch=watch, limit=SAVED)
    if not ended:
        return answer("host-lost", False, f"the run saved no checkpoint: {followed.describe()}")
    if ended[0].code:
        return answer("host-lost", False, ended[0].describe())
    return None


def remove_all(proof: Proof) -> CommandResult:
    """Take the environment away: the first command that failed, or the last one.

    The roles go first: one that has the stack's policy keeps it from being deleted. Repositories go
    only if this environment has made them.
    """
    removed = remove_roles(proof)
    if removed.code == 0:
        removed = proof.ask("teardown", "--delete-data", "--yes", "--json", *allow_loss(proof))
    if removed.code == 0:
        removed = call_aws(proof, "remove-images", proof.token, CONTROLLER_IMAGE, GPU_IMAGE)
    return removed


def allow_loss(proof: Proof) -> tuple[str, ...]:
    """The options of `teardown` for the proof's queues, by the names that its plan shows.

    The proof has cancelled its runs; one in its grace period has not ended yet.
    """
    prefix = "" if proof.world == "local" else f"batchml-{proof.env}-"
    return ("--allow-loss", f"{prefix}default", "--allow-loss", f"{prefix}gpu")


def remove_roles(proof: Proof) -> CommandResult:
    """Delete the roles that the proof has made and not deleted."""
    return call_aws(proof, "remove-roles", *ROLES)


def why_no_runs(proof: Proof) -> str:
    """Why another program's AWS does not run jobs; "" if it does, or refuses them.

    It is what the endpoint does, not what it is: a run that leaves RUNNABLE has a host; AWS Batch's
    own reason tells of one that has none.
    """
    job = str(proof.submit("again", wait=False).document.get("jobId", ""))
    if not job:
        return ""  # the next submission says why
    why = _wait_for_host(proof, job)
    proof.ask("cancel", job, "--json")
    return why


def _wait_for_host(proof: Proof, job: str) -> str:
    """Why the run has no host after `PATIENCE` seconds, or that AWS Batch says so; else ""."""
    waited = 0.0
    while True:
        found = proof.ask("show", job, "--json").document
        status, reason = str(found.get("status", "")), str(found.get("statusReason") or "")
        if status not in ("SUBMITTED", "PENDING", "RUNNABLE"):
            return ""
        if reason or waited >= PATIENCE:
            why = f": {reason}" if reason else f" after {waited:.0f} s"
            return f"the endpoint does not run jobs: a run is {status}{why}"
        proof.commands.sleep(_POLL)
        waited += _POLL


ASKERS: Mapping[str, Asker] = {
    "image": ask_image,
    "submitter": ask_submitter,
    "doctor-role": ask_doctor_role,
    "search": ask_search,
}
