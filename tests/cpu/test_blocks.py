"""The ready-made modules: what they compute is a contract; here is what else modules do."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import warpnorm
from kernel_contracts.blocks_contract import *  # noqa: F403
from kernel_contracts.blocks_contract import BLOCKS, COLS, given_to, random_parameters, results
from warpnorm.errors import InputError, InputTypeError


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.mark.parametrize("name", BLOCKS)
def test_copies_pickles_and_state(name: str) -> None:
    module = BLOCKS[name].make()
    random_parameters(module)
    given = given_to(BLOCKS[name], "cpu", torch.float32)
    before = copy.deepcopy(module)
    right = results(module, module, given)
    buffer = io.BytesIO()
    torch.save(before, buffer)
    buffer.seek(0)
    loaded = BLOCKS[name].make()
    loaded.load_state_dict(before.state_dict())
    for twin in (pickle.loads(pickle.dumps(before)), torch.load(buffer, weights_only=False), loaded, before):
        assert all(a.equal(b) for a, b in zip(results(twin, twin, given), right, strict=True))


@pytest.mark.parametrize("name", [name for name in BLOCKS if not name.startswith(("batch", "group"))])
def test_they_are_one_launch_and_a_small_sum(name: str) -> None:
    """Of norms over rows; by channel there are as many as the norm alone has."""
    module = BLOCKS[name].make()
    given = [t.requires_grad_() for t in given_to(BLOCKS[name], "cpu", torch.float32)]
    fused = module._normalize if name == "qk" else module.forward
    given = [given[0][..., :3, :], module._is_query(given[0].device)] if name == "qk" else given
    found = warpnorm.explain(fused, *given, target="sm_90")
    assert len(found.forward.launches) == 1
    assert found.backward is not None
    assert [launch for launch, _ in found.backward.launches][1:] in ([], ["column_sum_kernel"])


@pytest.mark.parametrize("name", BLOCKS)
def test_they_compile_whole(name: str) -> None:
    module = BLOCKS[name].make().eval()
    given = given_to(BLOCKS[name], "cpu", torch.float32)
    right, found = module(*given), torch.compile(module, fullgraph=True, backend="eager")(*given)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", BLOCKS)
def test_hooks_run_around_them(name: str) -> None:
    """Each time, also where the fused function is `forward` itself; so does what others keep in a module."""
    module, given = BLOCKS[name].make(), given_to(BLOCKS[name], "cpu", torch.float32)
    right = copy.deepcopy(module)(*given)
    right = right if isinstance(right, tuple) else (right,)
    module.of_others = object()  # such as what a library that shards or offloads models keeps there
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    for _ in range(2):
        seen.clear()
        leaves = [t.clone().requires_grad_() for t in given]
        outputs = module(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([o.sum() for o in outputs]).sum().backward()
        assert seen == ["before", "after", "backward"]
    assert all(found.equal(expected) for found, expected in zip(outputs, right, strict=True))


@pytest.mark.parametrize("kind", [warpnorm.nn.AddLayerNorm, warpnorm.nn.AddRMSNorm])
def test_dropout(kind: Any) -> None:
    module = kind(COLS, dropout=0.25)
    x, residual = torch.ones(400, COLS, requires_grad=True), torch.zeros(400, COLS)
    torch.manual_seed(0)
    output, h = module(x, residual)
    assert h.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((h == 0).float().mean().item() - 0.25) < 0.02
    h.sum().backward()
    torch.testing.assert_close(x.grad, h.detach())
    module.eval()
    assert module(x, residual)[1].equal(x)
    assert "dropout=0.25" in repr(module)
    assert output.shape == x.shape


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", [warpnorm.nn.AddLayerNorm, warpnorm.nn.AddRMSNorm])
def test_a_stream_begins_without_a_residual(kind: Any, dropout: float) -> None:
    """As with one of zeros, in every way that a module is called."""
    module = kind(COLS, eps=1e-5, dropout=dropout).eval()
    x = torch.randn(400, COLS, requires_grad=True)
    right, begun = module(x, torch.zeros(400, COLS))
    traced = torch.fx.symbolic_trace(module, concrete_args={"residual": None})
    for output, h in (module(x), module(x, None), module(x, residual=None), traced(x), copy.deepcopy(module)(x)):
        assert h.equal(begun)
        torch.testing.assert_close(output, right)
    expected = torch.autograd.grad((right * begun).sum(), (x, module.weight), retain_graph=True)
    output, h = module(x)
    for found, true in zip(torch.autograd.grad((output * h).sum(), (x, module.weight)), expected, strict=True):
        torch.testing.assert_close(found, true)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        module(torch.randn(4, COLS + 1))
    if dropout:
        output, h = module.train()(x)
        assert 0.4 < (h == 0).float().mean() < 0.6


def test_running_statistics_are_those_of_batch_norm() -> None:
    ours, theirs = warpnorm.nn.BatchNormReLU2d(8), torch.nn.BatchNorm2d(8)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, 5, 5)
        torch.testing.assert_close(ours(x), F.relu(theirs(x)))
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_the_mean_of_all_batches() -> None:
    ours, theirs = warpnorm.nn.BatchNormReLU2d(8, momentum=None), torch.nn.BatchNorm2d(8, momentum=None)
    for seed in range(3):
        torch.manual_seed(seed)
        x, residual = torch.randn(2, 4, 8, 5, 5)
        torch.testing.assert_close(ours(x, residual), F.relu(theirs(x) + residual))
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours.eval()(x), F.relu(theirs.eval()(x)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [warpnorm.nn.BatchNormReLU2d, warpnorm.nn.SyncBatchNormReLU2d])
def test_a_batch_that_is_refused_leaves_no_trace(kind: Any, momentum: float | None) -> None:
    """As of BatchNorm2d: neither is it counted nor averaged."""
    module, x = kind(8, momentum=momentum), torch.randn(4, 8, 5, 5)
    module(x)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for refused in (
        (torch.randn(1, 8, 1, 1),), (x[:, :3],), (x.long(),), (x, x[:3]), (x, "residual"), (x, torch.ones(4, 7, 5, 5)),
    ):  # fmt: skip
        with pytest.raises(warpnorm.WarpnormError):
            module(*refused)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_another_dtype(momentum: float | None) -> None:
    """Batches so small that PyTorch's operators run are taken as large ones are, and as BatchNorm2d takes them."""
    ours, theirs = warpnorm.nn.BatchNormReLU2d(8, momentum=momentum), warpnorm.nn.BatchNorm2d(8, momentum=momentum)
    for shape in ((2, 8, 4, 4), (16, 8, 32, 32)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(ours(x), F.relu(theirs(x)))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


TWO, THREE = torch.ones(2, 64), torch.ones(3, 64)
ROWS = (
    warpnorm.nn.AddRMSNorm, warpnorm.nn.AddLayerNorm, warpnorm.nn.GatedRMSNorm, warpnorm.nn.RMSNormFloat8,
)  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_what_does_not_fit_beside_the_input_is_refused(kind: Any) -> None:
    """In one sentence: it was PyTorch's, of a tensor that nobody has made."""
    module, name = kind(64), kind.__name__
    with pytest.raises(
        InputError, match=rf"^{name}: \w+ has shape \(3, 64\), but input has shape \(2, 64\): it must be"
    ):
        module(TWO, THREE)
    has_default = kind in ROWS[:2]  # they begin a residual stream
    for given in ((None,) if has_default else (TWO, None), (TWO, "gate"), (None, TWO)):
        with pytest.raises(InputTypeError, match=rf"^{name}: \w+ must be a tensor, but is of type (NoneType|str)$"):
            module(*given)
    module(TWO, THREE[:1])


@pytest.mark.parametrize("kind", [warpnorm.nn.AddRMSNorm, warpnorm.nn.AddLayerNorm])
@pytest.mark.parametrize("residual", [THREE, torch.ones(3, 2, 64), torch.ones(3, 1), 0.5], ids=range(4))
def test_a_residual_may_broadcast(kind: Any, residual: Any) -> None:
    x = torch.randn(3, 2, 64)[0] if getattr(residual, "ndim", 0) == 3 else torch.randn(3, 64)
    torch.testing.assert_close(kind(64)(x, residual)[1], x + residual)


def test_no_size_is_held_on_to() -> None:
    """By a look at it, where a module is part of a fused function: each number of rows would be captured anew."""
    module = warpnorm.nn.AddRMSNorm(64)
    fused = warpnorm.fuse(lambda x, residual: module(x, residual)[0] * 2)
    for rows in (2, 3, 4):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(fused(x, x), module(x, x)[0] * 2)
    assert sum(map(len, fused._captured.values())) == 1


def test_queries_are_known_after_a_start_on_meta() -> None:
    with torch.device("meta"):
        module = warpnorm.nn.QKNorm(8, 2, 1)
    module = module.to_empty(device="cpu")
    module.load_state_dict({"q_weight": torch.full((8,), 2.0), "k_weight": torch.full((8,), 3.0)})
    x = torch.randn(4, 4, 8)
    q, k, _v = module(x)
    torch.testing.assert_close(q, F.rms_norm(x[:, :2], (8,), eps=1e-6) * 2)
    torch.testing.assert_close(k, F.rms_norm(x[:, 2:3], (8,), eps=1e-6) * 3)
    assert {t.dtype for t in module(x.bfloat16())} == {torch.bfloat16}


def test_packed_heads_are_not_copied() -> None:
    module = warpnorm.nn.QKNorm(16, q_heads=4, k_heads=2)
    packed = torch.randn(2, 5, 8 * 16)
    q, k, v = module(packed.view(2, 5, 8, 16))
    assert (q.shape, k.shape, v.shape) == ((2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16))
    assert v.data_ptr() == packed.data_ptr() + 6 * 16 * 4
    assert list(module.state_dict()) == ["q_weight", "k_weight"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: warpnorm.nn.AddRMSNorm(8, dropout=1.0), "less than 1, but it is 1.0"),
        (lambda: warpnorm.nn.AddLayerNorm(8, dropout=-0.5), "at least 0"),
        (lambda: warpnorm.nn.AdaLayerNorm((2, 8)), "one dimension"),
        (lambda: warpnorm.nn.RMSNormFloat8(8, float8=torch.float16), "torch.float8_e4m3fn"),
        (lambda: warpnorm.nn.QKNorm(8, 2, 2)(torch.ones(3, 3, 8)), "at least 4 heads, but input has shape (3, 3, 8)"),
        (lambda: warpnorm.nn.QKNorm(8, 2, 2)(torch.ones(3, 6, 4)), "(..., heads, 8)"),
        (lambda: warpnorm.nn.QKNorm(16, -4, 2), "q_heads and k_heads not negative, but they are 16, -4 and 2"),
        (lambda: warpnorm.nn.QKNorm(16, 4, -2), "not negative"),
        (lambda: warpnorm.nn.QKNorm(0, 4, 2), "head_dim must be positive"),
        (
            lambda: warpnorm.nn.AdaLayerNorm(8)(torch.ones(2, 3, 8), torch.ones(3, 8), torch.ones(2, 8)),
            "scale has shape",
        ),
        (
            lambda: warpnorm.nn.AdaLayerNorm(8)(torch.ones(2, 3, 8), torch.ones(2, 8), torch.ones(2, 7)),
            "shift has shape",
        ),
        (lambda: warpnorm.nn.BatchNormReLU2d(8)(torch.ones(3, 8)), "expected 4D input"),
    ],
    ids=range(12),
)
def test_what_cannot_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises((InputError, ValueError)) as caught:
        make()
    assert says in str(caught.value)


@pytest.mark.parametrize("shape", [(), (2048,), (1, 2048), (3, 2048), (3, 1, 2048), (3, 5, 2048)], ids=str)
def test_a_modulation_for_all_for_samples_and_for_tokens(shape: tuple[int, ...]) -> None:
    x, scale, shift = (torch.randn(s, dtype=torch.float64) for s in ((3, 5, 2048), shape, shape))
    inputs = [t.requires_grad_() for t in (x, scale, shift)]
    spread = [t[:, None] if t.ndim == 2 else t for t in (scale, shift)]
    expected = F.layer_norm(x, (2048,)) * (1 + spread[0]) + spread[1]
    found = warpnorm.nn.AdaLayerNorm(2048)(x, scale, shift)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 1, 1, 1, 8)], ids=str)
def test_a_modulation_that_fits_nowhere_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="x has 4 dimensions, so it must be"):
        warpnorm.nn.AdaLayerNorm(8)(torch.randn(3, 5, 2, 8), torch.randn(shape), torch.randn(3, 8))


@pytest.mark.parametrize(("narrow", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
@pytest.mark.parametrize("cols", [16, 64, 2048])
def test_parameters_of_fewer_bits_than_the_input(cols: int, narrow: torch.dtype, wide: torch.dtype) -> None:
    """Small inputs run as plain PyTorch, whose operators refuse them; what a call takes must not depend on its size."""
    nn = warpnorm.nn
    x, other = torch.randn(2, 8, cols, dtype=wide), torch.randn(8, cols, dtype=wide)
    calls: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {
        "AddLayerNorm": (nn.AddLayerNorm(cols, dtype=narrow), (x[0], other)),
        "AddRMSNorm": (nn.AddRMSNorm(cols, dtype=narrow), (x[0], other)),
        "AdaLayerNorm": (nn.AdaLayerNorm(cols, elementwise_affine=True, dtype=narrow), (x, other[:2], other[2:4])),
        "GroupNormSiLU": (nn.GroupNormSiLU(4, 8, dtype=narrow), (x,)),
        "BatchNormReLU2d": (nn.BatchNormReLU2d(8, dtype=narrow), (x[..., None],)),
    }
    for name, (module, given) in calls.items():
        random_parameters(module)
        found, wanted = module(*given), copy.deepcopy(module).to(wide)(*given)
        torch.testing.assert_close(found, wanted, msg=name)
        if name != "BatchNormReLU2d":  # which needs a batch, and counts
            module(*(tensor[:0] for tensor in given))
            torch.func.jvp(module, given, given)
            torch.testing.assert_close(torch.compile(module, backend="aot_eager")(*given), wanted, msg=name)


def test_one_norm_of_small_and_large_images() -> None:
    """PyTorch's operator, which the small ones take, saves the running statistics that the large ones average into."""
    norms = [of(16) for of in (warpnorm.nn.BatchNorm2d, warpnorm.nn.BatchNormReLU2d, torch.nn.BatchNorm2d)]
    small, large = (torch.randn(2, 16, n, n) for n in (8, 64))
    for norm in norms:
        (norm(small).square().sum() + norm(large).square().sum()).backward()
    for a, b, c in zip(*(norm.buffers() for norm in norms), strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)
    torch.testing.assert_close(norms[0].weight.grad, norms[2].weight.grad)


def test_qk_norm_of_fakes_after_real_ones() -> None:
    warpnorm.nn.QKNorm(64, 4, 2)(torch.randn(3, 8, 64))
    with FakeTensorMode():
        shapes = [t.shape for t in warpnorm.nn.QKNorm(64, 4, 2)(torch.randn(3, 8, 64))]
    assert shapes == [(3, 4, 64), (3, 2, 64), (3, 2, 64)]
