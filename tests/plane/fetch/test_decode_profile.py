"""Decode profiles: the published tables, files, and corrections."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import msgspec
import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.fetch.pool import (
    Decoded,
    DecodeProfile,
    Sample,
    VariantProfile,
    corrections,
    load_decode_profile,
    measure_profile,
)
from tests.plane.fetch.published import PUBLISHED


def test_a_pool_is_no_larger_than_helps() -> None:
    slow = VariantProfile(name="a", size_bytes=1, decode_s=(1.0, 1.2, 1.9, 2.6))
    assert DecodeProfile(device="d", source="s", variants=(slow,)).num_sessions == 2


def test_beyond_the_table_decoders_are_busy() -> None:
    h20 = PUBLISHED["H20"]
    assert [h20.decode_time_s(1, 5), h20.decode_time_s(0, 7)] == [0.42, 0.62]
    assert h20.decode_time_s(3, 14) == pytest.approx(2 * 0.43)


def test_a_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(PUBLISHED["A100"].encode())
    assert load_decode_profile(path) == PUBLISHED["A100"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"variants": []}, "at least one"),
        ({"cell_values": 0}, "cell_values"),
        ({"variants": [{"name": "a", "size_bytes": 0, "decode_s": [1.0]}]}, "size 0"),
        ({"variants": [{"name": "a", "size_bytes": 1, "decode_s": [0.0]}]}, "positive"),
        ({"variants": [{"name": "a", "size_bytes": 1, "decode_s": [1.0], "switch_s": -1}]}, "switch -1"),
        (
            {
                "variants": [
                    {"name": "a", "size_bytes": 1, "decode_s": [1.0]},
                    {"name": "b", "size_bytes": 1, "decode_s": []},
                ]
            },
            "'b' has 0 decode times",
        ),
        ({"variants": [{"name": "a", "size_bytes": 1, "decode_s": [1.0]}] * 2}, "with unique names"),
    ],
)
def test_a_bad_file_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**msgspec.to_builtins(PUBLISHED["H20"]), **change}))
    with pytest.raises(ConfigError, match=message) as info:
        load_decode_profile(path)
    assert str(path) in str(info.value)


@pytest.mark.parametrize("content", [b"\xff{", b'{"device": "\xff"}', b"{}"])
def test_what_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="invalid decode profile"):
        load_decode_profile(path)


def test_stored_variants_are_found_by_codec_and_resolution() -> None:
    def named(*names: str) -> DecodeProfile:
        variants = tuple(VariantProfile(name=name, size_bytes=1, decode_s=(1.0,)) for name in names)
        return DecodeProfile(device="d", source="s", variants=variants)

    measured = named("hevc 240p", "zstd")
    assert measured.find_variant("hevc", "240p") == 0
    assert measured.find_variant("zstd", "1080p") == 1
    assert measured.find_variant("hevc", "480p") is None
    assert PUBLISHED["H20"].find_variant("hevc", "480p") == 1
    assert PUBLISHED["H20"].find_variant("zstd", "480p") is None


def test_corrections_follow_what_is_observed() -> None:
    assert corrections([], 4) == {}
    after_one = corrections([Decoded(2, 2.0)], 4)
    assert after_one == pytest.approx(dict.fromkeys(range(4), 2.0))  # the others too: nothing else is known of them
    settled = corrections([Decoded(v, 2.0 if v else 1.0) for _ in range(30) for v in (0, 1)], 3)
    assert settled[0] == pytest.approx(1.0, rel=0.02)
    assert settled[1] == pytest.approx(2.0, rel=0.02)


def test_one_outlier_does_not_carry_a_correction_away() -> None:
    usual = [Decoded(0, 1.0)] * 10
    assert corrections([*usual, Decoded(0, 1e9)], 1)[0] < 1.7


def test_corrected_times() -> None:
    h20 = PUBLISHED["H20"]
    slower = h20.corrected({1: 2.0})
    assert slower.decode_time_s(1, 3) == pytest.approx(0.60)
    assert slower.variants[0] == h20.variants[0]


class FakeMachine:
    """A clock, and samples that take their time on it; a change of sample takes longer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.last = ""

    def sample(self, name: str, size_bytes: int, decode_s: float, switch_s: float) -> Sample[None]:
        def decode(_: None) -> None:
            self.now_s += decode_s + (switch_s if self.last != name else 0.0)
            self.last = name

        return Sample(name, size_bytes, decode)


def test_measuring() -> None:
    machine = FakeMachine()
    samples = [machine.sample("large", 20, 1.0, 0.0), machine.sample("small", 10, 2.0, 0.5)]
    profile = measure_profile(
        samples,
        [None],
        device="d",
        source="s",
        cell_values=7,
        rounds=3,
        clock=lambda: machine.now_s,
    )
    assert [v.name for v in profile.variants] == ["small", "large"]
    small, large = profile.variants
    assert small.decode_s == pytest.approx((2.0,))
    assert small.switch_s == pytest.approx(0.5)
    assert large.decode_s == pytest.approx((1.0,))
    assert large.switch_s == 0.0


def test_as_many_sessions_as_chunks_at_once() -> None:
    """Each sets itself up once, and that is not counted."""
    now_s, lock, set_up = 0.0, threading.Lock(), set[str]()

    def decode(session: str) -> None:
        nonlocal now_s
        time.sleep(0.005)  # so that the others are asked for meanwhile
        with lock:
            now_s += 1.0 if session in set_up else 100.0
            set_up.add(session)

    profile = measure_profile(
        [Sample("only", 10, decode)],
        ["a", "b", "c"],
        device="d",
        source="s",
        cell_values=1,
        rounds=5,
        clock=lambda: now_s,
    )
    assert set_up == {"a", "b", "c"}
    (only,) = profile.variants
    assert len(only.decode_s) == 3
    assert only.decode_s[0] == 1.0
    assert max(only.decode_s) < 50
