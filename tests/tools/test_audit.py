"""`kvfetch audit` without a server: divergences of what is known, and what it refuses. tests/e2e/test_audit.py audits
SGLang."""

from __future__ import annotations

import math

import prometheus_client
import pytest
import torch
from msgspec.structs import replace

from harness.engine import free_port
from sgl_kvfetch.tools.audit import AuditedGroup, AuditResult, TopAnswer, _Case, _Export, _Run, compared, divergence
from sgl_kvfetch.tools.sglang_server import samples_of, total
from tests.tools.conftest import kvfetch


def likeliest(logprobs: torch.Tensor, count: int) -> dict[int, float]:
    values, tokens = logprobs.topk(count)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("sharp", [0.5, 3.0])
def test_a_divergence_is_a_lower_bound_that_gets_closer_with_each_known_token(spread: float, sharp: float) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        logits = sharp * torch.randn(200, dtype=torch.float64)
        p = logits.log_softmax(0)
        q = (logits + spread * torch.randn(200, dtype=torch.float64)).log_softmax(0)
        exact = float((p.exp() * (p - q)).sum())
        found = [divergence(likeliest(p, count), likeliest(q, count)) for count in (1, 20, 100, 200)]
        assert found[-1] == pytest.approx(exact, rel=1e-3, abs=1e-4)
        assert all(0 <= each <= exact + 1e-4 for each in found)
    assert divergence(likeliest(p, 20), likeliest(p, 20)) == pytest.approx(0, abs=1e-6)


def test_answers_that_share_no_likely_token_diverge_much() -> None:
    p, q = {1: math.log(0.7), 2: math.log(0.2)}, {3: math.log(0.6), 4: math.log(0.3)}
    # At best, q gives tokens 1 and 2 all of the tenth that is left.
    assert divergence(p, q) > 0.9 * math.log(0.9 / 0.1) - 0.5
    assert divergence(p, q) > 30 * divergence(p, {1: math.log(0.65), 2: math.log(0.2)})


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    tops = [{1: math.log(0.9)}] * 4
    computed = TopAnswer([1, 1, 1, 1], tops, None)
    assert len(compared(computed, computed)) == 4
    assert len(compared(computed, TopAnswer([1, 2, 1, 1], tops, None))) == 2


def test_where_most_tokens_came_from() -> None:
    sources = [TopAnswer([], [], cached).source for cached in (None, {}, {"device": 0}, {"device": 1, "storage": 2})]
    assert sources == ["unknown", "computed", "computed", "storage"]


def test_an_audit_of_nothing_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of which nothing came from a cache were computed three times."""
    answer = TopAnswer([1], [{1: -0.1}], {})
    run = _Run("http://x", None, [8], 1, 1, 0.03, False, 0.0)
    group = run._judged("8 tokens", answer.source, [_Case(8, answer, answer, answer)])
    result = AuditResult("http://x", "model", 0.03, 0, [group])

    async def audited(run: _Run) -> AuditResult:
        return result

    monkeypatch.setattr(_Run, "audit", audited)
    found = kvfetch("audit", "--server", "http://x")
    assert found.exit_code == 1
    assert "nothing compared" in found.stdout
    assert "nothing came from a cache" in found.stdout
    assert "sound" not in found.stdout


def test_audits_that_go_on_export_what_they_find() -> None:
    group = AuditedGroup("turn 1", "storage", 3, 640, 624, 12, 0.4, 0.5, 0.0, 2, 0, "differs")
    export = _Export(free_port())
    export.add(AuditResult("http://x", "model", 0.03, 0, [group, replace(group, source="device", kl=0, found="sound")]))
    found = samples_of(prometheus_client.generate_latest().decode())
    for source, result, kl in ("storage", "differs", 0.4), ("device", "sound", 0):
        assert total(found, "sgl_kvfetch_answers_audited_total", source=source, result=result) == 3
        assert total(found, "sgl_kvfetch_answers_kl", source=source, group="turn 1") == kl
