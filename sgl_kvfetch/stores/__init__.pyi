from .base import (
    AdminStore as AdminStore,
    Lookup as Lookup,
    ObjectInfo as ObjectInfo,
    SegmentHit as SegmentHit,
    Store as Store,
    is_namespace as is_namespace,
    object_digest as object_digest,
    require_name as require_name,
)
from .keyed import with_keys as with_keys
from .notes import (
    NOTE_KINDS as NOTE_KINDS,
    PINS as PINS,
    PROFILES as PROFILES,
    ListedProfile as ListedProfile,
    NoteKind as NoteKind,
    Pin as Pin,
    ProfileRow as ProfileRow,
    decode_pin as decode_pin,
    list_profiles as list_profiles,
    profile_rows as profile_rows,
    publish_profile as publish_profile,
    read_profile as read_profile,
)
from .open import (
    S3Options as S3Options,
    open_remote as open_remote,
    split_store_url as split_store_url,
    takes_token as takes_token,
)
from .remote import Breaker as Breaker, HttpOptions as HttpOptions, TlsFiles as TlsFiles, Token as Token
