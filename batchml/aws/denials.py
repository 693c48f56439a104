"""What AWS says when it denies, and the policy statement that would allow it.

Sources: IAM User Guide, "Troubleshoot access denied error messages"; EC2 API Reference, "Error
codes" (UnauthorizedOperation and its encoded message).
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

_WHO = re.compile(r"User:? (?P<who>arn:\S+|\S+) is not authorized")
_ACTION = re.compile(
    r"(?:not authorized )?to perform:? \[?(?P<action>[a-z0-9-]+:[A-Za-z0-9*]+)\]?"
    r"(?: on (?:the )?(?:resource:?)?\s*\[?(?P<resource>arn:[^\s\],]+|\*))?"
)
_ENCODED = re.compile(r"[Ee]ncoded authorization failure message: (?P<encoded>[\w=+/-]+)")
_EXPLICIT = re.compile(
    r"explicit deny(?: in an? (?P<policy>[A-Za-z -]*?(?:policy|permissions boundary))"
    r"(?::? (?P<which>arn:\S+))?)?"
)
_ABSENT = re.compile(r"because no (?P<policy>[A-Za-z -]*?(?:policy|permissions boundary)) allows")

# Where a statement for the caller helps. Elsewhere somebody else has closed a door before it.
_OWN = ("", "identity-based policy")


class Denial(Struct, frozen=True):
    """One denial: empty strings for what the message leaves out.

    `policy` is the kind of policy that decided, in AWS's words; `explicit` is True when it denies
    in so many words, which no other statement can undo.
    """

    action: str
    resource: str = ""
    who: str = ""
    explicit: bool = False
    policy: str = ""
    which: str = ""  # the ARN of that policy
    encoded: str = ""

    @property
    def is_mendable(self) -> bool:
        """True when a statement added to the caller's own policies would help."""
        return not self.explicit and self.policy in _OWN


def parse_denial(message: str) -> Denial | None:
    """Read an AccessDenied or UnauthorizedOperation message; None when it names no action."""
    encoded = _ENCODED.search(message)
    action = _ACTION.search(message)
    if action is None and encoded is None:
        return None
    who = _WHO.search(message)
    explicit = _EXPLICIT.search(message)
    absent = _ABSENT.search(message)
    decided = explicit or absent
    return Denial(
        action=action["action"] if action else "",
        resource=(action["resource"] or "").rstrip(".") if action else "",
        who=who["who"] if who else "",
        explicit=explicit is not None,
        policy=(decided["policy"] or "") if decided else "",
        which=(explicit["which"] or "").rstrip(".") if explicit else "",
        encoded=encoded["encoded"] if encoded else "",
    )


def statement(actions: Iterable[str], resources: Iterable[str]) -> dict[str, Any]:
    """The policy statement that allows `actions` on `resources`, on anything unless given."""
    return {
        "Effect": "Allow",
        "Action": sorted(set(actions)),
        "Resource": sorted(set(resources)) or ["*"],
    }


def statements(missing: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """What allows each (action, resource): one statement for those that name resources, and one
    for those that take none, so that neither widens the other."""
    pairs = list(missing)
    named = [pair for pair in pairs if pair[1] != "*"]
    free = [action for action, resource in pairs if resource == "*"]
    found = [statement(*zip(*named, strict=True))] if named else []
    return [*found, *([statement(free, ["*"])] if free else [])]


def in_one_line(policy: object) -> str:
    """JSON that can be pasted."""
    return json.dumps(policy)


def explain_denial(operation: str, denial: Denial) -> str:
    """One line that says what is denied, and below it the way out."""
    what = denial.action or operation
    where = f" on {denial.resource}" if denial.resource else ""
    who = f" to {denial.who}" if denial.who else ""
    said = f"AWS denies {what}{where}{who}"
    if denial.explicit:
        policy = " ".join((denial.policy or "policy", denial.which)).strip()
        said += f", by an explicit deny in a {policy}. No added statement can undo that."
        fixes = ["ask whoever owns that policy to take the deny out, or to exempt you"]
    elif not denial.is_mendable:
        said += f", because no {denial.policy} allows it. A statement of your own does not help."
        fixes = [f"ask whoever owns the {denial.policy} to allow {what}"]
    elif denial.action:
        said += ". Add this statement to a policy of yours:"
        fixes = [in_one_line(statement([what], [denial.resource] if denial.resource else []))]
        if denial.action == "sts:AssumeRole":
            fixes += [
                f"and name {denial.who or 'yourself'} as a principal in the role's trust policy"
            ]
    else:
        said, fixes = f"{said}.", []
    if denial.encoded:
        fixes += [
            "aws sts decode-authorization-message --query DecodedMessage --output text "
            f"--encoded-message {denial.encoded}"
        ]
    return "\n  ".join((said, *fixes))
