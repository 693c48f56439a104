"""The page of a proof: each claim, what was measured, and what is now known of our assumptions."""

from collections.abc import Mapping
from html import escape
from typing import Any

from batchml import __version__
from batchml.cli.render import timestamp
from batchml.prove.claims import ASSUMPTIONS, BY_ID, Assumption
from batchml.prove.folder import ProofRecord
from batchml.prove.service import ProofResult, to_json
from batchml.prove.steps import ClaimAnswer

RESULTS = {True: "held", False: "did not", None: "not asked"}
_WORLDS = {
    "local": "the embedded AWS Batch of this machine", "endpoint": "another program's AWS",
    "aws": "AWS",
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
        "assumptions": [_assumption_json(each, result.answers) for each in ASSUMPTIONS],
    }


def _claim_json(answer: ClaimAnswer) -> dict[str, Any]:
    claim = BY_ID[answer.claim]
    return {
        "id": claim.id, "claim": claim.text, "step": claim.step, "result": RESULTS[answer.held],
        "why": answer.why or None, "facts": dict(answer.facts),
    }  # fmt: skip


def _assumption_json(assumption: Assumption, answers: Mapping[str, ClaimAnswer]) -> dict[str, Any]:
    found = [answers[claim] for claim in assumption.claims]
    held = None
    if any(each.held is False for each in found):
        held = False
    elif found and all(each.held for each in found):
        held = True
    why = assumption.undecided or next((each.why for each in found if each.why), "")
    return {
        "file": assumption.file, "words": assumption.words, "claims": list(assumption.claims),
        "result": RESULTS[held], "why": why or None,
    }  # fmt: skip


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
<table><tr><th>result<th>claim<th>facts</tr>
{claims}
</table>
<h2>Steps</h2>
<table><tr><th>step<th>what<th>seconds<th>USD</tr>
{steps}
</table>
<h2>Assumptions of the documents</h2>
<table><tr><th>result<th>where<th>words</tr>
{assumptions}
</table>
</html>
"""


def render_page(document: Mapping[str, Any]) -> str:
    """The document of `make_document` as a page that loads nothing."""
    title = f"batchml {document['batchml']} in {_WORLDS[document['world']]}"
    summary = (
        f"{document['held']} claims held, {document['refuted']} did not, "
        f"{document['notAsked']} were not asked. {document['began']}, {document['seconds']} s, "
        f"${document['usd']:.2f} (estimated from list prices)"
        f"{'; interrupted' if document['interrupted'] else ''}."
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
    facts = [f"{name}: {value}" for name, value in claim["facts"].items()]
    texts = [*([claim["why"]] if claim["why"] else []), *facts]
    return f"<tr>{_result(claim['result'])}<td>{_text(claim['claim'])}<td>{_lines(texts)}</tr>"


def _step_row(step: Mapping[str, Any]) -> str:
    what = f"{step['title']}: {step['why']}" if step["why"] else step["title"]
    cells = (step["step"], what, f"{step['seconds']:.1f}", f"{step['usd']:.2f}")
    return "<tr>" + "".join(f"<td>{_text(cell)}" for cell in cells) + "</tr>"


def _assumption_row(each: Mapping[str, Any]) -> str:
    texts = [f"“{each['words']}”", *([each["why"]] if each["why"] else [])]
    return f"<tr>{_result(each['result'])}<td>{_text(each['file'])}<td>{_lines(texts)}</tr>"


def _result(result: str) -> str:
    return f'<td class="{result.split()[0]}">{_text(result)}'


def _lines(texts: list[str]) -> str:
    return "<br>".join(_text(text) for text in texts)


def _text(value: object) -> str:
    return escape(str(value))
