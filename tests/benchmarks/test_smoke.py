"""A small run of each benchmark that needs no SGLang server: it ends, and writes figures that make sense."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import (
    attention,
    audits,
    auto_profile,
    checksums,
    data_plane,
    fetch,
    hostile_store,
    memory,
    parking,
    stalls,
    watched,
    writing,
)
from benchmarks.adaptive import told
from benchmarks.adaptive.__main__ import main as adaptive
from benchmarks.prose import prose
from benchmarks.scaling.__main__ import main as scaling
from benchmarks.soak.__main__ import main as soak
from benchmarks.store.__main__ import main as store
from benchmarks.store.nginx import find_nginx
from benchmarks.stores import levels
from benchmarks.stores.__main__ import main as stores
from harness.faults import Fault
from harness.models import make_tiny_llama
from harness.redis_server import REDIS, REDIS_MISSING
from tests.benchmarks.conftest import Run
from tests.codec.container.test_levels import SPEC, make as make_laddered
from tests.codec.quant.profiles import make_profile

PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "bw.jsonl"
    path.write_text('{"bw": [6, 3.5, 4]}\n\n{"bw": [0.2, 9]}\n')
    return path


@pytest.mark.slow
def test_adaptive(run: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.adaptive.scenarios.HEAT_GBPS", (5.0, 40.0))
    monkeypatch.setattr("benchmarks.adaptive.scenarios.HEAT_TOKENS", (20_000,))
    found = run(adaptive, "--trace", trace, "--random", 3, "--device", "A100", "--plots", tmp_path)
    names = ["trace", "paper", "random", "several", "2x", "0.5x", "unprofiled", "grid A100"]
    assert [g["name"] for g in found["groups"]] == names
    for s in found["scenarios"]:
        assert s["oracle_bound_s"] <= s["oracle_s"] * (1 + 1e-9)
        assert s["oracle_s"] <= min(*s["fixed_s"].values(), s["algorithm1_s"], s["ours_s"]) * (1 + 1e-9)
    for name in ("adaptive_speedup.png", "adaptive_timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert told.main(["--random", "4", "--seed", "3"]) == 0
    counts = [int(line.split("│")[2]) for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert sum(counts[:-1]) == counts[-1] == 4


@pytest.mark.slow
def test_auto_profile(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SGLang, which only tells what calibrating costs it."""

    async def no_speed(*args: object) -> dict[str, list[float]]:
        return {}

    words = random.Random(0).choices(range(3, 128), k=12_000)
    monkeypatch.setattr(auto_profile, "prose", lambda: " ".join(f"w{word}" for word in words))
    monkeypatch.setattr(auto_profile, "speed", no_speed)
    model = make_tiny_llama(tmp_path / "m", num_layers=1, hidden_size=64, head_dim=32, vocab_size=128)
    found = run(auto_profile.main, "--model", model, "--windows", 2, "--held-out", 1)
    ours, theirs = found["targets"].values()
    assert ours == pytest.approx(theirs, rel=0.5)
    assert [*found["bits"]["auto"]] == [*found["bits"]["kvfetch calibrate"]] == ["0.001", "0.003", "0.01"]


def test_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--new", "4", "--prefixes", "20"]) == 0
    assert "sliding window" in capsys.readouterr().out


def test_checksums(capsys: pytest.CaptureFixture[str]) -> None:
    checksums.main(["--tokens", "64"])
    rates = {
        name.strip(): float(rate) for rate, name in (x.split("MB/s") for x in capsys.readouterr().out.splitlines())
    }
    assert 0 < rates["encode hevc"] < rates["frame sum"]


@pytest.mark.slow
@pytest.mark.parametrize("link", [[], ["--without-link"]], ids=["link", "no link"])
def test_data_plane_of_coded_cells(link: list[str], run: Run) -> None:
    coded = run(data_plane.main, "--coded", "--tokens", 256, "--rounds", 2, *link)["coded"]
    assert coded["num_cells"] == 11 * 4
    assert 256 * 32 * 8 * 256 * 1 / 8 < coded["wire_bytes"] < 256 * 32 * 8 * 256 * 2 / 8
    assert all(figure > 0 for each in coded["rounds"] for name, figure in each.items() if name.endswith("_s"))


@pytest.mark.slow
def test_writing(run: Run) -> None:
    rows = run(writing.main, "--tokens", 256, "--layers", 2, "--rounds", 2)["writes"]
    assert [(row["codec"], row["round"]) for row in rows] == [("ans", 1), ("ans", 2), ("raw", 1), ("raw", 2)]
    assert all(row["raw_mb_per_s"] > 0 and row["data_plane_cpu_s_per_gb"] > 0 for row in rows)


@pytest.mark.slow
def test_data_plane(run: Run) -> None:
    args = [
        "--codecs",
        "raw,zstd",
        "--prefixes",
        2,
        "--tokens",
        128,
        "--rounds",
        1,
        "--security",
        "none",
        "tls",
        "signed",
    ]
    rows = run(data_plane.main, *args)["codecs"]
    assert {row["security"] for row in rows} == {"none", "tls", "signed"}
    for row in rows:
        assert row["raw_gb"] == pytest.approx(2 * 128 * 6 * 8 * 128 * 2 * 2 / 1e9)
        assert 0 < row["wire_gb"] < row["raw_gb"]
        assert 0 < row["engine_share_of_cpu"] < 1
        assert row["fetch_wire_gb_per_s"] > 0


def test_fetch(run: Run, trace: Path) -> None:
    args = ["--tokens", 256, "--codecs", "zstd", "--rounds", 1, "--settings", "link", "--trace", trace]
    [row] = run(fetch.main, *args)["settings"]
    assert row["ideal_s"] == max(row["stages_s"]["transmit"], row["stages_s"]["decode_restore"])
    assert row["efficiency"] == pytest.approx(row["ideal_s"] / row["actual_s"])


@pytest.mark.slow
def test_hostile_store(run: Run) -> None:
    found = run(hostile_store.main, "--lookups", 2, "--at-once", 1)
    assert found["rows"]["padding"]["manifests_found"] < found["rows"]["small"]["manifests_found"]
    for row in found["rows"].values():
        assert row["grown_mib"] > 0
        assert row["longest_pause_ms"] > 0


@pytest.mark.slow
def test_memory(run: Run) -> None:
    args = ["--tokens", 2048, "--layers", 1, "--codec", "zstd", "--quantiser", "exact"]
    [point] = run(memory.main, *args)["points"]
    assert point["raw_bytes"] == 2048 * 2 * 8 * 128 * 2
    assert 0 < point["compressed_bytes"] <= point["stored_bytes"]
    assert point["compressed_bytes"] < point["peak_bytes"]
    assert 1 << 20 < point["decoded_bytes"] < memory.GOAL_BYTES


@pytest.mark.slow
def test_parking(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "LIMIT_US", 1e9)  # on machines of any speed
    found = run(parking.main, "--parked", 0, 3, "--steps", 50)["results"]
    assert [row["parked"] for row in found] == [0, 3]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in found)


def test_scaling(run: Run) -> None:
    """Half of the requests only fill the servers' pools."""
    found = run(scaling, "--requests", 500, "--documents", 1000, "--servers", 7)
    assert (found["fleet"]["servers"], found["total"]["requests_per_s"]) == (7, 14)
    assert found["per_request"]["requests"] == 1
    assert 0 < found["per_request"]["written_pages"] < found["per_request"]["prompt_pages"]
    limits = list(found["servers"].values())
    assert limits == sorted(limits)


def test_stalls(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "NUM_READS", 4)
    monkeypatch.setattr(stalls, "DEADLINE_S", 5.0)
    monkeypatch.setattr(stalls, "SCENES", [stalls.Scene("a connection hangs", Fault("hang", times=1))])
    [scene] = run(stalls.main, "--repeat", 1)["scenes"]
    [without], [hedged] = scene["without"], scene["hedged"]
    assert (without["reads_done"], hedged["reads_done"]) == (3, 4)
    assert hedged["duration_s"] < without["duration_s"]


@pytest.mark.slow
def test_store(run: Run, tmp_path: Path) -> None:
    sizes = ["--rounds", 1, "--seconds", 0.2, "--segments", 200, "--lookup-seconds", 1, "--clients", "1,2"]
    picture = tmp_path / "out.png"
    found = run(store, *sizes, "--sizes", 1, "--connections", "1,2", "--directory", tmp_path, "--plot", picture)
    if find_nginx() is None:
        assert found["serving"] is None
    else:
        assert [(row["range_mib"], row["connections"]) for row in found["serving"]["rows"]] == [(1, 1), (1, 2)]
        assert all(row["ratio"] > 0 and row["store_cpu_s_per_gb"] > 0 for row in found["serving"]["rows"])
    assert found["start"]["filled"]["first_lookup_s"] > 0
    idle, evicting = found["lookups"]["idle"], found["lookups"]["evicting"]
    assert idle["share_found"] == 1
    assert 0 < idle["p50_s"] <= idle["p99_s"] <= idle["max_s"]
    assert evicting["evicted_segments"] > 0
    assert all(row["segments_per_s"] > 0 and not row["runs"][0]["write_errors"] for row in found["writes"])
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
def test_stores(run: Run) -> None:
    sizes = ["--segments", 512, 512, "--question-tokens", 128, "--layers", 1, "--hits", 1, "--rtt-ms", 0, 1]
    rows = {row["store"]: row for row in run(stores, *sizes, "--get-usd", 0.5)["stores"]}
    serve, plain, presigned, indexed, disk = rows.values()
    assert serve["lookup_requests"] == {"store POST": 1}
    assert indexed["lookup_requests"]["index EVAL"] == disk["lookup_requests"]["index EVAL"] == 1
    # Clients may ask again now and then, when a server closes the connection that they ask on.
    trips = [row["lookup_round_trips"] for row in rows.values()]
    assert all(n <= found <= n + 3 for n, found in zip([1, 3, 3, 2, 2], trips, strict=True)), trips
    num_reads = serve["fetch_requests"]["store GET"]
    for row in (plain, presigned, indexed):
        reads = row["fetch_requests"]["s3 GET"]
        assert num_reads <= reads <= num_reads + 3
        assert row["usd_a_million_hits"] == 0.5 * (reads + row["lookup_requests"]["s3 GET"])
    assert (disk["fetch_requests"], disk["fetch_round_trips"]) == ({}, 0)


@pytest.mark.slow
def test_watched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(watched.main, "--segments", 100, "--browsers", 1, "--rounds", 2, "--seconds", 0.5)["rows"]
    assert rows
    assert all(row["ratio"] == pytest.approx(row["watched"] / row["alone"], rel=10) for row in rows.values())


@pytest.mark.slow
def test_soak(run: Run) -> None:
    sizes = ["--minutes", 0.4, "--clients", 8, "--slow-readers", 8, "--capacity", 32, "--orphan-age", 5]
    found = run(soak, *sizes, "--longest-lookup", 20)
    assert found["problems"] == []
    assert found["disturbances"]["killed"] > 0
    assert found["disturbances"]["full"] > 0
    for operation, result in (("read", "hit"), ("write", "done"), ("replace", "done"), ("delete", "done")):
        assert found["outcomes"][operation][result] > 0


def test_audits(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=64, head_dim=16)
    profile = make_profile(num_layers=4, num_heads=2, head_dim=16, cell_heads=2)
    profile.save(tmp_path / "profile")
    monkeypatch.setattr(audits, "prose", text.read_text)
    arguments = ("--windows", "1", "--context", "64", "--model", str(model), "--profile", str(tmp_path / "profile"))
    assert audits.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["exact", "sound", "median", "0.00,", "largest", "0.00"]
    found = {
        line[10:44].strip(): float(line[44:].split()[1])
        for line in lines
        if line.startswith("exact") and "least" in line
    }
    assert len(found) == 7
    assert min(found.values()) > 1


def test_real_model(real_model: Path) -> None:
    """It was converted well, or it would not know."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    tokens = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=1)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris"
    assert prose().startswith('The "assert" statement')


def test_levels_in_a_store_that_is_too_small(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve blocks are asked for again. A store with room for ten has them all without their last levels."""
    coded = make_laddered(replace(SPEC, num_levels=2), 0, 1)
    block = levels.Block(coded.manifest, (coded.data, *coded.level_data), (1.0, 9.0))
    monkeypatch.setattr(levels, "make_block", lambda model, profile: block)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"hash_ids": [{number}]}}\n' for number in (*range(12), *range(12))))
    rows = run(levels.main, trace, "--parts", "0.9,1.1", "--model", "m", "--profile", "p")["rows"]
    assert [(row["part"], row["drop_levels"]) for row in rows] == [(0.9, 0), (0.9, 1), (1.1, 0), (1.1, 1)]
    short, dropping, large, idle = rows
    assert short["served_tokens"] < dropping["served_tokens"] <= large["served_tokens"] == idle["served_tokens"]
    assert large["served_tokens"] == 12 * levels.BLOCK_TOKENS
    assert (short["kl"], large["kl"], idle["kl"]) == (1.0 if short["served_tokens"] else 0.0, 1.0, 1.0)
    assert 1.0 < dropping["kl"] <= 9.0
    assert short["num_dropped"] == large["num_dropped"] == 0 < dropping["num_dropped"]
