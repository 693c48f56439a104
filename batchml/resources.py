"""Where the files live that ship beside the code: `images/`, `jobs/`, `cfn/`."""

from pathlib import Path


def shipped(folder: str) -> Path:
    """Return the folder `images`, `jobs` or `cfn` that came with batchml.

    A wheel carries them under `batchml/share/`; a source checkout has them at its root.
    """
    package = Path(__file__).parent
    installed = package / "share" / folder
    return installed if installed.is_dir() else package.parent / folder
