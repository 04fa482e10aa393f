"""Memory of large results. Fresh memory costs its pages, as much time as the norm itself: it comes in huge ones where the
system allows it, and when a result is gone its memory is kept for the next of the same size. The compiled launcher, once it
is there, keeps it for all; until then it is counted here who uses what."""

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from warpnorm import settings
from warpnorm.cpu import build

# Bytes from which a result is large
LARGE = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Memory that has been a result's. Tensors and Python objects that still use it are counted; a storage that has
    been resized or moved into shared memory since is no longer what was kept."""

    storage: torch.UntypedStorage
    address: int
    size: int

    @property
    def is_idle(self) -> bool:
        return self.tensors == 1 and self.references <= _references_of_idle() and self.is_same

    @property
    def tensors(self) -> int:
        """That use it, and one more for Python's object."""
        return torch._C._storage_Use_Count(self.storage._cdata)

    @property
    def references(self) -> int:
        return sys.getrefcount(self.storage)

    @property
    def is_same(self) -> bool:
        is_there = self.storage.nbytes() == self.size and self.storage.data_ptr() == self.address
        return is_there and self.storage.resizable()  # `numpy` takes that away, for good


@cache
def _nobodys() -> Kept:
    """What nobody but its keeper can ever have seen."""
    with torch._C.DisableTorchFunction():
        return Kept(torch.UntypedStorage(1), 0, 0)


_fewest: int | None = None


def _references_of_idle() -> int:
    """The fewest that were ever counted: a profiler or debugger that looks into frames holds one more."""
    global _fewest
    now = _nobodys().references
    _fewest = now if _fewest is None else min(now, _fewest)
    return _fewest


_kept: list[Kept] = []  # the one that was used last is the last
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


keeper: Any = None  # the compiled launcher's module
_told: int | None = None  # how many bytes may be kept


def keeps(size: int) -> bool:
    """Whether the compiled launcher looks after a large result of so many bytes."""
    global _told
    now = settings.current()
    if keeper is None or now.launcher == "python" or size > now.keep_bytes:
        return False
    if _told != now.keep_bytes:
        if _told is None:
            keeper.look_after(LARGE, build.Address.to(build.pool().ask_for_huge_pages))
        _told = now.keep_bytes
        keeper.release(_told)
    if _kept:
        _release()
    return True


def are_kept(sizes: Sequence[int]) -> bool:
    """Whether the compiled launcher looks after results of so many bytes, as far as they are large."""
    return all(size < LARGE or keeps(size) for size in sizes)


def reuse(results: Sequence[torch.Tensor], is_scattered: bool = False) -> None:
    """Gives new results, which nobody has seen or written yet, the memory of earlier ones. `is_scattered`: threads will
    write here and there."""
    most = settings.current().keep_bytes
    for result in results:
        size = result.nbytes
        if not LARGE <= size <= most:
            continue
        if keeps(size):
            keeper.reuse(result, most, is_scattered)
        elif _can_count() and not _is_filled() and not _is_given(result, size):
            _keep(result.untyped_storage(), size, most)


def ask_for_huge_pages(results: Sequence[torch.Tensor], parts: int = 1) -> None:
    """`parts` threads share the pages, where they will write here and there: BatchNorm of 32 x 64 x 56 x 56 into fresh
    memory takes 5.2 ms, and 6.0 where two of them meet at the same page."""
    for result in results:
        size = result.nbytes
        if size < LARGE or (keeper is not None and keeper.has(result)):  # which has asked
            continue
        if size == (storage := result.untyped_storage()).nbytes():  # all of it is this result's
            build.pool().ask_for_huge_pages(
                ctypes.c_void_p(storage.data_ptr()), ctypes.c_int64(size), ctypes.c_int64(parts)
            )


@cache
def _can_count() -> bool:
    return hasattr(torch._C, "_storage_Use_Count")


def _is_filled() -> bool:
    """Whether PyTorch was told to fill new memory, which who asked for it shall find."""
    is_told: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return is_told and torch.are_deterministic_algorithms_enabled()


def _is_given(result: torch.Tensor, size: int) -> bool:
    if not _lock.acquire(blocking=False):  # another thread has it, or this one, in whose midst a finalizer runs
        return False
    try:
        for i, kept in reversed(list(enumerate(_kept))):  # the last used is the likeliest to be in a cache
            if kept.size == size and kept.is_idle:
                result.set_(kept.storage, 0, result.shape, result.stride())
                _kept.append(_kept.pop(i))
                return True
    finally:
        _lock.release()
    return False


def _keep(storage: torch.UntypedStorage, size: int, most: int) -> None:
    """Lets go of what was used longest ago: memory in use stays its users', idle memory goes back."""
    if not _lock.acquire(blocking=False):
        return
    before = _kept[:]  # which nothing of is gone, and no finalizer runs, before the lock is free
    try:
        _kept[:] = [kept for kept in before if kept.is_same]
        while _kept and sum(kept.size for kept in _kept) + size > most:
            del _kept[0]
        _kept.append(Kept(storage, storage.data_ptr(), size))
    finally:
        _lock.release()
    del before


def release() -> None:
    """Gives the memory of results that are gone back to the system."""
    if keeper is not None:
        keeper.release(0)
    _release()


def _release() -> None:
    if not _lock.acquire(blocking=False):
        return
    try:
        before = _kept[:]
        _kept.clear()
    finally:
        _lock.release()
    del before
