"""An archive in S3. A large file goes in parts, and a paper beside it says which are there."""

from __future__ import annotations

import hashlib
import json
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Tuple

from batchml.runtime.carry_place import CHANGES, Changed
from batchml.runtime.carry_tree import OWN, Entry
from batchml.runtime.carry_vaults import Moved, Read
from batchml.runtime.s3 import MOST_PARTS, PAGE, S3Store
from batchml.runtime.store import StoreError

PART = 16 << 20  # bytes that are held in memory, for each of the files that go at once
_ODD = f"{OWN}/odd/"

_Part = Tuple[str, str]  # its ETag, and the SHA-256 of what was sent


class S3Vault(S3Store):
    """Keys below a prefix. The methods are `Vault`'s.

    S3 checks each request against the SHA-256 that it is signed with.
    """

    proves = False

    def sizes(self) -> Dict[str, int]:
        found: Dict[str, int] = {}
        token = ""
        while True:
            query = [("list-type", "2"), ("max-keys", str(PAGE)), ("prefix", self._prefix)]
            query += [("continuation-token", token)] if token else []
            root = ElementTree.fromstring(self._wire.send("GET", "", query).body)
            for each in _named(root, "Contents"):
                key = _said(each, "Key")[len(self._prefix) :]
                papers = key.startswith(f"{OWN}/") and not key.startswith(_ODD)
                if key and not key.endswith("/") and not papers:  # FSx and consoles show folders so
                    found[key] = int(_said(each, "Size"))
            token = _said(root, "NextContinuationToken")
            if not token:
                return found

    def send(
        self, key: str, entry: Entry, read: Read, moved: Moved, settled: Callable[[], bool]
    ) -> str:
        if entry.size > PART:
            return _Upload(self, key, entry).run(read, moved, settled)
        body = read(0, entry.size)
        if len(body) < entry.size:
            raise Changed(f"it ends after {len(body)} of {entry.size} bytes")
        if not settled():
            raise Changed(CHANGES)
        self.put(key, body)
        moved(len(body), False)
        return hashlib.sha256(body).hexdigest()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody can be kept out of a bucket: the papers tell of two, at the end."""
        yield

    def tidy(self) -> None:
        """The bucket's rules end uploads that are days old."""

    def begin(self, key: str) -> str:
        """Begin an upload in parts; its id."""
        answer = self._wire.send("POST", self._key(key), [("uploads", "")])
        return _said(ElementTree.fromstring(answer.body), "UploadId")

    def send_part(self, key: str, upload: str, number: int, body: bytes) -> str:
        """The ETag of a part; empty where the upload is gone."""
        query = [("partNumber", str(number)), ("uploadId", upload)]
        answer = self._wire.send("PUT", self._key(key), query, body=body, fine=(404,))
        return "" if answer.status == 404 else str(answer.headers.get("ETag", ""))

    def end(self, key: str, upload: str, tags: List[str]) -> bool:
        """Make one object of the parts; False where the upload is gone, or was ended already."""
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        answer = self._wire.send("POST", self._key(key), [("uploadId", upload)], body=body,
                                 fine=(404,))  # fmt: skip
        if answer.status == 404:
            return False
        if answer.code:  # S3 may begin a success and then say that it failed
            raise StoreError(f"S3 refused the parts of {key}: {answer.code}", temporary=True)
        return True


class _Upload:
    """One large file. What was sent is compared with the file by its parts' SHA-256."""

    def __init__(self, vault: S3Vault, key: str, entry: Entry) -> None:
        self._vault, self._key, self._size = vault, key, entry.size
        self._step = max(PART, -(-entry.size // MOST_PARTS))
        self._paper = f"{OWN}/uploads/{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
        self._upload, self._parts = self._recalled()

    def run(self, read: Read, moved: Moved, settled: Callable[[], bool]) -> str:
        whole = hashlib.sha256()
        for number, start in enumerate(range(0, self._size, self._step), 1):
            wanted = min(self._step, self._size - start)
            body = read(start, wanted)
            if len(body) < wanted:
                raise Changed(f"it ends after {start + len(body)} of {self._size} bytes")
            whole.update(body)
            moved(wanted, self._part(number, body))
        if not settled():
            raise Changed(CHANGES)
        if not self._vault.end(self._key, self._upload, [tag for tag, _ in self._parts]):
            self._forget()
            # Unless an answer was lost: what is read back afterwards decides.
            if self._vault.sizes().get(self._key) != self._size:
                raise Changed("its upload was ended by another, or by the bucket's rules")
        self._forget()
        return whole.hexdigest()

    def _part(self, number: int, body: bytes) -> bool:
        """Have a part there; whether it was."""
        digest = hashlib.sha256(body).hexdigest()
        if number <= len(self._parts):
            if self._parts[number - 1][1] == digest:
                return True
            del self._parts[number - 1 :]  # the file is another now
        if not self._upload:
            self._upload = self._vault.begin(self._key)
        tag = self._vault.send_part(self._key, self._upload, number, body)
        if not tag:
            self._forget()
            raise Changed("its upload is gone: bucket rules end those that are days old")
        self._parts.append((tag, digest))
        told = {"upload": self._upload, "step": self._step, "parts": self._parts}
        self._vault.put(self._paper, json.dumps(told).encode())
        return False

    def _recalled(self) -> Tuple[str, List[_Part]]:
        try:
            told: Any = json.loads(self._vault.get(self._paper) or b"{}")
            if told.get("step") == self._step:
                return str(told["upload"]), [(str(tag), str(sha)) for tag, sha in told["parts"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        return "", []

    def _forget(self) -> None:
        self._upload, self._parts = "", []
        self._vault.delete(self._paper)


def _named(root: ElementTree.Element, name: str) -> List[ElementTree.Element]:
    return [each for each in root.iter() if each.tag.rpartition("}")[2] == name]


def _said(root: ElementTree.Element, name: str) -> str:
    found = _named(root, name)
    return (found[0].text or "") if found else ""
