"""A backend's permission to read from its store and to write to it."""

from __future__ import annotations

import logging

from sgl_kvfetch.config import KVFetchConfig

logger = logging.getLogger(__name__)


class Access:
    """The permissions of the config, until the weights change."""

    def __init__(self, config: KVFetchConfig) -> None:
        self._config = config
        self._suspended = False

    def suspend(self, reason: str) -> None:
        """Stop reading and writing, because what the engine computes no longer belongs to the namespace. This lasts
        until the backend is detached and attached again. Any thread may call it; it never waits."""
        if not self._suspended:
            self._suspended = True
            logger.warning("kvfetch neither reads nor writes any more: %s", reason)

    @property
    def reads(self) -> bool:
        return self._config.reads and not self._suspended

    @property
    def writes(self) -> bool:
        return self._config.writes and not self._suspended
