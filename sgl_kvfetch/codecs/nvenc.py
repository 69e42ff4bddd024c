"""HEVC by the GPU's video encoder, through PyNvVideoCodec 2.2: the bitstreams of `codecs.hevc`, for every decoder that
reads those.

Pictures go in from the host, where frames are packed, and come out as one packet each, in their order, since none is
predicted from a later one. NV12 is what PyNvVideoCodec takes from the host of 4:2:0; its chroma is one plane of pairs,
which is the same bytes as two planes where all chroma is one value. No colours are converted, and the range of colours
is left unsaid: libavcodec calls full-range 4:2:0 by another name, which our decoder refuses.

What is wrong with it is found by a trial at the start, by looking at each bitstream's form, and by decoding some of
them again: docs/decisions/0013-nvenc.md.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from sgl_kvfetch.codecs.base import FrameEncoder
from sgl_kvfetch.codecs.hevc import HevcCodec
from sgl_kvfetch.codecs.nvenc_caps import EncodeCaps, encode_caps
from sgl_kvfetch.codecs.nvenc_sessions import Kind, NoEncoderError, NvencSession, SessionPool
from sgl_kvfetch.codecs.nvidia import CODECS, brief, moving_gradients, takes
from sgl_kvfetch.codecs.registry import EncoderName
from sgl_kvfetch.errors import ConfigError, CorruptError
from sgl_kvfetch.layout.frames import MIN_PICTURE
from sgl_kvfetch.log import LimitedLogger

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

# Of a bitstream: encoded here, or on the CPU instead; decoded again, and then other pixels found.
Event = Literal["encoded", "fallback", "checked", "wrong"]

CHECK_EVERY = 32  # bitstreams of a size, after the first: the CPU is to be spared
MAX_SESSIONS = 8  # drivers for consumer GPUs allow a few only, all processes together


class NvencEncoder(FrameEncoder):
    """One of our HEVC codecs, on sessions that it may share with the other one. Pictures that NVENC does not take, and
    whatever comes while it gives no encoder or is not trusted, are encoded on the CPU."""

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
        if not self._pool.fault and takes(self._caps, kind.width, kind.height):
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
            logger.error("NVENC made a wrong bitstream, and is not used any more: %s", reason)
        self._pool.condemn(reason)

    def trial(self) -> str:
        """What is wrong with a few small pictures; nothing if they are right. One bitstream after another by the same
        encoder, which keeps pictures back that the next one must not begin with.

        Also the first to call ``Encode`` in this process: PyNvVideoCodec 2.2.4 looks for numpy then, and two threads
        that do so at once wait for each other for ever.
        """
        generator = torch.Generator().manual_seed(0)
        height, width = MIN_PICTURE, MIN_PICTURE + 8  # which is not whole in the larger coding units: it is cropped
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
        """As far as it is looked at."""
        if self._pool.fault:  # since it was begun
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
            found = self._codec.decode(bitstream, num_frames, height, width)
        except CorruptError as e:
            return f"a bitstream that is corrupt: {e}"
        return "" if torch.equal(found, frames) else "other pixels"


def open_encoders(
    choice: EncoderName, codecs: Collection[str], num_sessions: int, on_event: Callable[[Event], None] = lambda _: None
) -> tuple[Mapping[str, FrameEncoder], str]:
    """Encoders by the names of codecs, for those that NVENC of this thread's GPU is to encode, and a sentence about it,
    if there is something to say. Raises ConfigError if ``choice`` is nvenc, and it does not encode all HEVC of
    ``codecs``."""
    wanted = [name for name in codecs if name in CODECS]
    if choice == "nvenc" and not wanted:
        raise ConfigError(f"encoder = 'nvenc' encodes {' and '.join(CODECS)}, not {', '.join(codecs)}")
    if choice == "cpu" or not wanted:
        return {}, ""
    encoders, about = open_nvenc(wanted, num_sessions, on_event)
    if choice == "nvenc" and len(encoders) < len(set(wanted)):
        raise ConfigError(f"encoder = 'nvenc': {about}")
    return encoders, about


def open_nvenc(
    codecs: Collection[str], num_sessions: int, on_event: Callable[[Event], None] = lambda _: None
) -> tuple[dict[str, NvencEncoder], str]:
    """Encoders for those of ``codecs`` that NVENC of this thread's GPU encodes, bit for bit as a trial has shown, and a
    sentence about it. ``num_sessions``: how many bitstreams at once, at most `MAX_SESSIONS`. Raises nothing."""
    try:
        gpu = _make_current()
        caps = encode_caps()
        if not caps:
            return {}, "HEVC is encoded on the CPU: this GPU's NVENC encodes none without loss, or it has none"
        nvc = importlib.import_module("PyNvVideoCodec")
    except Exception as e:  # loads the driver's libraries, and fails in many ways
        return {}, f"HEVC is encoded on the CPU: {brief(e)}"

    def make_session() -> NvencSession:
        return NvencSession(nvc, gpu, lambda: torch.cuda.mem_get_info(gpu)[0])

    pool = SessionPool([make_session() for _ in range(min(num_sessions, MAX_SESSIONS))])
    encoders: dict[str, NvencEncoder] = {}
    on_cpu = []
    for name in codecs:
        reason = "its chroma format is not supported"
        if name in caps:
            tried = NvencEncoder(CODECS[name], caps[name], SessionPool([make_session()]))
            with ThreadPoolExecutor(1) as thread:  # where no context is current, as on the threads that encode
                reason = thread.submit(tried.trial).result()
        if reason:
            on_cpu.append(f"; {name} on the CPU: {reason}")
        else:
            encoders[name] = NvencEncoder(CODECS[name], caps[name], pool, on_event)
    return encoders, f"encoded on NVENC: {', '.join(encoders) or 'nothing'}{''.join(on_cpu)}"


def _make_current() -> int:
    """This thread's GPU, whose context is current from now on."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU that torch can use")
    torch.zeros(1, device="cuda")
    return torch.cuda.current_device()
