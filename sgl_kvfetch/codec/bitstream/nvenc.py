"""Encode HEVC on the GPU's video encoder, through PyNvVideoCodec 2.2, into the bitstreams of `hevc`.

Pictures go in from the host, where frames are packed. They come out in order, as one packet each, since none is
predicted from a later one. PyNvVideoCodec takes 4:2:0 from the host as NV12, whose chroma is one plane of pairs; as all
chroma has one value, its bytes equal those of two planes. Colours are not converted, and the bitstream does not signal
the colour range: libavcodec has another name for full-range 4:2:0, which our decoder refuses.

Faults are found by a trial at the start, by a check of each bitstream's form, and by decoding some bitstreams again:
docs/decisions/0013-nvenc.md.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec.bitstream.base import FrameEncoder
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS, HevcCodec, join_access_units
from sgl_kvfetch.codec.bitstream.nvidia import (
    EncodeCaps,
    brief,
    encode_caps,
    moving_gradients,
    pass_trials,
    supports_size,
)
from sgl_kvfetch.codec.layout.frames import MIN_PICTURE
from sgl_kvfetch.errors import ConfigError, CorruptError
from sgl_kvfetch.log import LimitedLogger

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

EncoderName = Literal["auto", "cpu", "nvenc"]  # the encoders of HEVC

# What happened to a bitstream: NVENC encoded it, or the CPU did; a check decoded it again; the check found it wrong.
Event = Literal["encoded", "fallback", "checked", "wrong"]

CHECK_EVERY = 32  # of a size, the first bitstream and then one in so many are decoded again, to save CPU time
MAX_SESSIONS = 8  # drivers for consumer GPUs allow only a few, over all processes
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


class NvencEncoder(FrameEncoder):
    """Encodes one HEVC codec, on sessions that both codecs may share. Falls back to the CPU for pictures whose size
    NVENC does not support, while NVENC gives no encoder, and once it is no longer trusted."""

    def __init__(
        self, codec: HevcCodec, caps: EncodeCaps, pool: SessionPool, on_event: Callable[[Event], None] = lambda _: None
    ) -> None:
        self._codec = codec
        self._caps = caps
        self._pool = pool
        self._on_event = on_event
        self._lock = threading.Lock()
        self._counts: Counter[Kind] = Counter()

    def encode(self, frames: torch.Tensor) -> bytes:
        frames = frames.contiguous().cpu()
        kind = self._kind(frames)
        if not self._pool.fault and supports_size(self._caps, kind.width, kind.height):
            try:
                bitstream = self._encode(kind, frames)
            except NoEncoderError as e:
                _limited.warning("nvenc", f"{self._codec.name} is encoded on the CPU: {e}")
            else:
                if self._is_right(kind, bitstream, frames):
                    self._on_event("encoded")
                    return bitstream
        self._on_event("fallback")
        return self._codec.encode(frames)

    def distrust(self, reason: str) -> None:
        if not self._pool.fault:
            logger.error("NVENC made a wrong bitstream and is disabled: %s", reason)
        self._pool.condemn(reason)

    def trial(self) -> str:
        """Encode and decode a few small pictures. Return what is wrong; an empty string if nothing is. One encoder
        makes all bitstreams: it keeps pictures of the last one that the next must not refer to.

        This must be the first call of ``Encode`` in the process: PyNvVideoCodec 2.2.4 looks up numpy in it, and two
        threads that do so at once deadlock.
        """
        generator = torch.Generator().manual_seed(0)
        height, width = MIN_PICTURE, MIN_PICTURE + 8  # not a multiple of the larger coding units, so it is cropped
        noise = torch.randint(0, 256, (6, 3, height, width), generator=generator, dtype=torch.uint8)
        smooth = moving_gradients(6, height, width)
        for frames in (smooth, noise, noise[:1], smooth ^ (noise & 1), torch.zeros_like(smooth[:2])):
            try:
                bitstream = self._encode(self._kind(frames), frames)
            except Exception as e:
                return f"a trial failed: {e if isinstance(e, NoEncoderError) else brief(e)}"
            if wrong := self._what_is_wrong(bitstream, frames):
                return f"a trial gave {wrong}"
        return ""

    def _kind(self, frames: torch.Tensor) -> Kind:
        surface = "YUV444" if self._codec.planes_a_picture == 3 else "NV12"
        return Kind(surface, width=frames.shape[3], height=frames.shape[2])

    def _encode(self, kind: Kind, frames: torch.Tensor) -> bytes:
        pictures = [picture.reshape(-1, kind.width) for picture in self._codec.to_pictures(frames.numpy())]
        with self._pool.session(kind) as session:
            return session.encode(kind, pictures)

    def _is_right(self, kind: Kind, bitstream: bytes, frames: torch.Tensor) -> bool:
        """Decode one in `CHECK_EVERY` bitstreams of a kind again. Return whether no fault is known."""
        if self._pool.fault:  # found while this bitstream was encoded
            return False
        with self._lock:
            is_looked_at = self._counts[kind] % CHECK_EVERY == 0
            self._counts[kind] += 1
        if not is_looked_at:
            return True
        self._on_event("checked")
        wrong = self._what_is_wrong(bitstream, frames)
        if wrong:
            self._on_event("wrong")
            self.distrust(f"{self._codec.name} of {kind.width}x{kind.height}: {wrong}")
        return not wrong

    def _what_is_wrong(self, bitstream: bytes, frames: torch.Tensor) -> str:
        num_frames, _, height, width = frames.shape
        try:
            found = self._codec.decode(bitstream, (num_frames, height, width))
        except CorruptError as e:
            return f"a corrupt bitstream: {e}"
        return "" if torch.equal(found, frames) else "other pixels"


def open_encoders(
    choice: EncoderName, codecs: Collection[str], num_sessions: int, on_event: Callable[[Event], None] = lambda _: None
) -> tuple[Mapping[str, FrameEncoder], str]:
    """Open encoders for the HEVC codecs in ``codecs`` that this thread's GPU encodes on NVENC. Return them by codec
    name, and a sentence about the result, which may be empty. Raises ConfigError if ``choice`` is nvenc and NVENC does
    not encode every HEVC codec in ``codecs``, or there is none."""
    wanted = [name for name in codecs if name in HEVC_CODECS]
    if choice == "nvenc" and not wanted:
        raise ConfigError(f"encoder = 'nvenc' encodes {' and '.join(HEVC_CODECS)}, not {', '.join(codecs)}")
    if choice == "cpu" or not wanted:
        return {}, ""
    encoders, about = open_nvenc(wanted, num_sessions, on_event)
    if choice == "nvenc" and len(encoders) < len(set(wanted)):
        raise ConfigError(f"encoder = 'nvenc': {about}")
    return encoders, about


def open_nvenc(
    codecs: Collection[str], num_sessions: int, on_event: Callable[[Event], None] = lambda _: None
) -> tuple[dict[str, NvencEncoder], str]:
    """Open encoders for those of ``codecs`` that NVENC of this thread's GPU encodes and that pass a bit-exact trial.
    Return them and a sentence about the result. ``num_sessions``: how many bitstreams are encoded at once, limited to
    `MAX_SESSIONS`. Raises nothing."""
    try:
        gpu = _make_current()
        caps = encode_caps()
        if not caps:
            return {}, "HEVC is encoded on the CPU: this GPU has no NVENC, or it cannot encode losslessly"
        nvc = importlib.import_module("PyNvVideoCodec")
    except Exception as e:  # loading the driver's libraries fails in many ways
        return {}, f"HEVC is encoded on the CPU: {brief(e)}"

    def make_session() -> NvencSession:
        return NvencSession(nvc, gpu, lambda: torch.cuda.mem_get_info(gpu)[0])

    pool = SessionPool([make_session() for _ in range(min(num_sessions, MAX_SESSIONS))])

    def trial(name: str) -> str:
        tried = NvencEncoder(HEVC_CODECS[name], caps[name], SessionPool([make_session()]))
        with ThreadPoolExecutor(1) as thread:  # without a current context, like the threads that encode
            return thread.submit(tried.trial).result()

    usable, result = pass_trials(codecs, caps, trial)
    encoders = {name: NvencEncoder(HEVC_CODECS[name], caps[name], pool, on_event) for name in usable}
    return encoders, f"encoded on NVENC: {result}"


def _make_current() -> int:
    """Make the context of this thread's GPU current, and return the GPU's index."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU that torch can use")
    torch.zeros(1, device="cuda")
    return torch.cuda.current_device()


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
