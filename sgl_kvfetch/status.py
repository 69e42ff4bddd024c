"""What a server tells of itself: its namespace, what it reads, and how its last requests fared.

SGLang's ``/server_info`` has it among ``internal_states``, as ``kvfetch``. `kvfetch why` reads it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.labels import Labels

STATUS_KEY = "kvfetch"
MAX_RECENT = 256


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """How one request fared. Only pages that were not in the server's memory count. ``request_id``: the id, cut as in
    `label_of_request`."""

    request_id: str
    at_s: float  # in seconds since the epoch
    first_hash: str  # of the first page that was looked up
    found_hash: str  # of the last page that was found, which stands for all before it; "" if there is none
    num_pages: int  # looked up
    num_found: int
    num_served: int
    reason: str  # a `Reason` if fewer were served than looked up; "" if nothing went wrong


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's namespace and heads, and what applies to all ranks. ``most_left_out``: how many levels a segment may
    lack. ``threshold_tokens``: SGLang's prefetch_threshold, below which nothing is looked up. ``writes_back``: whether
    SGLang stores only what it evicts."""

    mode: str  # "host" or "device"
    reads: bool
    writes: bool
    threshold_tokens: int
    namespace: Namespace
    first_head: int
    end_head: int
    labels: Labels = Labels()
    most_left_out: int = 0
    writes_back: bool = False
    recent: Annotated[list[Decided], Meta(max_length=MAX_RECENT)] = []  # the newest last
