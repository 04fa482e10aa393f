"""What a code object reads from outside, by its instructions: the names, and the attributes that are followed from there."""

import dis
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch

from warpnorm.errors import FusionError

# Packages whose functions read nothing that a user changes; `_operator` is `operator` all the same.
TRUSTED = frozenset({"torch", "warpnorm", "numpy", "builtins", "math", "operator", "functools", "itertools", "typing"})
TRUSTED |= {"collections", "contextlib", "dataclasses", "enum", "abc", "types"}
NOISE = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PRECALL"})
GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
DEREF = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
COMPARED = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
COLLECTED = GLOBAL | DEREF | ATTRIBUTE | {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"}
GETTERS = frozenset({"getattr", "hasattr", "attrgetter"})
# Loads whose lowest bit says that the value is called at once, and the version that brought it.
CALL_BIT = {op for op, since in {"LOAD_GLOBAL": (3, 11), "LOAD_ATTR": (3, 12)}.items() if sys.version_info >= since}


class Use(NamedTuple):
    """One way to read a name: the attributes followed from there, whether what they lead to is called at once, and whether
    it is compared, as a class with the type of something."""

    names: tuple[str, ...] = ()
    called: bool = False
    compared: bool = False


@cache
def trusted(module: str | None) -> bool:
    return (module or "").partition(".")[0].lstrip("_") in TRUSTED


def refusal(code: CodeType, what: str) -> FusionError:
    return FusionError(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) {what}")


def loads(root: CodeType, code: CodeType, outer: frozenset[str], own: str | None) -> Iterator[tuple[str, str, Use]]:
    """(where, name, use) of what `code`, which stands in `root`, reads from outside of `root`. `outer` are the free
    variables that lead there; `own` is what `self` is called."""
    ops, names, args = zip(*steps(code), strict=True)
    boxed = {*code.co_cellvars, *code.co_freevars}
    for at, (op, name) in enumerate(zip(ops[:-3], names, strict=False)):
        if op == "IMPORT_NAME" and (names[at - 2] != 0 or not trusted(name)):
            raise refusal(root, f"imports `{name}`: import it outside, and read there the one value that is needed.")
        if op in ("STORE_GLOBAL", "DELETE_GLOBAL") or (op in ("STORE_DEREF", "DELETE_DEREF") and name in outer):
            raise refusal(root, f"assigns to `{name}`, which would happen only while it is captured; return it instead")
        if op in ("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF") and name == own:
            raise refusal(root, f"assigns to `{own}`, so what it reads from there cannot be told.")
        end = at + 1
        while ops[end] in ATTRIBUTE:
            end += 1
        # From 3.12 on `super().f` is `super, __class__, self, LOAD_SUPER_ATTR f`; before, a call without arguments.
        if own and op in DEREF and name == "__class__" and ops[at + 2] == "LOAD_SUPER_ATTR":
            yield "super", "super()", Use((names[at + 2],))
        elif ops[end] == "LOAD_SUPER_ATTR" and ops[at - 1] in DEREF and names[at - 1] == "__class__":
            continue
        elif own and op in GLOBAL and name == "super" and ops[end] in ("CALL", "CALL_FUNCTION") and not args[end]:
            yield "super", "super()", Use((names[end + 1],) if ops[end + 1] in ATTRIBUTE else ())
        elif (
            op in GLOBAL
            or (op in DEREF and (name in outer or name == own))
            or (op == "LOAD_FAST" and name == own and name not in boxed)  # else it is the cell, for a function inside
        ):
            is_augmented = ops[end] in ("COPY", "DUP_TOP") and ops[end + 1] in ATTRIBUTE  # a.b += 1
            if ops[end] in ("STORE_ATTR", "DELETE_ATTR") or is_augmented:
                what = f"assigns to `{name}.{names[end + is_augmented]}`, which would happen only while it is captured"
                raise refusal(root, f"{what}; return the value, and assign it outside")
            called = ops[end - 1] == "LOAD_METHOD" or (ops[end - 1] in CALL_BIT and bool(args[end - 1] & 1))
            where = "global" if op in GLOBAL else "own" if name == own else "cell"
            yield where, name, Use(names[at + 1 : end], called, _is_compared(ops, names, end))
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name != "__annotate__":
            free = frozenset(inner.co_freevars)
            yield from loads(root, inner, outer & free, own if own in free else None)


def asked(code: CodeType, outer: frozenset[str], own: str | None) -> frozenset[str]:
    """The attributes that are read of what no path leads to, such as an argument, and that PyTorch has not given a tensor:
    the user may have."""
    found, is_path = {"_is_buffer"} if "Buffer" in code.co_names else set(), False  # which `isinstance` asks for
    for op, name, _ in steps(code):
        if op in ATTRIBUTE:
            found |= set() if is_path else {name}
        else:
            is_path = op in GLOBAL or (op in DEREF and name in outer) or name == own
    if not GETTERS.isdisjoint(code.co_names):
        found |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name != "__annotate__":
            found |= asked(inner, outer & frozenset(inner.co_freevars), own if own in inner.co_freevars else None)
    return frozenset(name for name in found if not hasattr(torch.Tensor, name))


def _is_compared(ops: Sequence[str], names: Sequence[Any], at: int) -> bool:
    """Whether what was loaded is, alone or in a tuple, the right side of a comparison, or the left one of `type(...)`."""
    while ops[at] in COLLECTED:
        if ops[at] in GLOBAL and names[at] == "type":
            return True
        at += 1
    return ops[at] in COMPARED


def steps(code: CodeType) -> Iterator[tuple[str, Any, int]]:
    """(operation, name, argument) of each instruction; one that works on two locals is taken apart."""
    for step in dis.get_instructions(code):
        if "_FAST" in step.opname:  # LOAD_FAST_BORROW, STORE_FAST_LOAD_FAST
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for op, name in zip(re.findall("[A-Z]+_FAST", step.opname), names, strict=True):
                yield op, name, 0
        elif step.opname not in NOISE:
            yield step.opname, step.argval, step.arg or 0
    yield from [("END", None, 0)] * 3
