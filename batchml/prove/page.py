"""The report of a proof: each claim, the measurements, and our unverified statements."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from batchml import __version__
from batchml.cli.render import timestamp
from batchml.prove.claims import ASSUMPTIONS, BY_ID, Assumption, World
from batchml.prove.folder import ProofRecord
from batchml.prove.service import ProofResult, to_json
from batchml.prove.steps import ClaimAnswer

RESULTS = {True: "held", False: "did not", None: "not asked"}
_SHOWN = {"held": "held", "did not": "did not hold", "not asked": "not tested"}
_WORLDS = {
    "local": "the embedded AWS Batch", "endpoint": "an AWS-compatible server", "aws": "AWS"
}  # fmt: skip


def make_document(record: ProofRecord, result: ProofResult) -> dict[str, Any]:
    """The proof as JSON."""
    return {
        "batchml": __version__,
        "proof": record.id,
        "world": record.world,
        "env": record.env,
        "began": timestamp(int(record.began * 1000)),
        "seconds": round(result.seconds, 1),
        "usd": round(result.usd, 4),
        "interrupted": result.is_interrupted,
        "held": result.count(True),
        "refuted": result.count(False),
        "notAsked": result.count(None),
        "left": result.left or None,
        "steps": [to_json(step) for step in result.steps],
        "claims": [_claim_json(answer) for answer in result.answers.values()],
        "assumptions": [
            _assumption_json(each, record.world, result.answers) for each in ASSUMPTIONS
        ],
    }


def _claim_json(answer: ClaimAnswer) -> dict[str, Any]:
    claim = BY_ID[answer.claim]
    return {
        "id": claim.id, "claim": claim.text, "step": claim.step, "result": RESULTS[answer.held],
        "why": answer.why or None, "facts": dict(answer.facts),
    }  # fmt: skip


def _assumption_json(
    assumption: Assumption, world: World, answers: Mapping[str, ClaimAnswer]
) -> dict[str, Any]:
    """An assumption and its result. All of them are about AWS, so only AWS decides them."""
    found = [answers[claim] for claim in assumption.claims] if world == "aws" else []
    held = None
    if any(each.held is False for each in found):
        held = False
    elif found and all(each.held for each in found):
        held = True
    elsewhere = "" if world == "aws" else "it needs AWS"
    why = assumption.undecided or elsewhere or next((each.why for each in found if each.why), "")
    return {
        "file": assumption.file, "words": assumption.words, "statement": assumption.statement,
        "claims": list(assumption.claims), "result": RESULTS[held], "why": why or None,
    }  # fmt: skip


# --- The page -------------------------------------------------------------------------------------


def _count(noun: str) -> Callable[[Any], str]:
    """A function that writes a number of things: "1 line", "20 lines", "no lines"."""
    return lambda number: f"{number or 'no'} {noun}{'s' if number != 1 else ''}"


def _in_words(form: str) -> Callable[[Any], str]:
    return lambda value: form.format(value)


def _list(form: str) -> Callable[[Any], str]:
    return lambda values: form.format(", ".join(map(str, values)) or "none")


# How people read a fact: by its name, or by "CLAIM.NAME".
_FACTS: Mapping[str, Callable[[Any], str]] = {
    "problems": _count("problem"),
    "resources": _count("changed resource"),
    "changes": _count("change"),
    "lines": _count("line"),
    "files": _count("file"),
    "attempts": _count("attempt"),
    "image": str,
    "verdict": str,
    "device": str,
    "role": str,
    "processors": _list("{}"),
    "gpus": _list("{}"),
    "folders": _list("libcuda.so.1 is in {}"),
    "exitCode": _in_words("exit code {}"),
    "batch-reachable.status": _in_words("it answers HTTP {} to a request without a signature"),
    "missing-key.status": _in_words("S3 answers HTTP {}"),
    "namesListBucket": lambda named: (
        f"S3's message {'names' if named else 'does not name'} s3:ListBucket"
    ),
    "mib": _in_words("{:,} MiB"),
    "uid": _in_words("user {}"),
    "refused": _in_words("S3 refuses the {}"),
    "ran": lambda runs: "; ".join(f"child {index}, in its run {run}" for index, run in runs),
    "trials": lambda counts: ", ".join(f"{n} {state.lower()}" for state, n in counts.items()),
    "longestSeconds": _in_words("the slowest line took {:.1f} s"),
    "seconds": _in_words("{:.1f} s after SIGTERM"),
    "grace": _in_words("grace period: {:g} s"),
    "gbitPerSecond": _in_words("{:.1f} Gbit/s"),
    "removedByAws": lambda number: f"{_count('resource')(number)} that AWS removes by itself",
}


def describe_fact(claim: str, name: str, value: Any) -> str:
    """A fact of a claim in words; "" for a fact that is not known."""
    form = _FACTS.get(f"{claim}.{name}") or _FACTS.get(name)
    if value in (None, ""):
        return ""
    return form(value) if form else f"{name}: {value}"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; margin-bottom: 2rem; }}
td, th {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid #8884; }}
td:first-child {{ white-space: nowrap; }}
.held {{ color: #1a7f37; }} .did {{ color: #cf222e; font-weight: bold; }} .not {{ color: #777; }}
code {{ overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{left}
<h2>Claims</h2>
<table><tr><th>result<th>claim<th>measured</tr>
{claims}
</table>
<h2>Steps</h2>
<table><tr><th>step<th>action<th>seconds<th>USD, estimated</tr>
{steps}
</table>
<h2>Unverified statements of the documentation</h2>
<table><tr><th>result<th>statement<th>where</tr>
{assumptions}
</table>
</html>
"""


def render_page(document: Mapping[str, Any]) -> str:
    """The document of `make_document` as a page that loads nothing."""
    title = f"batchml {document['batchml']}: claims tested on {_WORLDS[document['world']]}"
    began = f"{document['began'][:10]} at {document['began'][11:16]} UTC"
    summary = (
        f"{document['held']} claims held, {document['refuted']} did not hold, "
        f"{document['notAsked']} were not tested. It began on {began}, took "
        f"{document['seconds']:.0f} s and cost ${document['usd']:.2f}, estimated from list prices."
        f"{' It was interrupted.' if document['interrupted'] else ''}"
    )
    left = ""
    if document["left"]:
        command = f"<code>{_text(document['left'])}</code>"
        left = f"<p class=did>Something is left. To remove it: {command}</p>"
    return _PAGE.format(
        title=_text(title), summary=_text(summary), left=left,
        claims="\n".join(map(_claim_row, document["claims"])),
        steps="\n".join(map(_step_row, document["steps"])),
        assumptions="\n".join(map(_assumption_row, document["assumptions"])),
    )  # fmt: skip


def _claim_row(claim: Mapping[str, Any]) -> str:
    facts = [describe_fact(claim["id"], *fact) for fact in claim["facts"].items()]
    texts = [*([claim["why"]] if claim["why"] else []), *filter(None, facts)]
    return f"<tr>{_result(claim['result'])}<td>{_text(claim['claim'])}<td>{_lines(texts)}</tr>"


def _step_row(step: Mapping[str, Any]) -> str:
    action = f"{step['title']} ({step['why']})" if step["why"] else step["title"]
    cells = (step["step"], action, f"{step['seconds']:.1f}", f"{step['usd']:.2f}")
    return "<tr>" + "".join(f"<td>{_text(cell)}" for cell in cells) + "</tr>"


def _assumption_row(each: Mapping[str, Any]) -> str:
    texts = [each["statement"], *([each["why"]] if each["why"] else [])]
    return f"<tr>{_result(each['result'])}<td>{_lines(texts)}<td>{_text(each['file'])}</tr>"


def _result(result: str) -> str:
    return f'<td class="{result.split()[0]}">{_SHOWN[result]}'


def _lines(texts: list[str]) -> str:
    return "<br>".join(_text(text) for text in texts)


def _text(value: object) -> str:
    return escape(str(value))
