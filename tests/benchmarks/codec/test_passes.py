"""Coding tasks, the sandbox that answers run in, and a small run of the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.codec import passes
from benchmarks.codec.coding_tasks import LIBRARY, TASKS
from benchmarks.codec.passes import code_in
from benchmarks.codec.sandbox import passes as runs
from tests.benchmarks.conftest import Run

# A right answer to each task, in their order: the body of its function.
SOLUTIONS = (
    "return sum(map(tariff, weights))",
    "return sum(tariff(weight, fragile=True) for weight in weights)",
    "return crate_weight(boards, nails) + load",
    "return crate_weight(boards, nails) + load > CRATE_LIMIT",
    "return CRATE_LIMIT // BOARD_WEIGHT",
    "return sum(BERTH_FEE[ship.kind] for ship in ships)",
    "return sorted(BERTH_FEE, key=BERTH_FEE.get, reverse=True)",
    "return max(ships, key=Ship.cargo).name if ships else None",
    "return max(map(tide, range(1440)))",
    "return next((minute for minute in range(1440) if ship.floats(minute)), None)",
    "return [call_sign(ship.name, i) for i, ship in enumerate(ships, 1)]",
    "return call_sign(read_sign(sign)[0], read_sign(sign)[1] + 1)",
    "return hour * 60 + minute in QUIET_HOURS",
    "return sum(map(tariff, ship.parcels))",
    "return sorted(ship.name for ship in ships if ship.floats(minute))",
    "return min((parcel for ship in ships for parcel in ship.parcels), default=None)",
    "return sum(letter in 'aeiou' for letter in text.lower())",
    "return [sum(numbers[: i + 1]) for i in range(len(numbers))]",
    "return sorted(set(numbers))[-2] if len(set(numbers)) > 1 else None",
    "import itertools; return ''.join(f'{c}{len(list(run))}' for c, run in itertools.groupby(text))",
    "n = steps % len(items) if items else 0; return items[-n:] + items[:-n] if n else list(items)",
    "import re; t = re.sub(r'[^][(){}]', '', text)\n"
    "    for _ in t: t = t.replace('()', '').replace('[]', '').replace('{}', '')\n    return not t",
    "out = ''\n"
    "    values = 1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1\n"
    "    for n, r in zip(values, 'M CM D CD C XC L XL X IX V IV I'.split()):\n"
    "        out, number = out + r * (number // n), number % n\n    return out",
    "return [n for n in range(2, limit) if all(n % d for d in range(2, n))]",
    "return sorted(a + b)",
    "return {n: [w for w in words if len(w) == n] for n in map(len, words)}",
    "return sum((flatten(x) if isinstance(x, list) else [x] for x in nested), [])",
    "return min(words, key=lambda word: (-words.count(word), word))",
    "return [list(row) for row in zip(*rows)]",
    "return numbers.index(wanted) if wanted in numbers else -1",
    "return ''.join(chr((ord(c) - 97 + shift) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)",
    "return sum(map(int, str(abs(number))))",
)


@pytest.fixture(autouse=True)
def sandbox() -> None:
    try:
        runs("", "")
    except OSError as e:
        pytest.skip(f"needs a sandbox: {e}")


def test_right_answers_pass_and_empty_ones_do_not() -> None:
    """All tasks in two processes: the tests of a task fail where its function does nothing."""
    starts = [task.start for task in TASKS]
    assert len(set(starts)) == len(TASKS) >= 30
    solved = [f"{start}    {body}\n" for start, body in zip(starts, SOLUTIONS, strict=True)]
    tests = "\n".join(task.tests for task in TASKS)
    assert runs("\n".join([LIBRARY, *solved]), tests)
    fails = "try:\n    exec({!r})\nexcept (AssertionError, TypeError):\n    pass\nelse:\n    raise SystemExit(1)\n"
    each_fails = "".join(fails.format(task.tests) for task in TASKS)
    assert runs("\n".join([LIBRARY, *starts]), each_fails)


@pytest.mark.parametrize(
    "code",
    [
        "assert False",
        "this is no Python",
        "raise SystemExit(0)",
        "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
        "x = 'a' * (1 << 30)",
        "open('file', 'w', buffering=1).write('a' * 10 + chr(10))",
    ],
)
def test_the_sandbox_refuses(code: str) -> None:
    assert not runs(code, "")


def test_what_an_answer_prints_does_not_matter() -> None:
    assert runs("print('hello')", "assert True")


def test_the_code_of_an_answer() -> None:
    assert code_in("Sure:\n```python\nx = 1\n```\nThat is it. ```python\ny```") == "x = 1\n"
    assert code_in("```\nx = 1\n") == "x = 1\n"
    assert code_in("x = 1") == "x = 1"


def test_a_small_run(run: Run, tiny_llama: Path, text: Path) -> None:
    """A model of random weights solves nothing, and finds no passkeys."""
    args = ["--model", tiny_llama, "--text", text, "--part", "0:1", "--methods", "exact/zstd,kivi-2", "--tasks", 2]
    rows = run(passes.main, *args, "--new-tokens", 4, "--passkeys", 1, "--passkey-tokens", 128)["rows"]
    assert [row["name"] for row in rows] == ["exact", "exact/zstd", "kivi-2"]
    assert all((row["tasks"], row["solved"], row["lost"], row["won"]) == (2, 0, 0, 0) for row in rows)
    assert rows[0]["bits_per_value"] == 16
    assert all(0 < row["bits_per_value"] < 16 for row in rows[1:])
    assert all(row["passkeys_of"] == {"128": 1} for row in rows)
