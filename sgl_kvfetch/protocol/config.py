"""Parse and validate the user's ``--hicache-storage-backend-extra-config``, once, at start-up: options, stores,
quantiser. It is a value: what it names is opened by others.

The engine imports this before SGLang serves, when nothing may be counted yet: see `metrics`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sgl_kvfetch.codec import require_writable
from sgl_kvfetch.codec.bitstream.base import MOST_LEVELS
from sgl_kvfetch.codec.quant import QuantiserName
from sgl_kvfetch.errors import ConfigError, FormatError
from sgl_kvfetch.keys import is_unicode
from sgl_kvfetch.user_files import STORE_URLS, TOKEN_ENV, parse_duration, parse_size

if TYPE_CHECKING:
    from sgl_kvfetch.codec import Quantiser

_SECRET_KEYS = frozenset({"s3", "index"})  # their values are never shown

# SGLang reads these keys from the same dictionary, so we do not validate them.
SGLANG_KEYS = frozenset(
    {
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
        "file_storage_path",
    }
)

Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value)]
CACHEGEN = "cachegen("  # an identity, with bins of the user's
_BY_USER = "by user"  # the context in which a config is validated that a user wrote


def _size(value: object, info: ValidationInfo) -> int:
    """Parse a size. A bare number is one only in a config that was validated before, as the data plane gets it."""
    return value if isinstance(value, int) and info.context != _BY_USER else parse_size(str(value))


Size = Annotated[int, BeforeValidator(_size)]
SizeOrNone = Annotated[int, BeforeValidator(lambda value, info: _size(value, info) if value else 0)]
MiB = 1 << 20


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _is_unicode(cls, value: object) -> object:
        """JSON may have lone surrogates. The config goes to another process, in UTF-8, which cannot have them."""
        for text in value.values() if isinstance(value, dict) else (value,):
            if isinstance(text, str) and not is_unicode(text):
                raise ValueError("expected valid Unicode, found a lone surrogate")
        return value


class TlsConfig(_Keys):
    """Files for ``https://`` stores."""

    ca_file: Text | None = Field(default=None, description="the stores' CAs; by default the system's")
    cert_file: Text | None = Field(default=None, description="this server's certificate, for stores that demand one")
    key_file: Text | None = Field(default=None, description="the key of cert_file, if it is not in the same file")

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> Self:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file needs a cert_file")
        return self


class LevelsConfig(_Keys):
    """Qualities of ``klt`` in one segment, each in a data object of its own."""

    count: int = Field(
        default=2, ge=2, le=MOST_LEVELS, description="levels that are written; each divides the step by 3"
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="KL divergence that reading fewer levels may cost, where a prompt would take longer than 1 s; by "
        "default all levels are read",
    )


class DeviceModeConfig(_Keys):
    """What only device mode needs."""

    pool_share: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="share of the token-to-KV pool's size that may be staged for waiting requests",
    )


class KVFetchConfig(_Keys):
    """Every config key with its default. A test compares docs/configuration.md with this class."""

    store: str = Field(description=f"URL of the store: {' or '.join(STORE_URLS.values())}")
    token_file: Text | None = Field(
        None, description=f"file with the bearer token, read again on change; by default the environment's {TOKEN_ENV}"
    )
    tls: TlsConfig = Field(TlsConfig(), description="files for https:// stores: ca_file, cert_file, key_file")
    key_file: Text | None = Field(
        None,
        description="file with keys, the newest first, that all servers of a store share: encrypt what is stored with "
        "the newest, and use only what is encrypted with one of them",
    )
    s3: dict[str, str | bool] | None = Field(
        None,
        repr=False,
        description="endpoint, region, credentials and more of s3:// stores, under the names that obstore gives them; "
        "by default from the environment (AWS_*)",
    )
    index: Text | None = Field(
        None,
        repr=False,
        description="index of the pages of s3:// stores: redis://HOST:PORT/DB, rediss://..., or redis+cluster://...",
    )
    model_id: Text | None = Field(
        None,
        description="a name for the weights; by default they are fingerprinted at start",
    )
    mode: Literal["read_write", "read_only", "write_only"] = Field(
        "read_write", description="whether to read from the store, write to it, or both"
    )

    quantiser: str | None = Field(
        None,
        description="how values become 8-bit integers; by default klt with a profile, exact without; auto is exact "
        "until the store has a profile, which this server makes from its own prompts, and klt from then on",
    )
    profile: Text | None = Field(
        None,
        description="file from `kvfetch calibrate` for this model; by default klt takes the newest of the store",
    )
    target_kl: float | None = Field(
        None,
        gt=0,
        le=10,
        description="KL divergence of the next token's distribution that klt may cause, in nats, as calibrated; by "
        "default the profile's own",
    )
    codec: str = Field(
        "ans",
        description="how integers become bytes when this server writes; by default the fastest for the bits: video is "
        "for kvfetch encode, since CPUs make it slowly",
    )
    max_tp_size: int = Field(
        2,
        ge=1,
        le=1024,
        description="the largest TP size whose ranks can read what this server writes with exact and uint8",
    )

    recompute: Literal["auto", "never"] = Field(
        "auto", description="whether a stored prefix is recomputed when that is measured to be faster than fetching it"
    )
    lookup_timeout_s: float = Field(2.0, gt=0, le=600, description="timeout of a lookup, which then is a miss")
    fetch_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="timeout of a fetch; tokens that have not arrived by then are a miss"
    )
    max_connections: int = Field(
        16, ge=1, le=1024, description="connections to the store for reads; a few more serve all else"
    )
    ttl_s: Seconds | None = Field(
        None,
        ge=1,
        le=1e9,
        description="time, such as 1d, after which what this server writes is not read any more, and is deleted",
    )
    memory_cache: SizeOrNone = Field(
        0,
        description="size, such as 16GiB, of a cache in this machine's memory of what was read and written lately, "
        "as it is stored; each rank has one; by default there is none",
    )
    write_queue_bytes: int = Field(
        512 * MiB,
        ge=1 * MiB,
        description="bytes of pages that may wait to be written; further ones wait in SGLang's pool while it has room",
    )
    levels: LevelsConfig | None = Field(
        None,
        description="write klt in levels, and read fewer where the link is slow: count, max_kl",
    )
    audit_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of hits, and of computed segments that the store has, whose stored values are compared with "
        "what the server computes",
    )
    device: DeviceModeConfig = Field(DeviceModeConfig(), description="of device mode alone: pool_share")
    codec_threads: int = Field(
        default_factory=lambda: max(1, min(8, (os.cpu_count() or 1) // 2)),
        ge=1,
        le=256,
        description="threads that encode, and as many that decode, and as many again at low priority; by default half "
        "the cores, at most 8",
    )

    @field_validator("quantiser")
    @classmethod
    def _known_quantiser(cls, value: str | None) -> str | None:
        known = (*get_args(QuantiserName), "auto")
        if value is not None and value.startswith(CACHEGEN):
            from sgl_kvfetch.codec import quantiser_from_identity  # which imports torch, and most configs need not

            try:
                quantiser_from_identity(value)
            except FormatError as e:
                raise ValueError(str(e)) from e
        elif value is not None and value not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return value

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        return require_writable(value)

    @field_validator("store", mode="before")
    @classmethod
    def _one_url(cls, value: object) -> object:
        scheme, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
        if scheme == "file":
            raise ValueError(
                "a directory belongs to one process, and each rank opens the store: run `kvfetch serve "
                f"{rest or 'DIRECTORY'} --port 8700`, and use http://127.0.0.1:8700"
            )
        if scheme not in STORE_URLS or not rest:
            lacks_scheme = isinstance(value, str) and value and "://" not in value
            hint = f"; is it http://{value}?" if lacks_scheme else ""
            raise ValueError(f"expected one URL: {' or '.join(STORE_URLS.values())}{hint}")
        return value

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> Self:
        """Raises ValueError for keys that need, or exclude, each other."""
        name = self.quantiser_name
        if self.quantiser == "auto" and self.profile is not None:
            raise ValueError("quantiser = 'auto' takes its profile from the store: leave out profile, or set 'klt'")
        if name != "klt" and (self.profile is not None or "target_kl" in self.model_fields_set):
            raise ValueError(f"profile and target_kl need quantiser = 'klt', not {name!r}")
        if self.levels is not None and (name, self.codec) != ("klt", "ans"):
            raise ValueError(
                "levels needs quantiser = 'klt' with codec = 'ans': a level holds digits of coefficients, which only "
                "ans codes. `kvfetch encode` adds video alongside the levels"
            )
        if not self.store.startswith("s3:"):
            for key in ("s3", "index"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is for s3:// stores; kvfetch serve needs none")
        return self

    @property
    def num_levels(self) -> int:
        """How many levels the server writes; 1 for all at once."""
        return 1 if self.levels is None else self.levels.count

    @property
    def quantiser_name(self) -> str:
        """The quantiser; with ``auto``, the one that the server is to have in the end."""
        return "klt" if self.quantiser == "auto" else self.quantiser or ("exact" if self.profile is None else "klt")

    def coarseness(self, quantiser: Quantiser) -> int:
        """Return how many times the step may be tripled in what this config's server reads. Raises ConfigError."""
        max_kl = None if self.levels is None else self.levels.max_kl
        return 0 if max_kl is None else quantiser.coarseness_within(max_kl, "levels.max_kl")

    def as_json(self) -> dict[str, Any]:
        """Return the keys that are set, as `messages.Start` has them; ``model_validate`` reads them."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def as_exact(self) -> KVFetchConfig:
        """This config of ``klt`` as one of ``exact``, without the keys that only ``klt`` has."""
        kept = self.model_dump(exclude_unset=True, exclude={"quantiser", "profile", "target_kl", "levels"})
        return KVFetchConfig.model_validate(kept | {"quantiser": "exact"})

    def with_profile(self, path: str) -> KVFetchConfig:
        """Return this config of ``klt``, or of ``auto``, with a profile."""
        return self.model_copy(update={"quantiser": "klt", "profile": path})

    @property
    def reads(self) -> bool:
        return self.mode != "write_only"

    @property
    def writes(self) -> bool:
        return self.mode != "read_only"


GROUPS: dict[str, type[_Keys]] = {
    "tls": TlsConfig,
    "levels": LevelsConfig,
    "device": DeviceModeConfig,
}


def parse_config(extra: Mapping[str, Any]) -> KVFetchConfig:
    """Parse the extra config, ignoring SGLang's own keys in it.

    Raises ConfigError naming each invalid key, its value and what is allowed.
    """
    ours = {key: value for key, value in extra.items() if key not in SGLANG_KEYS}
    try:
        return KVFetchConfig.model_validate(ours, context=_BY_USER)
    except ValidationError as e:
        faults = "; ".join(_fault(dict(error)) for error in e.errors())
        raise ConfigError(f"kvfetch config: {faults}") from e


def _is_secret(key: str) -> bool:
    """Return whether the value of a key, or of one like it, may hold a secret."""
    return key.partition(".")[0] in _SECRET_KEYS or "token" in key.lower()


def _known(keys: Iterable[str]) -> str:
    return f"known keys are {', '.join(keys)}"


def _fault(error: dict[str, Any]) -> str:
    """Return one of pydantic's errors as a sentence that names the key, its value, and what would be right."""
    key = ".".join(map(str, error["loc"]))
    group = GROUPS.get(key.partition(".")[0]) if "." in key else None
    fields = (group or KVFetchConfig).model_fields
    known = list(fields)
    match error["type"]:
        case "extra_forbidden" if group and len(error["loc"]) == 1 and (field := key.partition(".")[2]) in known:
            return f'unknown key {key!r}; write it as {{"{key.partition(".")[0]}": {{"{field}": ...}}}}'
        case "extra_forbidden":
            close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else _known(known)
            is_secret = any(map(_is_secret, (key, *close))) or difflib.get_close_matches(key, ["token"])
            value = "" if is_secret else f" (= {error['input']!r})"
            return f"unknown key {key!r}{value}; {hint}"
        case "missing":
            return f"{key!r} is required: {fields[error['loc'][-1]].description}"
        case "model_type":
            keys = GROUPS[key].model_fields
            message = f'it has keys of its own; write it as {{"{key}": {{"{next(iter(keys))}": ...}}}}; {_known(keys)}'
        case _:
            message = error["msg"].removeprefix("Value error, ")
    if not key:
        return str(message)
    value = "(hidden)" if _is_secret(key) else repr(error["input"])
    return f"{key} = {value}: {message}"
