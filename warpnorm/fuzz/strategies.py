"""Hypothesis strategies of calls. They come in batches: one function with its dtypes and layouts, which may have to be
compiled, in several sizes, which need not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from warpnorm.fuzz.case import LAYOUTS, Case, Operand

ROW_NORMS = ("rms_norm", "layer_norm")
CHANNEL_NORMS = ("group_norm", "instance_norm", "batch_norm")
FORMS = ("plain", "fused")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
EPS = (1e-5, 1e-6, 1e-3, 1.0, 1e-8)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 97, 127, 128, 129)
WIDTHS = (*SIZES, 255, 256, 257, 509, 512, 513, 1021, 1024, 1025, 2047, 2048, 2049, 4096, 4099, 8191, 8192, 8200)
LARGEST = 1 << 15  # elements of a call
LEAST = {"plain": (16, 32, 48), "fused": (32, 48, 64)}  # sizes of one function, which is compiled once or a few times

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


@dataclass(frozen=True)
class Choice:
    """What may be drawn; words leave less of it."""

    norms: tuple[str, ...] = (*ROW_NORMS, *CHANNEL_NORMS)
    forms: tuple[str, ...] = FORMS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    layouts: tuple[str, ...] = tuple(LAYOUTS)

    @classmethod
    def of(cls, words: Sequence[str]) -> "Choice":
        choice, every = cls(), cls()
        for word in words:
            for field in ("norms", "forms", "dtypes", "layouts"):
                if word not in getattr(every, field):
                    continue
                before = getattr(choice, field)
                kept = () if before == getattr(every, field) else before
                choice = replace(choice, **{field: (*kept, word)})
                break
            else:
                known = ", ".join(name for names in vars(every).values() for name in names)
                raise ValueError(f"--only {word}: there is no such norm, form, dtype or layout; there are {known}")
        return choice


@dataclass(frozen=True)
class Kind:
    """A call but for its sizes: `shapes` gives those of the operands for the sizes that are drawn."""

    ours: str
    theirs: str
    dims: int  # sizes to draw
    shapes: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    operands: tuple[Operand, ...]
    is_fused: bool = False
    is_widened: bool = False
    route: str = "auto"
    may_be_empty: bool = False

    def case(self, sizes: tuple[int, ...], seed: int, values: str) -> Case:
        first, *others = (
            replace(operand, shape=shape) for operand, shape in zip(self.operands, self.shapes(sizes), strict=True)
        )
        first = replace(first, values=values)
        return Case(self.ours, self.theirs, (first, *others), seed, self.is_fused, self.is_widened, self.route)


@st.composite
def batches(draw: st.DrawFn, choice: Choice, route: str) -> list[Case]:
    """`route` is what is tested; some calls go where they would without it."""
    form = draw(st.sampled_from(choice.forms))
    norm = draw(st.sampled_from(choice.norms))
    strategy = fused_kinds if form == "fused" else row_kinds if norm in ROW_NORMS else channel_kinds
    kind = draw(strategy(choice, norm))
    kind = replace(kind, route=draw(st.sampled_from((route, route, route, "auto"))))
    least = draw(st.sampled_from((1, *LEAST[form])))  # a number of its own, which a failure shrinks
    return [kind.case(*some) for some in draw(st.lists(sizes_of(kind), min_size=least, max_size=2 * LEAST[form][-1]))]


@st.composite
def sizes_of(draw: st.DrawFn, kind: Kind) -> tuple[tuple[int, ...], int, str]:
    """Sizes whose product is not too large, the last one up to the widest, a seed and what the values are like."""
    left, sizes = LARGEST, []
    for position in reversed(range(kind.dims)):
        allowed = [size for size in (WIDTHS if position == kind.dims - 1 else SIZES) if size <= left]
        sizes.append(draw(st.sampled_from(allowed)))
        left //= sizes[-1]
    if kind.may_be_empty and draw(st.integers(0, 19)) == 19:
        sizes[draw(st.integers(0, kind.dims - 1))] = 0
    seed = draw(st.integers(0, 9999))
    values = "normal"
    if not kind.is_fused:
        wide = kind.operands[0].dtype in (torch.float32, torch.float64)
        special = ("far_from_zero", "tiny") if wide else ("small",)
        values = draw(st.sampled_from(("normal", "normal", "normal", *special, "huge")))
    return tuple(reversed(sizes)), seed, values


@st.composite
def row_kinds(draw: st.DrawFn, choice: Choice, norm: str) -> Kind:
    col_dims, lead = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    has_bias = norm == "layer_norm" and draw(st.booleans())
    weight = draw(st.sampled_from(("none", "vector", "scalar")))
    option = draw(st.sampled_from(("", "", "", "weight_offset", "normalized_dim", "return_stats", "out")))
    option = "" if option == "weight_offset" and weight == "none" else option
    eps = draw(st.sampled_from(EPS))
    x, *parameters = draw(operands_of(choice, (weight != "none") + has_bias))
    if option == "out":
        x, *parameters = (replace(operand, wants_grad=False) for operand in (x, *parameters))
    names = [f"x{i + 1}" for i in range(len(parameters))]
    of_weight = names[0] if weight != "none" else None
    of_bias = names[-1] if has_bias else None
    shape = f"x0.shape[-{col_dims}:]"
    given = [f"weight={of_weight}"] * (of_weight is not None) + [f"bias={of_bias}"] * has_bias + [f"eps={eps}"]
    extra = {"weight_offset": ["weight_offset=1.0"], "return_stats": ["return_stats=True"], "out": ["out=y"]}.get(
        option, []
    )
    shown = f"normalized_dim=-{col_dims}" if option == "normalized_dim" else shape
    ours = f"return warpnorm.{norm}(x0, {', '.join([shown, *given, *extra])})"
    if option == "out":
        ours = f"y = torch.empty_like(x0)\n{ours}"
    if option == "return_stats":
        ours = ours.replace("return", "y, m, r =" if norm == "layer_norm" else "y, r =", 1) + "\n" + MEAN[norm]
    is_own = weight == "scalar" or option in ("weight_offset", "return_stats")
    if is_own:
        offset = " + 1.0" if option == "weight_offset" else ""
        theirs = f"y = F.{norm}(x0, {shape}, eps={eps})"
        theirs += f" * ({of_weight}{offset})" if of_weight else ""
        theirs += f" + {of_bias}\n" if of_bias else "\n"
        theirs += STATISTICS[norm].format(col_dims, eps) + MEAN[norm] if option == "return_stats" else "return y"
    else:
        theirs = f"return F.{norm}(x0, {', '.join([shape, *given])})"
    full = [weight != "scalar"] * (weight != "none") + [True] * has_bias
    is_mixed = len({operand.dtype for operand in (x, *parameters)}) > 1

    def shapes(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [sizes, *(sizes[-col_dims:] if is_full else () for is_full in full)]

    return Kind(
        ours, theirs, lead + col_dims, shapes, (x, *parameters), is_widened=is_own or is_mixed, may_be_empty=True
    )


# The mean in deviations, from one: it may come close to zero
MEAN = {"layer_norm": "return y, 1 + m * r, r", "rms_norm": "return y, r"}
STATISTICS = {
    "layer_norm": "_, m, r = torch.native_layer_norm(x0.detach(), x0.shape[-{0}:], None, None, {1})\n",
    "rms_norm": "r = (x0.detach().square().mean(tuple(range(-{0}, 0)), True) + {1}).rsqrt()\n",
}


@st.composite
def channel_kinds(draw: st.DrawFn, choice: Choice, norm: str) -> Kind:
    spatial = draw(st.integers(1 if norm == "instance_norm" else 0, 3))
    groups = draw(st.sampled_from((1, 2, 3, 4))) if norm == "group_norm" else 1
    is_training = norm == "group_norm" or draw(st.sampled_from((True, True, False)))
    has_running = norm != "group_norm" and (not is_training or draw(st.booleans()))
    has_weight = draw(st.booleans())
    has_bias = has_weight and draw(st.booleans())
    eps = draw(st.sampled_from(EPS))
    x, *others = draw(operands_of(choice, has_weight + has_bias + 2 * has_running))
    names = [f"x{i + 1}" for i in range(len(others))]
    given = ["weight=x1"] * has_weight + ["bias=x2"] * has_bias + [f"eps={eps}"]
    before, after = "", ""
    call = f"group_norm(x0, {groups}, "
    if norm != "group_norm":
        flag = f"{'training' if norm == 'batch_norm' else 'use_input_stats'}={is_training}"
        call = f"{norm}(x0, None, None, {flag}, "
    if has_running:
        before = f"m, v = {names[-2]}.clone(), {names[-1]}.clone()\n"
        call, after = call.replace("None, None", "m, v"), ", m, v"
        mean, variance = others[-2:]
        others[-2:] = [
            replace(mean, wants_grad=False),
            replace(variance, dtype=mean.dtype, wants_grad=False, values="positive"),
        ]
    text = f"{before}return {{0}}.{call}{', '.join(given)}){after}"

    def shapes(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        channels = groups * sizes[1]
        return [(sizes[0], channels, *sizes[2:]), *((channels,) for _ in others)]

    is_mixed = len({operand.dtype for operand in (x, *others)}) > 1
    ours, theirs = text.format("warpnorm"), text.format("F")
    return Kind(ours, theirs, 2 + spatial, shapes, (x, *others), is_widened=is_mixed, may_be_empty=True)


@st.composite
def operands_of(draw: st.DrawFn, choice: Choice, parameters: int) -> list[Operand]:
    """The input, and parameters in its dtype or others, of which some want a gradient."""
    dtype = draw(st.sampled_from(choice.dtypes))
    of_parameters = draw(st.sampled_from((dtype, dtype, dtype, "float32", "any")))
    every = tuple(DTYPES)
    dtypes = [draw(st.sampled_from(every)) if of_parameters == "any" else of_parameters for _ in range(parameters)]
    simple = [name for name in ("contiguous", "every_other", "unaligned", "expanded_rows") if name in choice.layouts]
    layouts = [draw(st.sampled_from(("contiguous", *simple))) for _ in range(parameters)]
    layouts = [draw(st.sampled_from(choice.layouts)), *layouts]
    wants_any = draw(st.sampled_from((True, True, False)))
    wants = [wants_any and draw(st.sampled_from((True, True, False))) for _ in layouts]
    return [
        Operand((), DTYPES[name], layout, wants_grad=wanted)
        for name, layout, wanted in zip((dtype, *dtypes), layouts, wants, strict=True)
    ]


@st.composite
def fused_kinds(draw: st.DrawFn, choice: Choice, norm: str) -> Kind:
    """A function with one norm in it: what stands before and after, operands broadcast along some dimensions."""
    is_by_channel = norm in CHANNEL_NORMS
    dims = draw(st.integers(3, 4)) if is_by_channel else draw(st.integers(1, 3))
    count = draw(st.integers(0, 2))
    # which dimensions of the input an operand has at all, and which in full
    masks = [draw(st.lists(st.booleans(), max_size=dims)) for _ in range(count)]
    operands = draw(fused_operands(choice, count + 1))
    names = [f"x{k}" for k in range(count + 1)]
    lines = draw(steps(names, "a"))
    # Neither adding what is constant along a row nor scaling it would do: the norm undoes both
    lines.append(f"h = x0 + {draw(st.sampled_from(lines_of(lines) + names))} * torch.sin(x0)")
    eps = draw(st.sampled_from(EPS[:3]))
    groups = draw(st.sampled_from((1, 2, 3))) if norm == "group_norm" else 1
    calls = {
        "batch_norm": f"F.batch_norm(h, None, None, training=True, eps={eps})",
        "group_norm": f"F.group_norm(h, {groups}, eps={eps})",
        "instance_norm": f"F.instance_norm(h, eps={eps})",
    }
    row_call = f"F.{norm}(h, h.shape[-{draw(st.integers(1, min(2, dims)))}:], eps={eps})"
    lines.append("y = " + calls.get(norm, row_call))
    after = draw(steps(["y", "h", *names], "b"))
    lines += after
    results = [f"y * {draw(st.sampled_from([*lines_of(after), 'h', *names]))}"]
    results += draw(st.lists(st.sampled_from(["y", "h", "h * y", "torch.sin(h) + y"]), max_size=2, unique=True))
    body = "\n".join([*lines, f"return {', '.join(results)}"])

    def shapes(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        full = (sizes[0], groups * sizes[1], *sizes[2:]) if is_by_channel else sizes
        return [full, *(broadcast(full, mask) for mask in masks)]

    return Kind(body, body, dims, shapes, tuple(operands), is_fused=True)


def broadcast(full: tuple[int, ...], mask: Sequence[bool]) -> tuple[int, ...]:
    own = full[len(full) - len(mask) :]
    return tuple(size if is_full else 1 for size, is_full in zip(own, mask, strict=True))


@st.composite
def fused_operands(draw: st.DrawFn, choice: Choice, count: int) -> list[Operand]:
    dtype = draw(st.sampled_from(choice.dtypes))
    others = draw(st.sampled_from((dtype, dtype, "float32")))
    wants_any = draw(st.sampled_from((True, True, True, False)))
    found = []
    for k in range(count):
        layout = draw(st.sampled_from(choice.layouts if k == 0 else ("contiguous", "transposed", "unaligned")))
        wanted = wants_any and draw(st.sampled_from((True, True, False)))
        found.append(Operand((), DTYPES[others if k else dtype], layout, wants_grad=wanted))
    return found


@st.composite
def steps(draw: st.DrawFn, names: list[str], letter: str) -> list[str]:
    """Assignments to new names, each of what is there by then."""
    lines: list[str] = []
    for k in range(draw(st.integers(1, 3))):
        there = [*names, *lines_of(lines)]
        template = draw(st.sampled_from(UNARY + BINARY))
        lines.append(f"{letter}{k} = " + template.format(*(draw(st.sampled_from(there)) for _ in range(2))))
    return lines


def lines_of(lines: list[str]) -> list[str]:
    """The names that they assign to."""
    return [line.split(" = ")[0] for line in lines]
