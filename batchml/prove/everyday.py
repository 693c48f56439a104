"""The steps of a proof that hold anywhere: what users do every day, on `local` and in AWS."""

from collections.abc import Iterator, Mapping

from batchml.prove import account
from batchml.prove.children import CommandResult
from batchml.prove.claims import claims_of
from batchml.prove.proof import (
    Asker,
    FactTable,
    Proof,
    answer,
    judge_order,
    latencies,
    read_facts,
)
from batchml.prove.steps import ClaimAnswer

LINES = 20  # lines that the probe prints in the mode `inside`
FOLLOWED = 10  # and in the mode `lines`
# Seconds from a line's printing to its arrival. CloudWatch takes some; a busy laptop does, too.
LATENCY = {"local": 5.0, "endpoint": 15.0, "aws": 15.0}
GRACE = 5.0  # of the probe's job.toml
SHARED_MEMORY = 128  # MiB: half of the memory there
CANCELLED = 143


def ask_doctor(proof: Proof) -> Iterator[ClaimAnswer]:
    found = proof.ask("doctor", "--json")
    problems = [
        " ".join((each["text"], *each["fix"]))
        for each in found.document.get("findings", ())
        if each["mark"] == "problem"
    ]
    why = "; ".join(problems) or found.describe()
    yield answer("doctor", found.code == 0, why, problems=len(problems))


def ask_setup(proof: Proof) -> Iterator[ClaimAnswer]:
    proof.folder.update(made=True)
    found = proof.ask("setup", "--yes", "--json")
    steps = [each for each in found.document.get("steps", ()) if each["action"] != "keep"]
    held = found.code == 0 and bool(found.document.get("applied"))
    yield answer("setup", held, found.describe(), resources=len(steps))


def ask_plan(proof: Proof) -> Iterator[ClaimAnswer]:
    found = proof.ask("setup", "--plan", "--json")
    changes = [
        f"{each['action']} {each['kind']} {each['name']}: {'; '.join(each['reasons'])}"
        for each in found.document.get("steps", ()) if each["action"] != "keep"
    ]  # fmt: skip
    why = "; ".join(changes) or found.describe()
    yield answer("plan-empty", found.code == 0 and not changes, why, changes=len(changes))


def ask_probe(proof: Proof) -> Iterator[ClaimAnswer]:
    proof.folder.update(made=True)
    if proof.world == "endpoint":
        why = account.why_no_runs(proof)
        if why:
            claims = claims_of("probe", proof.world, proof.options)
            yield from (ClaimAnswer(claim.id, None, why) for claim in claims)
            return
    run = proof.submit("inside")
    yield answer("run-ends", run.code == 0, run.describe(), exitCode=run.code)
    facts = read_facts(run.err)
    seen = facts.find("code").get("token", "")
    yield answer("code-there", seen == proof.token, "the program found no code of this proof")
    numbers = [each["number"] for each in facts.all("line")]
    wrong = judge_order(numbers, LINES)
    complete = run.document.get("logComplete") is True
    why = wrong or "the log is not marked complete"
    yield answer("log-complete", complete and not wrong, why, lines=len(numbers))
    yield from _judge_inside(proof, facts)
    if run.code:
        return
    proof.runs["probe"] = str(run.document.get("jobId", ""))
    yield _judge_file(proof, "output-kept")
    yield _judge_file(proof, "checkpoint-kept", "--checkpoints")


def _judge_inside(proof: Proof, facts: FactTable) -> Iterator[ClaimAnswer]:
    """The claims that the program has decided by looking around."""
    batch = facts.find("batch")
    status = batch.get("answer", 0)
    yield answer("batch-reachable", bool(status), str(batch.get("error", "no fact")), status=status)
    mib = facts.find("shared-memory").get("mib", 0)
    yield answer("shared-memory", mib >= SHARED_MEMORY, f"{mib} MiB", mib=mib)
    if proof.world != "aws":
        return
    uid = facts.find("user").get("uid")
    yield answer("user-1000", uid == 1000, f"the program runs as user {uid}", uid=uid)
    metadata = facts.find("metadata")
    blocked = bool(metadata) and metadata.get("answer") != 200
    why = f"the metadata service answered {metadata.get('answer') or 'nothing'}"
    yield answer("metadata-blocked", blocked, why)
    role = facts.find("role")
    denied = role.get("denied")
    refusal = role.get("error") or f"a call beyond its policy: {denied or 'not refused'}"
    why = f"role {role.get('role') or 'none'}; {refusal}"
    yield answer("role-limited", bool(role.get("role") and denied), why, refused=denied)
    key = facts.find("missing-key")
    missing = key.get("answer") == "missing"
    why = str(key.get("error") or f"batchml read it as {key.get('answer') or 'unknown'}")
    names = key.get("namesListBucket")
    yield answer("missing-key", missing, why, status=key.get("status"), namesListBucket=names)


def _judge_file(proof: Proof, claim: str, *flags: str) -> ClaimAnswer:
    got, files = proof.fetch(proof.runs["probe"], claim, *flags)
    found = [text for name, text in files.items() if name.endswith("proof.txt")]
    names = ", ".join(files) or "no files"
    why = got.describe() if got.code else f"the program's file is not among {names}"
    return answer(claim, found == [proof.token], why, files=len(files))


def ask_second(proof: Proof) -> Iterator[ClaimAnswer]:
    run = proof.submit("again")
    seen = read_facts(run.err).find("workspace").get("seen")
    why = run.describe() if run.code else "the file of the first run is not there"
    yield answer("workspace-shared", seen == proof.token, why)


def ask_array(proof: Proof) -> Iterator[ClaimAnswer]:
    run = proof.submit("child", "--array", "2")
    job = str(run.document.get("jobId", ""))
    failed = run.code == 1 and run.document.get("class") == "app-error"
    yield answer("array-fails", failed, run.describe(), exitCode=run.code)
    if not job:
        return
    found = proof.ask("explain", job, "--json")
    verdict = str(found.document.get("verdict", ""))
    why = f"explain says: {verdict}" if verdict else found.describe()
    named = "RuntimeError" in verdict and "child 1" in verdict
    yield answer("explain-names", named, why, verdict=verdict)
    again = proof.ask("rerun", job, "--failed", "--wait", "--json")
    runs = [(each["index"], each["run"]) for each in read_facts(again.err).all("child")]
    ran = ", ".join(f"child {index} in its run {number}" for index, number in runs)
    why = again.describe() if again.code else f"reran: {ran or 'none'}"
    yield answer("rerun-failed", again.code == 0 and runs == [(1, 2)], why, ran=runs)


SWEEP = """\
name = "proof"
job = "{job}"
method = "grid"
goal = {{ max = "score" }}

[space]
mode = "trial"
x = [0.25, 0.75]

[limits]
trials = 2
parallel = 2
"""


def ask_sweep(proof: Proof) -> Iterator[ClaimAnswer]:
    path = proof.folder.job.parent / "proof-sweep.toml"
    path.write_text(SWEEP.format(job=proof.folder.job), "utf-8")
    if proof.world != "local":
        pushed, reference = account.push_image(proof, account.CONTROLLER_IMAGE)
        if not reference:
            yield answer("sweep-detached", False, pushed.describe())
            return
    begun = proof.ask("sweep", str(path), "--detach", "--json")
    key = str(begun.document.get("sweepId", ""))
    if begun.code or not key:
        yield answer("sweep-detached", False, begun.describe())
        return
    shown = proof.ask("sweeps", "show", key, "--follow", "--json", limit=900)
    counts = shown.document.get("counts", {})
    best = (shown.document.get("best") or {}).get("params", {}).get("x")
    held = shown.code == 0 and counts == {"DONE": 2} and best == 0.75
    ended = ", ".join(f"{count} {state}" for state, count in counts.items())
    why = shown.describe() if shown.code else f"trials: {ended}; best x: {best}"
    yield answer("sweep-detached", held, why, trials=counts)


def ask_follow(proof: Proof) -> Iterator[ClaimAnswer]:
    run = proof.submit("lines", wait=False)
    job = str(run.document.get("jobId", ""))
    if not job:
        yield answer("follow-order", False, run.describe())
        return
    shown = proof.ask("logs", job, "--follow")
    numbers = [each["number"] for each in read_facts(shown.out).all("line")]
    wrong = judge_order(numbers, FOLLOWED)
    why = shown.describe() if shown.code else wrong
    yield answer("follow-order", not (shown.code or wrong), why, lines=len(numbers))
    late = max(latencies(shown.lines), default=None)
    limit = LATENCY[proof.world]
    held = late is not None and late < limit
    why = "no line came" if late is None else f"a line took {late:.1f} s; limit: {limit:g} s"
    seconds = None if late is None else round(late, 2)
    yield answer("follow-latency", held, why, longestSeconds=seconds)


def ask_shell(proof: Proof) -> Iterator[ClaimAnswer]:
    run = proof.submit("hold", wait=False)
    job = str(run.document.get("jobId", ""))
    if not job:
        yield answer("shell-runs", False, run.describe())
        return
    proof.runs["held"] = job
    done = proof.ask("shell", job, "--wait", "--json", "--", "true")
    if done.code:
        yield answer("shell-runs", False, done.describe())
        return
    other = proof.ask("shell", job, "--json", "--", "sh", "-c", "echo proof; exit 7")
    said = str(other.document.get("output", "")).strip()
    why = f"`echo proof; exit 7` ended with {other.code} and printed {said!r}"
    yield answer("shell-runs", other.code == 7 and said == "proof", why, exitCode=other.code)


def ask_cancel(proof: Proof) -> Iterator[ClaimAnswer]:
    job = proof.runs["held"]
    stopped = proof.ask("cancel", job, "--json")
    end = proof.ask("wait", job, "--json", limit=300)
    documents = end.document or [{}]
    held = stopped.code == 0 and documents[0].get("class") == "cancelled"
    why = stopped.describe() if stopped.code else end.describe()
    yield answer("cancel-stops", held and end.code == CANCELLED, why, exitCode=end.code)
    logs = read_facts(proof.ask("logs", job).out)
    heard = logs.find("stopping")
    both = heard.get("signal") == "SIGTERM" and heard.get("stopFile") is True
    why = f"signal: {heard.get('signal', 'none')}; stop file: {heard.get('stopFile', False)}"
    yield answer("stop-signal", both, why)
    lived = max((each["seconds"] for each in logs.all("alive")), default=0.0)
    # A fifth is kept for the outputs where they go to S3.
    why = f"it was killed {lived:g} s after SIGTERM; its grace period is {GRACE:g} s"
    yield answer("grace-given", lived >= 0.7 * GRACE, why, seconds=lived, grace=GRACE)


def ask_host(proof: Proof) -> Iterator[ClaimAnswer]:
    words = ["--attempts", "2", "--retry-on", "host-lost"]
    if proof.world == "local":
        # The server's own fault: the attempt is killed, and reported as AWS reports a lost host.
        run = proof.submit("resume", *words, "--tag", "batchml:chaos=host-lost@2s")
        yield judge_resumed(run, read_facts(run.err))
        return
    begun = proof.submit("resume", *words, wait=False)
    job = str(begun.document.get("jobId", ""))
    if not job:
        yield answer("host-lost", False, begun.describe())
        return
    trouble = account.terminate_host(proof, job)
    if trouble is not None:
        yield trouble
        return
    end = proof.ask("logs", job, "--follow", "--json", limit=900)
    yield judge_resumed(end, read_facts(end.err))


def judge_resumed(run: CommandResult, facts: FactTable) -> ClaimAnswer:
    """The claim that the second attempt has found what the first one saved."""
    attempts = {each["number"]: each["found"] for each in facts.all("attempt")}
    held = run.code == 0 and attempts == {1: "", 2: "41"}
    why = run.describe() if run.code else f"checkpoints that the attempts found: {attempts}"
    return answer("host-lost", held, why, attempts=len(attempts))


def ask_gpu(proof: Proof) -> Iterator[ClaimAnswer]:
    if proof.world != "local":
        pushed, reference = account.push_image(proof, account.GPU_IMAGE)
        if not reference:
            yield answer("gpu-smi", False, pushed.describe())
            return
    words = ["--gpus", "1", "--image", account.GPU_IMAGE, "--memory", "6 GiB"]
    run = proof.submit("gpu", *words)
    facts = read_facts(run.err)
    gpus = facts.find("nvidia-smi").get("gpus", [])
    why = run.describe() if run.code else f"nvidia-smi shows {', '.join(gpus) or 'no GPU'}"
    yield answer("gpu-smi", len(gpus) == 1, why, gpus=gpus)
    if proof.world == "aws":
        found = facts.find("driver").get("found", [])
        yield answer("gpu-driver", bool(found), "libcuda.so.1 was not found", folders=found)
    step = facts.find("step")
    learned = step.get("after", 1.0) < step.get("before", 0.0)
    why = str(step.get("error") or f"loss {step.get('before')} became {step.get('after')}")
    yield answer("gpu-step", bool(step.get("device")) and learned, why, device=step.get("device"))


def ask_nodes(proof: Proof) -> Iterator[ClaimAnswer]:
    run = proof.submit("nodes", "--nodes", "2")
    rows = read_facts(run.err).all("nodes")
    met = sorted(each["index"] for each in rows)
    why = run.describe() if run.code else f"nodes that ended: {', '.join(map(str, met)) or 'none'}"
    yield answer("nodes-meet", run.code == 0 and met == [0, 1], why)
    sums = [each["sum"] for each in rows]
    speed = min((each["gbitPerSecond"] for each in rows), default=0.0)
    why = f"sums: {', '.join(map(str, sums)) or 'none'}; expected: 3 on each node"
    yield answer("all-reduce", sums == [3, 3], why, gbitPerSecond=speed)


def ask_teardown(proof: Proof) -> Iterator[ClaimAnswer]:
    cancel_runs(proof)
    if proof.world == "local":
        found = proof.ask("teardown", "--yes", "--json", *account.allow_loss(proof))
        if found.code == 0:
            found = proof.commands.run("local", "stop", "--json")
    else:
        found = account.remove_all(proof)
    held = found.code == 0
    if held:
        proof.folder.update(made=False)
    yield answer("teardown", held, found.describe())


def end_runs(proof: Proof) -> bool:
    """End the proof's runs and delete its roles in an environment of the user's own.

    Return whether that was possible. Its ended runs and their files stay, as those of any run.
    """
    cancel_runs(proof)
    return proof.world == "local" or account.remove_roles(proof).code == 0


def cancel_runs(proof: Proof) -> None:
    """Cancel the proof's runs that have not ended, also those of sweeps."""
    sweeps = proof.ask("sweeps", "ls", "--json").document
    for sweep in sweeps if isinstance(sweeps, list) else ():
        if sweep.get("status") != "ended":
            proof.ask("sweeps", "stop", str(sweep.get("sweepId")), "--now", "--json")
    runs = proof.ask("ls", "--limit", "1000", "--json").document
    going = [
        str(run["jobId"]) for run in (runs if isinstance(runs, list) else ())
        if run.get("status") not in ("SUCCEEDED", "FAILED")
    ]  # fmt: skip
    if going:
        proof.ask("cancel", *going, "--json")


ASKERS: Mapping[str, Asker] = {
    "doctor": ask_doctor, "setup": ask_setup, "plan": ask_plan, "probe": ask_probe,
    "second": ask_second, "array": ask_array, "sweep": ask_sweep, "follow": ask_follow,
    "shell": ask_shell, "cancel": ask_cancel, "host": ask_host, "gpu": ask_gpu,
    "nodes": ask_nodes, "teardown": ask_teardown,
}  # fmt: skip
