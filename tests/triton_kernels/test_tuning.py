from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from sgl_kvfetch.layout.choose import channel_layout
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.quant.registry import QuantiserName
from sgl_kvfetch.triton_kernels import restore as restore_module
from sgl_kvfetch.triton_kernels import tuning
from sgl_kvfetch.triton_kernels.pack import pack
from sgl_kvfetch.triton_kernels.restore import restore
from sgl_kvfetch.triton_kernels.restore_klt import restore_klt
from sgl_kvfetch.triton_kernels.runtime import INTERPRETED
from sgl_kvfetch.triton_kernels.tuning import (
    Entry,
    Key,
    Operation,
    Tuning,
    candidates,
    default,
    look_up,
    read_table,
    table_text,
    target_of,
)
from tests.triton_kernels.cases import (
    DEVICE,
    LATENT,
    Shape,
    assert_same_bits,
    centres_of,
    make_values,
    poisoned,
    scale_over,
    scattered_slots,
    wasteful,
)

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
NUM_SLOTS = 128
# The interpreter knows of no warps.
CHOICES = list({x.block if INTERPRETED else x: x for x in candidates("restore_exact", "sm_90", 80)}.values())
SMALL = Shape(tokens=21, layers=1, heads=3, dim=80)
ENTRY = Entry("restore_exact", "sm_90", "int16", 128, 4096, 8, "measured")


class TestBits:
    """Every candidate against the default, which other tests hold to the references."""

    @pytest.mark.parametrize("choice", CHOICES, ids=str)
    @pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
    def test_restore_and_pack(self, name: QuantiserName, choice: Tuning) -> None:
        quantiser = make_quantiser(name)
        values = make_values(SMALL, torch.bfloat16, quantiser)
        layout = SMALL.make_layout()
        slots = scattered_slots(SMALL.tokens, NUM_SLOTS)
        buffers = [poisoned(NUM_SLOTS, SMALL.heads, SMALL.dim, dtype=torch.bfloat16) for _ in range(SMALL.layers)]
        for layer, buffer in enumerate(buffers):
            buffer.view(torch.int16)[slots] = values[:, layer].contiguous().view(torch.int16)
        arguments = {**centres_of(quantiser, SMALL.layers), **scale_over(name)}
        expected = pack(buffers, slots, layout, **arguments)
        found = pack(buffers, slots, layout, **arguments, tuning=choice)
        assert_same_bits(found.frames, expected.frames)
        if expected.scales is not None and found.scales is not None:
            assert_same_bits(found.scales, expected.scales)

        arguments = {"scales": expected.scales, **centres_of(quantiser, SMALL.layers)}
        restored = [[torch.zeros_like(x) for x in buffers] for _ in range(2)]
        restore(list(expected.frames), layout, slots, restored[0], **arguments)
        restore(list(expected.frames), layout, slots, restored[1], **arguments, tuning=choice)
        for ours, theirs in zip(*restored, strict=True):
            assert_same_bits(ours, theirs)

    def test_a_head_larger_than_the_block(self) -> None:
        quantiser = make_quantiser("uint8")
        buffer = make_values(LATENT, torch.bfloat16, quantiser)[:, 0].contiguous()
        slots, layout = torch.arange(LATENT.tokens, device=DEVICE), LATENT.make_layout()
        expected = pack([buffer], slots, layout, centres=[127])
        found = pack([buffer], slots, layout, centres=[127], tuning=Tuning(16, 1))
        assert_same_bits(found.frames, expected.frames)

    @pytest.mark.parametrize("interleaved", [None, False, True])
    @pytest.mark.parametrize("dim", [16, 80, 256])
    def test_restore_klt(self, dim: int, interleaved: bool | None) -> None:
        """With sums that float32 holds exactly: what else is computed must not depend on the choice."""
        shape = Shape(70, 1, 1, dim)
        generator = torch.Generator().manual_seed(dim)
        inverse = torch.randint(-8, 9, (1, 1, dim, dim), generator=generator) / 4
        angles = torch.rand((shape.tokens, dim // 2), generator=generator)
        layout = channel_layout(shape.heads, dim, shape.tokens)
        integers = torch.randint(0, 256, (shape.tokens, 1, 1, dim), generator=generator, dtype=torch.uint8)
        arguments: dict[str, Any] = {
            "frames": layout.to_frames(integers).to(DEVICE),
            "layout": layout,
            "slots": scattered_slots(shape.tokens, NUM_SLOTS),
            "scales": torch.rand((shape.tokens, 1, 1), generator=generator).to(torch.bfloat16).to(DEVICE),
            "inverse": inverse.to(torch.bfloat16).to(DEVICE),
            "step": 0.37,
            "means": torch.randn((1, 1, dim), generator=generator).to(DEVICE),
            "rotation": None if interleaved is None else torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE),
            "interleaved": bool(interleaved),
        }

        def run(choice: Tuning) -> torch.Tensor:
            output = poisoned(NUM_SLOTS, 1, dim, dtype=torch.bfloat16)
            restore_klt(outputs=[output], tuning=choice, **arguments)
            return output

        expected = run(default("restore_klt", dim))
        choices = {x for target in TARGETS for x in candidates("restore_klt", target, dim)}
        for choice in {x.block if INTERPRETED else x: x for x in choices}.values():
            assert_same_bits(run(choice), expected)


class TestChoice:
    @pytest.mark.parametrize("operation", get_args(Operation))
    def test_the_default_is_a_candidate(self, operation: Operation) -> None:
        for target in TARGETS:
            for dim in (8, 64, 80, 128, 256, 576):
                assert default(operation, dim) in candidates(operation, target, dim)

    def test_what_the_table_does_not_know_goes_by_the_default(self) -> None:
        table = {ENTRY.key: ENTRY}
        assert look_up(ENTRY.key, table) == Tuning(4096, 8)
        for other in (
            Key("restore_symmetric", "sm_90", "int16", 128),
            Key("restore_exact", "sm_100", "int16", 128),
            Key("restore_exact", "sm_90", "int32", 128),
            Key("restore_exact", "sm_90", "int16", 64),
        ):
            assert look_up(other, table) == Tuning(2048, 4)

    def test_gpus_go_by_their_architecture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name_of, device = target_of.__wrapped__, torch.device("cuda", 1)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
        assert name_of(device) == "sm_100"
        monkeypatch.setattr(torch.version, "hip", "7.0")
        properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        assert name_of(device) == "gfx942"
        assert name_of(torch.device("cpu")) == "cpu"

    def test_blocks_of_tokens_that_use_another_matrix_instruction_are_no_candidates(self) -> None:
        def blocks(target: str, dim: int) -> set[int]:
            return {x.block for x in candidates("restore_klt", target, dim)}

        assert default("restore_klt", 128).block == 32
        assert blocks("sm_90", 128) == {16, 32}
        assert blocks("sm_90", 64) == {64, 128}
        assert blocks("gfx942", 128) == {32, 64}
        assert blocks("gfx942", 256) == {16}

    def test_wrappers_launch_what_the_table_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        key = Key("restore_exact", target_of(DEVICE), "int16", 80)
        launched: dict[str, Any] = {}

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *_, **options: launched.update(options)

        entry = Entry(key.operation, key.target, key.dtype, key.head_dim, 1024, 2, "")
        monkeypatch.setattr(tuning, "_shipped", lambda: {key: entry})
        monkeypatch.setattr(restore_module, "restore_exact_kernel", Kernel())
        buffer, slots = poisoned(4, 3, 80, dtype=torch.float16), torch.arange(4, device=DEVICE)
        frames = list(pack([buffer], slots, wasteful()).frames)
        restore(frames, wasteful(), slots, [buffer])
        assert (launched["num_warps"], launched["ROWS"] * launched["CHUNK"]) == (2, 1024)
        restore(frames, wasteful(), slots, [buffer], tuning=Tuning(4096, 8))
        assert (launched["num_warps"], launched["ROWS"] * launched["CHUNK"]) == (8, 4096)

    @pytest.mark.parametrize(("block", "warps"), [(2047, 4), (8, 4), (2048, 3), (2048, 0)])
    def test_only_powers_of_two(self, block: int, warps: int) -> None:
        with pytest.raises(ValueError, match="expected a power of two"):
            Tuning(block, warps)


class TestTable:
    def test_what_is_shipped_is_chosen_among_the_candidates_and_says_how(self) -> None:
        for key, entry in read_table().items():
            assert entry.tuning in candidates(key.operation, key.target, key.head_dim), entry
            assert entry.tuning != default(key.operation, key.head_dim), entry
            assert entry.source, entry

    def test_what_is_written_is_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "tuning.json"
        other = Entry("pack_head", "gfx942", "bfloat16", 128, 1024, 2, 'a "quoted" source')
        path.write_text(table_text([ENTRY, other]))
        assert list(read_table(path).values()) == [ENTRY, other]
        assert path.read_text().count("\n") == 4
        path.write_text(table_text([]))
        assert not read_table(path)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            (table_text([ENTRY, ENTRY]), "two entries for one key"),
            (table_text([ENTRY]).replace("4096", "4095"), "block is 4095"),
            (table_text([ENTRY]).replace("restore_exact", "restore_all"), "restore_all"),
            (table_text([ENTRY]).replace('"warps"', '"threads"'), "threads"),
            ("[", "truncated"),
        ],
    )
    def test_a_broken_table_is_refused(self, text: str, match: str, tmp_path: Path) -> None:
        path = tmp_path / "tuning.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{path}: .*{match}"):
            read_table(path)

    def test_it_is_packaged(self, tmp_path: Path) -> None:
        pytest.importorskip("setuptools")
        steps = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
        subprocess.run([sys.executable, "setup.py", "-q", *steps], cwd=ROOT, check=True, timeout=120)
        folder = tmp_path / "lib" / "sgl_kvfetch" / "triton_kernels"
        assert (folder / "tuning.py").exists()
        assert (folder / "tuning.json").read_bytes() == tuning.TABLE.read_bytes()
