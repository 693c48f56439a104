"""The request and the errors of the embedded server, before any service is known."""

from msgspec import Struct


class Request(Struct, frozen=True):
    """One HTTP request. `path` is the raw, still escaped path; header names are lower-case."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


class Response(Struct, frozen=True):
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Refused(Exception):
    """The server answers no, in AWS's shape: an error code, a message and an HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def client_error(message: str) -> Refused:
    """AWS Batch's answer to a mistake of the caller."""
    return Refused("ClientException", message)
