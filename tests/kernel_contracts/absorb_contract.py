"""Contract: in a graph of Inductor's a residual add becomes part of the norm after it, and of its backward, where the
summands are in memory anyway; the results are as accurate as those of PyTorch's norms in the same model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._inductor.pattern_matcher import stable_topological_sort

import warpnorm
from accuracy import assert_no_further

COLS = 1280
NORM, NORM_BACKWARD = "warpnorm.norm.default", "warpnorm.norm_backward.default"
Function = Callable[..., torch.Tensor]


def residual(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    h = x @ m + r
    return norms.rms_norm(h, (COLS,), w, 1e-6) @ m + h


def stack(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        r = x + r
        x = norms.layer_norm(r, (COLS,), w, w) @ m
    return norms.rms_norm(x + r, (COLS,), w, 1e-6)


def plus_one(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    if norms is F:
        return F.rms_norm(x + r, (COLS,), 1 + w, 1e-6)
    return norms.rms_norm(x + r, (COLS,), w, 1e-6, weight_offset=1.0)


def two_norms(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    h = x + r
    return norms.layer_norm(h, (COLS,), w) @ m + norms.rms_norm(h, (COLS,), w, 1e-6) @ m + h


def read_before(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    h = x + r
    gate = torch.sigmoid(h @ m)
    return norms.rms_norm(h, (COLS,), w, 1e-6) * gate


def elementwise(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return norms.rms_norm(torch.tanh(x) + r, (COLS,), w, 1e-6)


def scaled(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return norms.rms_norm(torch.add(x, r, alpha=2), (COLS,), w, 1e-6)


def spread(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return norms.rms_norm(x + r[:1], (COLS,), w, 1e-6)


def of_weight(norms: Any, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    h = x + r
    return norms.rms_norm(h, (COLS,), w * (1 + h.mean()), 1e-6)


@dataclass(frozen=True)
class Case:
    function: Function
    forward: int  # norms that have a sum in them
    backward: int
    why: str


CASES = [
    Case(residual, 1, 1, "the sum is read again"),
    Case(stack, 4, 3, "each sum is a summand of the next; nothing is added to the last gradient"),
    Case(plus_one, 1, 0, "the sum is read in backward alone"),
    Case(two_norms, 1, 1, "a sum is written once"),
    Case(read_before, 1, 1, "the sum is read before the norm"),
    Case(elementwise, 0, 0, "what Inductor would write as part of the sum"),
    Case(scaled, 0, 0, "no plain sum"),
    Case(spread, 0, 0, "summands of another shape"),
    Case(of_weight, 0, 0, "a weight that comes after the sum, and a gradient that is spread out"),
]


class Passed:
    """A backend that runs Inductor's passes of patterns, and the graph as it is then; `sums` counts the norms with a sum."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.adds: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)(graph, inputs)

    def keep(self, graph: Any, inputs: Any) -> Any:
        pass_patterns[0].apply(graph.graph)
        stable_topological_sort(graph.graph)
        graph.graph.lint()
        graph.recompile()
        nodes = [(str(node.target), node) for node in graph.graph.nodes]
        found = [len(node.args[0]) > 1 for name, node in nodes if name == NORM_BACKWARD]
        found += [
            node.args[2].count("aten.add") > 0 and "is_single" in node.args[2] for name, node in nodes if name == NORM
        ]
        self.sums.append(sum(found))
        self.adds.append(sum(name == "aten.add.Tensor" for name, _ in nodes))
        return make_boxed_func(graph.forward)


def leaves(dtype: torch.dtype, rows: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [
        torch.randn(rows, COLS),
        torch.randn(rows, COLS),
        torch.rand(COLS) + 0.5,
        torch.randn(COLS, COLS) * COLS**-0.5,
    ]
    return [t.to(device, dtype).requires_grad_() for t in made]


def results(function: Function, given: list[torch.Tensor]) -> list[torch.Tensor]:
    output = function(*given)
    output.backward(torch.linspace(-1, 1, output.numel(), device=output.device).to(output.dtype).view(output.shape))
    return [output.detach(), *(t.grad for t in given if t.grad is not None)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16 if k % 2 else torch.float32) for k, case in enumerate(CASES)],
    ids=[case.function.__name__ for case in CASES],
)
def test_sums_that_a_compiler_sees(case: Case, dtype: torch.dtype, device: str) -> None:
    torch._dynamo.reset()
    backend = Passed()
    compiled = torch.compile(lambda *given: case.function(warpnorm, *given), backend=backend, fullgraph=True)
    for rows in (6, 9):
        given = leaves(dtype, rows, device)
        found = results(compiled, given)
        torchs = results(lambda *t: case.function(F, *t), [t.detach().clone().requires_grad_() for t in given])
        truth = results(lambda *t: case.function(F, *t), [t.detach().double().requires_grad_() for t in given])
        for k, (ours, true, theirs) in enumerate(zip(found, truth, torchs, strict=True)):
            assert_no_further(f"{k}", ours, true, theirs)
    assert backend.sums == [case.forward, case.backward] * 2, case.why


def test_without_gradients_a_sum_that_nobody_reads_is_not_written(device: str) -> None:
    torch._dynamo.reset()
    backend = Passed()
    given = [t.detach() for t in leaves(torch.float32, 5, device)]
    found = torch.compile(lambda *t: plus_one(warpnorm, *t), backend=backend, fullgraph=True)(*given)
    torch.testing.assert_close(found, plus_one(F, *given))
    assert (backend.sums, backend.adds) == ([1], [0])


def test_inductor_has_no_sum_left(device: str) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    given = leaves(torch.float32, 6, device)
    compiled = torch.compile(lambda *t: stack(warpnorm, *t), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(lambda: results(compiled, given))
    forward, backward = codes
    own = "triton_poi_fused_add" if device == "cuda" else "cpp_fused"
    assert (forward.count(f"{NORM}("), forward.count(own)) == (4, 0)
    assert [line.split("]")[0].count(",") for line in backward.split(f"{NORM_BACKWARD}(")[1:]] == [0, 1, 1, 1]
    same = [t.detach().clone().requires_grad_() for t in given]
    for ours, right in zip(found, results(lambda *t: stack(warpnorm, *t), same), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
