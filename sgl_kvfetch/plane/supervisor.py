"""Keeps a data plane serving: starts it, watches it, restarts it when it ends, and switches to another one.

Data planes follow one another. One of them gets all new work, and two threads may replace it: the one that watches it,
and the engine's, which switches. What must hold is said at the fields.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from sgl_kvfetch import metrics
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.launch import Launch
from sgl_kvfetch.plane.run import CLOSE_S, EndedError, Run
from sgl_kvfetch.types import KVGeometry

logger = logging.getLogger(__name__)

# A data plane that cannot start fails again at once: there is no memory, or a file that it needs is gone.
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 30.0
_STEADY_S = 5.0  # after a data plane has served this long, the backoff starts anew


class _Prepared(NamedTuple):
    """A data plane that serves already, but gets no work yet, and what it was started with."""

    run: Run
    start: m.Start
    launch: Launch


class Supervisor:
    """Serves by one data plane at a time. Call ``close`` at the end."""

    def __init__(self, start: m.Start, geometry: KVGeometry, launch: Launch, page_bytes: int, value_bytes: int) -> None:
        """Start the data plane and wait until it serves. ``page_bytes``, ``value_bytes``: as for `Run`. Raises
        KVFetchError if the data plane refuses the config or fails."""
        # What the next data plane is started with: that of the first one, until a switch.
        self._start = start
        self._launch = launch
        # What the present data plane was told last of each kind, and those that follow it are told, too.
        self._told: dict[type, m.ShowPrompts | m.PauseCalibration | m.TakeProfile] = {}
        self._geometry = geometry
        self._shared_bytes = page_bytes, value_bytes
        self._closing = threading.Event()
        # A data plane whose imports are done, which take most of a start, but that was sent no `Start`.
        self._spare: Run | None = None
        # How often pages that a data plane had taken were lost: it ended, or the store had failed to take them, or they
        # were stored by another quantiser.
        self.num_losses = 0
        self._prepared: _Prepared | None = None  # for the next switch
        self.on_switch: Callable[[], None] = lambda: None  # what is known of the store's pages holds no longer
        # The data plane that gets all new work. It may have ended, while the next one is being started. Two threads
        # replace it, both with `_choosing` held: the watching one only the data plane that it watched itself.
        self._choosing = threading.Lock()
        self._run = self._begin_run()
        self._thread = self._begin_watch()  # watches `_run`
        self._former: threading.Thread | None = None  # watches the data plane before the last switch, until its end

    def tell(self, command: m.ShowPrompts | m.PauseCalibration | m.TakeProfile) -> None:
        """Tell the data plane, and those that follow it until a switch."""
        self._told[type(command)] = command
        self._run.channel.send(command)

    def prepare(self, make: Callable[[], tuple[m.Start, Launch]]) -> None:
        """Start a second data plane, on a thread, for `switch`. ``make`` returns what it is started with; it may take
        its time, and raise KVFetchError: then there is nothing to switch to."""
        threading.Thread(target=self._prepare, args=(make,), name="kvfetch-switch", daemon=True).start()

    @property
    def is_prepared(self) -> bool:
        return self._prepared is not None

    def switch(self) -> None:
        """Serve by the data plane that was prepared. The former one writes what is queued, and ends; its other work
        under way counts as misses. Call on the thread that steps: this never waits, since the new one serves already,
        and the former one keeps the thread that watches it."""
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        with self._choosing:
            former, self._run = self._run, prepared.run
            self._start, self._launch, self._told = prepared.start, prepared.launch, {}
        self.num_losses += 1  # what it has queued is of no use to the next one
        self.on_switch()
        former.channel.send(m.Close())
        self._former, self._thread = self._thread, self._begin_watch()

    def close(self) -> None:
        """Write what is queued, within a few seconds, and end the data plane. Waits for it. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        run = self._run
        run.channel.send(m.Close())
        if not run.running.join(CLOSE_S):
            logger.warning("kvfetch: the data plane did not end in %g s", CLOSE_S)
            run.running.kill()
        self._thread.join(CLOSE_S)
        if self._former is not None:
            self._former.join(CLOSE_S)
        if self._prepared is not None:
            self._prepared.run.end()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def _begin_run(self) -> Run:
        """Start a data plane, the spare one if there is one, and wait until it serves. Raises KVFetchError."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.launch is not self._launch:  # from before a switch
            spare.end()
            spare = None
        run = spare or self._new_run()
        self._let_start(run, self._start)
        for command in [*self._told.values()]:
            run.channel.send(command)
        return run

    def _let_start(self, run: Run, start: m.Start) -> None:
        """Wait until a data plane serves. If it does not, end it and raise KVFetchError."""
        try:
            run.channel.send(start)
            run.await_ready(self._closing)
        except BaseException:
            run.end()
            raise

    def _prepare(self, make: Callable[[], tuple[m.Start, Launch]]) -> None:
        try:
            start, launch = make()
            run = self._start_at_last(start, launch)
        except (KVFetchError, OSError) as e:
            if not self._closing.is_set():
                logger.warning("kvfetch: the profile cannot be used, and this server stores with 'exact': %s", e)
            return
        self._prepared = _Prepared(run, start, launch)
        if self._closing.is_set():
            run.end()

    def _start_at_last(self, start: m.Start, launch: Launch) -> Run:
        """Start a data plane, another one if it ends or takes too long, and so on: the other ranks wait for this one.
        Raises KVFetchError if it refuses the config, or at the close."""
        backoff_s = _LEAST_BACKOFF_S
        while True:
            try:
                run = self._new_run(launch)
                self._let_start(run, start)
                return run
            except (EndedError, OSError) as e:
                if self._closing.wait(backoff_s):
                    raise
                logger.warning("kvfetch: a data plane that stores with the profile did not start: %s", e)
                backoff_s = min(_MOST_BACKOFF_S, 2 * backoff_s)

    def _begin_watch(self) -> threading.Thread:
        thread = threading.Thread(target=self._watch, args=(self._run,), name="kvfetch-data", daemon=True)
        thread.start()
        return thread

    def _watch(self, run: Run) -> None:
        """Serve a run until its end, then start the next one, unless a switch has replaced it. Runs on the thread that
        receives."""
        use_one_thread()
        backoff_s = _LEAST_BACKOFF_S
        try:
            while True:
                began_s = time.monotonic()
                run.serve(self._closing, self._launch_spare)
                if run.end():
                    self._lose()
                if self._closing.is_set() or run is not self._run:
                    return
                if time.monotonic() - began_s > _STEADY_S:
                    backoff_s = _LEAST_BACKOFF_S
                logger.warning("kvfetch: the data plane ended; its work under way counts as misses; it is restarted")
                metrics.DATA_PLANE_STARTS.inc()
                while True:
                    if self._closing.wait(backoff_s):
                        return
                    backoff_s = min(_MOST_BACKOFF_S, 2 * backoff_s)
                    if run is not self._run:
                        return
                    try:
                        following = self._begin_run()
                    except (KVFetchError, OSError) as e:
                        logger.warning("kvfetch: the data plane did not start: %s", e)
                        continue
                    with self._choosing:
                        is_wanted = run is self._run
                        if is_wanted:
                            self._run = run = following
                    if not is_wanted:  # a switch was faster, and has a thread of its own
                        following.end()
                        return
                    break
        finally:
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.end()

    def _launch_spare(self) -> None:
        """Launch a spare data plane, because the present one does not answer. It may hang, or only be slow: if it
        answers after all, the spare one is kept for another time."""
        if self._spare is None and not self._closing.is_set():
            try:
                self._spare = self._new_run()
            except OSError as e:
                logger.warning("kvfetch: a spare data plane cannot be started: %s", e)

    def _new_run(self, launch: Launch | None = None) -> Run:
        return Run(launch or self._launch, self._geometry, self._start.sides, *self._shared_bytes, self._lose)

    def _lose(self) -> None:
        self.num_losses += 1
