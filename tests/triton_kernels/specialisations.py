"""Prints, as JSON, how many specialisations of each kernel Triton would compile for what a server launches in a day.

`test_compiled_kernels` runs it, without Triton's interpreter. Nothing is compiled: each launch asks Triton for the key
under which it would look for compiled code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks.gpu_check.quantise import make_profile
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.triton_kernels import ans, quantise_klt
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile as make_numbers, place_of
from tests.triton_kernels.cases import replaced_kernels
from tests.triton_kernels.coded_load import CodedPrompt

TOKENS = 1, 15, 16, 33, 64, 1024
HEADS, DIM = 2, 80
SLOTS = torch.arange(2048)  # of which launches take views, as with pages of one token


class Keys:
    """Replaces a kernel, and collects the keys of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.found: set[str] = set()
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Keys:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _, specialisation, options = self._bind(*args, **kwargs)
        self.found.add(repr((specialisation, options)))


def slots_of(num_tokens: int) -> Iterator[torch.Tensor]:
    for first in (0, 1, 3):
        yield SLOTS[first : first + num_tokens]


def buffers(layers: int) -> list[torch.Tensor]:
    return [torch.empty((len(SLOTS), 4 * HEADS, DIM), dtype=torch.bfloat16)[:, :HEADS] for _ in range(layers)]


def quantise_prompts() -> None:
    """Of cells of four layers and of one, one or more at once."""
    rope = Rope(inv_freq=(1.0,) * (DIM // 2))
    profile = make_numbers(num_layers=5, num_heads=HEADS, head_dim=DIM, cell_layers=4, cell_heads=HEADS, rope=rope)
    quantiser = KltQuantiser(profile, step=1.0)
    forwards = [quantiser.forward(place_of(profile, key, 1)) for key in profile.cells]
    for tokens in TOKENS:
        for slots in slots_of(tokens):
            for cells_of in (forwards, forwards[1:]):
                sides = [(buffers(len(each.turns)), buffers(len(each.turns))) for each in cells_of]
                inputs = [quantise_klt.KltInput(each, *side) for each, side in zip(cells_of, sides, strict=True)]
                cells = quantise_klt.KltCells(inputs, lambda x: x)
                output = torch.empty((cells.output_rows, tokens), dtype=torch.uint8)
                cells.quantise(slots, torch.empty((1, tokens, DIM)), tokens % 4, output)


def decode_long_chunks() -> None:
    """Of more tokens than the prompts of `load_prompts` have."""
    for tokens in TOKENS:
        chunk = ans.AnsChunk(0, 4 * tokens, 2, tokens, 0)
        for chunks in ([chunk], [chunk] * 16):
            data, rows = (torch.empty(48 * tokens, dtype=torch.uint8) for _ in range(2))
            ans.ans_decode(data, chunks, rows)


def load_prompts() -> None:
    """As SGLang's linker does: of any length, from any page on, in parts of any number of cells. The pool's layers have
    the shape of ``buffers``."""
    exact = make_quantiser("exact")
    one, more = (KltQuantiser(replace(make_profile(DIM), num_sinks=count), step=1.0) for count in (1, 3))
    of_kinds = (one, 1, (32, 1)), (more, 16, (2, 1)), (exact, 1, (32, 1)), (exact, 16, (2, 1))
    for quantiser, page_size, segment_pages in of_kinds:
        geometry, num_pages = KVGeometry(3, 4 * HEADS, DIM, DIM, page_size, "bfloat16"), sum(segment_pages)
        prompt = CodedPrompt(quantiser, geometry, segment_pages)
        for first_page in (0, 1):
            for first, scratch_bytes in ((1, 1 << 20), (3, 1 << (19 if quantiser is exact else 17))):
                prompt.load(SLOTS[first:][: (num_pages - first_page) * page_size], first_page, scratch_bytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with replaced_kernels(Keys) as kernels:
        quantise_prompts()
        decode_long_chunks()
        load_prompts()
    print(json.dumps({name: len(kernel.found) for name, kernel in kernels.items()}))
