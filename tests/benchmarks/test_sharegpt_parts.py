"""The conversations, the backends, the command line and the report of ``benchmarks.sharegpt``, without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.client import Answer
from benchmarks.sharegpt import backends
from benchmarks.sharegpt.__main__ import _config_json, main, parse
from benchmarks.sharegpt.backends import FileStorage, KVFetchStorage, wait_until_settled
from benchmarks.sharegpt.conversations import Dataset, load_encoder, make_conversations, read_dataset
from benchmarks.sharegpt.load import Record, Result
from benchmarks.sharegpt.report import make_report, plot_ttft, table_rows
from benchmarks.sharegpt.workload import Run
from benchmarks.traffic import Traffic
from sgl_kvfetch.errors import ConfigError

METRICS = """\
# TYPE sgl_kvfetch_wire_bytes counter
sgl_kvfetch_wire_bytes_total{{direction="read"}} {wire}.0
sgl_kvfetch_wire_bytes_total{{direction="write"}} 7.0
# TYPE sgl_kvfetch_raw_bytes counter
sgl_kvfetch_raw_bytes_total{{direction="read"}} {raw}.0
# TYPE sgl_kvfetch_queued_bytes gauge
sgl_kvfetch_queued_bytes{{queue="write"}} {queued}.0
# TYPE sgl_kvfetch_written_pages counter
sgl_kvfetch_written_pages_total{{result="stored"}} {pages}.0
"""


def _said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in messages]}


def _numbers(start: int, end: int) -> str:
    return " ".join(map(str, range(start, end)))


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_what_users_say_in_sharegpt(tmp_path: Path) -> None:
    entries = [
        _said(("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Why?")),
        _said(("gpt", "an answer to nothing"), ("user", "A"), ("user", "B"), ("assistant", "C"), ("gpt", "D")),
        _said(("gpt", "nobody asked")),
        _said(("human", " "), ("gpt", "nothing was said")),
    ]
    path = tmp_path / "some.json"
    path.write_text(json.dumps(entries))
    lines = tmp_path / "some.jsonl"
    lines.write_text("\n".join(map(json.dumps, entries)))
    assert read_dataset(path) == read_dataset(lines) == Dataset("sharegpt", [["Be brief.\nHi", "Why?"], ["A\nB"]])


def test_prompts_and_text(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines(), and not for JSON lines.
    (tmp_path / "a.jsonl").write_text('{"prompt": "one two", "label": 1}\n\n{"prompt": "three\u2028four"}\n')
    assert read_dataset(tmp_path / "a.jsonl") == Dataset("prompts", [["one two"], ["three\u2028four"]])
    (tmp_path / "a.txt").write_text("[once upon a time]\n")
    assert read_dataset(tmp_path / "a.txt") == Dataset("text", [["[once upon a time]\n"]])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", r"a\.json cannot be read: Input data was truncated"),
        ("a.json", [_said(("human", "x"), ("robot", "y"))], r"Invalid enum value 'robot'.*\[1\]\.from"),
        ("a.json", [], "has no user messages"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "x"}', r"missing required field `prompt` - at `\$\[1\]`"),
        ("a.txt", " \n", "has no user messages"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_where(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_dataset(path)


def test_texts_are_cut_into_pieces_and_turns() -> None:
    dataset = Dataset("prompts", [[_numbers(0, 50)], [_numbers(100, 120)]])
    made = make_conversations(dataset, _ids, count=4, turns=2, max_input_tokens=24, max_new_tokens=4)
    # The first piece of both texts before the second of the first; what is left, 10 tokens, makes a short one.
    assert [[ids[0] for ids in conversation] for conversation in made] == [[0, 10], [100, 110], [20, 30], [40, 45]]
    assert [sum(map(len, conversation)) for conversation in made] == [20, 20, 20, 10]


def test_dialogues_keep_the_turns_that_fit() -> None:
    dataset = Dataset("sharegpt", [[_numbers(i, i + 6) for i in range(0, 50, 10)], [_numbers(0, 99)]])
    first, long = make_conversations(dataset, _ids, count=2, turns=4, max_input_tokens=30, max_new_tokens=4)
    assert first == tuple(tuple(range(i, i + 6)) for i in (0, 10, 20))
    assert long == (tuple(range(30)),)


def test_what_cannot_fit_is_refused() -> None:
    dataset = Dataset("text", [["1 2 3"]])
    with pytest.raises(ConfigError, match="9 turns with answers of 64 tokens do not fit into prompts of 500 tokens"):
        make_conversations(dataset, _ids, count=1, turns=9, max_input_tokens=500, max_new_tokens=64)
    with pytest.raises(ConfigError, match="too short for a conversation of 4 turns"):
        make_conversations(dataset, _ids, count=1, turns=4, max_input_tokens=500, max_new_tokens=64)


def test_unknown_words_are_hashed_into_the_vocabulary(tiny_llama: Path) -> None:
    encode, _ = load_encoder(str(tiny_llama), Dataset("text", [["It was the best of times, the worst of times"]]))
    ids = encode("it was the best of times, it was the worst of times,")
    assert ids[:3] == ids[6:9]
    assert len(set(ids)) == 7
    assert all(3 <= i < 2048 for i in ids)
    encode, description = load_encoder(str(tiny_llama), Dataset("text", [["w17 w18 w19 what"]]))
    assert (encode("w5 w6"), description) == ([5, 6], "the model's tokenizer")


def test_bytes_read(tmp_path: Path) -> None:
    before = METRICS.format(wire=100, raw=300, queued=0, pages=0)
    after = METRICS.format(wire=600, raw=1300, queued=0, pages=0)
    assert KVFetchStorage("http://store:1", {"token": "secret"}).read(before, after, 4) == Traffic(500, 1000)
    backend = FileStorage(tmp_path)
    assert backend.read("", "", 0) == Traffic(0, 0)
    for page in ("aa", "bb", "cc"):
        for rank in (0, 1):
            (tmp_path / f"{page}_model_{rank}_2.bin").write_bytes(bytes(1000))
    assert backend.read("", "", 5) == Traffic(10_000, 10_000)
    assert backend.stored("", "") == {"wire_bytes": 6000, "raw_bytes": 6000}


class FakeServer:
    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts

    def metrics(self) -> str:
        return next(self._texts)


def test_waits_until_nothing_is_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_POLL_S", 0.01)
    monkeypatch.setattr(backends, "_QUIET_S", 0.05)
    busy = [(9, 0), (0, 4), (5, 4)]
    seen: list[tuple[int, int]] = []

    def texts() -> Iterator[str]:
        for queued, pages in busy:
            seen.append((queued, pages))
            yield METRICS.format(wire=0, raw=0, queued=queued, pages=pages)
        while True:
            yield METRICS.format(wire=0, raw=0, queued=0, pages=9)

    server: Any = FakeServer(texts())
    assert wait_until_settled(KVFetchStorage("http://store:1", {}), server) > 0
    assert seen == busy
    monkeypatch.setattr(backends, "_SETTLE_S", 0.1)
    stuck: Any = FakeServer(iter(lambda: METRICS.format(wire=0, raw=0, queued=1, pages=0), None))
    with pytest.raises(TimeoutError, match=r"the writes of kvfetch have not ended after 0\.1 s"):
        wait_until_settled(KVFetchStorage("http://store:1", {}), stuck)


def test_the_command_line() -> None:
    kvfetch = ["--kvfetch", "quantiser=uint8", "--kvfetch", "codec_threads=2"]
    given = ["--dataset", "x.txt", "--launch", "--backends", "kvfetch,none", *kvfetch, "--json", "out.json"]
    args = parse([*given, "--", "--context-length", "4096"])
    assert args.backends == ["kvfetch", "none"]
    assert args.kvfetch == {"quantiser": "uint8", "codec_threads": 2}
    assert args.sglang_args == ["--context-length", "4096"]
    assert args.plot == Path("out.png")


def test_secrets_are_not_reported() -> None:
    kvfetch = ["--kvfetch", "token=secret", "--kvfetch", "codec=zstd"]
    args = parse(["--dataset", "x.txt", "--launch", "--api-key", "secret", *kvfetch])
    config = _config_json(args)
    assert config["kvfetch"] == {"token": "(hidden)", "codec": "zstd"}
    assert "secret" not in json.dumps(config)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--launch --backends none,redis", "'none,redis'; allowed are none, file, kvfetch, each once"),
        ("--launch --kvfetch codec", "'codec': expected KEY=VALUE"),
        ("--launch --kvfetch codek=hevc", "unknown key 'codek'.*did you mean 'codec'"),
        ("--launch --store ftp://x", "store = 'ftp://x': expected http"),
        ("--launch --backends file --store http://x:1", "need the backend kvfetch"),
        ("--model m", "model need --launch"),
        ("--turns 0", "'0' is not a whole number of at least 1"),
        ("--request-rate -1", "'-1' is not a number above 0"),
        ("--json no/such/directory/out.json", "is not a file in an existing directory"),
        ("-- --tp 2", "need --launch"),
    ],
)
def test_a_bad_argument_is_named(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--dataset x.txt {args}".split())
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said


def test_what_cannot_be_run_is_said_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["--dataset", str(path)])
    path.write_text("some words")
    with pytest.raises(SystemExit, match=r"no SGLang at http://127\.0\.0\.1:9"):
        main(["--dataset", str(path), "--url", "http://127.0.0.1:9"])


def _answer(ttft_s: float, itl_s: list[float], **cached: int) -> Answer:
    ids = list(range(1 + len(itl_s)))
    tiers = {"device": 0, "host": 0, "storage": 0} | cached
    return Answer(ids, ttft_s, ttft_s + sum(itl_s), itl_s, prompt_tokens=100, cached=tiers)


RECORDS = [
    Record(0, 0, 0.0, _answer(0.1, [0.01, 0.03], device=16)),
    Record(0, 1, 0.2, _answer(0.3, [0.02, 0.04], device=32, host=16, storage=48)),
    Record(1, 0, 0.0, _answer(0.2, [])),
    Record(1, 1, 0.3, error="status 500: no"),
]


def test_the_report(tmp_path: Path) -> None:
    first = Run("none", "nothing", Result(RECORDS, 2.0, "0"), Traffic(0, 0))
    other = Result([Record(0, 0, 0.0, Answer([9])), *RECORDS[1:]], 1.0, "0")
    fill = {"requests": 4, "wire_bytes": 500, "raw_bytes": 1000}
    runs = [first, Run("kvfetch", "ours", other, None, other_cores=1.5, fill=fill)]
    report = json.loads(json.dumps(make_report(runs, method="how")))
    none, ours = report["runs"]
    assert (none["requests"], none["failures"], none["errors"]) == (4, 1, {"status 500: no": 1})
    assert (none["ttft_s"]["mean"], none["ttft_s"]["p50"]) == pytest.approx((0.2, 0.2))
    assert none["tpot_s"]["p50"] == pytest.approx(0.025)  # of 0.02 and 0.03; one token has no time per later token
    assert none["itl_s"]["mean"] == pytest.approx(0.025)
    assert none["cached_tokens"] == {"device": 48, "host": 16, "storage": 48}
    assert (none["prompt_tokens"], none["output_tokens"], none["requests_per_s"]) == (300, 7, 1.5)
    assert [(turn["turn"], turn["requests"]) for turn in none["by_turn"]] == [(1, 2), (2, 1)]
    assert (none["same_answers_as_first_run"], ours["same_answers_as_first_run"]) == (3, 2)
    assert (none["wire_bytes"], ours["wire_bytes"], len(none["records"])) == (0, None, 4)
    rows = {title: cells for title, *cells in table_rows(report["runs"])}
    assert rows["cached, from storage"] == ["48", "48"]
    assert rows["stored before, raw (MB)"] == ["", "0.00"]
    plot_ttft(tmp_path / "out.png", runs, "a test")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
