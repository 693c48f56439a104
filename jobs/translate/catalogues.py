"""Read translations that Python packages bring: the messages of their programs and manuals.

`--data gettext:pt_BR` takes English and Portuguese sentences from the gettext catalogues (*.mo) of
all installed packages. Those of this job's requirements.txt have some 9,000 pairs for pt_BR.
"""

from __future__ import annotations

import gettext
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from corpus import BadCorpus, Corpus, Pair, split

PREFIX = "gettext:"
_CATALOGUE = re.compile(r"(?:.*/)?([a-z]{2,3}(?:[_-]\w+)?)/LC_MESSAGES/[^/]+\.mo")
_LEAST, _MOST = 2, 60  # words of a sentence


def installed() -> Iterator[tuple[str, Path]]:
    """The language and the path of each catalogue of an installed package."""
    for package in metadata.distributions():
        for file in package.files or ():
            found = _CATALOGUE.fullmatch(file.as_posix())
            if found:
                yield found[1], Path(str(file.locate()))


def read(language: str, catalogues: Iterable[tuple[str, Path]] | None = None) -> Corpus:
    """Read the sentences in English and their translations. Raises BadCorpus if there are none."""
    known: Counter[str] = Counter()
    pairs: dict[str, str] = {}
    for name, path in sorted(catalogues if catalogues is not None else installed()):
        known[name] += 1
        if name == language:
            for source, target in _pairs(path):
                pairs.setdefault(source, target)
    found = split(sorted(pairs.items()))
    if found.train and found.valid:
        return found
    names = ", ".join(name for name, _ in known.most_common(12))
    raise BadCorpus(
        f"no installed package has translations into {language!r}: "
        + (f"most catalogues are for {names}" if names else "there is no package with catalogues")
    )


def _pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a catalogue; of a message with a plural, the singular."""
    try:
        messages = gettext.GNUTranslations(io.BytesIO(path.read_bytes()))._catalog
    except (OSError, ValueError) as error:
        raise BadCorpus(f"{path}: is not a catalogue of gettext: {error}") from error
    for key, text in messages.items():
        if isinstance(key, tuple) and key[1] != 0:
            continue
        # A context is before this character.
        source = str(key[0] if isinstance(key, tuple) else key).rpartition("\x04")[2]
        pair = (" ".join(source.split()), " ".join(text.split()))
        if all(_LEAST <= len(side.split()) <= _MOST for side in pair) and pair[0] != pair[1]:
            yield pair
