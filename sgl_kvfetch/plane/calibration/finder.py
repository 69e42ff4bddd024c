"""Looks for a profile until there is one: in the store, now and then, and by calibrating where nobody has done so.

Others may publish one first, at any time: another server, or somebody with ``kvfetch calibrate``. So the store is asked
before calibrating begins, while it runs, and before its profile is published.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from pathlib import Path

from sgl_kvfetch.errors import KVFetchError, StoreError
from sgl_kvfetch.log import LimitedLogger, brief
from sgl_kvfetch.plane.access import open_profile_store, store_keys
from sgl_kvfetch.plane.calibration.own import OwnCalibration, calibration_folder
from sgl_kvfetch.plane.profiles import PassedOver, take_from_store
from sgl_kvfetch.protocol import Emit, KVFetchConfig, TakenProfile, messages as m, require_profile_file
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.stores import publish_profile

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

_ASK_EVERY_S = 30.0  # the store, for its newest profile


class ProfileFinder:
    """Runs on the data plane's event loop, which must not wait for files: profiles are read on threads."""

    def __init__(self, config: KVFetchConfig, watch: m.Watch, emit: Emit) -> None:
        self._config = config
        self._watch = watch
        self._emit = emit
        self._news = asyncio.Event()
        folder = calibration_folder(watch.weights, config.store)
        self._own = OwnCalibration(folder, watch, config.codec_threads, self._news.set)
        self._passed_over = PassedOver()
        self._tasks = Tasks()
        self._tasks.begin(self._find())

    def serve(self, command: m.ShowPrompts | m.PauseCalibration) -> None:
        """Begin to carry out a command."""
        match command:
            case m.ShowPrompts():
                self._own.show(command.windows)
                self._news.set()
            case m.PauseCalibration():
                self._own.pause(is_paused=command.is_paused)

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._own.close()

    async def _find(self) -> None:
        while (taken := await self._in_store()) is None:
            if not await self._make_one():
                await self._wait()
        was_made_here = self._own.profile is not None
        await self._own.forget()
        if not was_made_here:
            logger.info("kvfetch: the store has a profile now")
        self._emit(m.ProfileFound(taken.digest))

    async def _make_one(self) -> bool:
        """Calibrate, or publish what was calibrated. Return whether there is a profile in the store now."""
        try:
            await self._own.begin()
            if (path := self._own.profile) is None:
                return False
            # One that this server would pass over would be published again and again.
            await asyncio.to_thread(require_profile_file, self._watch.needs, str(path))
            return await self._publish(path)
        except Exception as e:  # the finder must go on: nothing else looks for a profile
            _limited.warning("making", f"kvfetch: a profile cannot be made or published here: {brief(e)}")
            return False

    async def _wait(self) -> None:
        """Wait for news of the calibration, at most until it is time to ask the store."""
        try:
            # Servers that have started together do not ask together.
            async with asyncio.timeout(_ASK_EVERY_S * random.uniform(0.8, 1.2)):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def _in_store(self) -> TakenProfile | None:
        try:
            return await asyncio.to_thread(self._ask_store)
        except KVFetchError as e:
            _limited.warning("ask", f"kvfetch: {self._config.store} cannot be asked for a profile: {e}")
        except Exception as e:  # the finder must go on: nothing else asks
            _limited.warning("bug", f"kvfetch: asking {self._config.store} for a profile failed: {brief(e)}")
        return None

    def _ask_store(self) -> TakenProfile | None:
        fits = partial(require_profile_file, self._watch.needs)
        return asyncio.run(take_from_store(self._config, self._watch.weights, fits, None, self._passed_over))

    async def _publish(self, path: Path) -> bool:
        store = open_profile_store(self._config)
        try:
            name = await publish_profile(store, path, store_keys(self._config))
        except KVFetchError as e:
            needs = "; the token needs the role write" if isinstance(e, StoreError) else ""
            message = f"kvfetch: the profile in {path} cannot be published, and this server stores with 'exact': {e}"
            _limited.warning("publish", message + needs)
            return False
        finally:
            await store.close()
        logger.info("kvfetch: published profile %s to %s", name, self._config.store)
        return True
