from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.small_segments import NAMESPACE
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.prompts import page_hashes
from tests.segments import put_all
from tests.tools.conftest import kvfetch_json, said
from tests.tools.test_why import coded

TOKENS = list(range(3, 11))
TEXT = " ".join(f"w{token}" for token in TOKENS)


def store_pages(root: Path, num_pages: int, heads: range, salt: str | None = None) -> str:
    """Store the first pages of TOKENS, of one token each, for one rank of two. Return the namespace."""
    namespace = replace(NAMESPACE, num_heads=2)
    put_all(LocalStore(root), coded(namespace, range(num_pages), heads=heads, salt=salt, tokens=TOKENS))
    return namespace.digest()


def test_pin_list_and_remove(tmp_path: Path, tiny_llama: Path) -> None:
    """A page counts when all heads are stored."""
    root = tmp_path / "store"
    namespace = store_pages(root, 8, range(1))
    store_pages(root, 4, range(1, 2))
    name = page_hashes(TOKENS, 1)[-1].hex()
    assert said("pin", str(root)) == "no pins\n"
    output = said("pin", str(root), "--prompt", TEXT, "--model", str(tiny_llama), "--page-size", "1")
    assert output == f"{name}  {TEXT}\n  8 pages of 1 tokens; stored: 4 in {namespace}\n"
    assert said("pin", str(root)) == output
    said("pin", str(root), "--prompt", str(TOKENS[:3]), "--page-size", "1")
    labels = {pin["label"]: pin["num_pages"] for pin in kvfetch_json("pin", str(root))}
    assert labels == {TEXT: 8, str(TOKENS[:3]): 3}

    (left,) = kvfetch_json("pin", str(root), "--remove", name)
    other = page_hashes(TOKENS, 1)[2].hex()
    assert left["name"] == other
    output = said("pin", str(root), "--remove", other, "--remove", name, exit_code=1)
    assert output == f"FAILED {name}: there was no such pin\nno pins\n"
    assert said("pin", str(root)) == "no pins\n"


def test_a_file_of_prompts(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store_pages(root, 8, range(2), salt="tenant")
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": {TOKENS}}}\n{{"prompt": [1, 2]}}\n')
    options = ("--file", str(file), "--page-size", "1")
    assert [sum(pin["stored_pages"].values()) for pin in kvfetch_json("pin", str(root), *options)] == [0, 0]
    salted = kvfetch_json("pin", str(root), *options, "--cache-salt", "tenant")
    assert [sum(pin["stored_pages"].values()) for pin in salted] == [8, 0]
