"""Memory of results that is kept: given to the next one of its size when nobody uses it any more, and never before. By
Python; `test_memory_of_launcher.py` is of the compiled launcher."""

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import warpnorm
from warpnorm import settings
from warpnorm.cpu import memory
from warpnorm.errors import SettingError

COLS = 2048
ROWS = memory.LARGE // (4 * COLS)
SIZE = memory.LARGE


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)  # which would fill new memory
    memory.release()
    with settings.override(keep_bytes=4 * SIZE, launcher="python"):
        yield
    memory.release()


def norm(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return warpnorm.rms_norm(torch.randn(rows, COLS, generator=generator), (COLS,))


def test_a_result_that_is_gone_leaves_its_memory_to_the_next() -> None:
    first = norm()
    address = first.data_ptr()
    del first
    second = norm(1)
    assert second.data_ptr() == address
    torch.testing.assert_close(
        second, F.rms_norm(torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1)), (COLS,))
    )


USERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda y: y,
    "a view": lambda y: y[3, 5:7],
    "a detached alias": lambda y: y.detach(),
    "an array": lambda y: y.numpy(),
    "a part of an array": lambda y: y.numpy()[2:3],
    "a buffer": lambda y: memoryview(y.numpy()),
    "its storage": lambda y: y.untyped_storage(),
    "a list with its storage": lambda y: [y.untyped_storage()],
    "a capsule": torch.utils.dlpack.to_dlpack,
    "what autograd saved": lambda y: (y * torch.ones((), requires_grad=True)).sum(),
    "a closure": lambda y: lambda: y,
}


@pytest.mark.parametrize("user", USERS.values(), ids=USERS.keys())
def test_memory_in_use_stays_its_users(user: Callable[[torch.Tensor], Any]) -> None:
    result = norm()
    address, held = result.data_ptr(), user(result)
    is_as_it_was = result.untyped_storage().resizable()  # not of what has been an array's
    del result
    assert norm(1).data_ptr() != address
    del held
    gc.collect()
    assert norm(2).data_ptr() in {kept.address for kept in memory._kept}
    is_idle = any(kept.is_idle for kept in memory._kept if kept.address == address)
    assert is_idle == is_as_it_was, "nobody holds it any more"


def test_gradients_reuse_memory_and_are_right() -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, grad = (torch.randn(ROWS, COLS, generator=generator) for _ in range(2))
        weight = torch.randn(COLS, generator=generator)
        found, expected = [], []
        for function, into in ((warpnorm.rms_norm, found), (F.rms_norm, expected)):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            output = function(leaves[0], (COLS,), leaves[1], 1e-6)
            into += [output.detach(), *torch.autograd.grad(output, leaves, grad)]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        del found, output
    assert len(memory._kept) < 8, "no memory was used twice"


def test_memory_that_was_given_is_written_where_it_lies() -> None:
    for _ in range(2):
        norm()  # whose memory is idle
    base = torch.full((ROWS, COLS), torch.nan)
    alias, address = base[:], base.data_ptr()
    with torch.no_grad():
        warpnorm.rms_norm(torch.randn(ROWS, COLS), (COLS,), out=base)
    assert base.data_ptr() == address
    assert not alias.isnan().any()
    assert address not in {kept.address for kept in memory._kept}


def test_memory_that_changed_is_not_what_was_kept() -> None:
    shared, resized = norm(), norm(1)
    shared.share_memory_()
    expected = shared.clone()
    resized.untyped_storage().resize_(0)
    norm(2), norm(3), norm(4)
    assert torch.equal(shared, expected)
    sizes = [kept.storage.nbytes() for kept in memory._kept]
    assert sizes
    assert all(size == SIZE for size in sizes)


def test_no_more_is_kept_than_is_allowed() -> None:
    held = [norm(seed) for seed in range(7)]
    assert sum(kept.size for kept in memory._kept) == 4 * SIZE
    del held
    norm(rows=2 * ROWS)
    assert [kept.size // SIZE for kept in memory._kept] == [1, 1, 2], "what was used longest ago goes first"
    with settings.override(keep_bytes=SIZE // 2):
        norm()
    assert sum(kept.size for kept in memory._kept) == 4 * SIZE, "too large a result is not kept"


def test_nothing_is_kept_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("WARPNORM_KEEP_MB", "0")
    norm()
    assert not memory._kept
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("WARPNORM_KEEP_MB", "much")
    with pytest.raises(SettingError, match=r"'much'.*megabytes"):
        norm()


def test_new_memory_is_filled_where_pytorch_fills_it() -> None:
    torch.use_deterministic_algorithms(True)
    norm()
    assert not memory._kept
    torch.use_deterministic_algorithms(False)


def test_small_results_are_not_kept() -> None:
    norm(rows=ROWS - 1)
    assert not memory._kept
    norm()
    assert len(memory._kept) == 1


class Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func(*args, **(kwargs or {})))
        return self.seen[-1]


def test_who_watches_does_not_change_what_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that keeps every tensor it sees, and a profiler that looks into frames, while memory is counted first."""
    memory._nobodys.cache_clear()
    monkeypatch.setattr(memory, "_fewest", None)
    fused = warpnorm.fuse(lambda x: F.rms_norm(F.silu(x), (COLS,)))
    x = torch.randn(ROWS, COLS)
    fused(x)
    mode = Recording()
    with mode:
        fused(x)
    mode.seen.clear()
    sys.setprofile(lambda frame, *_: frame.f_locals)
    fused(x)
    sys.setprofile(None)
    for seed in range(3):
        first = norm(seed)
        kept, storage = first.clone(), first.untyped_storage()
        norm(seed + 1)
        assert torch.equal(first, kept)
        del first
        norm(seed + 2)
        assert torch.equal(torch.empty(0).set_(storage, 0, (ROWS, COLS)), kept)


def test_a_finalizer_may_call_a_norm() -> None:
    """While the lock is held what is let go of goes, and whatever its end calls."""
    done: list[int] = []
    held = [norm(seed) for seed in range(3)]
    for result in held:
        weakref.finalize(result.untyped_storage(), lambda: done.append(norm(9).numel()))
    del result, held
    norm(rows=4 * ROWS)  # takes the place of all
    assert len(done) == 3


def test_several_threads_never_share_a_result() -> None:
    expected = {seed: norm(seed).clone() for seed in range(4)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(8):
            if not torch.equal(norm(seed), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_can_go_on() -> None:
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
    expected = norm()
    with memory._lock:  # as another thread may have it at this moment
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(norm(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_that_an_array_had_can_be_resized() -> None:
    """NumPy's arrays take that from a storage for good; who has never seen one finds it as it was."""
    first = norm()
    first.numpy()
    del first
    second = norm(1)
    second.resize_(2 * ROWS, COLS)
    assert second.shape == (2 * ROWS, COLS)
