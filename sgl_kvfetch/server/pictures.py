"""Draws pictures of segments in processes of their own: decoding needs torch and video codecs, and reads bytes that
others have written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from aiohttp import web

from sgl_kvfetch.codec import Manifest
from sgl_kvfetch.log import printable
from sgl_kvfetch.server.bodies import Overloaded

_PICTURE_S = 60.0
_PICTURE_NICE = 10  # requests come first
_MOST_PICTURES = 4  # drawn or waiting: one is drawn at a time
_MOST_BYTES = 64 << 20  # of a picture
_MOST_MESSAGE_BYTES = 4096
_PIECE_BYTES = 64 << 10
# All that a drawing process may know: others, such as KVFETCH_TOKEN, may be secret.
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "VIRTUAL_ENV")

_FEW_THREADS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}  # each takes of the address space, which is limited


class Pictures:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._drawing = asyncio.Lock()
        self._num_pictures = 0

    async def draw(self, manifest: Manifest, span: int) -> bytes:
        """Return the contact sheet of a span as a PNG. Raises HTTPException."""
        if self._num_pictures >= _MOST_PICTURES:
            raise Overloaded("pictures", "other pictures are being drawn")
        self._num_pictures += 1
        try:
            async with self._drawing:
                return await self._draw(manifest.key.manifest_name, span)
        finally:
            self._num_pictures -= 1

    async def _draw(self, name: str, span: int) -> bytes:
        """Draw a span's pictures in a process of low priority and little memory. Raises HTTPException if that fails."""
        command = ("-P", "-m", "sgl_kvfetch.tools.pictures", str(self._root), name, str(span), str(os.getpid()))
        kept = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("PYTHON")}
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=kept | _FEW_THREADS, stdin=nothing, stdout=pipe, stderr=pipe
        )
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the second by a system call filter
            os.setpriority(os.PRIO_PROCESS, process.pid, _PICTURE_NICE)
        assert process.stdout is not None
        assert process.stderr is not None
        message = asyncio.create_task(_end_of(process.stderr))
        try:
            async with asyncio.timeout(_PICTURE_S):
                picture = await _all_of(process.stdout)
                failed = await process.wait()
        except TimeoutError as e:
            raise web.HTTPGatewayTimeout(text=f"drawing took longer than {_PICTURE_S:g} s") from e
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            last_line = await message
        if failed or not picture:
            why = printable(last_line.replace(str(self._root), "the store")) or "nothing was drawn"
            raise web.HTTPNotImplemented(text=f"cannot draw the frames: {why}")
        return picture


async def _all_of(stream: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while piece := await stream.read(_PIECE_BYTES):
        found += piece
        if len(found) > _MOST_BYTES:
            raise web.HTTPNotImplemented(text=f"cannot draw the frames: the picture has more than {_MOST_BYTES} bytes")
    return bytes(found)


async def _end_of(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end. Return its last line."""
    found = b""
    while piece := await stream.read(_PIECE_BYTES):
        found = (found + piece)[-_MOST_MESSAGE_BYTES:]
    lines = found.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
