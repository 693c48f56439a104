"""Find the folders that are installed with batchml: `images/`, `jobs/` and `cfn/`."""

from functools import cache
from pathlib import Path


@cache
def shipped_folder(folder: str) -> Path:
    """Return the path of the folder `images`, `jobs` or `cfn` of this installation.

    A wheel has them under `batchml/share/`; a source checkout has them at its root.
    """
    package = Path(__file__).parent
    installed = package / "share" / folder
    return installed if installed.is_dir() else package.parent / folder
