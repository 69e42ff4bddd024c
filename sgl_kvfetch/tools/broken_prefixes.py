"""``kvfetch why --log``: where prompts stop being equal to earlier ones, although what follows is equal again.

Each prompt is compared with the earlier one that shares its longest beginning. Where they part, the prefix is broken if
later parts of the prompt are in the earlier one, too: they are computed again only because of what changed before them.
A prompt that goes on with something new, such as the next turn of a conversation, loses nothing.

A prompt is a string here: of its text, or with one character for each token. So Python's own search compares them.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError
from sgl_kvfetch.prompts import Tokens, text_of
from sgl_kvfetch.user_files import read_text

_CHARS = 4  # of a token, where the log has texts
_LEAST = 64  # tokens that a request has to lose
_EQUAL = 12  # tokens in a row that are not equal by chance
_LOOK = 2048  # tokens within which prompts are equal again
_SHOWN = 60  # characters

# SGLang's line of a request, `Receive: obj=GenerateReqInput(...)`, has Python's notation. What it cuts has " ... ".
_TEXT = re.compile(r"""Receive: obj=.*?\btext=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(?! \.\.\.)""")
_IDS = re.compile(r"Receive: obj=.*?\binput_ids=(\[[\d, ]+\])(?! \.\.\.)")
_TIME = re.compile(r"\A\[[^]]*\] ")  # before its lines of JSON, too
_INSIDE = "request", "body", "request_body", "obj"  # in which gateways, and SGLang, wrap requests

# What changes, by its text and the words before it; the first that fits.
_PATTERNS = {
    "a date or a time": r"\d{4}-\d\d-\d\d|\b\d\d?:\d\d\b|(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day",
    "a task list": r"(?m)^\s*([-*+]|\d+[.)]) |\[[ xX]\]",
    "a random id": r"\b(?=[a-z-]*\d)[0-9a-f-]{8,}\b|\b(?=[\w-]*\d)[\w-]{12,}\b",
}
_MOVED, _ANEW, _OTHER = "the same text in another order", "an old turn that is rendered anew", "other text"
_ROLE = re.compile(r"\W*(\w+\W+)?(assistant|user|system|tool|model)\W*", re.IGNORECASE)  # a whole line


class BrokenPrefix(Struct, frozen=True):
    """A place where prompts part from earlier ones. ``position``: after how many equal tokens, in the request that lost
    most. ``behind``, ``was`` and ``became``: the text before it, and what changed there."""

    looks_like: str
    lost_tokens: int
    num_requests: int
    position: int
    behind: str
    was: str
    became: str


def broken_prefixes(log: Path, model: str | None) -> tuple[list[BrokenPrefix], int]:
    """Return the places of a log that cost most tokens, the worst first, and the number of its requests. ``model``:
    whose tokenizer tells the text of tokens. Raises ConfigError."""
    places: dict[tuple[str, ...], list[BrokenPrefix]] = {}
    seen: list[str] = []  # sorted: the prompt with the longest equal beginning is a neighbour
    num_requests = 0
    for prompt, is_text in _requests(log):
        num_requests += 1
        size = _CHARS if is_text else 1
        at = bisect_left(seen, prompt)
        changes = [_change(each, prompt, size) for each in seen[max(0, at - 1) : at + 1]]
        change = max(changes, key=lambda each: (each.start, each.lost), default=None)
        if change is not None and change.lost >= _LEAST * size:
            place = _place(prompt, change, is_text, model)
            line = place.behind.rstrip("\n").rpartition("\n")[2]
            words = re.findall(r"[^\W\d_]+", line) if is_text or model else [line]
            places.setdefault((place.looks_like, *words), []).append(place)
        if seen[at : at + 1] != [prompt]:
            seen.insert(at, prompt)
    found = []
    for same in places.values():
        worst, lost = max(same, key=lambda each: each.lost_tokens), sum(each.lost_tokens for each in same)
        found.append(msgspec.structs.replace(worst, lost_tokens=lost, num_requests=len(same)))
    return sorted(found, key=lambda each: -each.lost_tokens)[:10], num_requests


def lines_of(places: Sequence[BrokenPrefix], num_requests: int) -> Iterator[str]:
    """Yield what was found, for people."""
    for number, each in enumerate(places, 1):
        where = f"{each.looks_like}, after {each.position:,} equal tokens"
        yield f"{number}. {where}: {each.lost_tokens:,} tokens recomputed in {each.num_requests:,} requests"
        for name in ("behind", "was", "became"):
            yield f"     {name:7}{msgspec.json.encode(getattr(each, name)).decode()}"
    yield f"{num_requests:,} requests; {'move what changes after what stays' if places else 'no prefix is broken'}"


class _Change(NamedTuple):
    """``was`` became ``became`` at ``start``. ``lost``: how much behind that is in the earlier prompt, too."""

    start: int
    was: str
    became: str
    lost: int
    is_moved: bool


def _change(old: str, new: str, size: int) -> _Change:
    """Compare two prompts. ``size``: characters of a token."""
    start = behind = at = _num_equal(old, new)
    least, lost, first = _EQUAL * size, 0, (start, start)
    while again := _equal_again(old, new, start, behind, at, size):
        first = first if lost else again
        length = _num_equal(old[again[0] :], new[again[1] :])
        lost, behind, at = lost + length, again[0] + length, again[1] + length
    was, became = old[start : first[0]], new[start : first[1]]
    is_moved = any(len(a) >= least and b.find(a[:least], start) >= 0 for a, b in ((was, new), (became, old)))
    return _Change(start, was, became, lost, is_moved)


def _equal_again(old: str, new: str, start: int, behind: int, at: int, size: int) -> tuple[int, int] | None:
    """Return where the prompts are equal again: in ``old`` from ``behind`` on, or else from ``start`` on, and in
    ``new`` from ``at`` on."""
    least = _EQUAL * size
    for probe in range(at, min(len(new) - least, at + _LOOK * size) + 1, least // 2):
        some = new[probe : probe + least]
        if (found := max(old.find(some, behind), old.find(some, start))) >= 0:
            while probe > at and found > start and old[found - 1] == new[probe - 1]:
                found, probe = found - 1, probe - 1
            return found, probe
    return None


def _num_equal(a: str, b: str) -> int:
    """Return how many characters are equal at the beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _place(prompt: str, change: _Change, is_text: bool, model: str | None) -> BrokenPrefix:
    size = _CHARS if is_text else 1
    behind = prompt[max(0, change.start - _SHOWN * size) : change.start]
    was, became = (each[: _LOOK * size] for each in (change.was, change.became))
    if not is_text:
        parts = (list(map(ord, part)) for part in (behind, was, became))
        behind, was, became = ((text_of(model, part) if model else str(part)) for part in parts)
    if is_text or model:  # of a word that changed, both ends may be equal by chance
        behind, word = re.fullmatch(r"(?s)(.*?)(\S*)", behind).groups()  # type: ignore[union-attr]
        behind_it = prompt[change.start + len(change.became) :][: _SHOWN if is_text and was and became else 0]
        was, became = (word + each + re.split(r"\s", behind_it)[0] for each in (was, became))
    role = behind.endswith("\n") and _ROLE.fullmatch(behind.rstrip("\n").rpartition("\n")[2])
    near = f"{behind[-20:]}{was[:_SHOWN]}\n{became[:_SHOWN]}"
    looks_like = next((kind for kind, has in _PATTERNS.items() if re.search(has, near)), _ANEW if role else _OTHER)
    if change.is_moved or (role and not (change.was and change.became)):
        looks_like = _MOVED if change.is_moved else _ANEW
    shown = behind[-_SHOWN:], was[:_SHOWN], became[:_SHOWN]
    return BrokenPrefix(looks_like, change.lost // size, 1, change.start // size, *shown)


def _requests(log: Path) -> Iterator[tuple[str, bool]]:
    """Yield each request's prompt, and whether it is a text. Raises ConfigError if there is none."""
    found = False
    for line in read_text(log, "--log").split("\n"):  # texts may have other separators of lines
        prompt: Any = _of_json(_TIME.sub("", line))
        if match := _TEXT.search(line) or _IDS.search(line):
            with suppress(SyntaxError, ValueError):
                prompt = ast.literal_eval(match[1])
        if prompt:
            found = True
            if isinstance(prompt, str):
                yield prompt.encode(errors="replace").decode(), True  # there may be half a pair of surrogates
            else:
                yield "".join(chr(min(token, 0x10FFFF)) for token in prompt), False
    if not found:
        raise ConfigError(
            f"--log {log} has no prompts: expected JSONL with messages, prompt, text or input_ids, or what SGLang logs "
            "with --log-requests --log-requests-level 3"
        )


def _of_json(line: str) -> str | Tokens | None:
    """Return the prompt of a line; None if it is no request, such as SGLang's line of an answer."""
    try:
        request: Any = msgspec.json.decode(line, type=dict[str, Any])
    except DECODE_ERRORS:
        return None
    if request.get("event", "request.received") != "request.received":
        return None
    for name in _INSIDE:
        request = inner if isinstance(inner := request.get(name), dict) else request
    for name in ("input_ids", "text", "prompt"):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(request.get(name), str | Tokens)
    tools, turns = (found if isinstance(found := request.get(name), list) else [] for name in ("tools", "messages"))
    said = [f"<|{each.get('role')}|>\n{_said(each.get('content'))}\n" for each in turns if isinstance(each, dict)]
    return "".join([*(f"{_said(each)}\n" for each in tools), *said])


def _said(content: object) -> str:
    """Return a message's content, or a tool, as text."""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
