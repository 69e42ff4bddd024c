"""PyNvVideoCodec's encoder as it behaves, on the CPU: real lossless bitstreams by libx265, with larger coding units
than ours, packets that come three pictures late, and only so many encoders at a time. Signatures and packets are those
of version 2.2.4."""

from __future__ import annotations

import sys
import threading
import weakref
from enum import IntEnum
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.bitstream import nvenc
from sgl_kvfetch.codec.bitstream.nvidia import EncodeCaps

DELAY = 3
_X265 = "lossless=1:bframes=0:keyint=-1:min-cu-size=16:ctu=32:annexb=1:info=0:pools=none:frame-threads=1:log-level=none"


class PicFlags(IntEnum):
    FORCEIDR = 2
    OUTPUT_SPSPPS = 4


class Encoder:
    def __init__(self, nvc: FakeNvc, width: int, height: int, surface: str) -> None:
        self._nvc = nvc
        self._size = width, height
        self._surface = surface
        self._context: av.VideoCodecContext | None = None
        self._late: list[dict[str, Any]] = []
        self._time = 0

    def Encode(self, frame: np.ndarray, flags: int) -> list[dict[str, Any]]:
        assert isinstance(frame, np.ndarray)
        assert frame.dtype == np.uint8
        assert frame.flags.c_contiguous
        if self._nvc.fails == "encode" and self._time % 4 == 2:
            raise RuntimeError("EncodeFrame : \nError code : 20\nError Type : nvEncEncodePicture API failed")
        is_first = self._context is None
        if is_first or (flags & PicFlags.FORCEIDR and self._nvc.fails != "goes on"):
            # A session that goes on writes its parameter sets again only if told to.
            is_told = flags & PicFlags.OUTPUT_SPSPPS and self._nvc.fails != "no headers"
            self._context = self._new_context(has_headers=bool(is_first or is_told))
        assert self._context is not None
        picture = av.VideoFrame.from_ndarray(self._planes(frame), format=self._context.pix_fmt)
        picture.pts = self._time
        (data,) = map(bytes, self._context.encode(picture))
        self._late.append({"data": data, "timestamp": self._time, "picture_type": 3 if flags & 2 else 0})
        self._time += 1
        return [self._late.pop(0)] if len(self._late) > DELAY else []

    def EndEncode(self) -> list[dict[str, Any]]:
        late, self._late = self._late, []
        match self._nvc.fails:
            case "end":
                raise RuntimeError("SendEOS: out of memory")
            case "missing":
                return late[:-1]
            case "order":
                return late[::-1]
        return late

    def _new_context(self, has_headers: bool) -> av.VideoCodecContext:
        context = av.CodecContext.create("libx265", "w")
        assert isinstance(context, av.VideoCodecContext)
        context.width, context.height = self._size
        context.pix_fmt = "yuv444p" if self._surface == "YUV444" else "yuv420p"
        context.time_base = Fraction(1, 30)
        context.thread_count = 1
        headers = "repeat-headers=1" if has_headers else "repeat-headers=0"
        context.options = {"preset": "ultrafast", "tune": "zerolatency", "x265-params": f"{_X265}:{headers}"}
        if not has_headers:
            context.flags |= 1 << 22  # global header: none in the stream
        return context

    def _planes(self, frame: np.ndarray) -> np.ndarray:
        width, height = self._size
        if self._nvc.fails == "pixels":
            frame = frame.copy()
            frame[0, -1] ^= 1
        if self._surface == "YUV444":
            return frame.reshape(3, height, width)
        assert frame.shape == (height * 3 // 2, width)
        pairs = frame[height:].reshape(height // 2, width // 2, 2)
        chroma = np.concatenate([pairs[..., plane].reshape(-1, width) for plane in range(2)])
        return np.concatenate((frame[:height], chroma))


class FakeNvc:
    """The module. ``fails`` names what goes wrong from then on."""

    NV_ENC_PIC_FLAGS = PicFlags

    def __init__(self, max_open: int = 8) -> None:
        self.max_open = max_open
        self.free_bytes = 2 << 30
        self.fails = ""
        self.calls: list[tuple[str, int, int]] = []
        self.num_open = self.most_open = 0
        self._lock = threading.Lock()

    def CreateEncoder(self, width: int, height: int, fmt: str, usecpuinputbuffer: bool, **options: Any) -> Encoder:
        assert usecpuinputbuffer
        assert fmt in ("YUV444", "NV12"), "Format not supported"
        assert options == {
            "gpu_id": 0,
            "codec": "hevc",
            "preset": "P1",
            "tuning_info": "lossless",
            "rc": "constqp",
            "constqp": 0,
            "bf": 0,
            "gop": 0xFFFFFFFF,
            "repeatspspps": 1,
        }
        with self._lock:
            self.calls.append((fmt, width, height))
            if self.fails == "create" or self.num_open == self.max_open:
                raise RuntimeError("PyNvEncoderCaps : \nError code : 10\nError Type : nvEncOpenEncodeSessionEx")
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        encoder = Encoder(self, width, height, fmt)
        weakref.finalize(encoder, self._closed)
        return encoder

    def _closed(self) -> None:
        with self._lock:
            self.num_open -= 1


def make_caps(*, max_side: int = 8192) -> EncodeCaps:
    return EncodeCaps(129, 33, max_side, max_side, 262144, num_engines=3)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    """A machine with a GPU that encodes all of our HEVC, and with PyNvVideoCodec."""
    nvc = FakeNvc()
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", nvc)
    monkeypatch.setattr(nvenc, "_make_current", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (nvc.free_bytes, 24 << 30))
    monkeypatch.setattr(nvenc, "encode_caps", lambda: {"hevc": make_caps(), "hevc420": make_caps()})
    return nvc
