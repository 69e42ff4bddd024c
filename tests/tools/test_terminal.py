import ast
import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from harness.waiting import WAIT_S
from sgl_kvfetch import __version__
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.tools import terminal
from sgl_kvfetch.tools.app import COMMANDS, _run, import_command
from sgl_kvfetch.tools.terminal import _Formatter, format_size, make_console, make_table, say, show
from sgl_kvfetch.user_files import parse_duration, parse_size
from tests.tools.conftest import Stored

HEAVY = {"torch", "av", "numpy", "obstore", "redis", "transformers", "sglang"}


def test_sizes_and_durations() -> None:
    sizes = {"10GiB": 10 << 30, "500MB": 500_000_000, "1.5 kib": 1536, "12B": 12}
    assert {text: parse_size(text) for text in sizes} == sizes
    shown = {0: "0 B", 999: "999 B", 1024: "1 KiB", 1536: "1.5 KiB", 10 << 30: "10 GiB", 1 << 60: "1.02e+03 PiB"}
    assert {num_bytes: format_size(num_bytes) for num_bytes in shown} == shown
    assert [parse_duration(text) for text in ("90s", "45m", "1.5 h", "30d")] == [90, 2700, 5400, 30 * 86400]


NO_SIZES = "", "10G", "-1GiB", "1e9", "0", "0.1B", "1GiB1", "9" * 400, "9" * 17 + "GiB"
NO_DURATIONS = "", "30", "-1d", "2 weeks", "1h30m"


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        *((parse_size, text, "size") for text in NO_SIZES),
        (parse_size, "1.5", r"1.5 what\? say 1.5GiB or 1.5B"),
        *((parse_duration, text, "duration") for text in NO_DURATIONS),
    ],
)
def test_what_means_nothing_is_refused(parse: Callable[[str], float], text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_stored_text_cannot_forge_or_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLogger(logging.getLogger("kvfetch-test"))
    limited.warning("a", "a miss: layouts are for k\n\x1b[2JERROR all is lost, " + "v" * 1_000_000)
    (record,) = caplog.records
    assert record.getMessage().startswith("a miss: layouts are for k\N{REPLACEMENT CHARACTER}")
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) == 2000


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(command: str) -> None:
    assert inspect.getdoc(import_command(command)).partition("\n")[0] == COMMANDS[command]  # type: ignore[union-attr]


@pytest.mark.process
def test_help_and_what_needs_no_tensors_are_light(stored: Stored) -> None:
    segment = f"{stored.url}#{stored.segments[0].manifest.key.stem}"
    of_store = [["inspect", segment], ["pin", stored.url], ["gc", stored.url, "--capacity", "1MiB"]]
    code = (
        "import sys\nfrom sgl_kvfetch.tools.app import app\n"
        f"for args in {[['--version'], ['--help'], *([command, '--help'] for command in COMMANDS), *of_store]}:\n"
        "    try: app(args)\n    except SystemExit as e: assert not e.code, e\n"
        f"    if heavy := {HEAVY} & sys.modules.keys(): sys.exit(f'{{args}}: {{heavy}}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"kvfetch {__version__}\n")
    for command in COMMANDS:
        assert f"kvfetch {command} " in done.stdout  # an example


@pytest.mark.process
def test_output_that_nobody_takes_is_no_finding(stored: Stored) -> None:
    """A reader has left, or a disk is full: there is no traceback, and the exit code is not 1."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb", 0) as closed, Path("/dev/full").open("wb") as full:
        for out, said in ((closed, ""), (full, "kvfetch: [Errno 28] No space left on device\n")):
            command = [sys.executable, "-m", "sgl_kvfetch.tools", "inspect", stored.url]
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
            assert (done.returncode, done.stderr) == (2, said)
    with pytest.raises(BrokenPipeError):  # of a reader that leaves after the first table
        make_console().on_broken_pipe()


def test_a_fault_of_ours_is_no_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sgl_kvfetch.tools.app.app", lambda **options: 1 // 0)
    with pytest.raises(SystemExit, match="2"):
        _run()
    assert "ZeroDivisionError" in capsys.readouterr().err


EVIL = "m\x1b]0;OWNED\x07\x1b[2J\x9b1m\u202e"


def test_no_text_of_others_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, tables with their titles, consoles, failures, the log, and JSON."""
    table = make_table((EVIL,), (EVIL,))
    table.title = EVIL
    table.add_row(EVIL, EVIL)
    say(EVIL)
    make_console().print(EVIL)
    with pytest.raises(typer.Exit):
        show([], False, [table, f"{EVIL}\nsecond line"], {EVIL: EVIL})
    show({EVIL: EVIL}, True, [])
    record = logging.LogRecord("x", logging.WARNING, "x", 1, EVIL, (), None)
    print(_Formatter().format(record))
    out = capsys.readouterr().out
    assert "\nsecond line\n" in out
    assert all(line.isprintable() for line in out.split("\n"))
    assert json.loads(out[out.index("{") : out.rindex("}") + 1]) == {EVIL: EVIL}


def test_commands_print_by_the_terminals_module_alone() -> None:
    """`say` and `make_console` replace control characters; nothing else does."""
    folder = Path(terminal.__file__).parent
    found = [
        f"{path.name}:{node.lineno}"
        for path in folder.glob("*.py")
        if path.name != "terminal.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo", "typer.secho", "Console")
    ]
    assert found == []
