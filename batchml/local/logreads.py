"""The CloudWatch Logs calls: GetLogEvents, FilterLogEvents, DescribeLogGroups, DescribeLogStreams.

A token is a byte offset (`f/1234`, `b/1234`). At the end of a stream the forward token that comes
back equals the one that was sent, which is how CloudWatch Logs says "nothing more for now".
"""

import base64
import heapq
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from batchml.local.logstore import (
    MAX_BYTES,
    MAX_EVENTS,
    LogEvent,
    as_output,
    first_and_last,
    read_backward,
    read_forward,
)
from batchml.local.state import ACCOUNT, DEFAULT_LOG_GROUP, REGION
from batchml.local.store import Store, Stream
from batchml.local.wire import Refused

_Offsets = dict[str, Annotated[int, Meta(ge=0, le=2**62)]]
_SIDE_BY_SIDE = 64  # events of each stream in memory
LogPath = Callable[[str], Path]


class LogReads:
    """`path_of` gives the file of an attempt's output from its task id."""

    def __init__(self, store: Store, path_of: LogPath) -> None:
        self._store = store
        self._path_of = path_of

    def get_log_events(self, params: dict[str, Any]) -> dict[str, Any]:
        stream = self._store.stream(_group(params), params["logStreamName"])
        if stream is None:
            raise _not_found("The specified log stream does not exist.")
        path = self._path_of(stream.task_id)
        limit = params.get("limit", MAX_EVENTS)
        direction, offset = _position(params)
        if direction == "f":
            page = read_forward(
                path, offset or 0, limit, params.get("startTime", 0), params.get("endTime")
            )
        else:
            page = read_backward(path, offset, limit)
            events = _between(page.events, params)
            page = page._replace(events=events)
        return {
            "events": [as_output(event) for event in page.events],
            "nextForwardToken": f"f/{page.end}",
            "nextBackwardToken": f"b/{page.start}",
        }

    def filter_log_events(self, params: dict[str, Any]) -> dict[str, Any]:
        streams = self._chosen(params)
        wanted = _pattern(params.get("filterPattern", ""))
        offsets = _read_offsets(params.get("nextToken"))
        limit = params.get("limit", MAX_EVENTS)
        since, until = params.get("startTime", 0), params.get("endTime")
        found: list[dict[str, Any]] = []
        size = 0
        more = False
        for event, stream in heapq.merge(*(self._events(s, offsets) for s in streams), key=_order):
            if len(found) >= limit or size > MAX_BYTES:
                more = True
                break
            offsets[stream.task_id] = event.end
            in_time = since <= event.timestamp and (until is None or event.timestamp < until)
            if in_time and wanted(event.message):
                size += event.end - event.start
                found.append(_filtered(event, stream))
        token = {"nextToken": _offsets_token(offsets)} if more else {}
        return {"events": found, "searchedLogStreams": [], **token}

    def _events(self, stream: Stream, offsets: dict[str, int]) -> Iterator[tuple[LogEvent, Stream]]:
        # By pages: thousands of streams are read side by side, and none keeps its file open.
        path = self._path_of(stream.task_id)
        page = read_forward(path, offsets.get(stream.task_id, 0), _SIDE_BY_SIDE)
        while page.events:
            for event in page.events:
                yield event, stream
            page = read_forward(path, page.end, _SIDE_BY_SIDE)

    def _chosen(self, params: dict[str, Any]) -> list[Stream]:
        group = _group(params)
        names = params.get("logStreamNames")
        prefix = params.get("logStreamNamePrefix", "")
        if names and prefix:
            raise _invalid("Give logStreamNames or logStreamNamePrefix, not both.")
        if not names:
            self._check_group(group)
            return self._store.streams(group, prefix)
        found = [self._store.stream(group, name) for name in dict.fromkeys(names)]
        if None in found:
            raise _not_found("The specified log stream does not exist.")
        return [stream for stream in found if stream is not None]

    def _check_group(self, group: str) -> None:
        if group != DEFAULT_LOG_GROUP and group not in self._store.log_groups():
            raise _not_found("The specified log group does not exist.")

    def describe_log_groups(self, params: dict[str, Any]) -> dict[str, Any]:
        groups = {DEFAULT_LOG_GROUP: 0, **self._store.log_groups()}
        prefix = params.get("logGroupNamePrefix", "")
        pattern = params.get("logGroupNamePattern", "")
        found = [
            {
                "logGroupName": name,
                "creationTime": created,
                "arn": f"{_group_arn(name)}:*",
                "logGroupArn": _group_arn(name),
                "metricFilterCount": 0,
                "storedBytes": 0,
                "logGroupClass": "STANDARD",
            }
            for name, created in sorted(groups.items())
            if name.startswith(prefix) and pattern in name
        ]
        page, token = _page(found, params)
        return {"logGroups": page, **token}

    def describe_log_streams(self, params: dict[str, Any]) -> dict[str, Any]:
        group = _group(params)
        self._check_group(group)
        shown = [
            self._described(stream)
            for stream in self._store.streams(group, params.get("logStreamNamePrefix", ""))
        ]
        if params.get("orderBy") == "LastEventTime":
            shown.sort(key=lambda stream: stream.get("lastEventTimestamp", 0))
        if params.get("descending"):
            shown.reverse()
        page, token = _page(shown, params)
        return {"logStreams": page, **token}

    def _described(self, stream: Stream) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "logStreamName": stream.name,
            "creationTime": stream.created_at,
            "arn": f"{_group_arn(stream.log_group)}:log-stream:{stream.name}",
            "storedBytes": 0,
        }
        times = first_and_last(self._path_of(stream.task_id))
        if times:
            shown |= {
                "firstEventTimestamp": times[0],
                "lastEventTimestamp": times[1],
                "lastIngestionTime": times[1],
            }
        return shown


def _order(item: tuple[LogEvent, Stream]) -> tuple[int, str, int]:
    event, stream = item
    return event.timestamp, stream.name, event.start


def _filtered(event: LogEvent, stream: Stream) -> dict[str, Any]:
    return {
        "logStreamName": stream.name,
        **as_output(event),
        # Unique and ordered, as CloudWatch's are.
        "eventId": f"{event.timestamp:020d}{stream.task_id[:16]}{event.start:020d}",
    }


def _group(params: dict[str, Any]) -> str:
    name = params.get("logGroupName") or params.get("logGroupIdentifier")
    if not name:
        raise _invalid("logGroupName must be given.")
    return str(name).rpartition(":log-group:")[2].removesuffix(":*")


def _group_arn(name: str) -> str:
    return f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{name}"


def _position(params: dict[str, Any]) -> tuple[str, int | None]:
    token = params.get("nextToken")
    if not token:
        return ("f", 0) if params.get("startFromHead") else ("b", None)
    match = re.fullmatch(r"([fb])/(\d{1,18})", token)
    if not match:
        raise _invalid("The specified nextToken is invalid.")
    return match[1], int(match[2])


def _between(events: list[LogEvent], params: dict[str, Any]) -> list[LogEvent]:
    since, until = params.get("startTime", 0), params.get("endTime")
    return [
        event
        for event in events
        if event.timestamp >= since and (until is None or event.timestamp < until)
    ]


def _pattern(text: str) -> Callable[[str], bool]:
    """CloudWatch's plain patterns: every term, `?term` for any of them, `-term` for none."""
    if text.lstrip().startswith(("{", "[", "%")):
        raise _invalid("Only plain terms are served in filterPattern, not JSON, fields or regex.")
    try:
        terms = shlex.split(text)
    except ValueError:
        raise _invalid("filterPattern has an open quotation mark.") from None
    terms = [term for term in terms if term]
    every = [term for term in terms if term[0] not in "?-"]
    some = [term[1:] for term in terms if term[0] == "?"]
    none = [term[1:] for term in terms if term[0] == "-"]

    def wanted(message: str) -> bool:
        return (
            all(term in message for term in every)
            and (not some or any(term in message for term in some))
            and not any(term in message for term in none)
        )

    return wanted


def _page(
    found: list[dict[str, Any]], params: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The asked part of a list, and the token of the next when there is one."""
    start = _read_offsets(params.get("nextToken")).get("start", 0)
    end = start + params.get("limit", 50)
    token = {"nextToken": _offsets_token({"start": end})} if end < len(found) else {}
    return found[start:end], token


def _offsets_token(offsets: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(json.dumps(offsets).encode()).decode()


def _read_offsets(token: str | None) -> dict[str, int]:
    if not token:
        return {}
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(token.encode()), type=_Offsets)
    except (ValueError, RecursionError):
        raise _invalid("The specified nextToken is invalid.") from None


def _invalid(text: str) -> Refused:
    return Refused("InvalidParameterException", text)


def _not_found(text: str) -> Refused:
    return Refused("ResourceNotFoundException", text)
