"""Whether a failed attempt is tried again.

Source: AWS Batch API, RetryStrategy and EvaluateOnExit; User Guide, "Automated job retries".
"""

from collections.abc import Mapping
from typing import Any


def wants_retry(
    strategy: Mapping[str, Any],
    *,
    attempts_made: int,
    status_reason: str,
    reason: str,
    exit_code: int | None,
) -> bool:
    """True when the strategy asks for another attempt.

    The first entry of evaluateOnExit whose conditions all match decides; when none matches the job
    is retried, as AWS documents.
    """
    if attempts_made >= int(strategy.get("attempts", 1)):
        return False
    code = None if exit_code is None else str(exit_code)
    for rule in strategy.get("evaluateOnExit", ()):
        conditions = (
            (rule.get("onStatusReason"), status_reason or None),
            (rule.get("onReason"), reason or None),
            (rule.get("onExitCode"), code),
        )
        if all(pattern is None or matches(pattern, text) for pattern, text in conditions):
            return str(rule["action"]).upper() == "RETRY"
    return True


def matches(pattern: str, text: str | None) -> bool:
    """Exact, or by prefix when the pattern ends with `*`.

    AWS does not say whether `*` matches what is absent; it does here, since rule lists that people
    use end with it as a catch-all (docs/decisions/002-absent-reason.md).
    """
    if pattern == "*":
        return True
    if text is None:
        return False
    if pattern.endswith("*"):
        return text.startswith(pattern[:-1])
    return text == pattern
