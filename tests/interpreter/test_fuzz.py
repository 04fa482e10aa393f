"""The fuzzer by the interpreter: few batches of small sizes."""

import pytest

from warpnorm.fuzz import batches, run


@pytest.mark.parametrize("words", [("plain",), ("fused", "layer_norm", "float32")], ids=" ".join)
def test_random_calls(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "COUNTS", {"plain": (3,), "fused": (2,)})
    monkeypatch.setattr(batches, "LARGEST", 1 << 10)
    found = run.fuzz(run.Limits(60, functions=4), 0, "cpu", words)
    assert found.failures == [], [(failure.why, failure.code) for failure in found.failures]
    assert found.cases >= 4
