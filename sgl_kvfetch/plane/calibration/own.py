"""A calibration on this machine: its files, its lock, and its process.

What it needs and has done stands in a folder of the user's cache, one for each model's weights and store. So a server
that was started again goes on where the last one was. Of all servers of these on this machine, the one that holds the
lock calibrates. The folder is deleted, by it, once there is a profile, or when calibrating has failed: it has what
users have sent. What a server has left that ended before, the next data plane of this user deletes after a week,
whatever its quantiser.

`Job` is what a data plane hands over to that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, why
from sgl_kvfetch.plane.profiles import cache_folder
from sgl_kvfetch.processes import SLEEPING_THREADS
from sgl_kvfetch.protocol import Watch
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.user_files import replace_file

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

READY = b"ready\n"  # the process writes it once it ends with its parent, and before it computes
Windows = Sequence[Sequence[bytes]]  # as in `messages.ShowPrompts`


class Job(msgspec.Struct, frozen=True):
    """What the process that calibrates needs to know. Paths are of files; ``parent`` is the data plane's process."""

    parent: int
    model_folder: str
    model_name: str
    weights: str
    tp_size: int
    num_threads: int
    prompts: str
    unfinished: str
    profile: str

    def read_windows(self, tokenizer: Any) -> list[torch.Tensor]:
        """Return the prompts' windows, ``(tokens,)`` int64 each, without the tokens that stand before every prompt.
        Raises ConfigError."""
        import torch

        from sgl_kvfetch.codec.calibrate.text import without_prompt_start

        def tokens(piece: bytes) -> torch.Tensor:
            return without_prompt_start(tokenizer, torch.frombuffer(bytearray(piece), dtype=torch.int32))

        return [torch.cat([tokens(piece) for piece in each]) for each in read_prompts(Path(self.prompts))]


def write_prompts(path: Path, windows: Windows) -> None:
    """Write the prompts, which only this user may read. Raises OSError."""
    replace_file(path, msgspec.msgpack.encode(windows))


def read_prompts(path: Path) -> Windows:
    """Read the prompts that `write_prompts` wrote. Raises ConfigError."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=list[list[bytes]])
    except (*DECODE_ERRORS, OSError) as e:
        raise ConfigError(f"{path}: {why(e) if isinstance(e, OSError) else e}") from e


_MOST_AGE_S = 7 * 24 * 3600.0
_NOT_ITS = ("KVFETCH_TOKEN", "PROMETHEUS_MULTIPROC_DIR")  # parts of the environment


class OwnCalibration:
    """Runs on an event loop. ``on_end`` is called when its process has ended."""

    def __init__(self, folder: Path, watch: Watch, num_threads: int, on_end: Callable[[], None]) -> None:
        self._folder = folder
        self._watch = watch
        self._num_threads = num_threads
        self._on_end = on_end
        self._shown: Windows = ()
        self._lock: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = Tasks()  # one at most, which awaits the process's end
        self._is_paused = False
        self._can_pause = False  # it has seen to it that it ends with this process, also while it is stopped
        self._has_failed = False  # and is not tried again
        self._is_closed = False

    @property
    def profile(self) -> Path | None:
        """The profile that was made here, which is not in the store yet."""
        path = self._folder / "profile"
        return path if self._lock is not None and self._process is None and path.exists() else None

    def show(self, windows: Windows) -> None:
        self._shown = windows

    def pause(self, *, is_paused: bool) -> None:
        """Stop computing, or go on."""
        self._is_paused = is_paused
        if self._process is not None and self._process.returncode is None and self._can_pause:
            self._process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    async def begin(self) -> None:
        """Calibrate, if there are prompts and it has not been done, unless another server here is at it."""
        if self._has_failed or self._process is not None:
            return
        try:
            job = await asyncio.to_thread(self._prepare)
            if job is None:
                return
            logger.info(
                "kvfetch calibrates %s on its prompts, on %d threads at the lowest priority; its files are in %s until "
                "there is a profile, and a server that is ended leaves them for the next one",
                self._watch.model_name,
                self._num_threads,
                self._folder,
            )
            environ = {key: value for key, value in os.environ.items() if key not in _NOT_ITS}
            # -P: as for `DataPlaneProcess`.
            command = [sys.executable, "-P", "-m", "sgl_kvfetch.plane.calibration", msgspec.json.encode(job).decode()]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env=SLEEPING_THREADS | environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        except OSError as e:
            self._has_failed = True
            logger.warning(
                "kvfetch: no profile can be made in %s, and this server stores with 'exact': %s", self._folder, why(e)
            )
            await asyncio.to_thread(self._delete)
            return
        self._tasks.begin(self._await_end(self._process))

    def _prepare(self) -> Job | None:
        """Write the prompts, and return what there is to do; None if there is nothing, or another server of this
        machine is at it. Raises OSError."""
        prompts, watch = self._folder / "prompts", self._watch
        if not (self._shown or prompts.exists()) or not self._take_lock() or self.profile is not None:
            return None
        if not prompts.exists():
            write_prompts(prompts, self._shown)
        model = watch.model_folder, watch.model_name, watch.weights, watch.needs.tp_size
        files = (str(self._folder / name) for name in ("prompts", "unfinished", "profile"))
        return Job(os.getpid(), *model, self._num_threads, *files)

    async def _await_end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        if await process.stdout.read(len(READY)) == READY:
            self._can_pause = True
            self.pause(is_paused=self._is_paused)
        status = await process.wait()
        self._process, self._can_pause = None, False
        if status and not self._is_closed:
            self._has_failed = True
        if status > 0 and not self._is_closed:  # it has said why, and would fail again
            await asyncio.to_thread(self._delete)
        if status < 0 and not self._is_closed:
            logger.warning(
                "kvfetch: the calibration was ended by signal %d, as where memory is short; this server stores with "
                "'exact'",
                -status,
            )
        self._on_end()

    async def close(self) -> None:
        """End the process. What it has done stays."""
        await self._end()
        self._unlock()

    async def forget(self) -> None:
        """End the process, and delete the files: there is a profile. Another server that is at it deletes its own."""
        await self._end()
        await asyncio.to_thread(self._delete)

    async def _end(self) -> None:
        self._is_closed = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        await self._tasks.join()

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            if self._folder.exists() and self._take_lock():
                shutil.rmtree(self._folder, ignore_errors=True)
        self._unlock()

    def _take_lock(self) -> bool:
        """Return whether no other server of this machine is at it. Raises OSError."""
        if self._lock is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock_of(self._folder)
        return self._lock is not None

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def calibration_folder(weights: str, store: str) -> Path:
    """Return the folder for a model's weights and a store."""
    return cache_folder("calibrations", weights, store)


def delete_old() -> None:
    """Delete what servers of this user have left, of any model and store, if it has not changed for a week."""
    for folder in calibration_folder("", "").parent.glob("*/"):
        with contextlib.suppress(OSError):
            newest_s = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest_s < _MOST_AGE_S or (lock := _lock_of(folder)) is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock_of(folder: Path) -> int | None:
    """Lock a calibration's folder until what is returned is closed. None if a server has it. Raises OSError."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
