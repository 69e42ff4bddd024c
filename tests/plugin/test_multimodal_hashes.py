"""SGLang's page hashes of prompts with images: tokens of an image stand for its content."""

from __future__ import annotations

from array import array

import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

pytestmark = pytest.mark.skipif(
    not hasattr(MultimodalDataItem, "padding_sequence"), reason="models that take images are refused before 0.5.23"
)

PAGE_SIZE = 4
TEXT = list(range(100, 108))  # two pages in front of the image, and behind it


def image(seed: int) -> MultimodalDataItem:
    pixels = torch.rand((3, 8, 8), generator=torch.Generator().manual_seed(seed))
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels)
    item.set_pad_value()
    return item


def hashes(item: MultimodalDataItem, image_tokens: int) -> list[str]:
    prompt = [*TEXT, *item.padding_sequence(image_tokens), *TEXT]
    found: list[str] = get_storage_hash_str(RadixKey(array("q", prompt)), None, page_size=PAGE_SIZE)
    return found


@pytest.mark.parametrize("image_tokens", [1, 4, 6, 16])
def test_two_images_never_share_pages(image_tokens: int) -> None:
    one, other = hashes(image(0), image_tokens), hashes(image(1), image_tokens)
    before = len(TEXT) // PAGE_SIZE
    assert one[:before] == other[:before]
    assert not set(one[before:]) & set(other[before:])


def test_images_that_differ_in_one_value_share_none() -> None:
    changed = image(0)
    changed.feature[0, 0, 0] += 1e-6
    changed.pad_value = changed.hash = None
    changed.set_pad_value()
    assert not set(hashes(image(0), 16)[2:]) & set(hashes(changed, 16)[2:])
