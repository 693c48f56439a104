"""A store in S3, with the standard library's HTTP, so that images need no SDK."""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import ExitStack
from email.message import Message
from http.client import HTTPException
from typing import (
    Any,
    BinaryIO,
    Callable,
    Iterator,
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

from batchml.runtime.host_metadata import parse_time
from batchml.runtime.storage.credentials import (
    EMPTY_HASH,
    CredentialsProvider,
    domain_of,
    escape_path,
    escape_query,
    sign,
)
from batchml.runtime.storage.files import temporary_name
from batchml.runtime.storage.store import (
    PATIENT,
    RetryLimits,
    Store,
    StoreError,
    check_key,
    is_missing,
    no_check,
)

MAX_WHOLE = 96 * 1024**2  # bytes; larger files are sent in parts, so that a retry repeats one part
MOST_PARTS = 10_000  # S3's limit
PAGE = 1000  # keys of one list request; S3's limit

_BLOCK = 1 << 20
_REGION = re.compile(r"-\d{12}-([a-z]{2}(?:-[a-z]+)+-\d)$")  # ends the buckets of `batchml setup`
_RETRIED = {
    "ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "ThrottlingException",
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_DNS_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


class FileSlice(NamedTuple):
    """A part of a file, and its SHA-256: S3 refuses the upload if the file changes meanwhile."""

    path: str
    start: int  # byte
    size: int  # bytes
    hash: str


class ListedObject(NamedTuple):
    """An object in a list of S3."""

    key: str
    size: int  # bytes
    etag: str  # without its quotes
    changed: int  # when it was written, in ns since the epoch


class S3Response(NamedTuple):
    """An answer of S3."""

    status: int
    headers: Message
    body: bytes
    tries: int  # requests that were sent until this answer came

    @property
    def code(self) -> str:
        """S3's error code; empty without one."""
        return _text(self.body, "Code")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirects: a signature is valid for one host, so `S3Client` must sign again."""

    def redirect_request(self, *_: Any) -> None:
        return None


class S3Client:
    """Sends signed requests to one bucket, and repeats those that may succeed later."""

    def __init__(
        self,
        bucket: str,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        check: Callable[[], None] = no_check,
        limits: RetryLimits = PATIENT,
        credentials: Optional[CredentialsProvider] = None,
    ) -> None:
        self._bucket = bucket
        self._endpoint = (
            environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
        ).rstrip("/")
        self._region = region_of(bucket, environ)
        self._clock = clock
        self._sleep = sleep
        self._check = check
        self._limits = limits
        self._skew = 0.0  # seconds from our clock to S3's, as S3's answers show them
        self._credentials = credentials or CredentialsProvider(environ, clock)
        self._opener = urllib.request.build_opener(_NoRedirect())

    def send(
        self,
        method: str,
        key: str,
        query: Sequence[Tuple[str, str]] = (),
        headers: Optional[Mapping[str, str]] = None,
        body: Union[bytes, FileSlice] = b"",
        into: Optional[BinaryIO] = None,
        accept: Sequence[int] = (),
    ) -> S3Response:
        """Send a request, and again until an answer is a success or has a status in `accept`.

        The body of a success is written to `into`, if given. Raises StoreError.
        """
        problem = ""
        for number in range(self._limits.tries):
            if number:
                self._pause(min(8.0, 0.2 * 2**number) * random.uniform(0.5, 1.0))
            self._check()
            try:
                answer = self._send_once(method, key, query, headers or {}, body, into, number + 1)
            except (OSError, HTTPException) as error:
                if isinstance(error, (StoreError, FileNotFoundError, PermissionError)):
                    raise
                problem = " ".join(str(getattr(error, "reason", error)).split())
                continue
            if answer.status < 300 or answer.status in accept:
                return answer
            words = _text(answer.body, "Message")
            problem = f"{answer.status} {answer.code}{': ' if words else ''}{words}".strip()
            if not self._should_retry(answer):
                raise StoreError(
                    f"S3 refused {method} s3://{self._bucket}/{key}: {problem}",
                    code=answer.code, status=answer.status,
                )  # fmt: skip
        raise StoreError(
            f"{method} s3://{self._bucket}/{key} failed {self._limits.tries} times: {problem}",
            temporary=True,
        )

    def begin_upload(self, key: str, headers: Optional[Mapping[str, str]] = None) -> str:
        """Begin a multipart upload. Return its id."""
        return _text(self.send("POST", key, [("uploads", "")], headers).body, "UploadId")

    def send_part(self, key: str, upload: str, number: int, body: Union[bytes, FileSlice]) -> str:
        """Send a part, counted from 1. Return its ETag; empty if S3 has no such upload any more."""
        query = [("partNumber", str(number)), ("uploadId", upload)]
        answer = self.send("PUT", key, query, body=body, accept=(404,))
        return "" if answer.status == 404 else str(answer.headers.get("ETag", ""))

    def end_upload(self, key: str, upload: str, tags: Sequence[str]) -> Optional[int]:
        """Make one object of the parts with these ETags. Return None.

        If S3 has no such upload, return the number of requests that were sent: after more than one,
        an answer may have been lost, and the object may exist already.
        """
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        answer = self.send("POST", key, [("uploadId", upload)], body=body, accept=(404,))
        if answer.status == 404:
            return answer.tries
        if answer.code:  # S3 may answer with the status 200 and report an error in the body
            raise StoreError(f"S3 refused the parts of {key}: {answer.code}", temporary=True)
        return None

    def abort_upload(self, key: str, upload: str) -> None:
        self.send("DELETE", key, [("uploadId", upload)], accept=(404,))

    def list_objects(self, prefix: str, limit: Optional[int] = None) -> Iterator[ListedObject]:
        """The objects whose keys begin with `prefix`, by key; at most `limit` of them."""
        for root in self._pages(prefix, limit):
            for each in root.findall("{*}Contents"):
                yield ListedObject(
                    each.findtext("{*}Key") or "",
                    int(each.findtext("{*}Size") or 0),
                    (each.findtext("{*}ETag") or "").strip('"'),
                    _time_ns(each.findtext("{*}LastModified") or ""),
                )

    def list_folders(self, prefix: str) -> List[str]:
        """The first names below `prefix`, which is empty or ends with `/`; of folders with `/`."""
        root = next(self._pages(prefix, PAGE, [("delimiter", "/")]))
        folders = [each.text or "" for each in root.iterfind("{*}CommonPrefixes/{*}Prefix")]
        objects = [each.text or "" for each in root.iterfind("{*}Contents/{*}Key")]
        return [name[len(prefix) :] for name in (*folders, *objects) if name != prefix]

    def _pages(
        self, prefix: str, limit: Optional[int], more: Sequence[Tuple[str, str]] = ()
    ) -> Iterator[ElementTree.Element]:
        """The answers to ListObjectsV2 with at most `limit` keys together."""
        token, left = "", limit
        while left is None or left > 0:
            page = PAGE if left is None else min(PAGE, left)
            query = [("list-type", "2"), ("max-keys", str(page)), ("prefix", prefix), *more]
            query += [("continuation-token", token)] if token else []
            try:
                root = ElementTree.fromstring(self.send("GET", "", query).body)
            except ElementTree.ParseError as error:
                raise StoreError(f"S3 did not answer with a list: {error}") from error
            yield root
            left = None if left is None else left - len(root.findall("{*}Contents"))
            token = root.findtext("{*}NextContinuationToken") or ""
            if not token:
                return

    def _send_once(
        self,
        method: str,
        key: str,
        query: Sequence[Tuple[str, str]],
        headers: Mapping[str, str],
        body: Union[bytes, FileSlice],
        into: Optional[BinaryIO],
        number: int,
    ) -> S3Response:
        base, path = self._address(key)
        escaped = escape_query(query)
        if isinstance(body, FileSlice):
            digest, size = body.hash, body.size
        else:
            digest, size = hashlib.sha256(body).hexdigest() if body else EMPTY_HASH, len(body)
        host = urlsplit(base).netloc
        signed = sign(
            self._credentials.get(), self._region, method, host, path, escaped, headers, digest,
            self._clock() + self._skew,
        )  # fmt: skip
        if method in ("PUT", "POST"):
            signed["content-length"] = str(size)
            # Not signed, because urllib would add another one.
            signed["content-type"] = "application/octet-stream"
        url = base + path + (f"?{escaped}" if escaped else "")
        with ExitStack() as stack:
            data: Any = body if method in ("PUT", "POST") else None
            if isinstance(body, FileSlice):
                data = _read_slice(stack.enter_context(open(body.path, "rb")), body)
            request = urllib.request.Request(url, data=data, headers=signed, method=method)
            try:
                with self._opener.open(request, timeout=self._limits.timeout) as found:
                    return S3Response(found.status, found.headers, self._read(found, into), number)
            except urllib.error.HTTPError as error:
                with error:
                    return S3Response(error.code, error.headers, error.read(_BLOCK), number)

    def _read(self, found: Any, into: Optional[BinaryIO]) -> bytes:
        """Return the body, or write it `into` a file. Raises OSError if the body ends too early."""
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
        # `read` with a size does not raise if the answer was cut off.
        if length.isdigit() and int(length) != size and found.status != 204:
            raise OSError(f"the answer ended after {size} of {length} bytes")
        return b"".join(parts)

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            self._check()
            self._sleep(min(seconds, 0.5))
            seconds -= 0.5

    def _address(self, key: str) -> Tuple[str, str]:
        """The URL of an object: scheme with host, and escaped path."""
        path = escape_path(f"/{key}")
        if self._endpoint:
            parts = urlsplit(self._endpoint)
            return f"{parts.scheme}://{parts.netloc}", f"{parts.path}/{self._bucket}{path}"
        host = f"s3.{self._region}.{domain_of(self._region)}"
        if _DNS_NAME.fullmatch(self._bucket):
            return f"https://{self._bucket}.{host}", path
        return f"https://{host}", f"/{self._bucket}{path}"

    def _should_retry(self, answer: S3Response) -> bool:
        """Whether to send again. First correct region, credentials or clock as the answer says."""
        region = answer.headers.get("x-amz-bucket-region") or _text(answer.body, "Region")
        if answer.status in (301, 307, 400) and region and region != self._region:
            self._region = region
            return True
        if answer.code in _EXPIRED:
            self._credentials.forget()
            return True
        if answer.code == "RequestTimeTooSkewed":
            self._skew = _date(answer.headers.get("Date", ""), self._clock()) - self._clock()
            return True
        return answer.status in (408, 409, 429) or answer.status >= 500 or answer.code in _RETRIED


_S3 = TypeVar("_S3", bound="S3Store")


class S3Store(Store):
    """The store below a prefix of a bucket."""

    def __init__(self, client: S3Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    @classmethod
    def open(
        cls: Type[_S3],
        url: str,
        environ: Mapping[str, str],
        check: Callable[[], None] = no_check,
        limits: RetryLimits = PATIENT,
    ) -> _S3:
        """Open the store at `s3://BUCKET/PREFIX`. `check` is called often, and may raise to end."""
        bucket, _, prefix = url[len("s3://") :].partition("/")
        if not bucket:
            raise StoreError(f"{url!r} names no bucket: give s3://BUCKET/PREFIX")
        prefix = prefix.strip("/")
        client = S3Client(bucket, environ, check=check, limits=limits)
        return cls(client, f"{prefix}/" if prefix else "")

    def get(self, key: str) -> Optional[bytes]:
        return self._get(key, {})

    def has(self, key: str) -> bool:
        return self._fetch(key, {"range": "bytes=0-0"}) is not None

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        if length <= 0:
            return None if self.get(key) is None else b""
        return self._get(key, {"range": f"bytes={start}-{start + length - 1}"})

    def _get(self, key: str, headers: Mapping[str, str]) -> Optional[bytes]:
        answer = self._fetch(key, headers)
        if answer is None:
            return None
        return b"" if answer.status == 416 else answer.body  # 416: it ends before the range

    def _fetch(
        self, key: str, headers: Optional[Mapping[str, str]] = None, into: Optional[BinaryIO] = None
    ) -> Optional[S3Response]:
        """The answer to a GET: a success, or 416. None if the object does not exist."""
        name = self._key(key)
        try:
            return self._client.send("GET", name, headers=headers, into=into, accept=(416,))
        except StoreError as error:
            if is_missing(error.status, error.code, str(error), lambda: self._may_exist(key)):
                return None
            raise

    def _may_exist(self, key: str) -> bool:
        try:
            return self.keys(key, 1) == [key]
        except StoreError as error:
            if error.temporary:
                raise
            return True  # listing is denied, too

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._client.send("DELETE", self._key(key), accept=(404,))

    def put(self, key: str, data: bytes) -> None:
        self._client.send("PUT", self._key(key), body=data)

    def create(self, key: str, data: bytes) -> bool:
        answer = self._client.send(
            "PUT", self._key(key), headers={"if-none-match": "*"}, body=data, accept=(412,)
        )
        if answer.status != 412:
            return True
        return answer.tries > 1 and self.get(key) == data

    def keys(self, prefix: str, limit: Optional[int] = None) -> List[str]:
        found = self._client.list_objects(self._prefix + prefix, limit)
        return sorted(each.key[len(self._prefix) :] for each in found)

    def put_file(self, key: str, path: str) -> None:
        try:
            size = os.stat(path).st_size
            if size <= MAX_WHOLE:
                self._client.send("PUT", self._key(key), body=_hash_slice(path, 0, size))
            else:
                self._put_in_parts(self._key(key), path, size)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def get_file(self, key: str, path: str) -> bool:
        try:
            with temporary_name(path) as temporary:
                with open(temporary, "w+b") as file:
                    if self._fetch(key, into=file) is None:
                        return False
                os.replace(temporary, path)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
        return True

    def _put_in_parts(self, key: str, path: str, size: int) -> None:
        upload = self._client.begin_upload(key)
        step = max(MAX_WHOLE // 2, math.ceil(size / MOST_PARTS))
        gone = StoreError(f"S3 refused the parts of {key}: NoSuchUpload", temporary=True)
        try:
            tags = []
            for number, start in enumerate(range(0, size, step), 1):
                part = _hash_slice(path, start, min(step, size - start))
                tags.append(self._client.send_part(key, upload, number, part))
                if not tags[-1]:
                    raise gone
            if self._client.end_upload(key, upload, tags) == 1:
                raise gone
        except BaseException:
            try:
                self._client.abort_upload(key, upload)
            except OSError:
                pass  # the bucket's lifecycle rule removes it after a week
            raise

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)


def region_of(bucket: str, environ: Mapping[str, str]) -> str:
    """The likely region of a bucket. If it is wrong, S3's answer names the right one.

    ECS passes no region to containers on EC2 instances, but the names of buckets that `batchml
    setup` makes end with their region.
    """
    match = _REGION.search(bucket)
    if match:
        return match[1]
    return environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _hash_slice(path: str, start: int, size: int) -> FileSlice:
    """A part of a file with its SHA-256. It is shorter if the file ends before."""
    digest = hashlib.sha256()
    read = 0
    with open(path, "rb") as file:
        for block in _read_slice(file, FileSlice(path, start, size, "")):
            digest.update(block)
            read += len(block)
    return FileSlice(path, start, read, digest.hexdigest())


def _read_slice(file: BinaryIO, part: FileSlice) -> Iterator[bytes]:
    """The blocks of a part of a file."""
    file.seek(part.start)
    left = part.size
    while left:
        block = file.read(min(_BLOCK, left))
        if not block:
            return
        left -= len(block)
        yield block


def _text(body: bytes, name: str) -> str:
    """The text of the first element of this name in S3's XML; empty without one."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return ""
    found = (each.text for each in root.iter() if each.tag.rpartition("}")[2] == name)
    return (next(found, None) or "").strip()


def _time_ns(text: str) -> int:
    """A time of S3's XML, `2026-11-28T13:40:02.000Z`, in ns since the epoch; 0 if it is none."""
    try:
        return int(parse_time(text)) * 10**9
    except ValueError:
        return 0


def _date(text: str, default: float) -> float:
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, IndexError):
        return default
