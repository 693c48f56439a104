"""The folders that are shipped with the code: `images/`, `jobs/`, `cfn/`."""

from pathlib import Path


def shipped_folder(folder: str) -> Path:
    """Return the folder `images`, `jobs` or `cfn` of this batchml.

    A wheel has them under `batchml/share/`; a source checkout has them at its root.
    """
    package = Path(__file__).parent
    installed = package / "share" / folder
    return installed if installed.is_dir() else package.parent / folder
