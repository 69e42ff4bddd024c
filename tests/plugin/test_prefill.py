from __future__ import annotations

import random
import time
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvfetch.plugin.hooks import measure_prompts
from sgl_kvfetch.plugin.prefill import MIN_BATCHES, WINDOW, PrefillMeter, PrefillSpeed


def seconds(num_tokens: int) -> float:
    """A batch costs 20 ms, a token 1 ms."""
    return 0.02 + 0.001 * num_tokens


def fed(*sizes: int) -> PrefillSpeed:
    speed = PrefillSpeed()
    for size in sizes:
        speed.add_batch(size, seconds(size))
    return speed


def test_until_there_are_a_few_batches_the_fastest_counts() -> None:
    """The first one compiles kernels. There is no estimate before it."""
    speed = PrefillSpeed()
    speed.add_batch(0, 1.0)
    speed.add_batch(100, 0.0)
    assert speed.seconds_for(100) is None
    speed.add_batch(1000, 9.0)
    assert speed.seconds_for(1000) == pytest.approx(9.0)
    for _ in range(MIN_BATCHES - 2):
        speed.add_batch(1000, seconds(1000))
        assert speed.seconds_for(1000) == pytest.approx(seconds(1000))
    assert speed.seconds_saved(1000) == pytest.approx(seconds(1000))


def test_short_batches_do_not_tell_how_long_a_long_prompt_takes() -> None:
    speed = fed(*[20, 30] * MIN_BATCHES)
    assert speed.seconds_for(200) is not None
    assert speed.seconds_for(1000) is None
    assert speed.seconds_saved(1000) is None
    speed.add_batch(1024, seconds(1024))
    assert speed.seconds_for(100_000) == pytest.approx(100_000 / 1024 * seconds(1024))  # SGLang splits it


MIXED = 10, 64, 64, 500, 64, 30


def test_how_long_a_prompt_takes() -> None:
    for sizes, size, expected_s in (
        *((MIXED, size, seconds(size)) for size in (1, 64, 500)),  # batches and tokens both cost time
        (MIXED, 2000, 4 * seconds(500)),  # a longer prompt is several batches
        ((2048, 2048, 2048, 2000, 2048), 4096, 2 * seconds(2048)),  # batches of one size tell their rate
    ):
        assert fed(*sizes).seconds_for(size) == pytest.approx(expected_s, rel=0.01)


def test_fetching_saves_neither_the_batch_of_the_other_tokens_nor_reading_the_prefix() -> None:
    """Small batches after a long prefix take 0.2 ms a token of it, and twice as much where it is longest."""
    speed = fed(*MIXED)
    for size in (1, 64, 500):
        assert speed.seconds_saved(size) == pytest.approx(seconds(size + 1) - seconds(1))
    for before in (100, 400, 100, 400, 3200, 3200):
        speed.add_batch(10, seconds(10) + before * (0.0002 if before < 3000 else 0.0004), before)
    assert speed.seconds_saved(200) == pytest.approx(200 * (0.001 - 0.0002))
    assert speed.seconds_saved(500) == pytest.approx(500 * (0.001 - 0.0002))
    speed.add_batch(10, seconds(10) + 3200 * 0.0004, 3200)
    assert speed.seconds_saved(3200) == pytest.approx(6.4 * seconds(500) - 0.02 - 3200 * 0.0004)
    assert speed.seconds_for(500) == pytest.approx(seconds(500))  # what computes a prompt is estimated without them


def test_short_prompts_are_not_estimated_by_long_ones() -> None:
    """SmolLM2 on two cores, in docs/gpus.md: a token of a prompt of 4,096 takes 1.5 times as long as one of 1,024."""
    speed, measured = PrefillSpeed(), {1024: 0.40, 2048: 0.83, 4096: 2.45}
    for size, seconds_ in (*measured.items(), *measured.items()):
        speed.add_batch(size, seconds_)
    for size, seconds_ in measured.items():
        assert speed.seconds_for(size) == pytest.approx(seconds_)
    assert speed.seconds_for(1500) == pytest.approx(1500 * 0.40 / 1024, rel=0.05)


def test_outliers_do_not_count() -> None:
    """The first batches compile kernels; the others have noise and an occasional hiccup."""
    rng = random.Random(0)
    speed = PrefillSpeed()
    for i in range(WINDOW):
        size = rng.choice((16, 64, 300, 1000))
        speed.add_batch(
            size, seconds(size) * rng.uniform(0.95, 1.05) + (rng.uniform(1, 9) if i < 2 or i % 8 == 0 else 0)
        )
    assert speed.seconds_for(1000) == pytest.approx(seconds(1000), rel=0.1)
    assert speed.seconds_for(600) == pytest.approx(seconds(600), rel=0.1)


def test_only_the_latest_batches_count() -> None:
    speed = fed(10, 100, 1000, 100)
    for i in range(WINDOW):
        size = (50, 500)[i % 2]
        speed.add_batch(size, 2 * seconds(size))
    assert speed.seconds_for(500) == pytest.approx(2 * seconds(500))


def test_times_that_fall_with_the_size_still_give_a_rate() -> None:
    speed = PrefillSpeed()
    for size in (10, 100, 1000, 400):
        speed.add_batch(size, 1 / size)
    assert (speed.seconds_for(1000) or 0) > 0


def batch(launch_ts: float, num_tokens: int | None = 100, mode: ForwardMode = ForwardMode.EXTEND) -> SimpleNamespace:
    """Return what the meter reads of SGLang's ``ScheduleBatch``. Three requests decode in a mixed one."""
    num_decoding = 3 * (mode == ForwardMode.MIXED)
    of_batch = {"extend_num_tokens": num_tokens, "forward_mode": mode, "prefix_lens": [7, 8] + [9000] * num_decoding}
    return SimpleNamespace(launch_ts=launch_ts, decoding_reqs=[None] * num_decoding or None, **of_batch)


def test_how_long_a_batch_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    for batches, expected_s in (
        ([(batch(10.0), 11.0), (batch(14.0), 14.5)], [1.0, 0.5]),  # from its launch to its result
        # The second is launched while the first, a decode batch, is computed: it begins with that one's result.
        ([(batch(10.0, None, ForwardMode.DECODE), 11.0), (batch(10.25), 13.0)], [2.0]),
        ([(batch(10.0, 103, ForwardMode.MIXED), 11.0)], [1.0]),  # of the prompts alone
        (
            [(batch(10.0, mode=ForwardMode.SPLIT_PREFILL), 11.0), (batch(10.0, mode=ForwardMode.TARGET_VERIFY), 12.0)],
            [],
        ),
    ):
        meter, add = PrefillMeter(), Mock()
        monkeypatch.setattr(meter.speed, "add_batch", add)
        for each, end_s in batches:
            meter.finished(each, end_s)
        assert add.call_args_list == [call(100, seconds, 15) for seconds in expected_s]


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_hook_of_host_mode_measures_and_says_when_the_engine_is_idle(is_idle: bool) -> None:
    backend = Mock(meter=PrefillMeter())
    controller = SimpleNamespace(storage_backend_type="kvfetch", storage_backend=backend)
    running = SimpleNamespace(is_empty=lambda: is_idle)
    tree = SimpleNamespace(cache_controller=controller)
    scheduler = SimpleNamespace(tree_cache=tree, waiting_queue=[], running_batch=running)
    measure_prompts(None, scheduler, batch(time.monotonic() - 0.1), None)
    assert backend.meter.speed.seconds_for(100) is not None
    assert backend.record_idle_engine.called is is_idle
    controller.storage_backend_type, controller.storage_backend = "file", None  # while it is detached
    measure_prompts(None, scheduler, batch(time.monotonic()), None)
