"""The fuzzer by the interpreter: few batches of small sizes."""

import pytest

from warpnorm.fuzz import run, strategies


@pytest.mark.parametrize("words", [("plain",), ("fused", "layer_norm", "float32")], ids=" ".join)
def test_random_calls(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "LEAST", {"plain": (3,), "fused": (2,)})
    monkeypatch.setattr(strategies, "LARGEST", 1 << 10)
    found = run.fuzz(60, 0, "cpu", words, batches=4)
    assert found.failures == [], [(failure.why, failure.code) for failure in found.failures]
    assert found.cases >= 4
