"""One image's folder, with a real engine and a real registry."""

import uuid
from pathlib import Path

from batchml.aws.ecr import Ecr, ImageEngine
from batchml.jobs.find import ImageSource
from batchml.jobs.images import ImageRow, PushTarget, build, push
from batchml.model.image import Recipe
from tests.support.executor_rig import PROCESSOR, docker
from tests.support.fakes import FakeClock
from tests.support.registry_rig import Answer, Registry

OTHER = "amd64" if PROCESSOR == "arm64" else "arm64"
HOSTS = {"amd64": "m7i.large", "arm64": "m7g.large"}
SMALL = (
    "FROM scratch\nCOPY requirements.txt /one\nCOPY batchml /opt/batchml/batchml\n"
    'ENTRYPOINT ["python", "-m", "batchml.runtime.run"]\n'
)


class Rig:
    """One image's folder, an engine, a registry, and all that was told."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.registry = registry
        self.folder = folder
        self.engine = ImageEngine()
        self.clock = FakeClock()
        self.told: list[str] = []
        self.steps: list[str] = []

    def tell(self, text: str, is_step: bool) -> None:
        (self.steps if is_step else self.told).append(text)

    @property
    def target(self) -> PushTarget:
        return PushTarget(Ecr(self.registry.session()), "dev", {"team": "vision"})

    def push(self, processor: str = PROCESSOR) -> ImageRow:
        recipe = recipe_of(self.folder, processor)
        return push(self.engine, self.target, recipe, self.tell, self.clock)

    def build(self, processor: str = PROCESSOR) -> ImageRow:
        return build(self.engine, recipe_of(self.folder, processor), self.tell)

    @property
    def repository(self) -> str:
        return f"batchml/{self.folder.name}"

    def there(self, processor: str = PROCESSOR) -> tuple[str, int] | None:
        """What the registry itself has."""
        return self.registry.manifest(self.repository, recipe_of(self.folder, processor).tag)


def image_folder(below: Path, dockerfile: str = SMALL) -> Path:
    """An image that no other test has."""
    folder = below / "images" / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(f"# {folder.name}\n")
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def recipe_of(folder: Path, processor: str = PROCESSOR) -> Recipe:
    return ImageSource(folder).recipe().built_for(processor)


def failing(rig: Rig, method: str, part: str, answer: Answer, times: int = 10**6) -> None:
    """Let the registry answer so to requests whose path has `part` in it."""
    left = [times]

    def fault(asked: str, path: str) -> Answer | None:
        if asked == method and part in path and left[0] > 0:
            left[0] -= 1
            return answer
        return None

    rig.registry.fault = fault


def processor_in_engine(reference: str) -> str:
    return docker("image", "inspect", "--format", "{{.Architecture}}", reference).stdout.strip()
