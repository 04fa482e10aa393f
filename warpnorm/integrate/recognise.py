"""Which norm a module is: not by its name but by what it computes. A recipe is right where it reproduces the module's
outputs and gradients on inputs and parameters that tell all recipes apart, and a recipe from a norm with something around
it, in training and evaluation, in a copy on the CPU."""

import copy
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from warpnorm.integrate.recipes import (
    AFTER,
    ALIKE,
    ANYHOW,
    BEFORE,
    DENSE,
    INPUT,
    LAYER,
    PROMOTED,
    RMS,
    SINGLE,
    WEIGHT,
    WITH_GATE,
    Recipe,
)

LARGEST_EPS = 0.1
USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # where a module has no attribute for it
# Of the norm of an output, or of a gradient, in float32. An unbiased variance of 8192 columns is off by 6e-5
CLOSE, CLOSE_GRADIENT, CLOSE_HALF = 1e-5, 1e-4, 0.02
COLS = 24  # where a module does not say how many it has
BY_CHANNEL = (3, 4, 5)  # dimensions of inputs that have channels before their last one
LARGE = 1e10  # the third power of its inverse, which a gradient may have on the way, is still a float32
OTHER = "it computes something else than a norm"
OTHER_DTYPES = "the dtype of its result follows none of the rules known"
PYTORCHS = (
    torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase,
)  # fmt: skip
MACHINERY = frozenset(vars(torch.nn.Module()))
Tensors = list[torch.Tensor]
# Parameters of a probe, by what they are there for, of values from 0.5 to 1.5. What an abs, a relu or a clamp leaves as it
# is in one of them is changed in another
PARAMETERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda values: values,
    "parameters are negative or zero": lambda values: _signed(values) * (_places(values) % 3 > 0),
    "parameters are large": lambda values: 1e6 * _signed(values),
    "parameters are small": lambda values: 1e-3 * _signed(values),
}


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
    best: Recipe | None = None
    for candidate in _candidates(module, probe.is_gated):
        found = probe.agreed(candidate)
        if found is not None and (best is None or len(found.ndims) > len(best.ndims)):
            best = found
            if set(best.ndims) == set(map(len, probe.answers)):
                break
    if best is None:
        return f"{OTHER} where {probe.almost}" if probe.almost else f"{OTHER} with its parameters"
    reasons = []
    for result in (INPUT, PROMOTED, WITH_GATE, WEIGHT, SINGLE):
        found = best._replace(result=result)
        reasons.append(probe.refusal_in_dtypes(found))
        if not reasons[-1]:
            return found
    return next((reason for reason in reasons if reason != OTHER_DTYPES), OTHER_DTYPES)


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
        for offset in (0.0, 1.0) if weight else (0.0,):
            yield Recipe(norm, weight, bias, name, offset)


class _Question(NamedTuple):
    """Inputs, and which parameters. `where` is empty for what tells norms apart; else it says what tells a norm from one
    with something around it."""

    given: Tensors
    parameters: str = ""
    where: str = ""
    is_finite: bool = True


class _Answer(NamedTuple):
    question: _Question
    is_training: bool
    right: Tensors


class _Probe:
    """A module's copies with parameters drawn anew, questions, and its answers, in training and evaluation."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.modules = {name: _copy_of(module, torch.float32, self.generator, name) for name in PARAMETERS}
        self.forward = type(module).forward
        parameters = list(inspect.signature(self.forward).parameters.values())[1:]
        self.is_gated = len(parameters) > 1 and parameters[1].name == "gate"
        names = _eps_names(module)
        self.eps = [float(getattr(module, name)) for name in names] or list(USUAL_EPS)
        self.cols = cols = next((p.numel() for p in _vectors(module).values()), _cols(module))
        self.answers: dict[tuple[int, ...], list[_Answer]] = {}
        self.refusal = ""
        self.almost = ""  # where the module was no norm, when it had been one until then
        for shape in (
            (3, 4, cols), (5, cols), (cols,), (2, 3, 4, cols), (2, 5, 1, 2, cols),
            (2, cols, 3, 4), (2, cols, 3), (2, cols, 3, 1, 2),
        ):  # fmt: skip
            try:
                self.answers[shape] = [
                    _Answer(question, mode, self._run(question, None, mode))
                    for question in self._questions(shape)
                    for mode in (True, False)
                ]
            except Exception as error:
                self.refusal = self.refusal or f"it failed on a probe: {type(error).__name__}: {error}"

    def _questions(self, shape: tuple[int, ...]) -> Iterator[_Question]:
        """Ordinary values; a mean far from zero; one that is far from all others; values so small that eps is felt, or is
        all that is; and zeros. Then what a clamp or torch.nan_to_num would change."""
        count = 2 if self.is_gated else 1
        small = [scale for eps in self.eps for scale in (eps**0.5, 0.01 * eps**0.5)]
        for scale, mean, far in (
            (1.0, 0.0, 0.0),
            (0.5, 2.0, 0.0),
            (1.0, 0.0, 1e3),
            *((s, 0.0, 0.0) for s in (*small, 0.0)),
        ):
            values = self._values(count, shape)
            values[0] = values[0] * scale + mean
            values[0].view(-1)[0] += far
            yield _Question(list(values))
        usual = self._values(count, shape)
        for name in filter(None, PARAMETERS):
            yield _Question(list(usual), name, name)
        for k, name in enumerate(("inputs", "gates")[:count]):
            values = usual.clone()
            values[k] *= LARGE
            yield _Question(list(values), where=f"{name} are large")
            for value in ("nan", "inf", "-inf"):  # one at a time, as a NaN in a row hides all else
                values = usual.clone()
                values[k].view(-1)[0] = float(value)
                yield _Question(list(values), where=f"{name} are NaN or infinite", is_finite=False)

    def _values(self, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(count, *shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def _run(self, question: _Question, recipe: Recipe | None, is_training: bool) -> Tensors:
        """The output and all gradients; of what is not finite the output alone, as two ways to a gradient that is NaN differ
        in what else is."""
        module = self.modules[question.parameters]
        module.training = is_training
        leaves = [value.detach().clone().requires_grad_() for value in question.given]
        before = {name: id(value) for name, value in vars(module).items()}
        output = self.forward(module, *leaves) if recipe is None else recipe.run(module, *leaves)
        if not isinstance(output, torch.Tensor) or output.shape != leaves[0].shape:
            raise TypeError("what it returns is not a tensor of the shape of its input")
        if before != {name: id(value) for name, value in vars(module).items()}:
            raise TypeError("it keeps something of a call for later")
        if not question.is_finite:
            return [output.detach()]
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float32, device="cpu").view(output.shape)
        wanted = [*leaves, *(p for _, p in _parameters(module) if p is not None)]
        return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]

    def agreed(self, recipe: Recipe) -> Recipe | None:
        """It, for inputs of as many dimensions as it agrees on with the module, over the last of them or else over channels;
        nothing where there are none."""
        last = self._ndims(recipe, {*map(len, self.answers)})
        others = () if self.is_gated else {*map(len, self.answers)}.intersection(BY_CHANNEL).difference(last)
        by_channel = self._ndims(recipe._replace(by_channel=BY_CHANNEL), others)
        if not last and not by_channel:
            return None
        layout = self._layout(self._shape(by_channel[-1], True)) if by_channel else ANYHOW
        return recipe._replace(ndims=tuple(sorted(last + by_channel)), by_channel=by_channel, layout=layout)

    def _ndims(self, recipe: Recipe, asked: Collection[int]) -> tuple[int, ...]:
        """Of these numbers of dimensions those of which it agrees in all shapes."""
        wrong = {len(shape) for shape in self.answers if len(shape) in asked and not self._is_right(recipe, shape)}
        return tuple(sorted({*asked} - wrong))

    def _is_right(self, recipe: Recipe, shape: tuple[int, ...]) -> bool:
        if recipe.weight is not None and shape[1 if len(shape) in recipe.by_channel else -1] != self.cols:
            return False
        wrong = next((answer for answer in self.answers[shape] if not self._is_close(recipe, answer)), None)
        if wrong is not None:
            self.almost = self.almost or wrong.question.where
        return wrong is None

    def _is_close(self, recipe: Recipe, answer: _Answer) -> bool:
        question, is_training, right = answer
        try:
            output, *gradients = self._run(question, recipe, is_training)
        except Exception:
            return False
        if not question.is_finite:
            is_odd = ~right[0].isfinite()
            is_alike = torch.allclose(output[is_odd].double(), right[0][is_odd].double(), equal_nan=True)
            return is_alike and _are_close([output[~is_odd]], [right[0][~is_odd]], CLOSE)
        return _are_close([output], right[:1], CLOSE) and _are_close(gradients, right[1:], CLOSE_GRADIENT)

    def _shape(self, ndim: int, is_by_channel: bool) -> tuple[int, ...]:
        """One that was answered, if there is one with all columns in the dimension that is normed: of few columns more is
        rounded away."""
        at = 1 if is_by_channel else -1
        answered = (shape for shape in self.answers if len(shape) == ndim)
        return min(answered, key=lambda shape: shape[at] != self.cols)

    def _layout(self, shape: tuple[int, ...]) -> str:
        """How the module's result lies, of an input that is contiguous and of one with channels last."""
        x = self._values(1, shape)[0]
        if not self.forward(self.modules[""], x).is_contiguous():
            return ANYHOW
        try:
            other = self.forward(self.modules[""], x.movedim(1, -1).contiguous().movedim(-1, 1))
        except Exception:  # what it does not take, nobody can miss
            return DENSE
        return DENSE if other.is_contiguous() else ALIKE

    def refusal_in_dtypes(self, recipe: Recipe) -> str:
        """What stands against its rule for the dtype of the result, for inputs, gates and parameters of 16 and 32 bits. The
        values have a mean that 16 bits round, and are larger than float16 has."""
        last = [ndim for ndim in recipe.ndims if ndim not in recipe.by_channel]
        shapes = [self._shape(ndims[-1], ndims is not last) for ndims in (last, recipe.by_channel) if ndims]
        single, half = torch.float32, torch.bfloat16
        dtypes = list(product((single, half), (single, half) if self.is_gated else (single,), (single, half)))
        for shape, (of_input, of_gate, of_parameters) in product(shapes, dtypes):
            # Of few rows the roundings of one could be most of what is compared
            count = 2 if self.is_gated else 1
            values = self._values(count, (4 * shape[0], *shape[1:]) if len(shape) > 1 else shape)
            values[0] = values[0] * 1e4 + 9e4
            module = _copy_of(self.modules[""], of_parameters, self.generator)
            leaves = [value.to(dtype) for value, dtype in zip(values, (of_input, of_gate)[:count], strict=True)]
            try:
                right = self.forward(module, *leaves)
            except Exception:  # what it does not take, nobody can miss
                continue
            found = recipe.run(module, *leaves)
            if found.dtype != right.dtype:
                return OTHER_DTYPES
            if not _are_close([found.float()], [right.float()], CLOSE_HALF):
                words = f"inputs are {_word(of_input)}"
                words += f" and parameters {_word(of_parameters)}" if _vectors(module) else ""
                return f"{OTHER}, or rounds on the way, where {words}"
        return ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _are_close(found: Tensors, right: Tensors, tolerance: float) -> bool:
    return all(bool((a - b).norm() <= tolerance * b.norm() + 1e-30) for a, b in zip(found, right, strict=True))


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Every other one negative: both signs are there, however few there are."""
    return values * (1 - 2 * (_places(values) % 2))


def _places(values: torch.Tensor) -> torch.Tensor:
    return torch.arange(values.numel(), device=values.device)


def _copy_of(
    module: torch.nn.Module, dtype: torch.dtype, generator: torch.Generator, parameters: str = ""
) -> torch.nn.Module:
    """On the CPU, with new parameters, all of which have a gradient."""
    twin = copy.copy(module)
    twin.__dict__ = {name: copy.copy(value) for name, value in vars(module).items()}
    twin._parameters = {}
    for name, p in _parameters(module):
        if p is None:
            twin._parameters[name] = None
            continue
        values = torch.rand(p.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5
        twin._parameters[name] = torch.nn.Parameter(PARAMETERS[parameters](values).to(dtype))
    return twin


def _cols(module: torch.nn.Module) -> int:
    for name in ("normalized_shape", "hidden_size", "dim"):
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 1:  # 1 and -1 say which dimension is normed
            return value
        if isinstance(value, (tuple, list)) and len(value) == 1:
            return int(value[0])
    return COLS
