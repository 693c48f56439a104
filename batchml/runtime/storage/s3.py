"""A store in S3, by HTTP and the standard library alone: images need no SDK."""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPException
from typing import (
    Any,
    BinaryIO,
    Callable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)
from urllib.parse import urlsplit

from batchml.runtime.storage.credentials import EMPTY_HASH, Keyring, escape_path, escape_query, sign
from batchml.runtime.storage.store import PATIENT, Patience, StoreError, checked, go_on

WHOLE = 96 * 1024**2  # bytes; a larger file is sent in parts, and only the part that fails again
MOST_PARTS = 10_000  # S3's
PAGE = 1000  # keys of one list; S3's most

_BLOCK = 1 << 20
_REGION = re.compile(r"-\d{12}-([a-z]{2}(?:-[a-z]+)+-\d)$")  # how `batchml setup` names buckets
_AGAIN = {
    "ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "ThrottlingException",
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_DNS_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


class Slice(NamedTuple):
    """Bytes of a file, and their hash: a file that changes meanwhile is refused by S3."""

    path: str
    start: int
    size: int
    hash: str


class Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes
    tries: int

    @property
    def code(self) -> str:
        """S3's word for what is wrong; empty when it gave none."""
        return _text(self.body, "Code")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A signature is for one host: S3's redirects are followed here, signed anew."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Wire:
    """Sends signed requests to one bucket, again where that may help."""

    def __init__(
        self,
        bucket: str,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        check: Callable[[], None] = go_on,
        patience: Patience = PATIENT,
    ) -> None:
        self._bucket = bucket
        self._endpoint = (
            environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
        ).rstrip("/")
        self._region = region_of(bucket, environ)
        self._clock = clock
        self._sleep = sleep
        self._check = check
        self._patience = patience
        self._skew = 0.0  # seconds to add to our clock, as S3 says
        self._keys = Keyring(environ, clock)
        self._opener = urllib.request.build_opener(_NoRedirect())

    def send(
        self,
        method: str,
        key: str,
        query: Sequence[Tuple[str, str]] = (),
        headers: Optional[Mapping[str, str]] = None,
        body: Union[bytes, Slice] = b"",
        into: Optional[BinaryIO] = None,
        fine: Sequence[int] = (),
    ) -> Answer:
        """Send until there is an answer to keep: a success, or one of the statuses in `fine`.

        The body of a success goes `into` a file if there is one. Raises StoreError.
        """
        trouble = ""
        for number in range(self._patience.tries):
            if number:
                self._rest(min(8.0, 0.2 * 2**number) * random.uniform(0.5, 1.0))
            self._check()
            try:
                answer = self._once(method, key, query, headers or {}, body, into, number + 1)
            except (OSError, HTTPException) as error:
                if isinstance(error, (StoreError, FileNotFoundError, PermissionError)):
                    raise
                trouble = " ".join(str(getattr(error, "reason", error)).split())
                continue
            if answer.status < 300 or answer.status in fine:
                return answer
            trouble = self._trouble(answer)
            if not self._may_help(answer):
                raise StoreError(
                    f"S3 refused {self._words(method, key)}: {trouble}", code=answer.code
                )
        raise StoreError(f"S3 did not do {self._words(method, key)}: {trouble}", temporary=True)

    def _once(
        self,
        method: str,
        key: str,
        query: Sequence[Tuple[str, str]],
        headers: Mapping[str, str],
        body: Union[bytes, Slice],
        into: Optional[BinaryIO],
        number: int,
    ) -> Answer:
        base, path = self._place(key)
        asked = escape_query(query)
        if isinstance(body, Slice):
            digest, size = body.hash, body.size
        else:
            digest, size = hashlib.sha256(body).hexdigest() if body else EMPTY_HASH, len(body)
        host = urlsplit(base).netloc
        signed = sign(
            self._keys.get(), self._region, method, host, path, asked, headers, digest,
            self._clock() + self._skew,
        )  # fmt: skip
        data: Any = None
        if method in ("PUT", "POST"):
            signed["content-length"] = str(size)
            signed["content-type"] = "application/octet-stream"  # not signed; urllib has its own
            data = _open_slice(body) if isinstance(body, Slice) else body
        url = base + path + (f"?{asked}" if asked else "")
        request = urllib.request.Request(url, data=data, headers=signed, method=method)
        try:
            with self._opener.open(request, timeout=self._patience.timeout) as found:
                return Answer(found.status, found.headers, self._read(found, into), number)
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read(_BLOCK), number)
        finally:
            if isinstance(body, Slice) and data is not None:
                data.close()

    def _read(self, found: Any, into: Optional[BinaryIO]) -> bytes:
        """The whole body, or where it went. Raises OSError for one that ended early."""
        if into is not None:
            into.seek(0)
            into.truncate()
        parts: List[bytes] = []
        size = 0
        while True:
            block = found.read(_BLOCK)
            if not block:
                break
            size += len(block)
            self._check()
            if into is None:
                parts.append(block)
            else:
                into.write(block)
        length = found.headers.get("Content-Length", "")
        # `read` with a size says nothing about an answer that was cut.
        if length.isdigit() and int(length) != size and found.status != 204:
            raise OSError(f"the answer ended after {size} of {length} bytes")
        return b"".join(parts)

    def _rest(self, seconds: float) -> None:
        while seconds > 0:
            self._check()
            self._sleep(min(seconds, 0.5))
            seconds -= 0.5

    def _place(self, key: str) -> Tuple[str, str]:
        """Where an object is: the address of a host, and an escaped path."""
        path = escape_path(f"/{key}")
        if self._endpoint:
            parts = urlsplit(self._endpoint)
            return f"{parts.scheme}://{parts.netloc}", f"{parts.path}/{self._bucket}{path}"
        end = "amazonaws.com.cn" if self._region.startswith("cn-") else "amazonaws.com"
        host = f"s3.{self._region}.{end}"
        if _DNS_NAME.fullmatch(self._bucket):
            return f"https://{self._bucket}.{host}", path
        return f"https://{host}", f"/{self._bucket}{path}"

    def _may_help(self, answer: Answer) -> bool:
        """Whether to send again; what S3 says about region, keys and clock is taken up first."""
        region = answer.headers.get("x-amz-bucket-region") or _text(answer.body, "Region")
        if answer.status in (301, 307, 400) and region and region != self._region:
            self._region = region
            return True
        if answer.code in _EXPIRED:
            self._keys.forget()
            return True
        if answer.code == "RequestTimeTooSkewed":
            self._skew = _date(answer.headers.get("Date", ""), self._clock()) - self._clock()
            return True
        return answer.status in (408, 409, 429) or answer.status >= 500 or answer.code in _AGAIN

    def _trouble(self, answer: Answer) -> str:
        words = _text(answer.body, "Message")
        return f"{answer.status} {answer.code}{': ' if words else ''}{words}".strip()

    def _words(self, method: str, key: str) -> str:
        return f"{method} s3://{self._bucket}/{key}"


_S3 = TypeVar("_S3", bound="S3Store")


class S3Store:
    """Keys below a prefix of a bucket. The methods are `Store`'s."""

    def __init__(self, wire: Wire, prefix: str) -> None:
        self._wire = wire
        self._prefix = prefix

    @classmethod
    def open(
        cls: Type[_S3],
        url: str,
        environ: Mapping[str, str],
        check: Callable[[], None] = go_on,
        patience: Patience = PATIENT,
    ) -> _S3:
        """At `s3://BUCKET/PREFIX`; `check` is called often and may raise, to give up."""
        bucket, _, prefix = url[len("s3://") :].partition("/")
        if not bucket:
            raise StoreError(f"{url!r} names no bucket: s3://BUCKET/PREFIX")
        prefix = prefix.strip("/")
        return cls(
            Wire(bucket, environ, check=check, patience=patience), f"{prefix}/" if prefix else ""
        )

    def get(self, key: str) -> Optional[bytes]:
        return self._get(key, {})

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        if length <= 0:
            return None if self.get(key) is None else b""
        return self._get(key, {"range": f"bytes={start}-{start + length - 1}"})

    def _get(self, key: str, headers: Mapping[str, str]) -> Optional[bytes]:
        try:
            answer = self._wire.send("GET", self._key(key), headers=headers, fine=(404, 416))
        except StoreError as error:
            # S3 says that something is not there only to those who may list the bucket, to others
            # that they may not read it. A role that may list some prefixes is one of the others
            # here: a GET names no prefix. Listing does (GetObject, "Permissions"; cfn/roles.yaml).
            if error.code != "AccessDenied" or key in self.keys(key):
                raise
            return None
        if answer.status == 416:  # it ends before the range
            return b""
        return None if answer.status == 404 and _is_missing(answer) else answer.body

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._wire.send("DELETE", self._key(key), fine=(404,))

    def put(self, key: str, data: bytes) -> None:
        self._wire.send("PUT", self._key(key), body=data)

    def create(self, key: str, data: bytes) -> bool:
        answer = self._wire.send(
            "PUT", self._key(key), headers={"if-none-match": "*"}, body=data, fine=(412,)
        )
        if answer.status != 412:
            return True
        return answer.tries > 1 and self.get(key) == data

    def keys(self, prefix: str) -> List[str]:
        found: List[str] = []
        token = ""
        while True:
            query = [("list-type", "2"), ("max-keys", str(PAGE)), ("prefix", self._prefix + prefix)]
            if token:
                query.append(("continuation-token", token))
            answer = self._wire.send("GET", "", query)
            for element in _elements(answer.body, "Key"):
                found.append((element.text or "")[len(self._prefix) :])
            token = _text(answer.body, "NextContinuationToken")
            if not token:
                return sorted(found)

    def put_file(self, key: str, path: str) -> None:
        try:
            size = os.stat(path).st_size
            if size <= WHOLE:
                self._wire.send("PUT", self._key(key), body=_slice(path, 0, size))
            else:
                self._put_parts(self._key(key), path, size)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def get_file(self, key: str, path: str) -> bool:
        temporary = f"{path}.{os.urandom(8).hex()}.tmp"
        try:
            with open(temporary, "w+b") as file:
                answer = self._wire.send("GET", self._key(key), into=file, fine=(404,))
            if answer.status == 404:
                _is_missing(answer)
                return False
            os.replace(temporary, path)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
        return True

    def _put_parts(self, key: str, path: str, size: int) -> None:
        begun = self._wire.send("POST", key, [("uploads", "")])
        upload = ("uploadId", _text(begun.body, "UploadId"))
        step = max(WHOLE // 2, -(-size // MOST_PARTS))
        try:
            tags = []
            for number, start in enumerate(range(0, size, step), 1):
                part = _slice(path, start, min(step, size - start))
                answer = self._wire.send(
                    "PUT", key, [("partNumber", str(number)), upload], body=part
                )
                tags.append((number, answer.headers.get("ETag", "")))
            done = "".join(
                f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
                for number, tag in tags
            )
            text = f"<CompleteMultipartUpload>{done}</CompleteMultipartUpload>"
            answer = self._wire.send("POST", key, [upload], body=text.encode(), fine=(404,))
            # S3 may begin a success and then say that it failed; a 404 that follows a lost answer
            # says that the upload was completed.
            if answer.code and not (answer.status == 404 and answer.tries > 1):
                raise StoreError(f"S3 refused the parts of {key}: {answer.code}", temporary=True)
        except BaseException:
            try:
                self._wire.send("DELETE", key, [upload], fine=(404,))
            except OSError:
                pass  # the bucket's rules remove it after a week
            raise

    def _key(self, key: str) -> str:
        return self._prefix + checked(key)


def region_of(bucket: str, environ: Mapping[str, str]) -> str:
    """Where a bucket is likely to be. S3 corrects it where the container can reach other regions.

    ECS tells containers on EC2 instances no region, but our buckets carry theirs in their name.
    """
    named = _REGION.search(bucket)
    if named:
        return named[1]
    return environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _is_missing(answer: Answer) -> bool:
    """True for an object that is not there. Raises StoreError for a bucket that is not."""
    if answer.code == "NoSuchBucket":
        raise StoreError(f"S3: {_text(answer.body, 'Message') or 'the bucket does not exist'}")
    return True


def _slice(path: str, start: int, size: int) -> Slice:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        left = size
        while left:
            block = file.read(min(_BLOCK, left))
            if not block:
                break
            digest.update(block)
            left -= len(block)
    return Slice(path, start, size - left, digest.hexdigest())


class _Part:
    """A file from one place to another, as `http.client` reads it."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()


def _open_slice(part: Slice) -> _Part:
    file = open(part.path, "rb")  # noqa: SIM115 - closed by the one who sends it
    file.seek(part.start)
    return _Part(file, part.size)


def _elements(body: bytes, name: str) -> List[ElementTree.Element]:
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return []
    return [each for each in root.iter() if each.tag.rpartition("}")[2] == name]


def _text(body: bytes, name: str) -> str:
    """The first element of this name in S3's XML; empty when there is none."""
    found = _elements(body, name)
    return (found[0].text or "").strip() if found else ""


def _date(text: str, default: float) -> float:
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, IndexError):
        return default
