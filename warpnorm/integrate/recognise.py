"""Which norm a module is: not by its name but by what it computes. A recipe is right where it reproduces the module's
outputs and gradients on inputs that tell all recipes apart, in training and evaluation, with parameters drawn anew, in a
copy on the CPU."""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch.nn.utils import parametrize

from warpnorm.integrate.recipes import AFTER, BEFORE, INPUT, LAYER, PROMOTED, RMS, SINGLE, WEIGHT, WITH_GATE, Recipe

LARGEST_EPS = 0.1
USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # where a module has no attribute for it
# Of the norm of an output, or of a gradient, in float32. An unbiased variance of 8192 columns is off by 6e-5
CLOSE, CLOSE_GRADIENT, CLOSE_HALF = 1e-5, 1e-4, 0.02
COLS = 24  # where a module does not say how many it has
PYTORCHS = (
    torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase,
)  # fmt: skip
MACHINERY = frozenset(vars(torch.nn.Module()))
Tensors = list[torch.Tensor]


def looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Whether it is worth a probe, and a word where it is none of ours: a module that inherits from one of PyTorch's norms;
    or has no others in it, and says so by its name, or has one or two vectors and an eps."""
    if isinstance(module, PYTORCHS):
        return True
    if next(module.children(), None) is not None or type(module).__module__.startswith("torch.nn.utils."):
        return False
    is_named = "norm" in type(module).__name__.lower()
    return is_named or (0 < len(_vectors(module)) <= 2 and any("eps" in name.lower() for name in _eps_names(module)))


def likeness(module: torch.nn.Module) -> Any:
    """Modules of which this is equal follow the same recipe."""
    plain = (bool, int, float, str, bytes, type(None), tuple)
    attributes = [
        (name, repr(value) if isinstance(value, plain) else id(value))
        for name, value in sorted(vars(module).items())
        if name not in MACHINERY
    ]
    parameters = [
        (name, None if _is_lazy(p) else getattr(p, "shape", None), type(p)) for name, p in _parameters(module)
    ]
    return type(module), tuple(attributes), tuple(parameters), len(list(module.buffers()))


def recipe_of(module: torch.nn.Module) -> Recipe | str:
    """The recipe that it follows, or why there is none. Whatever modes the caller is in, the probe is in none of them."""
    refusal = refusal_of(module) or _refusal_of_parameters(module)
    if refusal:
        return refusal
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        modes.enter_context(torch.autocast("cpu", enabled=False))
        modes.enter_context(torch.device("cpu"))
        modes.enter_context(torch.random.fork_rng(devices=[]))
        modes.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # about questions that nobody but the probe asks
        try:
            return _find(module)
        except Exception as error:  # of a module that its author did not think of being copied or probed
            return f"it cannot be probed: {type(error).__name__}: {error}"


def refusal_of(module: torch.nn.Module) -> str:
    """What stands against changing the class of any module."""
    kind: Any = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a script, whose code cannot be changed"
    if "forward" in vars(module):
        return "it has a forward of its own, beside that of its class"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    if next(module.children(), None) is not None:
        return "it has modules in it"
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return "its class pickles in a way of its own"
    return ""


def _refusal_of_parameters(module: torch.nn.Module) -> str:
    if any(map(_is_lazy, module.parameters())):
        return "its parameters have no shape yet: patch after the first call"
    if any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in module.parameters()):
        return "its parameters are of a class of their own"
    vectors = _vectors(module)
    if len(vectors) != len(list(module.parameters(recurse=False))) or len(vectors) > 2:
        return "its parameters are not one or two vectors"
    if len({p.numel() for p in vectors.values()}) > 1:
        return "its parameters have different sizes"
    if next(module.buffers(), None) is not None:
        return "it has buffers, as norms by running statistics do"
    return ""


def _find(module: torch.nn.Module) -> Recipe | str:
    probe = _Probe(module)
    if not probe.answers:
        return probe.refusal
    for candidate in _candidates(module, probe.is_gated):
        found = probe.agreed(candidate)
        if found is not None:
            results = (found._replace(result=result) for result in (INPUT, PROMOTED, WITH_GATE, WEIGHT, SINGLE))
            right = next(filter(probe.agrees_in_dtypes, results), None)
            return "the dtype of its result follows none of the rules known" if right is None else right
    return "it computes something else than a norm with its parameters"


def _is_lazy(parameter: Any) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedParameter)


def _parameters(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return list(module._parameters.items())


def _vectors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in _parameters(module) if p is not None and not _is_lazy(p) and p.ndim == 1}


def _eps_names(module: torch.nn.Module) -> list[str]:
    """Attributes that are small numbers, those that say so first."""
    found = [
        name for name, value in vars(module).items()
        if isinstance(value, float) and 0 <= value <= LARGEST_EPS and not name.startswith("_")
    ]  # fmt: skip
    return sorted(found, key=lambda name: "eps" not in name.lower())


def _candidates(module: torch.nn.Module, is_gated: bool) -> Iterator[Recipe]:
    names = list(_vectors(module))
    orders: list[tuple[str | None, str | None]] = [(None, None)]
    if len(names) == 1:
        orders = [(names[0], None)]
    elif len(names) == 2:
        orders = [(names[0], names[1]), (names[1], names[0])]
    eps: Sequence[str | float] = _eps_names(module) or USUAL_EPS
    for name, (weight, bias), norm in product(eps, orders, (RMS, LAYER)):
        if norm == RMS and bias is not None:
            continue
        if is_gated:
            if norm == RMS and weight is not None:
                yield from (Recipe(norm, weight, None, name, gate=gate) for gate in (BEFORE, AFTER))
            continue
        for offset, is_by_channel in product((0.0, 1.0) if weight else (0.0,), (False, True)):
            yield Recipe(norm, weight, bias, name, offset, is_by_channel)


class _Probe:
    """A module's copy with parameters drawn anew, questions, and its answers, in training and evaluation."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.module = _copy_of(module, torch.float32, self.generator)
        self.forward = type(module).forward
        parameters = list(inspect.signature(self.forward).parameters.values())[1:]
        self.is_gated = len(parameters) > 1 and parameters[1].name == "gate"
        names = _eps_names(module)
        self.eps = [float(getattr(module, name)) for name in names] or list(USUAL_EPS)
        self.cols = cols = next((p.numel() for p in _vectors(module).values()), _cols(module))
        self.answers: dict[tuple[int, ...], list[tuple[bool, Tensors, Tensors]]] = {}
        self.refusal = ""
        for shape in ((3, 2, cols), (5, cols), (cols,), (2, 3, 4, cols), (2, 1, 2, 2, cols), (2, cols, 3, 4)):
            asked = list(self._questions(shape))
            try:
                self.answers[shape] = [
                    (mode, given, self._run(given, None, mode)) for mode, given in product((True, False), asked)
                ]
            except Exception as error:
                self.refusal = self.refusal or f"it failed on a probe: {type(error).__name__}: {error}"

    def _questions(self, shape: tuple[int, ...]) -> Iterator[Tensors]:
        """Ordinary values; a mean far from zero; one that is far from all others; values so small that eps is felt, or is
        all that is; and zeros."""
        count = 2 if self.is_gated else 1
        small = [scale for eps in self.eps for scale in (eps**0.5, 0.01 * eps**0.5)]
        for scale, mean, far in (
            (1.0, 0.0, 0.0),
            (0.5, 2.0, 0.0),
            (1.0, 0.0, 1e3),
            *((s, 0.0, 0.0) for s in (*small, 0.0)),
        ):
            values = torch.randn(count, *shape, generator=self.generator, dtype=torch.float32, device="cpu")
            values[0] = values[0] * scale + mean
            values[0].view(-1)[0] += far
            yield list(values)

    def _run(self, given: Tensors, recipe: Recipe | None, is_training: bool) -> Tensors:
        """The output and all gradients."""
        module = self.module
        module.training = is_training
        leaves = [value.detach().clone().requires_grad_() for value in given]
        before = {name: id(value) for name, value in vars(module).items()}
        output = self.forward(module, *leaves) if recipe is None else recipe.run(module, *leaves)
        if not isinstance(output, torch.Tensor) or output.shape != leaves[0].shape:
            raise TypeError("what it returns is not a tensor of the shape of its input")
        if before != {name: id(value) for name, value in vars(module).items()}:
            raise TypeError("it keeps something of a call for later")
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float32, device="cpu").view(output.shape)
        wanted = [*leaves, *(p for _, p in _parameters(module) if p is not None)]
        return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]

    def agreed(self, recipe: Recipe) -> Recipe | None:
        """It, for inputs of as many dimensions as it agrees on with the module; nothing where there are none."""
        ndims: dict[int, bool] = {}
        is_contiguous = False
        for shape, answers in self.answers.items():
            if recipe.is_by_channel and len(shape) != 4:
                continue
            is_there = recipe.weight is None or shape[1 if recipe.is_by_channel else -1] == self.cols
            right = is_there and all(self._is_close(recipe, *answer) for answer in answers)
            ndims[len(shape)] = ndims.get(len(shape), True) and right
            if right and recipe.is_by_channel:
                is_contiguous = answers[0][2][0].is_contiguous()
        found = tuple(sorted(ndim for ndim, right in ndims.items() if right))
        return recipe._replace(ndims=found, is_contiguous=is_contiguous) if found else None

    def _is_close(self, recipe: Recipe, is_training: bool, given: Tensors, right: Tensors) -> bool:
        try:
            output, *gradients = self._run(given, recipe, is_training)
        except Exception:
            return False
        return _are_close([output], right[:1], CLOSE) and _are_close(gradients, right[1:], CLOSE_GRADIENT)

    def agrees_in_dtypes(self, recipe: Recipe) -> bool:
        """Of the result, for inputs, gates and parameters of 16 and 32 bits. The values have a mean that 16 bits round, and
        are larger than float16 has."""
        shape = next(shape for shape in self.answers if len(shape) == recipe.ndims[-1])
        given = list(torch.randn(2, *shape, generator=self.generator, dtype=torch.float32, device="cpu"))
        given[0] = given[0] * 1e4 + 9e4
        single, half = torch.float32, torch.bfloat16
        for of_input, of_gate, of_parameters in product(
            (single, half), (single, half) if self.is_gated else (single,), (single, half)
        ):
            module = _copy_of(self.module, of_parameters, self.generator)
            leaves = [value.to(dtype) for value, dtype in zip(given, (of_input, of_gate), strict=True)]
            leaves = leaves if self.is_gated else leaves[:1]
            try:
                right = self.forward(module, *leaves)
            except Exception:  # what it does not take, nobody can miss
                continue
            found = recipe.run(module, *leaves)
            if found.dtype != right.dtype or not _are_close([found.float()], [right.float()], CLOSE_HALF):
                return False
        return True


def _are_close(found: Tensors, right: Tensors, tolerance: float) -> bool:
    return all(bool((a - b).norm() <= tolerance * b.norm() + 1e-30) for a, b in zip(found, right, strict=True))


def _copy_of(module: torch.nn.Module, dtype: torch.dtype, generator: torch.Generator) -> torch.nn.Module:
    """On the CPU, with new parameters, all of which have a gradient."""
    twin = copy.copy(module)
    twin.__dict__ = {name: copy.copy(value) for name, value in vars(module).items()}
    twin._parameters = {
        name: None
        if p is None
        else torch.nn.Parameter(
            (torch.rand(p.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5).to(dtype)
        )
        for name, p in _parameters(module)
    }
    return twin


def _cols(module: torch.nn.Module) -> int:
    for name in ("normalized_shape", "hidden_size", "dim"):
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, (tuple, list)) and len(value) == 1:
            return int(value[0])
    return COLS
