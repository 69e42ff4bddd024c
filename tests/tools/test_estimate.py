"""``kvfetch estimate`` against what ``benchmarks.ttft`` measured, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.tools import estimate
from sgl_kvfetch.tools.estimate import CODINGS, values_per_token
from tests.tools.conftest import kvfetch, kvfetch_json

DOCS = Path(__file__).parents[2] / "docs"
SMOLLM = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMOLLM))
    return path


def measured() -> dict[tuple[int, str], list[float]]:
    """Return the rows of the table of times to first token with AMX, whose speeds `estimate` has, by tokens and link:
    one time for each way."""
    table = (DOCS / "gpus.md").read_text().partition("| two cores with AMX")[2].partition("\n\n")[0]
    rows, gbps = {}, ""
    for line in table.splitlines()[2:]:
        first, *cells = (cell.strip(" *") for cell in line.strip("| ").split("|"))
        tokens, _, link = first.partition(", ")
        gbps = link.removesuffix(" Gbps") or gbps
        rows[int(tokens.removesuffix(" tokens").replace(",", "")), gbps] = [
            float(re.findall(r"[\d.]+", cell)[0]) for cell in cells
        ]
    return rows


def test_it_is_within_a_fifth_of_what_was_measured(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is what raw reuse over 0.1 Gbps took beside transmitting: all other times follow from it."""
    monkeypatch.setattr(estimate, "_DECODE_THREADS", 1)
    rows = measured()
    assert len(rows) == 9
    raw_bytes = values_per_token(str(config)) * 2
    for (tokens, gbps), (computing, raw, _, _, ours) in rows.items():
        batch_s = rows[tokens, "0.1"][1] - 8 * tokens * raw_bytes / 0.1e9
        options = ("--link", f"{gbps}Gbps", "--prefill-tps", f"{tokens / computing}", "--batch", f"{batch_s}")
        found = kvfetch_json("estimate", "--model", str(config), *options)
        assert found["computing_s"][str(tokens)] == pytest.approx(computing)
        for name, seconds in (("raw", raw), ("klt", ours)):
            assert found["codings"][name]["ttft_s"][str(tokens)] == pytest.approx(seconds, rel=0.2), (tokens, gbps)


def test_bits_a_value_are_those_of_the_codec_s_page() -> None:
    page = (DOCS / "codec.md").read_text()
    for name, row in (("exact", "| `exact` | 11.32 | "), ("uint8", "| `uint8` | 7.15 | ")):
        assert float(page.partition(row)[2].partition(" ")[0]) == CODINGS[name].bits_per_value
    default = float(page.partition("| the default | 5.3e-4 | ")[2].partition(" ")[0])
    assert CODINGS["klt"].bits_per_value == pytest.approx(default, rel=0.03)


def test_sizes_and_break_even(config: Path) -> None:
    use = ("--days", "3", "--prompts", "50", "--tokens", "10000")
    args = ("estimate", "--model", str(config.parent), "--link", "1Gbps", "--prefill-tps", "1000", "--batch", "0.1")
    raw = kvfetch_json(*args, *use)["codings"]["raw"]
    assert raw["bytes_per_token"] == 23040
    assert raw["stored_bytes"] == 3 * 50 * 10000 * 23040
    assert raw["break_even_tokens"] == 123  # 0.1 s, at 1 ms less 0.18 ms a token
    lines = kvfetch(*args[:-4], "--prefill-tps", "1e9").stdout
    assert lines.count("never") == len(CODINGS)


@pytest.mark.parametrize(
    ("link", "prefill_tps", "expected"),
    [
        ("10Gbps", "8000", "worth it: a prompt of 4,096 tokens takes 0.512 s to compute, 0.0991 s to fetch with exact"),
        ("500Mbps", "8000", "worth it with klt alone: a prompt of 4,096 tokens takes 0.512 s to compute, 1.03 s"),
        ("1Gbps", "100000", "not worth it: a prompt of 4,096 tokens takes 0.041 s to compute"),
    ],
)
def test_the_first_line_is_whether_it_is_worth_it(config: Path, link: str, prefill_tps: str, expected: str) -> None:
    options = ("estimate", "--model", str(config), "--link", link, "--prefill-tps", prefill_tps)
    assert kvfetch_json(*options)["verdict"].startswith(expected)
    said = kvfetch(*options).stdout
    assert said.startswith(expected[:9])


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, 2 * 30 * 3 * 64),
        ({"head_dim": 128}, 2 * 30 * 3 * 128),
        ({"num_key_value_heads": None}, 2 * 30 * 9 * 64),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 30 * 576),
    ],
)
def test_values_a_token_by_kind_of_model(config: Path, changes: dict[str, Any], values: int) -> None:
    config.write_text(json.dumps({"text_config": SMOLLM | changes}))
    assert values_per_token(str(config)) == values


def test_it_says_what_a_gpu_takes(tmp_path: Path) -> None:
    """What it predicts of a load is within a tenth of what docs/kernels.md has, at best and at worst. Its second line
    has what was measured on an H200."""
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    options = ("estimate", "--model", str(tmp_path), "--link", "100Gbps", "--prefill-tps", "30000")
    found = kvfetch_json(*options, "--batch", "0", "--tokens", "32768")
    rows = (DOCS / "kernels.md").read_text().partition("| 8B, 32,768 tokens | raw |")[2]
    for name, seconds in found["gpu_s"].items():
        row = rows.partition(f"|  | {name} |")[2].partition("\n")[0]
        best_ms, worst_ms = (float(x) for x in row.split("|")[-2].split(" to "))
        load_s = seconds - 32768 * found["codings"][name]["bytes_per_token"] / 12.5e9
        assert 0.9 * best_ms < 1e3 * load_s < 1.1 * worst_ms
    assert found["gpu_s"].keys() == {"exact", "klt"}

    said = " ".join(kvfetch(*options).output.split())
    page = (DOCS / "gpus.md").read_text()
    computed, fetched = (
        int(page.partition(f"| {row} | ")[2].split(",")[0].split(" ")[0]) / 1000
        for row in ("computed", "fetched, no limit of the link")
    )
    assert f"took {fetched} s to fetch with klt" in said
    assert f"and {computed} s to compute" in said
