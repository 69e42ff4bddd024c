"""Parse and validate the user's ``--hicache-storage-backend-extra-config``, once, at start-up."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sgl_kvfetch.codecs import CodecName
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.quant.registry import QuantiserName
from sgl_kvfetch.quant.symmetric import MAX_BINS, MIN_BINS

TOKEN_ENV = "KVFETCH_TOKEN"

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

Bins = list[Annotated[int, Field(ge=MIN_BINS, le=MAX_BINS)]]
MiB = 1 << 20


class KVFetchConfig(BaseModel):
    """Every config key with its default. A test compares docs/configuration.md with this class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: tuple[str, ...] = Field(
        min_length=1,
        description="URL of the store: http://HOST:PORT, https://..., or file:///DIRECTORY; "
        "or a list of replicas, the nearest first",
    )
    token: str | None = Field(None, repr=False, description=f"bearer token; by default the environment's {TOKEN_ENV}")
    model_id: str | None = Field(
        None,
        min_length=1,
        description="a name for the weights; by default they are fingerprinted at start",
    )
    mode: Literal["read_write", "read_only", "write_only"] = Field(
        "read_write", description="whether to read from the store, write to it, or both"
    )

    quantiser: QuantiserName | None = Field(
        None, description="how values become 8-bit integers; by default klt with a profile, exact without"
    )
    profile: str | None = Field(
        None, min_length=1, description="file from `kvfetch calibrate` for this model; klt needs it"
    )
    target_kl: float | None = Field(
        None,
        gt=0,
        le=10,
        description="KL divergence of the next token's distribution that klt may cause, in nats, as calibrated; by "
        "default the profile's own",
    )
    cachegen_k_bins: Bins | None = Field(
        None, min_length=1, description="bins of K by layer, the last for all further layers; by default CacheGen's"
    )
    cachegen_v_bins: Bins | None = Field(None, min_length=1, description="bins of V by layer, as for K")
    codec: CodecName = Field("hevc", description="how integers become bytes when this server writes")
    span_tokens: int = Field(1024, ge=1, le=1 << 20, description="tokens a chunk; partial reads are rounded up to it")

    lookup_timeout_s: float = Field(2.0, gt=0, le=600, description="timeout of a lookup, which then is a miss")
    fetch_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="timeout of a fetch; tokens that have not arrived by then are a miss"
    )
    max_connections: int = Field(
        16, ge=1, le=1024, description="connections to the store for reads; a few more serve all else"
    )
    read_bytes: int = Field(4 * MiB, ge=64 << 10, le=1 << 30, description="approximate size of a ranged GET")
    inflight_bytes: int = Field(256 * MiB, ge=1 * MiB, description="compressed bytes that may wait to be decoded")
    write_queue_bytes: int = Field(
        512 * MiB, ge=1 * MiB, description="raw bytes that may wait to be written; further writes are dropped"
    )
    decode_profile: str | None = Field(
        None,
        min_length=1,
        description="file from `kvfetch profile` on this machine, for choosing among a segment's variants",
    )
    device_pool_share: float = Field(
        0.3, gt=0, le=1, description="device mode: share of the token-to-KV pool that fetches may hold"
    )
    round_tokens: int = Field(
        8192,
        ge=1,
        le=1 << 20,
        description="device mode: tokens in a round, at most; a prefix gets slots and joins the tree round by round",
    )
    fetch_order: Literal["shortest", "fifo", "priority"] = Field(
        "shortest",
        description="device mode: order of fetches; shortest first (without starvation), fifo, or by the request's "
        "priority",
    )
    recompute: Literal["auto", "never"] = Field(
        "auto",
        description="device mode: whether a prefix is computed when that is measured to be faster than fetching it",
    )
    codec_threads: int = Field(
        default_factory=lambda: max(1, min(8, (os.cpu_count() or 1) // 2)),
        ge=1,
        le=256,
        description="threads that encode, and as many that decode; by default half the cores, at most 8",
    )

    @field_validator("store", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("store")
    @classmethod
    def _known_schemes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            scheme, separator, rest = url.partition("://")
            if not separator or scheme not in ("http", "https", "file") or not rest:
                raise ValueError("expected http://HOST:PORT, https://HOST:PORT or file:///DIRECTORY")
        if len(set(value)) < len(value):
            raise ValueError("a replica is listed twice")
        return value

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> Self:
        name = self.quantiser_name
        if name != "cachegen" and (self.cachegen_k_bins or self.cachegen_v_bins):
            raise ValueError(f"cachegen_k_bins and cachegen_v_bins need quantiser = 'cachegen', not {name!r}")
        if name == "klt" and self.profile is None:
            raise ValueError("quantiser = 'klt' needs a profile: run kvfetch calibrate, and set profile to its file")
        if name != "klt" and (self.profile is not None or "target_kl" in self.model_fields_set):
            raise ValueError(f"profile and target_kl need quantiser = 'klt', not {name!r}")
        return self

    @property
    def quantiser_name(self) -> QuantiserName:
        return self.quantiser or ("exact" if self.profile is None else "klt")

    @property
    def reads(self) -> bool:
        return self.mode != "write_only"

    @property
    def writes(self) -> bool:
        return self.mode != "read_only"


def parse_config(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> KVFetchConfig:
    """Parse the extra config, ignoring SGLang's own keys in it.

    Raises ConfigError naming each invalid key, its value and what is allowed.
    """
    ours = {key: value for key, value in extra.items() if key not in SGLANG_KEYS}
    if "token" not in ours and environ.get(TOKEN_ENV) and not _has_only_directories(ours.get("store")):
        ours["token"] = environ[TOKEN_ENV]
    try:
        return KVFetchConfig.model_validate(ours)
    except ValidationError as e:
        faults = "; ".join(_fault(dict(error)) for error in e.errors())
        raise ConfigError(f"kvfetch config: {faults}") from e


def _has_only_directories(store: object) -> bool:
    urls = store if isinstance(store, list | tuple) else [store]
    return all(str(url).startswith("file:") for url in urls)


def _fault(error: dict[str, Any]) -> str:
    key = ".".join(map(str, error["loc"]))
    known = list(KVFetchConfig.model_fields)
    match error["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}"
            return f"unknown key {key!r} (= {error['input']!r}); {hint}"
        case "missing":
            return f"{key!r} is required: {KVFetchConfig.model_fields[key].description}"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return str(message)
    value = "(hidden)" if key == "token" else repr(error["input"])
    return f"{key} = {value}: {message}"
