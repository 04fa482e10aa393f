"""Every kernel on the CPU, by Triton's interpreter: run with TRITON_INTERPRET=1, which must be set before Triton is
imported. Memory is poisoned with NaN, and the kernels are forced. A run has a fortieth of the contracts' cases, of
teams and of calls that come again an eighth; WARPNORM_TEST_ALL=1 has all."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from selection import select
from warpnorm import pipeline, settings
from warpnorm.plan import device as devices

if not settings.is_interpreting():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items, "interpreter", ("test_contracts.py", "test_channels.py"), one_in=40)
    some = ("test_teams.py", "test_repeat.py", "test_repeat_channels.py")
    select(config, items, "interpreter", some, one_in=8, keeps_lone=True)


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture(autouse=True)
def kernels_on_poisoned_memory() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled with NaN
    with settings.override(route="kernels"):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By the plans of a GPU."""
    gpu = replace(devices.KNOWN["sm_90"], backend="interpreter", arch="cpu")
    monkeypatch.setattr(devices, "_numbers", lambda device: gpu)
    pipeline.prepare_forward.cache_clear()
    pipeline.prepare_backward.cache_clear()
    yield
    pipeline.prepare_forward.cache_clear()
    pipeline.prepare_backward.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Two workers share two cores: threads that wait for each other would take most of PyTorch's time."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def round_to_nearest() -> None:
    """The interpreter truncates float32 to bfloat16; the compiled kernels round to nearest, as PyTorch does."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    truncating = builder.cast_impl

    def cast(self, source, target):  # type: ignore[no-untyped-def]
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            bits = rounded.view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits, target.scalar)
        return truncating(self, source, target)

    builder.cast_impl = cast


@pytest.fixture(autouse=True, scope="session")
def comparisons_are_booleans() -> None:
    """The interpreter says of a comparison that it has the dtype of what is compared, which it becomes where one of scalars
    is spread over a tile; the compiler says int1."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.binary_op

    def binary_op(self, lhs, rhs, op):  # type: ignore[no-untyped-def]
        found = original(self, lhs, rhs, op)
        return interpreter.TensorHandle(found.data, tl.int1) if found.data.dtype == np.bool_ else found

    builder.binary_op = binary_op


@pytest.fixture(autouse=True, scope="session")
def reductions_by_halves() -> None:
    """The interpreter takes element after element where several tiles are reduced at once; here each is summed, or all are
    folded."""
    from triton.runtime import interpreter

    from warpnorm.kernels.statistics import merge_moments

    def reduce(self, input):  # type: ignore[no-untyped-def]
        if self.combine_fn is not merge_moments:
            return [self.sum(tile) for tile in input]
        tiles = [np.moveaxis(tile.handle.data, self.axis, -1) for tile in input]
        while (half := tiles[0].shape[-1] // 2) > 0:
            halves = [tile[..., part] for part in (slice(half), slice(half, None)) for tile in tiles]
            given = [self.to_tensor(tile, input[i % len(input)].dtype) for i, tile in enumerate(halves)]
            tiles = [found.handle.data for found in self.combine_fn.fn(*given)]
        return [self.to_tensor(tile[..., 0], part.dtype) for tile, part in zip(tiles, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce


@pytest.fixture(autouse=True, scope="session")
def mathematical_library() -> None:
    """The interpreter has no mathematical library; the compiled kernels' is tested on a GPU."""
    from interpreter.library import provide_library

    provide_library()


@pytest.fixture(autouse=True, scope="session")
def patch_the_language_once() -> None:
    """The interpreter replaces the functions of `tl` at every call of a device function, which takes most of its time; once
    for every launch is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    done: set[frozenset[int]] = set()
    one_at_a_time = threading.Lock()
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_once(function):  # type: ignore[no-untyped-def]
        key = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if key in done:
            return interpreter._LangPatchScope()
        done.add(key)
        return patch(function)

    def launch(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        with one_at_a_time:  # what one launch replaces, another would put back
            done.clear()
            return run(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch
