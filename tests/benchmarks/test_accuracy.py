from pathlib import Path

import pytest

from benchmarks.accuracy import _compare, main
from harness.engine import Generation


def answer(ids: list[int], logprobs: list[float], storage: int = 0) -> Generation:
    return Generation("", ids, logprobs, storage, {"storage": storage}, 0.0, {})


def test_answers_are_compared_as_long_as_they_are_alike() -> None:
    computed = [answer([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0]), answer([5, 6, 7, 8], [-2.0] * 4)]
    restored = [answer([1, 2, 3, 4], [-1.0, -1.2, -1.0, -1.0], 32), answer([5, 9, 7, 8], [-2.2, -9.0, -9.0, -9.0], 16)]
    row = _compare("klt", computed, restored, [[0] * 40, [0] * 24], 0.8)
    assert (row.equal_answers, row.equal_first_tokens, row.prompts) == (1, 2, 2)
    assert row.from_storage == 48 / 64
    assert row.equal_tokens == 5 / 8
    assert row.logprob_change_max == pytest.approx(0.2)
    assert row.logprob_change_mean == pytest.approx(0.4 / 5)


def test_a_cached_reference_is_none() -> None:
    with pytest.raises(SystemExit, match="cached before it was computed"):
        _compare("klt", [answer([1], [-1.0], 16)], [answer([1], [-1.0], 16)], [[0] * 40], 0.8)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--configs", "int4"], "'int4' is unknown; known are exact, uint8, cachegen, klt and klt:TARGET_KL"),
        (["--configs", "klt"], "'klt' needs --profile"),
        (["--prompts", "0"], "--prompts is 0; expected 1 or more"),
        (["--prompt-tokens", "16"], "--prompt-tokens is 16; expected 32 or more"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "m", "--text", "t", *argv])
    assert message in capsys.readouterr().err


def test_too_little_text_is_named(tmp_path: Path) -> None:
    from harness.models import make_tiny_llama

    model = make_tiny_llama(tmp_path / "m", num_layers=1, vocab_size=64)
    (tmp_path / "t").write_text("w5 w6 w7")
    with pytest.raises(SystemExit, match="the text has 0 windows of 768 tokens, expected 50"):
        main(["--model", str(model), "--text", str(tmp_path / "t")])
