"""Functions with one norm in them, to be fused: what stands before and after, operands broadcast along some dimensions."""

from collections.abc import Sequence

from warpnorm.fuzz.case import Operand
from warpnorm.fuzz.draws import Draws
from warpnorm.fuzz.kinds import CHANNEL_NORMS, DTYPES, EPS, Choice, Kind

# All smooth and well conditioned, so that the plain function in float64 is the truth
UNARY = (
    "torch.sin({0})",
    "torch.cos({0})",
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "torch.erf({0})",
    "torch.atan({0})",
    "F.silu({0})",
    "F.gelu({0})",
    "F.gelu({0}, approximate='tanh')",
    "F.mish({0})",
    "F.softplus({0})",
    "torch.log1p({0} * {0})",
    "torch.sqrt(1.0 + {0} ** 2)",
    "torch.exp(-{0}.square())",
    "1 / (2 + {0}.sin())",
    "({0} * 0.75 - 1.25)",
)
BINARY = (
    "({0} + {1})",
    "({0} - 0.5 * {1})",
    "({0} * {1})",
    "{0} / (1.5 + torch.cos({1}))",
    "torch.addcmul({0}, {0}, {1}, value=0.25)",
    "torch.logaddexp({0}, {1})",
)
# With kinks, and what is zero there. Inputs are on the same side of one in every dtype, or upon it; a computed value may
# not be, and where one is too close to tell, gradients are not compared: see check.py. None of them jumps.
KINKED = {
    "F.relu({0})": ("{0}",),
    "torch.abs({0})": ("{0}",),
    "F.leaky_relu({0}, 0.125)": ("{0}",),
    "{0}.clamp(-1.0, 0.75)": ("{0} + 1.0", "{0} - 0.75"),
    "torch.clamp({0}, min=-0.5)": ("{0} + 0.5",),
    "F.hardtanh({0})": ("{0} + 1.0", "{0} - 1.0"),
    "{0} * F.relu6({0} + 3.0)": ("{0} + 3.0", "{0} - 3.0"),
    "torch.where({0} > 0.25, {0}, 0.5 * {0} + 0.125)": ("{0} - 0.25",),
    "torch.maximum({0}, {1})": ("{0} - {1}",),
    "torch.minimum({0}, {1})": ("{0} - {1}",),
}


def fused_kinds(draws: Draws, choice: Choice, norm: str) -> Kind:
    """A function with one norm in it: what stands before and after, operands broadcast along some dimensions."""
    is_by_channel = norm in CHANNEL_NORMS
    dims = 3 + draws.below(2) if is_by_channel else 1 + draws.below(3)
    count = draws.below(3)
    # which dimensions of the input an operand has at all, and which in full
    masks = [[draws.flag() for _ in range(draws.below(dims + 1))] for _ in range(count)]
    operands = fused_operands(draws, choice, count + 1)
    names = [f"x{k}" for k in range(count + 1)]
    kinks: list[str] = []
    has_kinks = draws.flag()
    lines = steps(draws, names, "a", kinks if has_kinks else None)
    # Neither adding what is constant along a row nor scaling it would do: the norm undoes both
    lines.append(f"h = x0 + {draws.pick(lines_of(lines) + names)} * torch.sin(x0)")
    eps = draws.pick(EPS[:3])
    groups = draws.pick((1, 2, 3)) if norm == "group_norm" else 1
    calls = {
        "batch_norm": f"F.batch_norm(h, None, None, training=True, eps={eps})",
        "group_norm": f"F.group_norm(h, {groups}, eps={eps})",
        "instance_norm": f"F.instance_norm(h, eps={eps})",
    }
    cols = 0 if is_by_channel else 1 + draws.below(min(2, dims))
    row_call = f"F.{norm}(h, h.shape[-{cols}:], eps={eps})"
    lines.append("y = " + calls.get(norm, row_call))
    after = steps(draws, ["y", "h", *names], "b", kinks if has_kinks else None)
    lines += after
    results = [f"y * {draws.pick([*lines_of(after), 'h', *names])}"]
    results += draws.several(["y", "h", "h * y", "torch.sin(h) + y"], 2)
    body = "\n".join([*lines, f"return {', '.join(results)}"])

    def shapes(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        full = (sizes[0], groups * sizes[1], *sizes[2:]) if is_by_channel else sizes
        return [full, *(broadcast(full, mask) for mask in masks)]

    return Kind(body, body, dims, shapes, tuple(operands), cols, is_fused=True, kinks=", ".join(kinks))


def broadcast(full: tuple[int, ...], mask: Sequence[bool]) -> tuple[int, ...]:
    own = full[len(full) - len(mask) :]
    return tuple(size if is_full else 1 for size, is_full in zip(own, mask, strict=True))


def fused_operands(draws: Draws, choice: Choice, count: int) -> list[Operand]:
    dtype = draws.pick(choice.dtypes)
    others = draws.pick((dtype, dtype, "float32"))
    wants_any = draws.pick((True, True, True, False))
    found = []
    # Of rows of one value the norm is zero, but for what the function before it is off by
    layouts = [layout for layout in choice.layouts if layout != "expanded_columns"] or list(choice.layouts)
    for k in range(count):
        layout = draws.pick(layouts if k == 0 else ("contiguous", "transposed", "unaligned"))
        wanted = wants_any and draws.pick((True, True, False))
        found.append(Operand((), DTYPES[others if k else dtype], layout, wants_grad=wanted))
    return found


def steps(draws: Draws, names: list[str], letter: str, kinks: list[str] | None = None) -> list[str]:
    """Assignments to new names, each of what is there by then. `kinks` gets what is zero at those of computed values, or is
    None where there shall be none."""
    lines: list[str] = []
    for k in range(1 + draws.below(3)):
        there = [*names, *lines_of(lines)]
        template = draws.pick(UNARY + BINARY + (() if kinks is None else tuple(KINKED)))
        given = [draws.pick(there) for _ in range(2)]
        lines.append(f"{letter}{k} = " + template.format(*given))
        for kink in KINKED.get(template, ()):
            if kinks is not None and not all(name.startswith("x") for name in given[: 2 if "{1}" in kink else 1]):
                kinks.append(kink.format(*given))
    return lines


def lines_of(lines: list[str]) -> list[str]:
    """The names that they assign to."""
    return [line.split(" = ")[0] for line in lines]
