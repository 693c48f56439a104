"""Run training containers on AWS Batch, and on this machine through an embedded AWS Batch.

Importing the package costs almost nothing: it imports no module until a public name is first used.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the 8 ms that importing typing takes
if TYPE_CHECKING:
    from typing import Any

    from batchml.client import Client
    from batchml.errors import BatchmlError
    from batchml.handles import RunHandle
    from batchml.model.job import JobSpec, Resources
    from batchml.model.run import JobStatus, Run

_MODULES = {
    "BatchmlError": "batchml.errors",
    "Client": "batchml.client",
    "JobSpec": "batchml.model.job",
    "JobStatus": "batchml.model.run",
    "Resources": "batchml.model.job",
    "Run": "batchml.model.run",
    "RunHandle": "batchml.handles",
}

__all__ = [
    "BatchmlError",
    "Client",
    "JobSpec",
    "JobStatus",
    "Resources",
    "Run",
    "RunHandle",
    "__version__",
]


def __getattr__(name: str) -> "Any":
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'batchml' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)


def __dir__() -> "list[str]":
    return sorted(__all__)
