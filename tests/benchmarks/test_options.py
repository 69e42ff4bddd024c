from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.options import Options, parse_options
from benchmarks.sharegpt import EXIT_ERROR, main


def _parse(args: str) -> Options:
    return parse_options(args.split())


def test_launch() -> None:
    options = _parse(
        "--launch --dataset x.txt --backends kvfetch,none --kvfetch quantiser=uint8 --kvfetch codec_threads=2 "
        "--json out.json -- --context-length 4096 --tp 2"
    )
    assert options.url is None
    assert options.backends == ("kvfetch", "none")
    assert options.kvfetch == {"quantiser": "uint8", "codec_threads": 2}
    assert options.sglang_args == ("--context-length", "4096", "--tp", "2")
    assert options.plot_path == Path("out.png")
    assert options.arrivals.concurrency == 2


def test_live_with_poisson_arrivals() -> None:
    options = _parse("--dataset x.txt --request-rate 2.5 --seed 7")
    assert options.url == "http://127.0.0.1:30000"
    assert (options.arrivals.concurrency, options.arrivals.request_rate, options.arrivals.seed) == (None, 2.5, 7)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--launch --backends none,redis", "--backends is 'none,redis'; allowed are none, file, kvfetch"),
        ("--launch --backends none,none", "each once"),
        ("--launch --kvfetch codec", "'codec': expected KEY=VALUE"),
        ("--launch --kvfetch codek=hevc", "unknown key 'codek'.*did you mean 'codec'"),
        ("--launch --kvfetch store=http://x:1", "use --store"),
        ("--launch --store ftp://x", "store = 'ftp://x': expected http"),
        ("--launch --backends file --store http://x:1", "need the backend kvfetch"),
        ("--model m", "--model needs --launch"),
        ("--turns 0", "'0' is not a whole number of at least 1"),
        ("--request-rate -1", "'-1' is not a number above 0"),
        ("--request-rate 1 --concurrency 2", "not allowed with"),
        ("--answers nobody", "invalid choice: 'nobody'"),
        ("--json no/such/directory/out.json", "is not a file in an existing directory"),
        ("-- --tp 2", "need --launch"),
    ],
)
def test_a_bad_argument_is_named(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(f"--dataset x.txt {args}")
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said


def test_what_cannot_be_run_is_said_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.txt"
    assert main(["--dataset", str(path)]) == EXIT_ERROR
    assert "cannot be read" in capsys.readouterr().out
    path.write_text("some words")
    assert main(["--dataset", str(path), "--answers", "dataset"]) == EXIT_ERROR
    assert "has no answers" in capsys.readouterr().out
    assert main(["--dataset", str(path), "--url", "http://127.0.0.1:9"]) == EXIT_ERROR
    assert "no SGLang at http://127.0.0.1:9" in capsys.readouterr().out
