"""Which norm a module is: not by its name but by what it computes. A recipe is right where it reproduces the module's
outputs and gradients on inputs that tell all recipes apart, with parameters drawn anew, in a copy."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from warpnorm.integrate.recipes import AFTER, BEFORE, INPUT, LAYER, PROMOTED, RMS, WEIGHT, Recipe

LARGEST_EPS = 0.1
TOLERANCE = 1e-4  # in float32, of the norm of an output or gradient; neighbouring recipes differ by much more
COLS = 24  # where a module does not say how many it has
RESULTS = (INPUT, PROMOTED, WEIGHT)
MIXED = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))  # of the input, of the parameters


def looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Whether it is worth a probe, and a word where it is none of ours: a module without others in it, that says so by its
    name, or has one or two vectors and a small number that is an eps."""
    if next(module.children(), None) is not None:
        return False
    return "norm" in type(module).__name__.lower() or (0 < len(_vectors(module)) <= 2 and bool(_eps_names(module)))


def likeness(module: torch.nn.Module) -> Any:
    """Modules of which this is equal follow the same recipe."""
    plain = (bool, int, float, str, bytes, type(None), tuple)
    attributes = [
        (name, repr(value) if isinstance(value, plain) else id(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
    ]
    parameters = [
        (name, None if _is_lazy(p) else getattr(p, "shape", None), type(p)) for name, p in module._parameters.items()
    ]
    return type(module), tuple(attributes), tuple(parameters), len(list(module.buffers()))


def recipe_of(module: torch.nn.Module) -> Recipe | str:
    """The recipe that it follows, or why there is none."""
    refusal = _refusal(module)
    if refusal:
        return refusal
    try:
        probe = _Probe(module)
    except Exception as error:  # a copy or a probe that its author did not think of
        return f"it cannot be probed: {type(error).__name__}: {error}"
    found = next((recipe for recipe in _candidates(module, probe.is_gated) if probe.agrees(recipe)), None)
    if found is None:
        return probe.refusal or "it computes something else than a norm with its parameters"
    result = next((result for result in RESULTS if probe.agrees_in_dtype(found._replace(result=result))), None)
    if result is None:
        return "the dtype of its result follows none of the rules known"
    return found._replace(result=result)


def _refusal(module: torch.nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a script, whose code cannot be changed"
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


def _is_lazy(parameter: Any) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedParameter)


def _vectors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 1}


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
    eps: Sequence[str | float] = _eps_names(module) or (1e-5, 1e-6, 1e-8, 1e-12)
    for name, (weight, bias), norm in product(eps, orders, (RMS, LAYER)):
        if norm == RMS and bias is not None:
            continue
        if is_gated:
            if norm == RMS and weight is not None:
                yield from (Recipe(norm, weight, None, name, gate=gate) for gate in (BEFORE, AFTER))
            continue
        for offset, is_by_channel in product((0.0, 1.0) if weight else (0.0,), (False, True)):
            yield Recipe(norm, weight, bias, name, offset, is_by_channel=is_by_channel)


class _Probe:
    """A module's copy with parameters drawn anew, its answers, and the questions."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.module = _copy_of(module, torch.float32, self.generator)
        self.forward = type(module).forward
        parameters = list(inspect.signature(self.forward).parameters.values())[1:]
        self.is_gated = len(parameters) > 1 and parameters[1].name == "gate"
        cols = next((p.numel() for p in self.module.parameters()), _cols(module))
        self.answers: list[list[tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]]] = []
        errors = []
        for shape in ((3, 2, cols), (2, cols, 3, 4)):
            try:
                self.answers.append([(given, self._run(self.module, given)) for given in self._questions(shape)])
            except Exception as error:
                errors.append(f"it failed on a probe of shape {shape}: {type(error).__name__}: {error}")
                self.answers.append([])
        self.refusal = "" if any(self.answers) else errors[0]

    def _questions(self, shape: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
        """Ordinary values; a mean far from zero; and values so small that eps is felt."""
        count = 2 if self.is_gated else 1
        asked = []
        for scale, mean in ((1.0, 0.0), (0.5, 2.0), (1e-3, 0.0)):
            values = torch.randn(count, *shape, generator=self.generator)
            asked.append(tuple(value * scale + mean for value in values))
        return asked

    def _run(
        self, module: torch.nn.Module, given: Sequence[torch.Tensor], recipe: Recipe | None = None
    ) -> list[torch.Tensor]:
        leaves = [value.detach().clone().requires_grad_() for value in given]
        output = self.forward(module, *leaves) if recipe is None else recipe.run(module, leaves)
        if not isinstance(output, torch.Tensor) or output.shape != leaves[0].shape:
            raise TypeError("what it returns is not a tensor of the shape of its input")
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
        wanted = [*leaves, *module.parameters()]
        return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]

    def agrees(self, recipe: Recipe) -> bool:
        """On everything that the module itself took in this place of its channels."""
        answers = self.answers[1 if recipe.is_by_channel else 0]
        try:
            return bool(answers) and all(
                _is_close(self._run(self.module, given, recipe), right) for given, right in answers
            )
        except Exception:
            return False

    def agrees_in_dtype(self, recipe: Recipe) -> bool:
        given = self.answers[1 if recipe.is_by_channel else 0][0][0]
        for of_input, of_parameters in MIXED:
            module = _copy_of(self.module, of_parameters, self.generator)
            leaves = [value.to(of_input) for value in given]
            try:
                right = self.forward(module, *leaves)
            except Exception:  # what it does not take, nobody can miss
                continue
            found = recipe.run(module, leaves)
            if found.dtype != right.dtype or not _is_close([found.float()], [right.float()], 0.02):
                return False
        return True


def _is_close(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor], tolerance: float = TOLERANCE) -> bool:
    return all((a - b).norm() <= tolerance * b.norm() + 1e-30 for a, b in zip(found, right, strict=True))


def _copy_of(module: torch.nn.Module, dtype: torch.dtype, generator: torch.Generator) -> torch.nn.Module:
    """On the CPU, without hooks, with new parameters that all have a gradient."""
    twin = copy.copy(module)
    twin.__dict__ = {name: copy.copy(value) for name, value in vars(module).items()}
    drawn: dict[str, Any] = {}
    for name, p in module.named_parameters(recurse=False):
        values = torch.rand(p.shape, generator=generator) + 0.5
        drawn[name] = torch.nn.Parameter(values.to(dtype))
    twin._parameters = {name: drawn.get(name) for name in module._parameters}
    return twin


def _cols(module: torch.nn.Module) -> int:
    for name in ("normalized_shape", "hidden_size", "dim"):
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, (tuple, list)) and len(value) == 1:
            return int(value[0])
    return COLS
