"""The fuzzer by the interpreter: few batches of small sizes; for longer, or with other seeds, by environment variables, and
then also by the plans of a GPU, whose programs run at the same time."""

import os

import pytest

from interpreter import together
from warpnorm.fuzz import batches, run
from warpnorm.fuzz.kinds import Kind

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


@pytest.mark.skipif(not MINUTES, reason="takes minutes: WARPNORM_TEST_FUZZ_MINUTES")
@pytest.mark.usefixtures("as_chosen")
@pytest.mark.parametrize("words", [("layer_norm",), ("rms_norm",), ("batch_norm",), ("group_norm",)], ids=" ".join)
def test_random_calls_as_a_gpu_would(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of which each takes another pattern, none of them much work."""

    def large(draws: batches.Draws, kind: Kind, has_gpu: bool) -> batches.Inner:
        if kind.is_twice:
            return inner_of(draws, kind, False)
        return batches._large_rows(draws, kind) if kind.cols else batches._large_images(draws, kind)

    inner_of = batches.inner_of
    monkeypatch.setattr(batches, "inner_of", large)
    monkeypatch.setattr(batches, "COUNTS", {"plain": (4,), "fused": (3,)})
    monkeypatch.setattr(batches, "LARGEST_ON_GPU", 1 << 20)
    monkeypatch.setattr(batches, "CHANNELS", (8, 16, 24))
    monkeypatch.setattr(batches, "SIDES", (7, 8, 14, 16, 28, 32, 56))
    monkeypatch.setattr(batches, "MOST_SAMPLES", 40)
    with together.at_once(SEED):
        found = run.fuzz(run.Limits(60 * MINUTES), SEED, "cpu", words)
    print(found.summary)
    assert found.failures == [], [(failure.why, failure.code) for failure in found.failures]
    assert found.cases >= 4
