"""Contract: a call that was seen before computes what the first one does, and takes the same way only where nothing that
decides about it has changed."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import pipeline, repeat, routing, settings
from warpnorm.errors import InputError, InputTypeError
from warpnorm.launch import launcher

COLS = 1100  # on a CPU fewer are not worth native code
FRESH = itertools.count(1 << 40)  # settings that nobody has had, under which nothing was seen


def launchers() -> list[str]:
    return ["python", "compiled"] if launcher.compiler() and not settings.is_interpreting() else ["python"]


@pytest.fixture(autouse=True, params=launchers())
def by_launcher(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nothing was seen so far."""
    repeat._seen.clear()
    repeat._scratch.clear()
    with settings.override(launcher=request.param, keep_bytes=next(FRESH)):
        yield request.param


@pytest.fixture
def quick_calls(monkeypatch: pytest.MonkeyPatch, by_launcher: str) -> list[Any]:
    """The outputs of the compiled launcher."""
    found: list[Any] = []
    if by_launcher == "compiled":
        original = launcher.find(repeat._set_up, 0).call

        def quick(*key: Any) -> Any:
            output = original(*key)
            if output is not None:
                found.append(tuple(output.shape))
            return output

        monkeypatch.setattr(repeat, "quick", quick)
    return found


@pytest.fixture
def first_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of which shape each input was that took the long way."""
    found, original = [], repeat.first

    def first(norm: Any, input: torch.Tensor, *rest: Any) -> Any:
        found.append((norm.name, tuple(input.shape)))
        return original(norm, input, *rest)

    monkeypatch.setattr(repeat, "first", first)
    return found


def operands(rows: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, COLS), (COLS,), (COLS,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


CALLS = {
    "layer_norm": (lambda x, w, b: warpnorm.layer_norm(x, COLS, w, b), lambda x, w, b: F.layer_norm(x, (COLS,), w, b)),
    "layer_norm_alone": (lambda x, w, b: warpnorm.layer_norm(x, [COLS]), lambda x, w, b: F.layer_norm(x, (COLS,))),
    "rms_norm": (lambda x, w, b: warpnorm.rms_norm(x, (COLS,), w), lambda x, w, b: F.rms_norm(x, (COLS,), w)),
    "rms_norm_eps": (
        lambda x, w, b: warpnorm.rms_norm(x, x.shape[-1:], w, 1e-3),
        lambda x, w, b: F.rms_norm(x, (COLS,), w, 1e-3),
    ),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_again_is_as_the_first(
    name: str, needs_grad: bool, device: str, first_calls: list[Any], quick_calls: list[Any], by_launcher: str
) -> None:
    call, plain = CALLS[name]
    for seed in range(4):
        given = [o.requires_grad_(needs_grad) for o in operands(5, device, seed)]
        output, expected = call(*given), plain(*given)
        torch.testing.assert_close(output, expected)
        if needs_grad:
            used = [o for o in given if o is given[0] or "alone" not in name][: 2 if "rms" in name else 3]
            grad = torch.randn_like(output)
            found = torch.autograd.grad(output, used, grad)
            for a, b in zip(found, torch.autograd.grad(expected, used, grad), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(first_calls) == 1
    assert len(quick_calls) == (2 if by_launcher == "compiled" else 0)  # the second call is Python's, which tells of it


def test_bits_are_those_of_the_first(device: str, first_calls: list[Any]) -> None:
    given = operands(7, device)
    first = warpnorm.layer_norm(given[0], COLS, *given[1:])
    for _ in range(3):
        assert warpnorm.layer_norm(given[0], COLS, *given[1:]).equal(first)
        _, mean, _ = warpnorm.layer_norm(given[0], COLS, *given[1:], return_stats=True)  # not in anybody's scratch
        torch.testing.assert_close(mean, given[0].mean(-1, keepdim=True))
    assert len(first_calls) == 4


def test_what_decides_is_in_the_key(device: str, first_calls: list[Any]) -> None:
    x, w, b = operands(6, device)
    wide = torch.randn(6, 2 * COLS, device=device)
    odd = torch.randn(6 * COLS + 1, device=device)[1:].view(6, COLS)
    calls = {
        "plain": lambda: (x, w, b, 1e-5),
        "other_eps": lambda: (x, w, b, 1e-2),
        "fewer_rows": lambda: (x[:4], w, b, 1e-5),
        "strides": lambda: (wide[:, ::2], w, b, 1e-5),
        "slice": lambda: (wide[:, COLS:], w, b, 1e-5),
        "unaligned": lambda: (odd, w, b, 1e-5),
        "dtype": lambda: (x.double(), w, b, 1e-5),
        "dtype_of_weight": lambda: (x, w.double(), b, 1e-5),
        "no_bias": lambda: (x, w, None, 1e-5),
        "no_weight": lambda: (x, None, b, 1e-5),
        "more_dimensions": lambda: (x.view(2, 3, COLS), w, b, 1e-5),
    }
    for count, (name, make) in enumerate(calls.items(), start=1):
        for _ in range(3):
            input, weight, bias, eps = make()
            expected = warpnorm.reference.layer_norm(input, (COLS,), weight, bias, eps, 0.0)[0]
            torch.testing.assert_close(warpnorm.layer_norm(input, COLS, weight, bias, eps), expected, msg=name)
        assert len(first_calls) == count, name


def test_what_cannot_be_repeated_takes_the_long_way(device: str, first_calls: list[Any]) -> None:
    x, w, b = operands(6, device)
    spread = torch.randn(1, device=device).expand(COLS)
    pairs = torch.randn(6, COLS, dtype=torch.complex64, device=device)
    plain, negated = torch.imag(pairs), torch.imag(pairs.conj())
    assert (plain.is_neg(), negated.is_neg(), plain.data_ptr()) == (False, True, negated.data_ptr())
    for weight in (spread, 2.0, torch.tensor(2.0, device=device)):
        for _ in range(3):
            output = warpnorm.layer_norm(x, COLS, weight, b)
            torch.testing.assert_close(output, F.layer_norm(x, (COLS,)) * weight + b)
    for input in (plain, plain, plain, negated, negated, plain):  # of one key
        torch.testing.assert_close(warpnorm.layer_norm(input, COLS, w, b), F.layer_norm(input, (COLS,), w, b))
    assert len(first_calls) == 7 + 1 + 2


def test_bad_input_is_still_refused(device: str) -> None:
    x, w, b = operands(6, device)
    for _ in range(3):
        warpnorm.layer_norm(x, (COLS,), w, b)
    for shape in ((float(COLS),), float(COLS), (COLS + 1,), str(COLS), None):
        with pytest.raises((InputError, TypeError, ValueError)):
            warpnorm.layer_norm(x, shape, w, b)
    with pytest.raises((InputError, TypeError, ValueError)):
        warpnorm.layer_norm(x, (COLS,), w[:-1], b)


def test_settings_and_modes_are_asked_each_time(device: str, monkeypatch: pytest.MonkeyPatch, by_launcher: str) -> None:
    if by_launcher == "compiled":
        pytest.skip("it has tests of its own")
    x, w, b = operands(6, device)
    warpnorm.layer_norm(x, COLS, w, b)
    ran: list[Any] = []
    monkeypatch.setattr(repeat.Repeat, "__call__", lambda self, operands: ran.append(1) or x)
    assert warpnorm.layer_norm(x, COLS, w, b) is x
    assert len(ran) == 1
    with settings.override(route="reference"):
        warpnorm.layer_norm(x, COLS, w, b)
    monkeypatch.setattr(routing, "is_seen_through", lambda tensors: True)
    warpnorm.layer_norm(x, COLS, w, b)
    assert len(ran) == 1


def test_differentiated_twice(device: str) -> None:
    given = [o.requires_grad_() for o in operands(3, device, dtype=torch.float64)]
    for _ in range(3):
        norm = lambda x, w, b: warpnorm.layer_norm(x, COLS, w, b)  # noqa: E731
        assert torch.autograd.gradgradcheck(norm, given, atol=1e-4, fast_mode=True)


def test_gradients_of_other_layouts(device: str) -> None:
    """An expanded gradient, as of a sum, one of a slice, and none for some operands."""
    given = operands(6, device)
    for needed in ((True, True, True), (False, True, False), (True, False, False)):
        leaves = [o.detach().requires_grad_(need) for o, need in zip(given, needed, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        for grad in (torch.ones((), device=device).expand(6, COLS), torch.randn(6, 2 * COLS, device=device)[:, ::2]):
            for _ in range(4):
                found = torch.autograd.grad(warpnorm.layer_norm(leaves[0], COLS, *leaves[1:]), wanted, grad)
                expected = torch.autograd.grad(F.layer_norm(leaves[0], (COLS,), *leaves[1:]), wanted, grad)
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_operands_come_back_with_other_strides(device: str) -> None:
    """From where they were kept, as on another device: dense, where they were a slice."""
    wide = torch.randn(6, 2 * COLS, device=device)
    hooks = {
        "same": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "copy": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    }
    for name in ("same", "same", "same", "copy", "copy", "same"):
        found = []
        for norm in (warpnorm.rms_norm, F.rms_norm):
            x = wide[:, :COLS].detach().requires_grad_()
            with hooks[name]():
                output = norm(x, (COLS,))
            found.append(torch.autograd.grad(output.square().sum(), x)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_an_eps_that_may_change_is_read_each_time(device: str, first_calls: list[Any]) -> None:
    x, w, b = operands(6, device)
    eps = torch.tensor(1e-5)
    for value in (1e-5, 1e-5, 1e-5, 10.0):
        eps.fill_(value)
        output = warpnorm.layer_norm(x, COLS, w, b, eps)  # type: ignore[arg-type]
        torch.testing.assert_close(output, F.layer_norm(x, (COLS,), w, b, value))
    with pytest.raises(InputTypeError, match="eps"):
        warpnorm.layer_norm(x, COLS, w, b, [1e-5])  # type: ignore[arg-type]


def test_many_batches_share_few_places(device: str) -> None:
    batches = (1, 2, 3, 5, 8, 9, 16, 17, 32)
    for rows in batches:
        x, w, b = operands(rows, device)
        for _ in range(3):
            torch.testing.assert_close(warpnorm.layer_norm(x, COLS, w, b), F.layer_norm(x, (COLS,), w, b))
    assert len(repeat._seen) == len(batches)
    assert len(repeat._scratch) == 6


def test_large_statistics_take_no_more_than_their_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next power of two: of 2^31 + 5 rows these would be 2^32 statistics that nobody reads."""
    monkeypatch.setattr(repeat, "LARGEST_SCRATCH", 32)
    x, w, b = operands(5, device)
    for _ in range(3):
        torch.testing.assert_close(warpnorm.layer_norm(x, COLS, w, b), F.layer_norm(x, (COLS,), w, b))
    (seen,) = repeat._seen.values()
    taken = repeat._scratch_at(seen.place, seen.launch, x)
    assert [len(statistic) for statistic in taken] == [5, 5]
    assert repeat._scratch == {}
    monkeypatch.setattr(repeat, "LARGEST_SCRATCH", 64)
    assert [len(statistic) for statistic in repeat._scratch_at(seen.place, seen.launch, x)] == [8, 8]
    assert len(repeat._scratch) == 1


def test_many_gradients_at_once(device: str) -> None:
    given = [o.requires_grad_() for o in operands(6, device)]
    grads = torch.randn(4, 6, COLS, device=device)
    expected = torch.autograd.grad(F.layer_norm(given[0], (COLS,), *given[1:]), given, grads, is_grads_batched=True)
    for _ in range(4):
        output = warpnorm.layer_norm(given[0], COLS, *given[1:])
        found = torch.autograd.grad(output, given, grads, is_grads_batched=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_device_that_refuses_teams(
    needs_grad: bool, device: str, first_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From some call on: that one and the next are right, by other plans. Other errors are the caller's."""
    x, w, b = operands(6, device)
    x.requires_grad_(needs_grad)
    with settings.override(launcher="python"):
        expected = [warpnorm.layer_norm(x, COLS, w, b) for _ in range(2)][-1]
        (seen,) = repeat._seen.values()
        taken, into = [], type(seen.launch).into

        def refuse(*arguments: Any) -> None:
            taken.append(arguments)
            if len(taken) == 1:
                raise RuntimeError("too many blocks in cooperative launch")
            into(*arguments)

        monkeypatch.setattr(pipeline, "refuses_teams", lambda error, device: "cooperative" in str(error))
        monkeypatch.setattr(type(seen.launch), "into", refuse)
        first_calls.clear()
        for _ in range(2):
            torch.testing.assert_close(warpnorm.layer_norm(x, COLS, w, b), expected)
        assert len(first_calls) == 1  # the refused one
        monkeypatch.setattr(type(seen.launch), "into", lambda *_: torch.empty(-1))
        with pytest.raises(RuntimeError, match="negative"):
            warpnorm.layer_norm(x, COLS, w, b)
