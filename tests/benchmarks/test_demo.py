from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import demo
from benchmarks.prose import prose


def test_the_prose_is_english_and_long() -> None:
    text = prose()
    assert len(text) > 300_000
    assert text.startswith('The "assert" statement')
    assert " the " in text[:1000]


def test_a_prompt_holds_the_question_after_as_much_text_as_fits(tiny_llama: Path) -> None:
    text = " ".join(f"w{3 + i % 500}" for i in range(6000))
    ids = demo._asked(tiny_llama, text, "w7 w8 w9")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert abs(len(ids) - demo._PROMPT_TOKENS) <= 4
    assert tokenizer.decode(ids).split()[-3:] == ["w7", "w8", "w9"]
    assert tokenizer.decode(ids).split()[:2] == ["w3", "w4"]


@pytest.mark.slow
@pytest.mark.sglang
def test_without_the_real_model_a_random_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "is_available", lambda: False)
    assert demo.main(["--link-gbps", "0.2", "--picture", str(tmp_path / "demo.png")]) == 0
    said = capsys.readouterr().out
    assert "small random model is used" in said
    assert "raw bytes reused" in said
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
