"""The protocol between the HTTP client and the server: paths, content types, limits and bodies."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.keys import NAMESPACE_PATTERN, PAGE_HASH_BYTES
from sgl_kvfetch.stores.base import MAX_LOOKUP_ANSWER_BYTES as MAX_LOOKUP_ANSWER_BYTES, ObjectInfo


class Route(StrEnum):
    """The paths of the server."""

    OBJECTS = "/v1/objects"
    LOOKUP = "/v1/lookup"
    NOTES = "/v1/notes"
    CHECK = "/v1/check"
    FOLDERS = "/v1/folders"
    HEALTH = "/healthz"
    METRICS = "/metrics"
    SUMMARY = "/v1/summary"
    SEGMENTS = "/v1/segments"
    AUDITS = "/v1/audits"


PAGE_PATHS = ("/", "/page.css", "/basics.js", "/charts.js", "/segments.js", "/page.js")

MSGPACK_TYPE = "application/msgpack"
NDJSON_TYPE = "application/x-ndjson"
BYTES_TYPE = "application/octet-stream"

MAX_LOOKUP_PAGES = 1 << 16  # in one request; clients split longer lookups
MAX_LOOKUP_REQUEST_BYTES = MAX_LOOKUP_PAGES * PAGE_HASH_BYTES + 1024
MAX_LINE_BYTES = 4096  # of a listing
MAX_SMALL_ANSWER_BYTES = 4096  # to a deletion by prefix, and to a report of damage
MAX_FOLDERS = 1 << 14  # in an answer
MAX_FOLDERS_BYTES = 64 * MAX_FOLDERS
MAX_LISTED_NOTE_BYTES = 256

_ENTITY_TAG = re.compile(r'"([0-9a-f]{32})"')


def entity_tag(digest: str) -> str:
    """Format an object's digest as an HTTP ETag."""
    return f'"{digest}"'


def parse_entity_tag(text: str) -> str | None:
    """Parse the digest in an entity tag; None for any other text."""
    match = _ENTITY_TAG.fullmatch(text.strip())
    return match and match[1]


_PageHashes = Annotated[bytes, Meta(max_length=MAX_LOOKUP_PAGES * PAGE_HASH_BYTES)]  # one after another


class LookupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    namespace: Annotated[str, Meta(pattern=rf"^{NAMESPACE_PATTERN}\Z")]
    page_hashes: _PageHashes


class Folders(msgspec.Struct, frozen=True):
    """The folders of a namespace."""

    folders: list[Annotated[str, Meta(pattern=rf"^{NAMESPACE_PATTERN}\Z")]]


class Deleted(msgspec.Struct, frozen=True):
    """The answer to a deletion by prefix. With ``more``, objects may be left: servers limit the time of a request."""

    deleted: Annotated[int, Meta(ge=0)]
    more: bool


class Checked(msgspec.Struct, frozen=True):
    """The answer to a report of damage: whether the segment was damaged, and so was deleted."""

    deleted: bool


class Notes(msgspec.Struct, frozen=True):
    """The notes of a kind."""

    notes: list[ObjectInfo]


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with status 400 or higher. ``error`` is a fixed word, ``message`` is for people."""

    error: str
    message: str
