"""Sessions that keep NVENC's encoders, and a pool that shares them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sgl_kvfetch.codec.bitstream.hevc import join_access_units
from sgl_kvfetch.codec.bitstream.nvidia import brief

_REST_S = 60.0  # how long a session is not used after a failure of NVENC
# Free device memory that a CUDA context and an encoder's pictures need. Without it, PyNvVideoCodec 2.2.4 would pass the
# driver a null pointer: it does not check whether it got the context.
_NEEDED_BYTES = 1 << 30

_OPTIONS = {
    "codec": "hevc",
    "preset": "P1",  # the fastest
    "tuning_info": "lossless",
    "rc": "constqp",
    "constqp": 0,
    "bf": 0,
    "gop": 0xFFFFFFFF,  # no periodic IDR pictures: each bitstream's first one is requested
    "repeatspspps": 1,
}

# NAL units of HEVC (H.265, table 7-1).
_PARAMETER_SETS = {32, 33, 34}  # of video, sequence, picture
_IDR = (19, 20)
_MAX_PICTURE_DATA = 31


class NoEncoderError(Exception):
    """NVENC made no bitstream. The frames may be fine."""


class Kind(NamedTuple):
    """The properties of pictures that an encoder is made for."""

    surface: str  # format of the encoder's input
    width: int
    height: int


class NvencSession:
    """An encoder, created on first use and kept from bitstream to bitstream, since PyNvVideoCodec creates a temporary
    CUDA context for each new one. For one thread at a time."""

    def __init__(self, nvc: Any, gpu: int, free_bytes: Callable[[], int]) -> None:
        """``nvc``: the module PyNvVideoCodec. ``gpu``: torch's index. ``free_bytes``: returns its free memory."""
        self._nvc = nvc
        self._gpu = gpu
        self._free_bytes = free_bytes
        self._encoder: Any = None
        self._kind: Kind | None = None
        self._rests_until_s = 0.0

    def cost(self, kind: Kind) -> int:
        """Rank the session for encoding ``kind``: the pool picks the lowest cost."""
        if self._kind is None:
            return 3 if self._rests else 1
        return 0 if self._kind == kind else 2

    def encode(self, kind: Kind, pictures: Sequence[np.ndarray]) -> bytes:
        """Encode contiguous uint8 pictures, ``(rows, width)``, which must not change meanwhile. Raises
        `NoEncoderError`. After any exception the encoder is dropped, and none is created for a while."""
        if self._rests:
            raise NoEncoderError("NVENC failed a moment ago")
        try:
            if self._kind != kind:
                self._open(kind)
            return join_access_units(self._encode(pictures))
        except BaseException:
            self.close()
            self._rests_until_s = time.monotonic() + _REST_S
            raise

    def close(self) -> None:
        self._encoder = self._kind = None

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def _open(self, kind: Kind) -> None:
        self.close()  # frees its memory for the next one
        if (free_bytes := self._free_bytes()) < _NEEDED_BYTES:
            raise NoEncoderError(f"NVENC is not used while only {free_bytes >> 20} MiB are free on the GPU")
        try:
            self._encoder = self._nvc.CreateEncoder(
                kind.width, kind.height, kind.surface, True, gpu_id=self._gpu, **_OPTIONS
            )
        except Exception as e:
            raise NoEncoderError(f"NVENC gave no encoder for {kind.width}x{kind.height}: {brief(e)}") from e
        self._kind = kind

    def _encode(self, pictures: Sequence[np.ndarray]) -> list[bytes]:
        flags = self._nvc.NV_ENC_PIC_FLAGS
        begin = int(flags.FORCEIDR) | int(flags.OUTPUT_SPSPPS)
        packets: list[dict[str, Any]] = []
        try:
            for index, picture in enumerate(pictures):
                packets += self._encoder.Encode(picture, 0 if index else begin)
            packets += self._encoder.EndEncode()
            times = [packet["timestamp"] for packet in packets]
            access_units = [bytes(packet["data"]) for packet in packets]
        except Exception as e:
            raise NoEncoderError(f"NVENC failed: {brief(e)}") from e
        if len(access_units) != len(pictures):
            raise NoEncoderError(f"NVENC made {len(access_units)} pictures, expected {len(pictures)}")
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise NoEncoderError("NVENC reordered the pictures")
        if not all(access_units) or not _stands_alone(access_units[0]):
            raise NoEncoderError("NVENC made a bitstream that does not start with an IDR picture and parameter sets")
        return access_units


class SessionPool:
    """Sessions shared by all codecs. Prefers a session with an encoder of the wanted kind, then one without any."""

    def __init__(self, sessions: Collection[NvencSession]) -> None:
        self.fault = ""  # why NVENC is disabled
        self._idle = list(sessions)
        self._returned = threading.Condition()

    @contextmanager
    def session(self, kind: Kind) -> Iterator[NvencSession]:
        """Borrow a session, waiting until one is idle."""
        with self._returned:
            self._returned.wait_for(lambda: self._idle)
            session = min(self._idle, key=lambda session: session.cost(kind))  # on a tie, the longest idle
            self._idle.remove(session)
        try:
            yield session
        finally:
            with self._returned:
                if self.fault:
                    session.close()
                self._idle.append(session)
                self._returned.notify()

    def condemn(self, fault: str) -> None:
        """Disable NVENC: close idle sessions now, others when they are returned."""
        with self._returned:
            self.fault = self.fault or fault
            for session in self._idle:
                session.close()


def _stands_alone(access_unit: bytes) -> bool:
    """Return whether the access unit is an IDR picture after all its parameter sets."""
    found: set[int] = set()
    at = access_unit.find(b"\0\0\1")
    while 0 <= at < len(access_unit) - 3:
        nal_type = access_unit[at + 3] >> 1 & 0x3F
        if nal_type <= _MAX_PICTURE_DATA:
            return nal_type in _IDR and found >= _PARAMETER_SETS
        found.add(nal_type)
        at = access_unit.find(b"\0\0\1", at + 3)
    return False
