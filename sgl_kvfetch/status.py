"""What a server tells of itself: its namespace, what it reads, and how its last requests fared.

SGLang's ``/server_info`` has it among ``internal_states``, as ``kvfetch``. `kvfetch why` reads it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.keys import Labels, Namespace

STATUS_KEY = "kvfetch"
MAX_RECENT = 256
RECENT_AUDITS = 20  # audits whose median is compared with DRIFTS
DRIFTS = 1.5  # as docs/operations.md#audits measures it: below it is sound
LENGTHS = (1024, 8192, 65536)  # tokens: kinds of prompts
MAX_AUDITS_BYTES = 16 << 10

_Text = Annotated[str, Meta(max_length=2000)]


class Audits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What audits of one rank have found: ratios of errors to those that are expected (docs/operations.md#audits)."""

    model: _Text  # for people, as is `quantiser`
    quantiser: _Text
    num_audits: int = 0
    at_s: float = 0.0  # of the last one, in seconds since the epoch
    ratio: float = 0.0  # the largest ratio of the last audit
    where: _Text = ""  # the place of that ratio
    typical: float = 0.0  # over all layers, the median of the last `num_recent` audits
    num_recent: int = 0
    before: float | None = None  # the same of the audits before them; None if there are none
    by_length: Annotated[dict[str, float], Meta(max_length=16)] = {}  # of all known audits, by `length_of` their tokens
    off: _Text = ""  # why nothing is read or written any more; "" if it is

    @property
    def drifts(self) -> bool:
        """Whether errors are larger than expected in most of the last audits, though perhaps in none by much."""
        return self.num_recent >= RECENT_AUDITS and self.typical > DRIFTS

    @property
    def says(self) -> str:
        """One line on whether what is stored fits."""
        if self.off:
            return f"nothing of it is used: {self.off}"
        if not self.num_audits:
            return "nothing was audited yet"
        kinds = ", ".join(f"{kind} tokens {ratio:.2g}" for kind, ratio in self.by_length.items())
        before = "" if self.before is None else f", and {self.before:.2g} before"
        found = (
            f"errors are {self.typical:.2g} times as large as expected, the median of the last {self.num_recent} "
            f"audits{before} (by length of prompt: {kinds})"
        )
        if self.num_recent < RECENT_AUDITS:
            return f"{found}: too few to say more"
        fits = "does not fit" if self.drifts else "fits"
        return f"{found}: it {fits} the prompts"

    @property
    def advice(self) -> str:
        """What to do; "" if nothing."""
        if self.off:
            return "docs/operations.md#audits says what to do"
        if not self.drifts:
            return ""
        if self.quantiser.startswith("klt"):
            return (
                "kvfetch calibrate --publish with prompts like those of your users, and attach again; if that changes "
                "nothing, weights may have changed under the same name: a new model_id"
            )
        return (
            "weights may have changed under the same name, which needs a new model_id; or this machine computes "
            "otherwise than those that wrote"
        )


def length_of(token: int) -> str:
    """Return the kind of prompt that a token belongs to, by its position."""
    for most in LENGTHS:
        if token <= most:
            return f"to {most}"
    return "more"


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
    """One rank's namespace and heads, and what applies to all ranks. ``coarseness``: as in `Tolerance`.
    ``threshold_tokens``: SGLang's prefetch_threshold, below which nothing is looked up. ``unstored``: why SGLang stores
    less than it computes. ``audits``: None before the first one."""

    mode: str  # "host" or "device"
    reads: bool
    writes: bool
    threshold_tokens: int
    namespace: Namespace
    first_head: int
    end_head: int
    labels: Labels = Labels()
    coarseness: int = 0
    unstored: Annotated[list[_Text], Meta(max_length=8)] = []
    audits: Audits | None = None
    recent: Annotated[list[Decided], Meta(max_length=MAX_RECENT)] = []  # the newest last
