"""Models of the transformers library, small and randomly initialised: a patched one computes what it did, learns as it did,
and compiles as it did."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warpnorm

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
TEXT = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 3}
STEPS = 20


def make(model: str, config: str, **arguments: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**arguments))


# The model, how many norms it has, and what they are
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int, str]] = {
    "llama": (make("LlamaForCausalLM", "LlamaConfig", **TEXT), 5, "rms_norm with weight"),
    "gemma": (make("Gemma3ForCausalLM", "Gemma3TextConfig", **TEXT), 13, "rms_norm with 1 + weight"),
    "qwen3": (make("Qwen3ForCausalLM", "Qwen3Config", **TEXT), 9, "rms_norm with weight"),
    "olmo": (make("OlmoForCausalLM", "OlmoConfig", **TEXT), 5, "layer_norm"),
    "mamba2": (
        make(
            "Mamba2ForCausalLM", "Mamba2Config", hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1,
            num_hidden_layers=2, vocab_size=96, chunk_size=8,
        ),
        5,
        "rms_norm of x * silu(gate) with weight",
    ),
    "t5": (
        make(
            "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            vocab_size=96, dropout_rate=0.0, decoder_start_token_id=0,
        ),
        12,
        "rms_norm with weight",
    ),
    "bert": (make("BertForMaskedLM", "BertConfig", **SIZES, **NO_DROPOUT), 6, "warpnorm.nn.LayerNorm"),
    "vit": (
        make("ViTForImageClassification", "ViTConfig", **SIZES, **NO_DROPOUT, image_size=32, patch_size=8, num_labels=3),
        5,
        "warpnorm.nn.LayerNorm",
    ),
    "convnext": (
        make("ConvNextForImageClassification", "ConvNextConfig", **STAGES, image_size=32),
        9,
        "layer_norm with weight and bias over channels",
    ),
    "resnet": (
        make("ResNetForImageClassification", "ResNetConfig", **STAGES, embedding_size=8, layer_type="basic"),
        12,
        "warpnorm.nn.BatchNorm2d",
    ),
}  # fmt: skip
IMAGES = ("vit", "convnext", "resnet")


def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module, warpnorm.integrate.patch.Report]:
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    patched = copy.deepcopy(model)
    return model, patched, warpnorm.patch(patched)


def batch(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name in IMAGES:
        images = torch.randn(4, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 1, 2, 0])}
    tokens = torch.randint(3, 96, (3, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).detach().double().norm() / right.detach().double().norm())


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name: str) -> None:
    model, patched, report = pair(name)
    _make, count, what = MODELS[name]
    assert len(report.swapped) == count, report
    assert report.left == ()
    assert what in {change.what for change in report.swapped}
    right, found = model(**batch(name)), patched(**batch(name))
    assert distance(found.logits, right.logits) < 2e-6
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=1e-6)
    right.loss.backward()
    found.loss.backward()
    for (key, a), b in zip(patched.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        if a.grad is not None and b.grad is not None and float(b.grad.norm()) > 1e-6:
            assert distance(a.grad, b.grad) < 1e-5, key
    for a, b in zip(patched.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["llama", "gemma", "resnet"])
def test_training_follows(name: str) -> None:
    model, patched, _report = pair(name)
    losses = []
    for one in (model, patched):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        of_steps = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = one(**batch(name)).loss
            loss.backward()
            optimizer.step()
            of_steps.append(loss.detach())
        losses.append(torch.stack(of_steps))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_same_tokens(name: str) -> None:
    tokens = batch(name)["input_ids"]
    right, found = (
        model.eval().generate(tokens, max_new_tokens=8, do_sample=False) for model in pair(name)[:2]  # type: ignore[operator]
    )  # fmt: skip
    assert found.equal(right)
    assert found.shape[1] == tokens.shape[1] + 8


@pytest.mark.parametrize("name", ["gemma", "convnext"])
def test_it_compiles_whole(name: str) -> None:
    model, patched, _report = pair(name)
    right = model(**batch(name))
    found = torch.compile(patched, fullgraph=True, backend="aot_eager")(**batch(name))
    assert distance(found.logits, right.logits) < 2e-6
    found.loss.backward()


@pytest.mark.parametrize("name", ["llama", "mamba2", "convnext"])
def test_put_back_bit_by_bit(name: str) -> None:
    model, patched, report = pair(name)
    assert len(warpnorm.unpatch(patched).swapped) == len(report.swapped)
    assert [type(m) for m in patched.modules()] == [type(m) for m in model.modules()]
    right, found = model(**batch(name)), patched(**batch(name))
    assert found.logits.equal(right.logits)
    assert list(patched.state_dict()) == list(model.state_dict())
