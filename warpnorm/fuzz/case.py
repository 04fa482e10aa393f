"""One call as a record: a function as source, in our words and in PyTorch's, and its operands, which seeds make. It prints
as Python code that runs by itself."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpnorm import functional
from warpnorm.fuse import fuse
from warpnorm.fuzz import truth
from warpnorm.problem import compute_dtype

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """How a tensor lies in memory: the shape of what is made, and the view of it."""

    base: Callable[[Shape], Shape]
    view: str
    least_dims: int = 0


LAYOUTS = {
    "contiguous": Layout(lambda s: s, "t"),
    "transposed": Layout(lambda s: (*s[:-2], s[-1], s[-2]), "t.mT", 2),
    "reversed": Layout(lambda s: s[::-1], "t.permute({backwards})", 2),
    "every_other": Layout(lambda s: (*s[:-1], 2 * s[-1]), "t[..., ::2]", 1),
    "unaligned": Layout(lambda s: (*s[:-1], s[-1] + 3), "t[..., 3:]", 1),
    "padded": Layout(lambda s: (*s[:-1], s[-1] + 8), "t[..., :-8]", 1),
    "rows_apart": Layout(lambda s: (2 * s[0], *s[1:]), "t[1::2]", 1),
    "flipped": Layout(lambda s: s, "t.flip(-1)", 1),
    "expanded_rows": Layout(lambda s: (1, *s[1:]), "t.expand({shape})", 1),
    "expanded_columns": Layout(lambda s: (*s[:-1], 1), "t.expand({shape})", 2),
    "overlapping": Layout(lambda s: (*s[:-2], s[-2] + s[-1] - 1), "t.unfold(-1, *{last}, 1)", 2),
    "channels_last": Layout(lambda s: (s[0], *s[2:], s[1]), "t.movedim(-1, 1)", 3),
}
VALUES = {
    "normal": "t",
    "positive": "t.abs() + 0.5",
    "far_from_zero": "t * 0.1 + 1e4",
    "tiny": "t * 1e-18",
    "huge": "t * 6e3",
    "small": "t * 0.01",
}


@dataclass(frozen=True)
class Operand:
    shape: Shape
    dtype: torch.dtype
    layout: str = "contiguous"
    values: str = "normal"
    wants_grad: bool = True

    def text(self, seed: int, device: str) -> str:
        """What makes it."""
        layout = LAYOUTS[self.layout]
        if len(self.shape) < layout.least_dims or 0 in self.shape:
            layout = LAYOUTS["contiguous"]
        generator = f"torch.Generator({device!r}).manual_seed({seed})"
        drawn = f"torch.randn({layout.base(self.shape)}, generator={generator}, device={device!r}, dtype=torch.double)"
        drawn = VALUES[self.values].replace("t", drawn, 1)
        drawn = f"({drawn})" if " " in VALUES[self.values] else drawn
        moved = f"{drawn}.to({self.dtype})"
        words = {"shape": self.shape, "last": self.shape[-1:], "backwards": tuple(reversed(range(len(self.shape))))}
        return layout.view.format(**words).replace("t", moved, 1)

    def make(self, seed: int, device: str) -> torch.Tensor:
        return eval(self.text(seed, device), {"torch": torch})


@dataclass(frozen=True)
class Case:
    """`ours` and `theirs` are the bodies of functions of x0, x1, ...; the same where `ours` is to be fused. `is_widened`:
    PyTorch has no such call, and is asked in the dtype of computation; `is_mixed`: of several dtypes, in which it may have
    it. `is_twice`: gradients of gradients too. `averaged`: operands that statistics are averaged into, which decide about
    nothing else. `kinks`: what is zero where the function has one."""

    ours: str
    theirs: str
    operands: tuple[Operand, ...]
    seed: int = 0
    is_fused: bool = False
    is_widened: bool = False
    is_mixed: bool = False
    is_twice: bool = False
    averaged: tuple[int, ...] = ()
    kinks: str = ""
    route: str = "auto"

    @property
    def names(self) -> str:
        return ", ".join(f"x{i}" for i in range(len(self.operands)))

    @property
    def computed(self) -> torch.dtype:
        """In which dtype."""
        return compute_dtype([o.dtype for i, o in enumerate(self.operands) if i not in self.averaged])

    @property
    def of_ours(self) -> Callable[..., Any]:
        return function_of(self.names, self.ours, self.is_fused)

    @property
    def of_theirs(self) -> Callable[..., Any]:
        return function_of(self.names, self.theirs, False)

    @property
    def of_truth(self) -> Callable[..., Any]:
        """The same, closer to the true values."""
        return function_of(self.names, self.theirs, False, is_close=True)

    @property
    def of_kinks(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        before, _, _ = self.theirs.rpartition("return ")
        return function_of(self.names, f"{before}return ({self.kinks},)", False)

    def make(self, seed: int, device: str) -> list[torch.Tensor]:
        return [operand.make(100 * seed + i, device) for i, operand in enumerate(self.operands)]

    def seeded(self, seed: int) -> "Case":
        return replace(self, seed=seed)

    def code(self, device: str, names: Sequence[str]) -> str:
        """To paste: what `names` say is ours beside PyTorch's in float64."""
        lines = [
            "import torch",
            "import torch.nn.functional as F",
            "",
            "import warpnorm",
            "from warpnorm import settings",
        ]
        decorator = "@warpnorm.fuse\n" if self.is_fused else ""
        lines += ["", "", decorator + _definition("ours", self.names, self.ours)]
        lines += ["", "", _definition("theirs", self.names, self.theirs), "", ""]
        lines += [f"x{i} = {o.text(100 * self.seed + i, device)}" for i, o in enumerate(self.operands)]
        lines += [
            f"operands = [{self.names}]",
            f"wanted = {[i for i, o in enumerate(self.operands) if o.wants_grad]}",
            f"is_twice = {self.is_twice}",
            RUNNING,
            "torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN",
            f"with settings.override(route={self.route!r}):",
            "    found = run(ours, operands)",
            "with torch.backends.cudnn.flags(enabled=False):",
            "    truth = run(theirs, [x.double() for x in operands])",
            f"for name, one, other in zip({list(names)}, found, truth):",
            "    print(name, one.dtype, tuple(one.shape), (one.double() - other).abs().max().item())",
        ]
        return "\n".join(lines)


RUNNING = """

def grads_for(outputs, first):
    for k, y in enumerate(outputs, first):
        generator = torch.Generator(y.device).manual_seed(k)
        drawn = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.double)
        yield drawn.bfloat16().half().to(y.dtype)  # which both 16-bit dtypes have


def run(function, operands):
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(operands)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results, grown = [y.detach() for y in outputs], [y for y in outputs if y.requires_grad]
    asked = [leaves[i] for i in wanted]
    for first in (10**9, 10**9 + 100)[: 1 + is_twice]:
        if grown and asked:
            grads = [*grads_for(grown, first)]
            grown = torch.autograd.grad(grown, asked, grads, allow_unused=True, create_graph=is_twice)
            grown = [g for g in grown if g is not None]
            results += [g.detach() for g in grown]
            grown = [g for g in grown if g.requires_grad]
    return results

"""


@lru_cache(maxsize=64)
def function_of(names: str, body: str, is_fused: bool, is_close: bool = False) -> Callable[..., Any]:
    space: dict[str, Any] = {"torch": torch, "F": F, "warpnorm": functional} | (truth.NAMES if is_close else {})
    exec(_definition("program", names, body), space)
    return fuse(space["program"]) if is_fused else space["program"]


def _definition(name: str, names: str, body: str) -> str:
    return f"def {name}({names}):\n" + textwrap.indent(body, "    ")
