"""Attaching a store while SGLang runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.plugin import weight_updates

logger = logging.getLogger(__name__)


def try_to_connect(connect: Callable[[str | None], object], extra_config: str | None) -> str | None:
    """Return None, or why ``connect`` failed. Never raises, because the other ranks wait for this rank's answer."""
    try:
        weight_updates.require_no_former_pages()
        connect(extra_config)
    except KVFetchError as error:
        logger.warning("kvfetch is not attached: %s", error)
        return str(error)
    except Exception as error:
        logger.exception("kvfetch is not attached")
        return f"{type(error).__name__}: {error}"
    return None
