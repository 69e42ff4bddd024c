"""`kvfetch bench` without a server: prompts, and what it refuses. tests/e2e/test_commands.py measures SGLang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.small_segments import NAMESPACE
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.tools.bench import BenchResult, GroupResult, _Answer, _group_result, _Metrics, _report, _Sent
from sgl_kvfetch.tools.bench_prompts import Group, cut_prompts, make_groups
from sgl_kvfetch.tools.sglang_server import open_server
from sgl_kvfetch.tools.terminal import show
from sgl_kvfetch.tools.why import Asked
from tests.tools.conftest import kvfetch
from tests.tools.test_why import decided as made_decision, status_of, told_by_a_server


async def tokenise(text: str) -> list[int]:
    return [len(word) for word in text.split()]


async def test_prompts_of_a_file_are_one_group_without_those_that_are_too_long(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [1, 2]}\n\n{"prompt": "a bc def"}\n{"prompt": "one two three four"}\n{"prompt": "x"}\n')
    groups, num_skipped = await make_groups(file, [], 3, 3, tokenise)
    assert [(group.name, group.prompts) for group in groups] == [("prompts", [[1, 2], [1, 2, 3]])]
    assert num_skipped == 1
    with pytest.raises(ConfigError, match="all prompts are longer than the 1 tokens that the server takes"):
        await make_groups(file, [], 3, 1, tokenise)
    with pytest.raises(ConfigError, match="--lengths: 9 tokens are too long"):
        await make_groups(None, [9], 3, 8, tokenise)


def test_prompts_of_a_length_follow_one_another_in_the_text() -> None:
    groups = cut_prompts([5, 6, 7], [2, 4], 2)
    assert [(group.name, group.prompts) for group in groups] == [
        ("2 tokens", [[5, 6], [7, 5]]),
        ("4 tokens", [[6, 7, 5, 6], [7, 5, 6, 7]]),
    ]


async def test_what_waits_in_the_servers_queue_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than that the server does not write."""
    monkeypatch.setattr("sgl_kvfetch.tools.bench._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("sgl_kvfetch.tools.bench._WRITE_WAIT_S", 0.0)
    metrics = "".join(
        f"sgl_kvfetch_{name} {value}\n"
        for name, value in (("written_pages_total", 3), ('queued_bytes{queue="write"}', 1 << 20))
    )
    with told_by_a_server(None, metrics) as url:
        async with open_server(url) as session:
            found = _Metrics(session, url)
            with pytest.raises(ConfigError, match=r"wrote 0 of 5 pages, and no more for 0 s; 1 MiB .* log says why"):
                await found.wait_until_written(await found.read(), 5)


def compared(*again: tuple[float, str, int]) -> GroupResult:
    """A group's result: each prompt took 2 s at first. ``again``: the second time, the tier of its tokens, how many."""
    tiers = dict.fromkeys(("device", "host", "storage"), 0)
    computed = [_Answer(2.0, tiers, f"first {number}", 1024) for number, _ in enumerate(again)]
    answers = [_Answer(s, tiers | {tier: count}, f"r{number}", 1024) for number, (s, tier, count) in enumerate(again)]
    reasons = {answer.request_id: "" if answer.cached["storage"] else Reason.SOONER for answer in answers}
    decided = [made_decision(request_id, reason, 15, 0) for request_id, reason in reasons.items()]
    group = Group("1,024 tokens", [[1] * 1024] * len(again))
    asked = Asked(64, status_of(recent=decided), False, [])
    return _group_result(group, _Sent(computed, 0), _Sent(answers, 1 << 20), asked)


def test_what_was_not_fetched_has_no_time_and_no_gain(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that is computed again, and happens to be faster, is no gain of the store."""
    groups = [
        compared((1.0, "storage", 0), (1.1, "storage", 0)),
        compared((1.0, "device", 960), (0.5, "storage", 960), (0.1, "storage", 0)),
        compared((0.5, "storage", 960)),
    ]
    none, one, both = groups
    assert (none.fetched, none.not_fetched) == (None, {"sooner": 2})
    assert one.fetched is not None
    assert (one.fetched.all_s, one.fetched.stored_tokens, one.fetched.wire_bytes) == ([0.5], 960, None)
    assert one.not_fetched == {"in_memory": 1, "sooner": 1}
    assert both.fetched is not None
    assert (both.fetched.wire_bytes, both.not_fetched) == (1 << 20, {})

    show(None, False, _report(BenchResult("", "", "model", 64, 0, groups)))
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line.lstrip().startswith("1,024 tokens")]
    assert rows[0][2:] == ["2", "1,024", "2", *["-"] * 5]
    assert rows[1][2:] == ["3", "1,024", "2", "0.5", "4.00x", "960", "960", "-"]
    assert "3 of 6 prompts were not fetched: sooner. What to do: nothing: the link or the decoder" in output


def test_a_server_that_tells_nothing_of_a_request() -> None:
    request = _Answer(2.0, {"device": 0, "host": 0, "storage": 0}, "r", 100)
    for asked, reason in [
        (Asked(64, None, False, []), "not_attached"),
        (Asked(64, status_of(threshold_tokens=256), False, []), "short"),
        (Asked(64, status_of(), False, []), "unknown"),
    ]:
        found = _group_result(Group("", [[1]]), _Sent([request], 0), _Sent([request], 0), asked)
        assert found.not_fetched == {reason: 1}


def test_servers_of_which_nothing_could_be_said_are_refused(tmp_path: Path) -> None:
    """Metrics say when a prompt is stored, and how many bytes are fetched. A reader with another namespace would find
    nothing, though it serves the same files; nothing is computed before that is known."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [1, 2]}')
    other = replace(NAMESPACE, kv_dtype="float8_e4m3fn")
    with told_by_a_server(status_of()) as server, told_by_a_server(status_of(other)) as reader:
        for options, said in (
            (("--flush",), "has no metrics of sgl_kvfetch: start it with --enable-metrics"),
            (
                ("--reader", reader),
                "would find nothing that --server stores: kv_dtype is 'float8_e4m3fn' and 'bfloat16'; start all",
            ),
        ):
            refused = kvfetch("bench", "--server", server, "--file", str(tmp_path / "prompts.jsonl"), *options)
            assert (refused.exit_code, said in refused.stderr) == (2, True), refused.output
