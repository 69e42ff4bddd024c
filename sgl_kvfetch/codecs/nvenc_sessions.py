"""NVENC's encoders, kept and shared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sgl_kvfetch.codecs.hevc import join_access_units
from sgl_kvfetch.codecs.nvidia import brief

_REST_S = 60.0  # of a session, after NVENC failed it
# On the device, for a CUDA context and an encoder's pictures. PyNvVideoCodec 2.2.4 does not look whether it was given
# the context, and would hand the driver a pointer to nothing.
_NEEDED_BYTES = 1 << 30

_OPTIONS = {
    "codec": "hevc",
    "preset": "P1",  # the fastest
    "tuning_info": "lossless",
    "rc": "constqp",
    "constqp": 0,
    "bf": 0,
    "gop": 0xFFFFFFFF,  # for ever: what begins a bitstream is asked for
    "repeatspspps": 1,
}

# NAL units of HEVC (H.265, table 7-1).
_PARAMETER_SETS = {32, 33, 34}  # of video, sequence, picture
_IDR = (19, 20)
_MAX_PICTURE_DATA = 31


class NoEncoderError(Exception):
    """NVENC made no bitstream, which says nothing about the frames."""


class Kind(NamedTuple):
    """What an encoder is made for."""

    surface: str  # format of its input
    width: int
    height: int


class NvencSession:
    """An encoder, made when it is needed and kept from bitstream to bitstream: to make one takes PyNvVideoCodec a CUDA
    context, for a moment. For one thread at a time."""

    def __init__(self, nvc: Any, gpu: int, free_bytes: Callable[[], int]) -> None:
        """``nvc``: the module PyNvVideoCodec. ``gpu``: as torch counts them. ``free_bytes``: of its memory."""
        self._nvc = nvc
        self._gpu = gpu
        self._free_bytes = free_bytes
        self._encoder: Any = None
        self._kind: Kind | None = None
        self._rests_until_s = 0.0

    def cost(self, kind: Kind) -> int:
        """For choosing among sessions: the least is the best to use."""
        if self._kind is None:
            return 3 if self._rests else 1
        return 0 if self._kind == kind else 2

    def encode(self, kind: Kind, pictures: Sequence[np.ndarray]) -> bytes:
        """``pictures``: uint8, ``(rows, width)``, contiguous; not to be written meanwhile. Raises `NoEncoderError`; an
        encoder that something went wrong with is not used again, nor is there another one for a while."""
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
        self.close()  # before the next one takes its place
        if (free_bytes := self._free_bytes()) < _NEEDED_BYTES:
            raise NoEncoderError(f"NVENC is left alone while {free_bytes >> 20} MiB are free on the GPU")
        try:
            self._encoder = self._nvc.CreateEncoder(
                kind.width, kind.height, kind.surface, True, gpu_id=self._gpu, **_OPTIONS
            )
        except Exception as e:
            raise NoEncoderError(f"NVENC gave no encoder for {kind.width}x{kind.height}: {brief(e)}") from e
        self._kind = kind

    def _encode(self, pictures: Sequence[np.ndarray]) -> list[bytes]:
        """Access units."""
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
            raise NoEncoderError("NVENC put pictures into another order")
        if not all(access_units) or not _stands_alone(access_units[0]):
            raise NoEncoderError("NVENC made a bitstream that does not begin anew")
        return access_units


class SessionPool:
    """Sessions for all codecs. One that has an encoder of the wanted kind comes first, then one that has none."""

    def __init__(self, sessions: Collection[NvencSession]) -> None:
        self.fault = ""  # why NVENC is used no more
        self._idle = list(sessions)
        self._returned = threading.Condition()

    @contextmanager
    def session(self, kind: Kind) -> Iterator[NvencSession]:
        """Waits for one if all are in use."""
        with self._returned:
            self._returned.wait_for(lambda: self._idle)
            session = min(self._idle, key=lambda session: session.cost(kind))  # of equals, the one idle longest
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
        """Close the sessions, those in use as they come back."""
        with self._returned:
            self.fault = self.fault or fault
            for session in self._idle:
                session.close()


def _stands_alone(access_unit: bytes) -> bool:
    """Whether it is a picture predicted from no other, after all its parameter sets."""
    found: set[int] = set()
    at = access_unit.find(b"\0\0\1")
    while 0 <= at < len(access_unit) - 3:
        nal_type = access_unit[at + 3] >> 1 & 0x3F
        if nal_type <= _MAX_PICTURE_DATA:
            return nal_type in _IDR and found >= _PARAMETER_SETS
        found.add(nal_type)
        at = access_unit.find(b"\0\0\1", at + 3)
    return False
