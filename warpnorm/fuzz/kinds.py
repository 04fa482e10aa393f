"""Kinds of calls: a norm with its options, dtypes and layouts, which may have to be compiled, but for the sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from warpnorm.fuzz.case import LAYOUTS, Case, Operand
from warpnorm.fuzz.draws import Draws

ROW_NORMS = ("rms_norm", "layer_norm")
CHANNEL_NORMS = ("group_norm", "instance_norm", "batch_norm")
FORMS = ("plain", "fused")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
EPS = (1e-5, 1e-6, 1e-3, 1.0, 1e-8)


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
    """A call but for its sizes: `shapes` gives those of the operands for the sizes that are drawn. `cols` of these, the last
    ones, are columns of a norm over rows. `is_twice`: gradients of gradients too, of few elements."""

    ours: str
    theirs: str
    dims: int  # sizes to draw
    shapes: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    operands: tuple[Operand, ...]
    cols: int = 0
    is_fused: bool = False
    is_widened: bool = False
    is_mixed: bool = False
    is_twice: bool = False
    averaged: tuple[int, ...] = ()
    kinks: str = ""
    route: str = "auto"
    may_be_empty: bool = False

    def case(self, sizes: tuple[int, ...], seed: int, values: str, is_twice: bool) -> Case:
        first, *others = (
            replace(operand, shape=shape) for operand, shape in zip(self.operands, self.shapes(sizes), strict=True)
        )
        first = replace(first, values=values)
        return Case(
            self.ours, self.theirs, (first, *others), seed, self.is_fused, self.is_widened, self.is_mixed,
            is_twice, self.averaged, self.kinks, self.route,
        )  # fmt: skip


def can_be_twice(draws: Draws, operands: Sequence[Operand]) -> bool:
    """One in some kinds is differentiated twice: of dtypes whose own rounding would not hide what is wrong."""
    is_wide = all(operand.dtype in (torch.float32, torch.float64) for operand in operands)
    return is_wide and any(operand.wants_grad for operand in operands) and draws.flag(6)


def row_kinds(draws: Draws, choice: Choice, norm: str) -> Kind:
    col_dims, lead = 1 + draws.below(2), draws.below(3)
    has_bias = norm == "layer_norm" and draws.flag()
    weight = draws.pick(("none", "vector", "scalar"))
    option = draws.pick(("", "", "", "weight_offset", "normalized_dim", "return_stats", "out"))
    option = "" if option == "weight_offset" and weight == "none" else option
    eps = draws.pick(EPS)
    x, *parameters = operands_of(draws, choice, (weight != "none") + has_bias)
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
        ours, theirs, lead + col_dims, shapes, (x, *parameters), col_dims, is_widened=is_own,
        is_mixed=is_mixed and not is_own, is_twice=can_be_twice(draws, (x, *parameters)), may_be_empty=True,
    )  # fmt: skip


# The mean in deviations, from one: it may come close to zero
MEAN = {"layer_norm": "return y, 1 + m * r, r", "rms_norm": "return y, r"}
STATISTICS = {
    "layer_norm": "_, m, r = torch.native_layer_norm(x0.detach(), x0.shape[-{0}:], None, None, {1})\n",
    "rms_norm": "r = (x0.detach().square().mean(tuple(range(-{0}, 0)), True) + {1}).rsqrt()\n",
}


def channel_kinds(draws: Draws, choice: Choice, norm: str) -> Kind:
    spatial = 1 + draws.below(3) if norm == "instance_norm" else draws.below(4)
    groups = draws.pick((1, 2, 3, 4)) if norm == "group_norm" else 1
    is_training = norm == "group_norm" or draws.pick((True, True, False))
    has_running = norm != "group_norm" and (not is_training or draws.flag())
    has_weight = draws.flag()
    has_bias = has_weight and draws.flag()
    eps = draws.pick(EPS)
    x, *others = operands_of(draws, choice, has_weight + has_bias + 2 * has_running)
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
    is_twice = can_be_twice(draws, (x, *others))
    averaged = (len(others) - 1, len(others)) if has_running and is_training else ()
    return Kind(
        ours, theirs, 2 + spatial, shapes, (x, *others), is_mixed=is_mixed, is_twice=is_twice, averaged=averaged,
        may_be_empty=True,
    )  # fmt: skip


def operands_of(draws: Draws, choice: Choice, parameters: int) -> list[Operand]:
    """The input, and parameters in its dtype or others, of which some want a gradient."""
    dtype = draws.pick(choice.dtypes)
    of_parameters = draws.pick((dtype, dtype, dtype, "float32", "any"))
    every = tuple(DTYPES)
    dtypes = [draws.pick(every) if of_parameters == "any" else of_parameters for _ in range(parameters)]
    simple = [name for name in ("contiguous", "every_other", "unaligned", "expanded_rows") if name in choice.layouts]
    of_others: list[str] = [draws.pick(("contiguous", *simple)) for _ in range(parameters)]
    layouts = [draws.pick(choice.layouts), *of_others]
    wants_any = draws.pick((True, True, False))
    wants = [wants_any and draws.pick((True, True, False)) for _ in layouts]
    return [
        Operand((), DTYPES[name], layout, wants_grad=wanted)
        for name, layout, wanted in zip((dtype, *dtypes), layouts, wants, strict=True)
    ]
