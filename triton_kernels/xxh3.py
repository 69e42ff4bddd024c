"""xxh3: the XXH3 checksum (128 bits, seed 0) of integers on the device that decoded them.

A manifest has this checksum of each part's integers. Flat frames begin with them, byte for byte. So what a GPU decodes
into flat frames can be verified there, by the same checksum as on the CPU. Only 64 bytes of each input go to the host.

XXH3: Y. Collet, github.com/Cyan4973/xxHash, doc/xxhash_spec.md. The input is cut into blocks of 16 stripes, and a
stripe has 8 words of 64 bits. A block's stripes are summed up in any order, and blocks one after the other. The rest
needs only the 8 sums, and takes the host microseconds. Inputs of up to 240 bytes have another function, which is not
here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from sgl_kvfetch.triton_kernels.runtime import COMPILE_OPTIONS, jit, on_device, require, table_on, tl, use_kernels

MIN_BYTES = 241  # shorter inputs have another function
ALIGNMENT = 8  # of inputs in memory, in bytes
SUMS = 8

_STRIPE_BYTES = 64
_STRIPES = 16  # of a block
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_INITIAL = _PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]
_AVALANCHE = 0x165667919E3779F9
_MASK = (1 << 64) - 1

# The kernel's constants are the secret, its 8 words for the last stripe, and the initial sums. Here the last two begin.
_LAST_SECRET, _INITIAL_SUMS = 24, 32


def xxh3_sums(data: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return for each range the sums from which ``digest_of`` makes its checksum: int64 ``(ranges, SUMS)``, on the
    device.

    This does not wait for the device. CPU tensors use the reference, unless Triton's interpreter is on. All others use
    the kernel, on the current stream.

    Args:
        data: uint8, contiguous, a multiple of ``ALIGNMENT`` bytes, at such an address.
        ranges: Start and size in bytes of each input. Starts are multiples of ``ALIGNMENT``.

    Raises:
        ValueError: data of another dtype or with other strides, or ranges that exceed it or are too short.
        UnsupportedError: a GPU without Triton.
    """
    require(
        data.dtype == torch.uint8 and data.is_contiguous() and data.numel() % ALIGNMENT == 0,
        lambda: f"data is {data.dtype} {tuple(data.shape)}, expected contiguous uint8, a multiple of {ALIGNMENT} bytes",
    )
    for start, size in ranges:
        require(
            start >= 0 and start % ALIGNMENT == 0 and size >= MIN_BYTES and start + size <= data.numel(),
            lambda start=start, size=size: (  # type: ignore[misc]
                f"range of {size} bytes from {start} on, of {data.numel()}; expected at least {MIN_BYTES} bytes from a "
                f"multiple of {ALIGNMENT} on"
            ),
        )
    return (_launch if use_kernels(data.device) else xxh3_sums_reference)(data.view(-1), ranges)


def xxh3_sums_reference(data: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Compute ``xxh3_sums`` on the CPU, for data from any device. Same arguments."""
    all_bytes, constants = data.cpu().numpy().reshape(-1), _constants().numpy().view("<u8")
    secrets = np.lib.stride_tricks.sliding_window_view(constants[:_LAST_SECRET], SUMS)
    found = []
    for start, size in ranges:
        taken = all_bytes[start : start + size]
        stripes = taken[: (size - 1) // _STRIPE_BYTES * _STRIPE_BYTES].view("<u8").reshape(-1, SUMS)
        sums = constants[_INITIAL_SUMS:].copy()
        for first in range(0, len(stripes), _STRIPES):
            block = stripes[first : first + _STRIPES]
            sums += _added(block, secrets[: len(block)])
            if len(block) == _STRIPES:
                sums = (sums ^ (sums >> np.uint64(47)) ^ secrets[_STRIPES]) * np.uint64(_PRIMES_32[0])
        last = taken[-_STRIPE_BYTES:].copy().view("<u8").reshape(1, SUMS)
        found.append(sums + _added(last, constants[None, _LAST_SECRET:_INITIAL_SUMS]))
    return torch.from_numpy(np.stack(found).view(np.int64)).to(data.device)


def _added(stripes: np.ndarray, secrets: np.ndarray) -> np.ndarray:
    keys = stripes ^ secrets
    products = (keys & np.uint64(0xFFFFFFFF)) * (keys >> np.uint64(32))
    return (products + stripes.reshape(-1, SUMS // 2, 2)[..., ::-1].reshape(-1, SUMS)).sum(0)


def digest_of(sums: Sequence[int], size: int) -> bytes:
    """Return the checksum of ``size`` bytes, 16 bytes as ``xxh3_128_digest`` returns them. ``sums``: of ``xxh3_sums``,
    as signed or unsigned numbers."""
    words = np.array([[x & _MASK for x in sums]], dtype="<u8")
    return digests_of(words, np.array([size])).tobytes()


def digests_of(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the checksums of many inputs, as ``digest_of`` does for one: uint8 ``(inputs, 16)``. ``sums``: int64 or
    uint64 ``(inputs, SUMS)``. ``sizes``: int64 ``(inputs,)``."""
    with np.errstate(over="ignore"):
        sums, sizes = sums.view("<u8"), sizes.astype("<u8")
        low = _merged(sums, 11, sizes * np.uint64(_PRIMES_64[0]))
        high = _merged(sums, len(_SECRET) - _STRIPE_BYTES - 11, ~(sizes * np.uint64(_PRIMES_64[1])))
    return np.stack([high, low], axis=1).astype(">u8").view(np.uint8)


def _merged(sums: np.ndarray, secret_start: int, found: np.ndarray) -> np.ndarray:
    """Return 64 bits of each checksum, uint64 ``(inputs,)``. ``found``: what they begin with."""
    mixed = sums ^ np.array(struct.unpack_from("<8Q", _SECRET, secret_start), dtype="<u8")
    x, y, half, low = mixed[:, ::2], mixed[:, 1::2], np.uint64(32), np.uint64(0xFFFFFFFF)
    # Both halves of products of 128 bits, from products of 32 bits each.
    inner = (x & low) * (y & low)
    middle = (x >> half) * (y & low) + (inner >> half)
    cross = (x & low) * (y >> half) + (middle & low)
    high = (x >> half) * (y >> half) + (middle >> half) + (cross >> half)
    found = found + (x * y ^ high).sum(axis=1, dtype="<u8")
    found = (found ^ (found >> np.uint64(37))) * np.uint64(_AVALANCHE)
    return found ^ (found >> half)


def _constants() -> torch.Tensor:
    last = _SECRET[len(_SECRET) - _STRIPE_BYTES - 7 :][:_STRIPE_BYTES]
    return torch.frombuffer(bytearray(_SECRET + last + struct.pack("<8Q", *_INITIAL)), dtype=torch.int64)


@cache
def _constants_on(device: torch.device) -> torch.Tensor:
    return _constants().to(device)


def _launch(data: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    sums = torch.empty((len(ranges), SUMS), dtype=torch.int64, device=data.device)
    if ranges:
        _launch_table(data, table_on(ranges, data.device), sums)
    return sums


def xxh3_sums_table(data: torch.Tensor, table: torch.Tensor, sums: torch.Tensor) -> None:
    """Do the same as ``xxh3_sums`` with a table that was made before. Checks nothing. ``table``: int64 ``(ranges, 2)``
    on the device. ``sums``: int64 ``(ranges, SUMS)``, for what ``xxh3_sums`` returns."""
    if use_kernels(data.device):
        _launch_table(data, table, sums)
        return
    sums.copy_(xxh3_sums_reference(data, [(start, size) for start, size in table.tolist()]))


def _launch_table(data: torch.Tensor, table: torch.Tensor, sums: torch.Tensor) -> None:
    with on_device(data.device):
        xxh3_kernel[len(table),](
            data,
            data.view(torch.int64),
            table,
            _constants_on(data.device),
            sums,
            STRIPES=_STRIPES,
            WORDS=SUMS,
            PRIME=_PRIMES_32[0],
            LAST_SECRET=_LAST_SECRET,
            INITIAL_SUMS=_INITIAL_SUMS,
            num_warps=1,
            **COMPILE_OPTIONS,
        )


@jit
def _products(b_data, b_secret):
    b_key = b_data ^ b_secret
    return (b_key & 0xFFFFFFFF) * (b_key >> 32)


@jit
def _load_words(p_words, m_word):
    return tl.load(p_words, mask=m_word, other=0).to(tl.uint64, bitcast=True)


@jit
def xxh3_kernel(
    p_data,  # (bytes,)
    p_words,  # the same, as words of eight bytes
    p_ranges,  # (ranges, 2): start and size in bytes
    p_constants,  # the secret, its words for the last stripe, the initial sums
    p_sums,  # (ranges, WORDS)
    STRIPES: tl.constexpr,
    WORDS: tl.constexpr,
    PRIME: tl.constexpr,
    LAST_SECRET: tl.constexpr,
    INITIAL_SUMS: tl.constexpr,
):
    """Each program sums up one range. A word is added to its neighbour's sum. The product of the two halves of word XOR
    secret is added to its own sum."""
    p_range = p_ranges + 2 * tl.program_id(0)
    start, size = tl.load(p_range), tl.load(p_range + 1).to(tl.int32)
    p_words += start // 8
    o_sum, o_stripe = tl.arange(0, WORDS), tl.arange(0, STRIPES)[:, None]
    o_word = o_stripe * WORDS + o_sum[None, :]
    o_neighbour = o_stripe * WORDS + (o_sum ^ 1)[None, :]
    m_sum = o_sum >= 0
    b_secret = _load_words(p_constants + o_stripe + o_sum[None, :], o_word >= 0)
    b_mixer = _load_words(p_constants + STRIPES + o_sum, m_sum)
    b_sum = _load_words(p_constants + INITIAL_SUMS + o_sum, m_sum)
    num_stripes = (size - 1) // (8 * WORDS)
    for i_stripe in range(0, num_stripes, STRIPES):
        m_word = o_word < (num_stripes - i_stripe) * WORDS
        b_data = _load_words(p_words + i_stripe * WORDS + o_word, m_word)
        b_neighbour = _load_words(p_words + i_stripe * WORDS + o_neighbour, m_word)
        b_sum += tl.sum(tl.where(m_word, _products(b_data, b_secret) + b_neighbour, 0), axis=0)
        b_mixed = (b_sum ^ (b_sum >> 47) ^ b_mixer) * PRIME
        b_sum = tl.where(num_stripes - i_stripe >= STRIPES, b_mixed, b_sum)

    o_byte = tl.arange(0, 8)[None, :]
    p_last = p_data + start + (size - 8 * WORDS)
    b_shift = (8 * o_byte).to(tl.uint64)
    b_last = tl.sum(tl.load(p_last + 8 * o_sum[:, None] + o_byte).to(tl.uint64) << b_shift, axis=1)
    b_neighbour = tl.sum(tl.load(p_last + 8 * (o_sum ^ 1)[:, None] + o_byte).to(tl.uint64) << b_shift, axis=1)
    b_sum += _products(b_last, _load_words(p_constants + LAST_SECRET + o_sum, m_sum)) + b_neighbour
    tl.store(p_sums + tl.program_id(0) * WORDS + o_sum, b_sum.to(tl.int64, bitcast=True))
