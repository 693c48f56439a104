"""AWS in this process: botocore's clients are real, and the test gives the answers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from batchml.aws.session import Access, Session

# `answer(operation, parameters)` -> the answer, or the code of an error
Answer = Callable[[str, dict[str, Any]], Mapping[str, Any] | str]


class Http(NamedTuple):
    status_code: int


class ScriptedSession(Session):
    """A session whose calls never leave; botocore checks and writes each request all the same.

    `calls` are the operations with their parameters, in the order in which they were made. The
    environment has to have credentials: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(Access("us-east-1"))
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer
        self._known: set[int] = set()

    def asked(self, operation: str) -> list[dict[str, Any]]:
        return [params for name, params in self.calls if name == operation]

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any:
        made = super().client(service, attempts, region)
        if id(made) not in self._known:
            self._known.add(id(made))
            made.meta.events.register("provide-client-params.*.*", self._note)
            made.meta.events.register("before-call.*.*", self._respond)
        return made

    def _note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append((model.name, dict(params)))

    def _respond(self, model: Any, **_: Any) -> tuple[Http, dict[str, Any]]:
        answer = self._answer(model.name, self.calls[-1][1])
        if isinstance(answer, str):
            code, message = answer.split(": ") if ": " in answer else (answer, "")
            error = {"Code": code, "Message": message}
            return Http(400), {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 400}}
        return Http(200), dict(answer)
