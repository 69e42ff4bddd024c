"""Names every reason why pages of a prompt were computed and not served from the store.

There is one word for a reason, wherever it is shown: in ``sgl_kvfetch_misses_total``, in traces, in what a server
tells of its requests (`status.py`), and in `kvfetch why`. docs/operations.md has a row for each, with what to do.
"""

from __future__ import annotations

from enum import StrEnum

from sgl_kvfetch.errors import (
    CorruptError,
    EncryptedError,
    FormatError,
    KVFetchError,
    NamespaceMismatchError,
    StoreError,
    UnsupportedError,
)


class Reason(StrEnum):
    """Why pages were not served. The value is the word that users see."""

    # The server does not ask for these pages.
    NOT_ATTACHED = "not_attached"  # it has no kvfetch backend
    NOT_READING = "not_reading"  # its mode is write_only, or its weights were updated
    SHORT = "short"  # the prompt is shorter than prefetch_threshold, or than a page

    # The store has them for other servers only.
    OTHER_WEIGHTS = "other_weights"
    OTHER_FLAGS = "other_flags"
    OTHER_QUANTISER = "other_quantiser"
    OTHER_PAGE_SIZE = "other_page_size"
    OTHER_CACHE = "other_cache"  # another dtype or shape of the KV cache, or other side pools
    OTHER_SALT = "other_salt"  # stored without the request's cache_salt
    OTHER_HEADS = "other_heads"  # some ranks' heads are missing

    # The store does not have them.
    NEVER_WRITTEN = "never_written"
    EVICTED = "evicted"
    EXPIRED = "expired"
    DIVERGES = "diverges"  # prompts that begin alike are stored, and go on with other tokens

    # The store has them, and they cannot be used.
    COARSE = "coarse"
    CORRUPT = "corrupt"
    FORMAT = "format"
    MISSING = "missing"  # a manifest names data that is gone
    ENCRYPTED = "encrypted"  # with a key that the server lacks, or not at all where it has keys
    UNSUPPORTED = "unsupported"  # cells of more heads than the rank has

    # The server could have had them.
    SOONER = "sooner"  # computing them is sooner
    SKIPPED = "skipped"  # a pause after failures
    LATE = "late"
    TIMEOUT = "timeout"
    NO_SLOTS = "no_slots"
    POLICY = "policy"
    CANCELLED = "cancelled"
    DATA_PLANE = "data_plane"  # it ended
    AUDIT = "audit"  # the engine computes a few pages, which are compared with the stored ones
    AUDITED = "audited"  # such comparisons have found that what is stored is wrong
    FAILED = "failed"  # loading into the GPU's pool
    INTERNAL = "internal"

    # The store failed, in a lookup, a fetch or a write: the reasons of `StoreError`.
    REFUSED = "refused"
    TLS = "tls"
    UNAUTHORISED = "unauthorised"
    SERVER = "server"
    PROXY = "proxy"  # in front of the store: it does not reach it, or waits no longer
    CLOCK = "clock"  # this machine's, which S3 compares
    IO = "io"
    TRUNCATED = "truncated"
    PROTOCOL = "protocol"  # an invalid answer, or one with another namespace's pages
    FULL = "full"
    TOO_LARGE = "too_large"
    INVALID = "invalid"


# Those that `sgl_kvfetch_misses_total` counts: something was looked up or written, and failed.
COUNTED = tuple(Reason)[tuple(Reason).index(Reason.COARSE) :]
ADVICE: dict[Reason, str] = {
    Reason.NOT_ATTACHED: "start SGLang with --hicache-storage-backend kvfetch, or attach the store to it",
    Reason.NOT_READING: "set mode to read_write; after a weight update, detach and attach with a new model_id",
    Reason.SHORT: "lower prefetch_threshold in the config; whole pages alone are stored",
    Reason.OTHER_WEIGHTS: "serve the same files, or give both servers the same model_id if they are equal",
    Reason.OTHER_FLAGS: "start all servers of a model with the same flags",
    Reason.OTHER_QUANTISER: "give all servers of a model the same quantiser, profile and target_kl",
    Reason.OTHER_PAGE_SIZE: "start all servers of a model with the same --page-size",
    Reason.OTHER_CACHE: "start all servers of a model with the same KV cache dtype, side pools and pipeline stages",
    Reason.OTHER_SALT: "send the cache_salt that the first request had: it keeps tenants apart",
    Reason.OTHER_HEADS: "see in the other ranks' log why they did not write",
    Reason.NEVER_WRITTEN: "see sgl_kvfetch_written_pages_total by result, mode and --hicache-write-policy; if prompts "
    "like it were sent before, kvfetch why --log finds what changes in them",
    Reason.EVICTED: "a larger --capacity; kvfetch pin keeps a prompt",
    Reason.EXPIRED: "a longer ttl_s on the servers that write",
    Reason.DIVERGES: "move what changes (a date, an id, a list) to the end; kvfetch why --log finds it in a log",
    Reason.COARSE: "a larger --capacity, or a larger max_kl",
    Reason.CORRUPT: "kvfetch verify names the damage; delete the segment, and servers write it again",
    Reason.FORMAT: "kvfetch verify names the damage; if all segments have it, update this server",
    Reason.MISSING: "nothing if it is rare; else the store is too small: a larger --capacity",
    Reason.ENCRYPTED: "give all servers of the store the same key_file",
    Reason.SOONER: "nothing: the link or the decoder is slower than the engine; recompute = never fetches anyway",
    Reason.SKIPPED: "look at the failures before it: sgl_kvfetch_misses_total by reason",
    Reason.UNSUPPORTED: "raise max_tp_size on the servers that write",
    Reason.LATE: "fewer bytes (klt), or a faster link; in device mode also a larger device.pool_share",
    Reason.TIMEOUT: "a longer lookup_timeout_s or fetch_timeout_s, fewer bytes (klt), or a faster store",
    Reason.NO_SLOTS: "nothing if it is rare; else a smaller device.pool_share",
    Reason.POLICY: "leave out --hicache-storage-prefetch-policy and prefetch_timeout_*",
    Reason.CANCELLED: "nothing: the request was aborted, or the cache flushed",
    Reason.DATA_PLANE: "look for the out-of-memory killer, and leave the data plane some cores",
    Reason.AUDIT: "nothing: one hit in a hundred is recomputed and compared (audit_share)",
    Reason.AUDITED: "docs/operations.md#audits: calibrate with prompts like yours, or a new model_id after new weights",
    Reason.FAILED: "the error is in SGLang's log; for want of memory, a smaller --mem-fraction-static",
    Reason.INTERNAL: "a bug: report the traceback in SGLang's log",
    Reason.REFUSED: "is the store running? address, firewall, proxy: kvfetch doctor STORE",
    Reason.TLS: "tls.ca_file, tls.cert_file, or http:// for https://: kvfetch doctor STORE",
    Reason.UNAUTHORISED: "a token with the role that is needed",
    Reason.SERVER: "the store's log, and its /healthz",
    Reason.PROXY: "the proxy in front of the store: does it reach it, and is its time for a request long enough?",
    Reason.CLOCK: "set the clock of this machine right: timedatectl says whether it is synchronised",
    Reason.IO: "the store's log, and its disk",
    Reason.TRUNCATED: "a proxy between server and store that cuts answers",
    Reason.PROTOCOL: "a proxy between server and store that changes answers",
    Reason.FULL: "a larger --capacity",
    Reason.TOO_LARGE: "a larger --capacity, of more than one object; in lookups, larger pages",
    Reason.INVALID: "equal versions of store and servers",
}


def reason_of(error: KVFetchError | TimeoutError) -> Reason:
    """Return the reason that an error stands for."""
    match error:
        case TimeoutError():
            return Reason.TIMEOUT
        case StoreError():
            return Reason(error.reason)
        case EncryptedError():
            return Reason.ENCRYPTED
        case CorruptError():
            return Reason.CORRUPT
        case FormatError():
            return Reason.FORMAT
        case NamespaceMismatchError():
            return Reason.PROTOCOL
        case UnsupportedError():
            return Reason.UNSUPPORTED
    return Reason.INTERNAL
