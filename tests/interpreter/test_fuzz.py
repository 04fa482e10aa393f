"""The fuzzer by the interpreter: few batches of small sizes; for longer, or with other seeds, by environment variables."""

import os

import pytest

from warpnorm.fuzz import batches, run

MINUTES = float(os.environ.get("WARPNORM_TEST_FUZZ_MINUTES", "0"))
SEED = int(os.environ.get("WARPNORM_TEST_FUZZ_SEED", "0"))
WORDS = [("plain",), ("fused", "layer_norm", "float32"), *([("fused",)] if MINUTES else [])]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_random_calls(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "COUNTS", {"plain": (3,), "fused": (2,)})
    monkeypatch.setattr(batches, "LARGEST", 1 << 10)
    limits = run.Limits(60 * MINUTES) if MINUTES else run.Limits(60, functions=4)
    found = run.fuzz(limits, SEED, "cpu", words)
    print(found.summary)
    assert found.failures == [], [(failure.why, failure.code) for failure in found.failures]
    assert found.cases >= 4
