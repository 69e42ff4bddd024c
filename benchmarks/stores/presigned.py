"""An S3 store that is read with presigned URLs and our own HTTP client, to compare with obstore's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import obstore

from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.stores.base import Lookup, Store
from sgl_kvfetch.stores.by_name import lookup_by_name
from sgl_kvfetch.stores.hedged import HedgedStore
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions

_VALID = timedelta(hours=1)


class PresignedStore(HttpStore):
    """Reads objects and looks them up by name. Nothing else works."""

    def __init__(self, url: str, config: Mapping[str, Any], options: HttpOptions) -> None:
        """``url`` is ``s3://BUCKET/PREFIX``; ``config`` has obstore's keys."""
        super().__init__(config["endpoint"], options=options)
        parts = urlsplit(url)
        self._objects = obstore.store.S3Store(
            parts.netloc,
            prefix=parts.path.strip("/"),
            config=cast(Any, config),
            client_options={"allow_http": True},
        )

    def _object_url(self, name: str) -> str:
        return obstore.sign(self._objects, "GET", name, _VALID)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        return await lookup_by_name(self.get, namespace, page_hashes)


def open_presigned(config: KVFetchConfig) -> Store:
    """Open ``config.store`` with hedged reads, as SGLang's servers would."""
    options = HttpOptions(config.fetch_timeout_s, max_connections=config.max_connections)
    return HedgedStore(PresignedStore(config.store, config.s3 or {}, options), config.max_connections)
