"""`patch` swaps the norms of a model in place and `unpatch` puts them back: a module stays the object that it is, with its
parameters, buffers and hooks, and changes its class, to one that computes the same by warpnorm."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from warpnorm import nn
from warpnorm.errors import InputTypeError
from warpnorm.integrate.recipes import Recipe
from warpnorm.integrate.recognise import likeness, looks_like_a_norm, recipe_of, refusal_of

# PyTorch's own, by what they are; what inherits from one of them may compute anything, unless it keeps what ours replace
OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(nn, name)
    for name in (
        "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d",
        "InstanceNorm2d", "InstanceNorm3d",
    )
}  # fmt: skip
REPLACED = {
    kind: {name for part in ours.__mro__ if part.__module__ == nn.__name__ for name in vars(part) if name[:2] != "__"}
    for kind, ours in OURS.items()
}
SHOWN = 3  # names of modules that are alike


@dataclass(frozen=True)
class Change:
    """A module that was swapped (`what` it is now), or left (`what` stood against it)."""

    name: str
    kind: str
    what: str


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` did."""

    swapped: tuple[Change, ...]
    left: tuple[Change, ...]

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)} of {len(self.swapped) + len(self.left)} norms", *_grouped(self.swapped)]
        return "\n".join([*lines, *(["left as they are", *_grouped(self.left)] if self.left else [])])


def _grouped(changes: Sequence[Change]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        groups.setdefault((change.kind, change.what), []).append(change.name or "the model itself")
    for (kind, what), names in groups.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"  {len(names)} x {kind}: {what} ({', '.join(names[:SHOWN])}{more})"


def patch(model: torch.nn.Module) -> Report:
    """Swap the norms of a model in place: PyTorch's own, and every module that computes a LayerNorm or an RMSNorm of its
    last dimension, or of its channels, with its own parameters, whatever its name: `(1 + weight)`, gates and results of
    other dtypes included. A module that is not PyTorch's own is swapped only if it gives the same outputs and gradients on a
    probe. All others are left as they are; the report says which, and why.

    Modules stay the objects that they are: parameters, buffers, hooks, requires_grad, dtype, device, training mode and the
    state_dict do not change, nor does `isinstance`. `warpnorm.unpatch` puts them back."""
    _check(model, "patch")
    swaps: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []
    swapped, left = [], []
    known: dict[Any, Recipe | str] = {}  # of modules that are alike
    for name, module in model.named_modules():
        kind = type(module)
        if is_patched(kind) or kind.__module__.startswith("warpnorm."):
            continue
        found: Recipe | str | None
        if pytorchs(kind) is not None:
            found = refusal_of(module) or None
        elif looks_like_a_norm(module):
            key = likeness(module)
            found = known[key] = known[key] if key in known else recipe_of(module)
        else:
            continue
        if not isinstance(found, str):
            try:
                swaps.append((module, patched_class(kind, found)))
            except Exception as error:  # of a class that does not want to be inherited from
                found = f"its class cannot be inherited from: {type(error).__name__}: {error}"
        if isinstance(found, str):
            left.append(Change(name, kind.__name__, found))
            continue
        swapped.append(Change(name, kind.__name__, str(found or f"warpnorm.nn.{pytorchs(kind).__name__}")))  # type: ignore[union-attr]
    for module, kind in swaps:  # nothing has changed until here
        module.__class__ = kind
    return Report(tuple(swapped), tuple(left))


def unpatch(model: torch.nn.Module) -> Report:
    """Put back what `warpnorm.patch` has swapped: every module is again what it was."""
    _check(model, "unpatch")
    swapped, left = [], []
    for name, module in model.named_modules():
        kind: Any = type(module)
        if is_patched(kind):
            module.__class__ = kind.patched_from
            swapped.append(Change(name, kind.__name__, f"{kind.patched_from.__module__}.{kind.__name__}"))
        elif any(map(is_patched, kind.__mro__)):
            left.append(Change(name, kind.__name__, "its class was changed after it was patched: undo that first"))
    return Report(tuple(swapped), tuple(left))


def _check(model: Any, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputTypeError(f"{function}: takes a torch.nn.Module, but got something of type {type(model).__name__}")


def is_patched(kind: type) -> bool:
    return "patched_from" in vars(kind)


def pytorchs(kind: type[torch.nn.Module]) -> type[torch.nn.Module] | None:
    """The norm of PyTorch's that a class is, or inherits from and computes as: it has other arguments, attributes or checks
    at most. One that makes its objects in a way of its own is left."""
    found = next((base for base in kind.__mro__ if base in OURS), None)
    if found is None or issubclass(kind, LazyModuleMixin):
        return None
    names = ("__new__", *REPLACED[found])
    return found if all(getattr(kind, name, None) is getattr(found, name, None) for name in names) else None


def patched_class(kind: type[torch.nn.Module], recipe: Recipe | None) -> type[torch.nn.Module]:
    """A class of the same name that inherits from `kind`: of PyTorch's own, warpnorm's; or with a forward by a recipe."""
    if (kind, recipe) not in _classes:
        _classes[kind, recipe] = _make_class(kind, recipe)
    return _classes[kind, recipe]


_classes: dict[tuple[type[torch.nn.Module], Recipe | None], type[torch.nn.Module]] = {}


def _make_class(kind: type[torch.nn.Module], recipe: Recipe | None) -> type[torch.nn.Module]:
    members: dict[str, Any] = {"patched_from": kind, "recipe": recipe, "__module__": __name__, "__reduce_ex__": _reduce}
    base = pytorchs(kind)
    if recipe is None and base is not None:
        return type(kind.__name__, (OURS[base],) if kind is base else (OURS[base], kind), members)
    assert recipe is not None
    original = kind.forward
    parameters = list(inspect.signature(original).parameters.values())[1:]
    names, count = [parameter.name for parameter in parameters], 1 if recipe.gate is None else 2
    defaults = {parameter.name: parameter.default for parameter in parameters[count:]}

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """By the recipe where the call is of the kind that it was found by, else as ever."""
        given = dict(zip(names, args)) | kwargs  # noqa: B905
        asked = [given.pop(name, None) for name in names[:count]]
        is_known = all(name in defaults and value is defaults[name] for name, value in given.items())
        is_known = is_known and len(args) <= len(names) and all(isinstance(value, torch.Tensor) for value in asked)
        if is_known and asked[0].ndim in recipe.ndims:
            return recipe.run(self, *asked)
        return original(self, *args, **kwargs)

    return type(kind.__name__, (kind,), members | {"forward": forward})


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickled and copied as what it was, to be patched again."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else dict(vars(self))
    return _rebuild, (type(self).patched_from, type(self).recipe), state


def _rebuild(kind: type[torch.nn.Module], recipe: Recipe | None) -> torch.nn.Module:
    patched = patched_class(kind, recipe)
    return patched.__new__(patched)
