from .base import (
    AdminStore as AdminStore,
    Lookup as Lookup,
    ObjectInfo as ObjectInfo,
    SegmentHit as SegmentHit,
    Store as Store,
    WrappedStore as WrappedStore,
    fill_pieces as fill_pieces,
    is_namespace as is_namespace,
    object_digest as object_digest,
    require_name as require_name,
    require_namespace as require_namespace,
)
from .coverage import furthest as furthest
from .http_answers import client_errors as client_errors
from .keyed import with_keys as with_keys
from .open import (
    STORE_URLS as STORE_URLS,
    S3Options as S3Options,
    open_hedged as open_hedged,
    open_remote as open_remote,
    split_store_url as split_store_url,
    takes_token as takes_token,
)
from .pins import (
    MAX_LABEL as MAX_LABEL,
    MAX_PIN_BYTES as MAX_PIN_BYTES,
    MAX_PIN_PAGES as MAX_PIN_PAGES,
    MAX_PINNED_PART as MAX_PINNED_PART,
    Pin as Pin,
    decode_pin as decode_pin,
    pinned_segments as pinned_segments,
    require_pin_name as require_pin_name,
)
from .profiles import (
    MAX_HEAD_BYTES as MAX_HEAD_BYTES,
    MAX_PROFILE_BYTES as MAX_PROFILE_BYTES,
    MAX_PROFILES as MAX_PROFILES,
    MAX_PROFILES_OF_WEIGHTS as MAX_PROFILES_OF_WEIGHTS,
    MAX_PROFILES_PART as MAX_PROFILES_PART,
    ListedProfile as ListedProfile,
    ProfileKeys as ProfileKeys,
    ProfileRow as ProfileRow,
    is_profile_name as is_profile_name,
    list_profiles as list_profiles,
    parse_head as parse_head,
    profile_rows as profile_rows,
    publish_profile as publish_profile,
    read_profile as read_profile,
    require_profile_length as require_profile_length,
    require_profile_name as require_profile_name,
)
from .redis_index import IndexOptions as IndexOptions, PageIndex as PageIndex
from .remote import Breaker as Breaker, HttpOptions as HttpOptions, TlsFiles as TlsFiles
from .verified import (
    MAX_DAMAGED as MAX_DAMAGED,
    MAX_VERIFIED_BYTES as MAX_VERIFIED_BYTES,
    Damaged as Damaged,
    Verified as Verified,
    decode_verified as decode_verified,
)
