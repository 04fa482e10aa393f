"""Contract: a norm by channel that was seen before computes what the first call does, averages into the running statistics
as that does, and takes the same way only where nothing that decides about it has changed."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import warpnorm
from kernel_contracts.repeat_contract import FRESH, launchers
from warpnorm import functional, repeat, repeat_channels, settings
from warpnorm.errors import InputError
from warpnorm.launch import launcher

# On a CPU fewer elements are not worth native code
SHAPE = (3, 6, 5, 8) if settings.is_interpreting() else (2, 6, 128, 96)


@pytest.fixture(autouse=True, params=launchers())
def by_launcher(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nothing was seen so far."""
    repeat_channels._seen.clear()
    with settings.override(launcher=request.param, keep_bytes=next(FRESH)):
        yield request.param


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, by_launcher: str) -> list[str]:
    """Which way each call took."""
    taken: list[str] = []

    def noted(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*rest: Any, **more: Any) -> Any:
            found = function(*rest, **more)
            if found is not None:
                taken.append(way)
            return found

        return noting

    monkeypatch.setattr(functional, "_by_channel_kernels", noted("long", functional._by_channel_kernels))
    monkeypatch.setattr(repeat_channels.ChannelRepeat, "run", noted("python", repeat_channels.ChannelRepeat.run))
    found = launcher.find(repeat._set_up, 0) if by_launcher == "compiled" else None
    monkeypatch.setattr(repeat, "quick", found and noted("compiled", found.call))
    return taken


def expected_ways(by_launcher: str, calls: int) -> list[str]:
    return ["long", "python", *["compiled" if by_launcher == "compiled" else "python"] * (calls - 2)]


def images(device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """An input, a weight and a bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (SHAPE, SHAPE[1:2], SHAPE[1:2])
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def buffers(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Running statistics."""
    return [torch.full(SHAPE[1:2], value, device=device, dtype=dtype) for value in (0.5, 2.0)]


CALLS: dict[str, Callable[..., Any]] = {
    "training": lambda of, x, w, b, mean, var: of.batch_norm(x, mean, var, w, b, True, 0.3),
    "untracked": lambda of, x, w, b, mean, var: of.batch_norm(x, None, None, w, b, True),
    "bare": lambda of, x, w, b, mean, var: of.batch_norm(x, mean, var, None, None, True, 0.3),
    "evaluation": lambda of, x, w, b, mean, var: of.batch_norm(x, mean, var, w, b, False),
    "groups": lambda of, x, w, b, mean, var: of.group_norm(x, 3, w, b),
    "bare_groups": lambda of, x, w, b, mean, var: of.group_norm(x, 2, w, None),
    "instances": lambda of, x, w, b, mean, var: of.instance_norm(x, None, None, w, b),
}
# On a CPU where PyTorch's operators are quicker, nothing is seen
ON_A_CPU = ("training", "untracked", "bare")


def cases() -> list[str]:
    return list(CALLS) if settings.is_interpreting() or torch.cuda.is_available() else list(ON_A_CPU)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", cases())
def test_again_is_as_the_first(name: str, needs_grad: bool, device: str, ways: list[str], by_launcher: str) -> None:
    call = CALLS[name]
    for seed in range(4):
        given = [o.requires_grad_(needs_grad) for o in images(device, seed)]
        ours, theirs = buffers(device), buffers(device)
        output, expected = call(warpnorm, *given, *ours), call(F, *given, *theirs)
        torch.testing.assert_close(output, expected)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        if needs_grad:
            used = [given[0]] if name == "bare" else given[:2] if name == "bare_groups" else given
            grad = torch.randn_like(output)
            found = torch.autograd.grad(output, used, grad)
            for a, b in zip(found, torch.autograd.grad(expected, used, grad), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert ways == expected_ways(by_launcher, 4)


def test_bits_are_those_of_the_first(device: str, ways: list[str]) -> None:
    given = [o.requires_grad_() for o in images(device)]
    grad = torch.randn_like(given[0])
    found = []
    for _ in range(5):
        running = buffers(device)
        output = warpnorm.batch_norm(given[0], *running, *given[1:], True)
        found.append((output, *running, *torch.autograd.grad(output, given, grad)))
    for results in found[1:]:
        assert all(a.equal(b) for a, b in zip(results, found[0], strict=True))
    assert "long" not in ways[1:]


def test_the_momentum_may_change(device: str, ways: list[str], by_launcher: str) -> None:
    x, w, b = images(device)
    for momentum in (0.1, 0.1, 0.25, 1.0, 0.0, 1 / 3):
        ours, theirs = buffers(device), buffers(device)
        warpnorm.batch_norm(x, *ours, w, b, True, momentum)
        F.batch_norm(x, *theirs, w, b, True, momentum)
        for a, b_ in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b_)
    assert ways == expected_ways(by_launcher, 6)
    warpnorm.batch_norm(x, *buffers(device), w, b, True, 1)  # no float
    assert ways[-1] == "long"


def test_no_momentum_is_none_of_a_call_before(device: str) -> None:
    """Which read memory that is not its own, once there had been a call with one."""
    x, w, b = images(device)
    for _ in range(3):
        warpnorm.batch_norm(x, *buffers(device), w, b, True)
    running = buffers(device)
    with pytest.raises(TypeError, match="momentum must be a float"):
        warpnorm.batch_norm(x, *running, w, b, True, None)
    assert all(torch.equal(a, b) for a, b in zip(running, buffers(device), strict=True))


@pytest.mark.parametrize("name", cases())
def test_checkpoints(name: str, device: str) -> None:
    """What is computed again, by a call that was seen before, has saved the same as the first."""
    for seed in range(4):
        given = [o.requires_grad_() for o in images(device, seed)]
        used = [given[0]] if name == "bare" else given[:2] if name == "bare_groups" else given
        found = []
        for of in (warpnorm, F):
            running = dict(zip(("mean", "var"), buffers(device), strict=True))  # not saved, as a module's are not
            output = checkpoint(partial(CALLS[name], of, **running), *given, use_reentrant=False)
            grad = torch.ones_like(output) + output.detach()
            found.append(torch.autograd.grad(output, used, grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_what_others_have_too_is_not_averaged_into(device: str) -> None:
    """Memory that is copied when somebody writes into it."""
    x, w, b = images(device)
    for _ in range(4):
        shared = buffers(device)
        running = [torch._lazy_clone(t) for t in shared]
        warpnorm.batch_norm(x, *running, w, b, True)
        for a, b_ in zip(shared, buffers(device), strict=True):
            assert torch.equal(a, b_)
        assert not torch.equal(running[0], shared[0])


def test_a_module_that_counts_its_batches(device: str, ways: list[str], by_launcher: str) -> None:
    """Whose momentum is another one for every batch."""
    ours, theirs = (of(SHAPE[1], momentum=None).to(device) for of in (warpnorm.nn.BatchNorm2d, torch.nn.BatchNorm2d))
    for seed in range(5):
        x = images(device, seed)[0]
        torch.testing.assert_close(ours(x), theirs(x))
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert ways == expected_ways(by_launcher, 5)


def test_who_saved_the_running_statistics_learns_of_it(device: str, ways: list[str]) -> None:
    x, w, b = images(device)
    mean, var = buffers(device)
    for _ in range(4):
        leaf = torch.ones_like(mean).requires_grad_()
        product = leaf * mean
        before = mean._version, var._version
        warpnorm.batch_norm(x, mean, var, w, b, True)
        assert (mean._version, var._version) == (before[0] + 1, before[1] + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    assert "long" not in ways[1:]


def test_what_decides_is_in_the_key(device: str, ways: list[str]) -> None:
    x, w, b = images(device)
    mean, var = buffers(device)
    tall = torch.randn(SHAPE[0], 2 * SHAPE[1], *SHAPE[2:], device=device)
    calls = {
        "plain": lambda of: of.batch_norm(x, mean.clone(), var.clone(), w, b, True),
        "eps": lambda of: of.batch_norm(x, mean.clone(), var.clone(), w, b, True, eps=1e-2),
        "no_bias": lambda of: of.batch_norm(x, mean.clone(), var.clone(), w, None, True),
        "no_weight": lambda of: of.batch_norm(x, mean.clone(), var.clone(), None, b, True),
        "untracked": lambda of: of.batch_norm(x, None, None, w, b, True),
        "slice": lambda of: of.batch_norm(tall[:, : SHAPE[1]], mean.clone(), var.clone(), w, b, True),
        "flat": lambda of: of.batch_norm(x.flatten(2), mean.clone(), var.clone(), w, b, True),
    }
    for name, call in calls.items():
        ways.clear()
        for _ in range(3):
            torch.testing.assert_close(call(warpnorm), call(F), msg=name)
        assert ways[0] == "long", name
        assert "long" not in ways[1:], name


def test_statistics_in_memory_that_is_read(device: str, ways: list[str]) -> None:
    """Which the kernels cannot average meanwhile."""
    x, w, b = images(device)
    mean, var = buffers(device)
    for _ in range(3):
        warpnorm.batch_norm(x, mean, var, w, b, True)
    both = torch.stack([mean, var, w])
    ours, theirs = both.clone(), both.clone()
    for _ in range(2):
        ways.clear()
        output = warpnorm.batch_norm(x, ours[0], ours[1], ours[2], b, True)
        torch.testing.assert_close(output, F.batch_norm(x, theirs[0], theirs[1], theirs[2], b, True))
        torch.testing.assert_close(ours, theirs)
        assert ways == ["long"]


def test_bad_input_is_still_refused(device: str) -> None:
    x, w, b = images(device)
    mean, var = buffers(device)
    for _ in range(4):
        warpnorm.batch_norm(x, mean, var, w, b, True)
    before = mean.clone()
    with pytest.raises(InputError, match="requires a gradient"):
        warpnorm.batch_norm(x, mean.clone().requires_grad_(), var, w, b, True)
    with pytest.raises((InputError, TypeError)):
        warpnorm.batch_norm(x, mean, var, w, b, 1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="shape"):
        warpnorm.batch_norm(x, mean, var, w[:-1], b, True)
    with pytest.raises(InputError, match="both be given"):
        warpnorm.batch_norm(x, mean, None, w, b, True)
    assert mean.equal(before)


def test_differentiated_twice(device: str) -> None:
    def penalty(of: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        output = of.batch_norm(given[0], None, None, *given[1:], True)
        first = torch.autograd.grad(output.square().mean(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    given = [o.requires_grad_() for o in images(device, dtype=torch.float64)]
    expected = penalty(F, given)
    for _ in range(4):
        for a, b in zip(penalty(warpnorm, given), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-10)


def test_gradients_of_other_layouts(device: str) -> None:
    """An expanded gradient, as of a sum, one of a slice, and none for some operands."""
    given = images(device)
    wide = torch.randn(*SHAPE[:-1], 2 * SHAPE[-1], device=device)[..., ::2]
    for needed in ((True, True, True), (False, True, False), (True, False, True)):
        leaves = [o.detach().requires_grad_(need) for o, need in zip(given, needed, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        for grad in (torch.ones((), device=device).expand(SHAPE), wide):
            for _ in range(4):
                output, expected = (of.batch_norm(leaves[0], None, None, *leaves[1:], True) for of in (warpnorm, F))
                found = torch.autograd.grad(output, wanted, grad)
                for a, b in zip(found, torch.autograd.grad(expected, wanted, grad), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_many_gradients_at_once(device: str) -> None:
    given = [o.requires_grad_() for o in images(device)]
    grads = torch.randn(3, *SHAPE, device=device)

    def find(of: Any) -> tuple[torch.Tensor, ...]:
        output = of.batch_norm(given[0], None, None, *given[1:], True)
        return torch.autograd.grad(output, given, grads, is_grads_batched=True)

    expected = find(F)
    for _ in range(4):
        for a, b in zip(find(warpnorm), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def fused_norms() -> dict[str, Callable[..., Any]]:
    """Functions of an input, a second one, a weight, a bias and running statistics."""
    return {
        "relu": lambda x, r, w, b, mean, var: F.relu(F.batch_norm(x, mean, var, w, b, True, 0.2) + r),
        "untracked": lambda x, r, w, b, mean, var: F.batch_norm(x * 2, None, None, w, b, True).sigmoid() * r,
        "silu": lambda x, r, w, b, mean, var: F.silu(F.group_norm(x, 3, w, b)) + r,
    }


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", fused_norms())
def test_fused_again_is_as_the_first(
    name: str, needs_grad: bool, device: str, ways: list[str], by_launcher: str
) -> None:
    plain = fused_norms()[name]
    fused = warpnorm.fuse(plain)
    for seed in range(4):
        x, w, b = images(device, seed)
        given = [o.requires_grad_(needs_grad) for o in (x, torch.randn_like(x), w, b)]
        ours, theirs = buffers(device), buffers(device)
        output, expected = fused(*given, *ours), plain(*given, *theirs)
        torch.testing.assert_close(output, expected)
        for a, c in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, c)
        if needs_grad:
            grad = torch.randn_like(output)
            found = torch.autograd.grad(output, given, grad)
            for a, c in zip(found, torch.autograd.grad(expected, given, grad), strict=True):
                assert a.shape == c.shape
                torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-3)
    if by_launcher == "compiled":
        assert ways == ["compiled"] * 3


def test_a_fused_module_counts_its_batches(device: str, ways: list[str], by_launcher: str) -> None:
    ours, theirs = (warpnorm.nn.BatchNormReLU2d(SHAPE[1]).to(device), torch.nn.BatchNorm2d(SHAPE[1]).to(device))
    for seed in range(4):
        x = images(device, seed)[0]
        torch.testing.assert_close(ours(x), F.relu(theirs(x)))
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    if by_launcher == "compiled":
        assert ways == ["compiled"] * 3
    for norm in (ours, theirs):
        norm.eval()
    x = images(device)[0]
    torch.testing.assert_close(ours(x), F.relu(theirs(x)))
    assert int(ours.num_batches_tracked) == 4


def test_what_backward_does_not_read_is_not_held(device: str) -> None:
    """The variance is averaged into the running one, and nobody needs it then: no more than a mean and an rstd lie beside
    each other in what is saved."""
    x, w, b = images(device)
    for _ in range(4):
        y = warpnorm.batch_norm(x.requires_grad_(), *buffers(device), w, b, training=True)
        saved = [t for t in getattr(y.grad_fn, "saved_tensors", ()) if t is not None and t.shape == w.shape]
        # each starts at a multiple of 16 bytes; the compiled launcher, whose tensors nobody sees, has memory for each
        assert all(t.untyped_storage().nbytes() <= 2 * (-(-w.numel() // 4) * 16) for t in saved)
