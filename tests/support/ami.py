"""`cfn/ami.yaml` taken apart, for tests: its resources, and what Image Builder would run."""

import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import yaml
from msgspec import Meta, Struct

from batchml.resources import shipped_folder
from tests.security.cloudformation import parse


def template_text() -> str:
    return (shipped_folder("cfn") / "ami.yaml").read_text()


def template() -> dict[str, Any]:
    return parse(template_text())


# --- component documents: EC2 Image Builder User Guide, "Use documents in AWSTOE" -------------


class Commands(Struct, forbid_unknown_fields=True):
    commands: Annotated[list[str], Meta(min_length=1)]


class Step(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z0-9_-]{0,127}$")]
    action: Literal["ExecuteBash"]
    inputs: Commands
    timeoutSeconds: Annotated[int, Meta(ge=1, le=43_200)] = 7200
    onFailure: Literal["Abort", "Continue", "Ignore"] = "Abort"
    maxAttempts: Annotated[int, Meta(ge=1)] = 1


class Phase(Struct, forbid_unknown_fields=True):
    name: Literal["build", "validate", "test"]
    steps: Annotated[list[Step], Meta(min_length=1)]


class Parameter(Struct, forbid_unknown_fields=True):
    type: Literal["string"]
    description: str = ""
    default: str | None = None


class Document(Struct, forbid_unknown_fields=True):
    name: str
    description: str
    schemaVersion: Annotated[float, Meta(ge=1.0, le=1.0)]
    phases: Annotated[list[Phase], Meta(min_length=1)]
    parameters: list[dict[str, Parameter]] = []


class Script(NamedTuple):
    component: str
    phase: str
    step: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.component}-{self.phase}-{self.step}"


def data() -> dict[str, str]:
    """Component -> its document, as text; in the order of the recipe."""
    resources = template()["Resources"]
    components = resources["Recipe"]["Properties"]["Components"]
    names = [component["ComponentArn"]["Ref"] for component in components]
    return {name: resources[name]["Properties"]["Data"] for name in names}


def documents() -> dict[str, Document]:
    """Raises msgspec.ValidationError where a document is not one that Image Builder takes."""
    return {
        name: msgspec.convert(yaml.safe_load(text), type=Document) for name, text in data().items()
    }


def scripts(*phases: str) -> list[Script]:
    """What is run, in Image Builder's order: a phase of all components, then the next phase."""
    return [
        Script(component, phase.name, step.name, command)
        for wanted in phases
        for component, document in documents().items()
        for phase in document.phases
        if phase.name == wanted
        for step in phase.steps
        for command in step.inputs.commands
    ]


_INNER = re.compile(r"^ *cat >(?P<path>\S+) <<'END'\n(?P<text>.*?)^ *END$", re.M | re.S)


def files_of(script: Script) -> Iterator[tuple[str, str]]:
    """The files that a step writes: path and content."""
    for match in _INNER.finditer(script.text):
        yield match["path"], textwrap.dedent(match["text"])
