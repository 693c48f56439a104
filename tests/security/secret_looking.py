"""What looks like a secret: names of variables and parameters, and values (T12)."""

import re

_NAME = re.compile(
    r"secret|passw(or)?d|token(?!s|i[sz])|credential|(api|access|private|encryption|auth)[_-]?key",
    re.I,
)
# Names of things that speak about secrets without being one.
_ABOUT = re.compile(r"(arns?|file|path|name|keys?arn)$|^JobSecret", re.I)
_VALUE = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY|\bgh[pousr]_[A-Za-z0-9]{36}"
    r"|\bhf_[A-Za-z0-9]{30}|\bsk-[A-Za-z0-9_-]{20}|://[^/\s:@$]+:[^/\s:@$]+@"
)


def is_secret_name(name: str) -> bool:
    return bool(_NAME.search(name)) and not _ABOUT.search(name)


def is_secret_value(value: str) -> bool:
    return bool(_VALUE.search(value))
