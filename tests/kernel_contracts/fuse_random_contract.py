"""Contract: random functions. Hypothesis writes the source of a function with one norm in it: what stands before and after,
how its operands are broadcast and lie in memory, their dtypes, how many results it has. Fused, each is as accurate as
plain. All operators are smooth and well conditioned, so that the plain function in float64 is the truth."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import warpnorm
from kernel_contracts.fuse_operators_contract import check_fused
from warpnorm.fuzz.draws import Draws
from warpnorm.fuzz.fused import lines_of, steps

EXAMPLES = 25
NORMS = {"layer": "F.layer_norm(h, h.shape[-{0}:])", "rms": "F.rms_norm(h, h.shape[-{0}:], eps=1e-5)"}


@dataclass(frozen=True)
class Operand:
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool

    def make(self, seed: int, device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(device, self.dtype)
        return tensor.mT.contiguous().mT if self.is_transposed and tensor.ndim > 1 else tensor


@dataclass(frozen=True)
class Program:
    """Prints as what failed."""

    source: str
    operands: tuple[Operand, ...]

    @property
    def function(self) -> Callable[..., Any]:
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.source, names)
        return names["program"]

    def __repr__(self) -> str:
        return "\n".join([self.source, *(f"x{k}: {operand}" for k, operand in enumerate(self.operands))])


class Drawn(Draws):
    """Choices that Hypothesis makes."""

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__()
        self._draw = draw

    def below(self, count: int) -> int:
        return self._draw(st.integers(0, count - 1))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    shape = (*draw(st.lists(st.integers(1, 4), max_size=3)), draw(st.sampled_from((24, 33, 40, 64))))
    operands = draw(operands_of(shape))
    names = [f"x{k}" for k in range(len(operands))]
    lines = steps(Drawn(draw), names, "a")
    # Neither adding what is constant along a row nor scaling it would do: the norm undoes both
    lines.append(f"h = x0 + {draw(st.sampled_from(lines_of(lines) + names))} * torch.sin(x0)")
    norm = draw(st.sampled_from(sorted(NORMS)))
    lines.append("y = " + NORMS[norm].format(draw(st.integers(1, min(2, len(shape))))))
    after = steps(Drawn(draw), ["y", "h", *names], "b")
    lines += after
    results = [f"y * {draw(st.sampled_from([*lines_of(after), 'h', *names]))}"]
    results += draw(st.lists(st.sampled_from(["y", "h", "h * y", "torch.sin(h) + y"]), max_size=2, unique=True))
    body = "\n".join(f"    {line}" for line in [*lines, f"return {', '.join(results)}"])
    return Program(f"def program({', '.join(names)}):\n{body}", operands)


@st.composite
def operands_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Operand, ...]:
    """The first has the whole shape; the others are broadcast along some of its dimensions, or lack some."""
    dtypes = draw(st.sampled_from([(torch.float32,), (torch.float64,), (torch.float32, torch.float64)]))
    shapes = [shape]
    for _ in range(draw(st.integers(0, 3))):
        own = shape[draw(st.integers(0, len(shape))) :]
        shapes.append(tuple(size if draw(st.booleans()) else 1 for size in own))
    return tuple(Operand(s, draw(st.sampled_from(dtypes)), draw(st.booleans())) for s in shapes)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(program=programs())
def test_random_functions(program: Program, device: str) -> None:
    check_fused(
        warpnorm.fuse(program.function),
        program.function,
        lambda seed: [operand.make(50 * seed + k, device) for k, operand in enumerate(program.operands)],
        draws=24,  # gradients of a single element are among them
        own_draws=3,
    )
