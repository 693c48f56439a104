"""Addresses of AWS services that the embedded server does not serve: an S3 store beside it."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

_SERVICE = re.compile(r"[a-z][a-z0-9_]*")

# These the embedded server answers itself.
_SERVED = ("batch", "cloudwatch_logs", "ecs", "logs", "sts")


def endpoint_mistakes(endpoints: Mapping[str, str]) -> Iterator[str]:
    """Yield the mistakes in a table of service -> URL."""
    for service, url in endpoints.items():
        if service in _SERVED:
            yield f"{service}: the embedded AWS Batch answers for {service} itself."
        elif not _SERVICE.fullmatch(service):
            yield (
                f"{service}: not a service as AWS's variables name it, in small letters: s3, "
                f"dynamodb, secrets_manager."
            )
        if not _is_url(url):
            yield f"{service}: found {url!r}. Expected a URL like http://127.0.0.1:9000."


def endpoint_variables(endpoints: Mapping[str, str]) -> dict[str, str]:
    """The environment variables by which AWS's SDKs find these services."""
    return {f"AWS_ENDPOINT_URL_{service.upper()}": url for service, url in endpoints.items()}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # ValueError when it is none
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username or re.search(r"\s", text))
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname)
