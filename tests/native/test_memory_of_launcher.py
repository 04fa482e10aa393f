"""Memory of results that the compiled launcher keeps: given to the next one of its size when nobody uses it any more, and
never before, whether the launcher runs a call or Python does."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from native.test_memory import COLS, ROWS, SIZE, USERS
from warpnorm import repeat, settings
from warpnorm.cpu import memory
from warpnorm.launch import launcher

MANY = 1 << 40


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    if not launcher.can_be_built() or repeat.prepare_launcher():
        pytest.skip("there is no compiled launcher here")
    torch.use_deterministic_algorithms(False)  # which would fill new memory
    with settings.override(keep_bytes=4 * SIZE, launcher="compiled"):
        for _ in range(3):
            by_launcher()
        memory.release()
        yield
    memory.release()


def source(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, COLS, generator=torch.Generator().manual_seed(seed))


def by_launcher(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return warpnorm.rms_norm(source(seed, rows), (COLS,))


def by_python(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """It has the statistics to return."""
    return warpnorm.rms_norm(source(seed, rows), (COLS,), return_stats=True)[0]


by_way = pytest.mark.parametrize("norm", [by_launcher, by_python])


def idle() -> int:
    """Bytes."""
    return int(launcher.module.release(MANY))


def test_the_launcher_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python would do is not there."""
    monkeypatch.setattr(repeat, "again", None)
    by_launcher()


@by_way
def test_a_result_that_is_gone_leaves_its_memory_to_the_next(norm: Callable[..., torch.Tensor]) -> None:
    first = norm()
    address = first.data_ptr()
    assert idle() == 0
    del first
    assert idle() == SIZE
    second = norm(1)
    assert second.data_ptr() == address
    torch.testing.assert_close(second, F.rms_norm(source(1), (COLS,)))


@by_way
@pytest.mark.parametrize("user", USERS.values(), ids=USERS.keys())
def test_memory_in_use_stays_its_users(user: Callable[[torch.Tensor], Any], norm: Callable[..., torch.Tensor]) -> None:
    result = norm()
    address, held = result.data_ptr(), user(result)
    del result
    assert norm(1).data_ptr() != address
    del held
    gc.collect()
    assert idle() == 2 * SIZE
    assert norm(2).data_ptr() == address, "nobody holds it any more"


@by_way
def test_memory_that_was_moved_or_resized_is_free(norm: Callable[..., torch.Tensor]) -> None:
    shared, resized = norm(), norm(1)
    shared.share_memory_()
    resized.untyped_storage().resize_(0)
    assert idle() == 2 * SIZE
    expected = shared.clone()
    norm(2), norm(3), norm(4)
    assert torch.equal(shared, expected)
    norm(5).numpy()  # which takes that from a storage for good
    assert norm(6).resize_(2 * ROWS, COLS).untyped_storage().nbytes() == 2 * SIZE


def test_no_more_is_kept_than_is_allowed() -> None:
    held = [by_launcher(seed) for seed in range(7)]
    del held
    assert idle() == 4 * SIZE
    by_python(rows=2 * ROWS)
    assert idle() == 4 * SIZE, "what was used longest ago went first"
    assert launcher.module.release(2 * SIZE) == 2 * SIZE
    by_python(rows=5 * ROWS)
    assert idle() == 2 * SIZE, "too large a result is not kept"
    with settings.override(keep_bytes=0):
        held = [by_launcher() for _ in range(3)]
        del held
    assert idle() == 2 * SIZE, "nothing is kept where that is asked for"


@by_way
def test_new_memory_is_filled_where_pytorch_fills_it(norm: Callable[..., torch.Tensor]) -> None:
    torch.use_deterministic_algorithms(True)
    result = norm()
    torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(result, F.rms_norm(source(), (COLS,)))
    del result
    assert idle() == 0


def test_results_are_tensors_like_any() -> None:
    with torch.inference_mode():
        assert by_launcher().is_inference()
    y = by_launcher()
    assert y.is_contiguous()
    assert (y.storage_offset(), y.untyped_storage().nbytes(), y._version) == (0, SIZE, 0)
    y.mul_(2)
    assert y._version == 1
    lazy = torch._lazy_clone(y)
    y.add_(1)
    assert torch.equal(lazy + 1, y)
    del lazy, y
    gc.collect()
    assert idle() > 0


def test_gradients_are_kept_too() -> None:
    x, grad = source().requires_grad_(), source(1)
    y = warpnorm.rms_norm(x, (COLS,))
    for _ in range(3):
        (found,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        address = found.data_ptr()
        del found
    assert idle() == SIZE
    (found,) = torch.autograd.grad(y, x, grad)
    assert found.data_ptr() == address
    with settings.override(launcher="python"):
        (expected,) = torch.autograd.grad(warpnorm.rms_norm(x, (COLS,)), x, grad)
    assert torch.equal(found, expected)


def test_several_threads_never_share_a_result() -> None:
    expected = {seed: by_launcher(seed).clone() for seed in range(4)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        wrong.extend(seed for _ in range(8) if not torch.equal(by_launcher(seed), expected[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert idle() <= 4 * SIZE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_can_go_on() -> None:
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
    expected, held = by_launcher(), by_launcher(1)
    child = os.fork()
    if child == 0:
        del held
        os._exit(0 if torch.equal(by_launcher(), expected) and idle() == SIZE else 1)
    assert os.waitpid(child, 0)[1] == 0
