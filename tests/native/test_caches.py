"""Every table that a process fills has an end; what leaves one is gone from memory, or still there for whoever has it."""

import ast
import ctypes
import gc
import linecache
import os
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import packed, pipeline, settings
from warpnorm.cpu import build, run
from warpnorm.launch import lasting, shared
from warpnorm.trace import environment

numbers = count()


def source() -> tuple[str, int]:
    """C that nobody has built, and what it answers."""
    answer = os.getpid() % 1000 * 1000 + next(numbers)
    return f"int answer(void) {{ return {answer}; }}", answer


def mapped() -> int:
    """Libraries of ours in the memory of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in lines if "/native_" in line})


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the memory of a process is read from /proc")
def test_libraries_that_nobody_has_are_closed() -> None:
    gc.collect()
    before, known = mapped(), set(build._libraries)
    kept, answer = source()
    address = build.Address.of(kept, "answer")
    for _ in range(5):
        text, number = source()
        assert build.load(text).answer() == number
    gc.collect()
    assert mapped() == before + 1
    assert set(build._libraries) - known == {kept}
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == answer
    del address
    gc.collect()
    assert mapped() == before
    assert build.load(kept).answer() == answer, "and again"


def test_a_launch_keeps_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else forgets it: the call would end the process."""
    x, scale = torch.randn(4, 1100), 1.5 + os.getpid() * 1e-9

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x * scale, (1100,))

    launches = []
    prepare = pipeline.prepare_forward
    monkeypatch.setattr(pipeline, "prepare_forward", lambda *args: launches.append(prepare(*args)) or launches[-1])
    with settings.override(launcher="python"):  # the compiled one keeps what it was told of
        expected = warpnorm.fuse(function)(x)
    launch = launches[0]
    prepare.cache_clear()
    run._function.cache_clear()
    gc.collect()
    output = torch.empty_like(x)
    launch([x], [output])
    assert output.equal(expected)
    before = len(build._libraries)
    launches.clear()
    del launch
    gc.collect()
    assert len(build._libraries) == before - 1, "and who has no launch has no library"


def test_functions_made_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code object each, that nothing would ever leave."""
    monkeypatch.setattr(environment, "LARGEST_CACHE", 8)
    for known in environment._reads:
        known.clear()
    x = torch.randn(3, 70)
    for k in range(20):
        made: dict[str, Any] = {"F": F, "torch": torch, "scale": k + 1.0}
        exec("def function(x):\n    return F.rms_norm(torch.sin(x) * scale, x.shape[-1:])", made)
        torch.testing.assert_close(warpnorm.fuse(made["function"])(x), made["function"](x))
        exec("def function(x):\n    return F.rms_norm(x * torch.get_rng_state()[0], x.shape[-1:])", made)
        with pytest.raises(warpnorm.FusionError, match="changes from call to call"):
            warpnorm.fuse(made["function"])(x)
        assert len(environment._reads[False]) <= 8


def test_generated_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("warpnorm.codegen.cache")
    monkeypatch.setattr(cache, "LARGEST_CACHE", 4)
    monkeypatch.setattr(cache, "_modules", {})
    modules = []
    for k in range(10):
        modules.append(cache.load(f"def answer():\n    return {k} + {os.getpid()}\n"))
        assert len(cache._modules) <= 4
    assert [str(m.__file__) in linecache.cache for m in modules] == [False] * 6 + [True] * 4
    assert [m.answer() - os.getpid() for m in modules] == list(range(10)), "who has a module keeps it"
    assert cache.load(f"def answer():\n    return 0 + {os.getpid()}\n").answer() == os.getpid(), "and again"


def test_bound_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = pytest.importorskip("warpnorm.codegen.bind")
    monkeypatch.setattr(bind, "LARGEST_CACHE", 3)
    made: list[int] = []
    build_once = bind._once(lambda k: made.append(k) or (None if k == 1 else object()))
    kernels = [build_once(k) for k in range(5)]
    assert len(build_once.built) == 3
    assert [build_once(k) for k in (2, 3, 4)] == kernels[2:]
    assert made == list(range(5)), "what is there is not built again, even if it is nothing"
    build_once(1)
    assert build_once(1) is None
    assert made == [*range(5), 1]


def test_mailboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every stream and kind of team, of which there may be any number in time."""
    device = torch.device("cpu")
    monkeypatch.setattr(shared, "_mailboxes", {})
    monkeypatch.setattr(shared, "_left", {device: shared.STOCK})
    monkeypatch.setattr(shared, "MOST_MAILBOXES", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for k in range(10):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, k=k: SimpleNamespace(cuda_stream=k))
        box = shared.team_mailbox(2, 3, 1, device)
        assert not box.any()
        box.fill_(k + 1)  # numbers of messages go on from launch to launch
        assert shared.team_mailbox(2, 3, 1, device) is box
        assert len(shared._mailboxes) <= 4


def test_lenders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has one, and whoever comes later waits until the one before has launched what it had memory for."""
    monkeypatch.setattr(shared, "_lenders", {})
    monkeypatch.setattr(shared, "MOST_LENDERS", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(lasting, "lasting", lambda make, device: make())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **options: empty(*sizes, **options))
    words = shared.Shared((4, 8), torch.int32, shared.ZEROS)
    device = torch.device("cuda")
    for k in range(10):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, k=k: SimpleNamespace(cuda_stream=k))
        with shared.lent((3, 100), torch.float32, words, device) as (partials, lines):
            sizes = [t.numel() for t in (*partials, *lines)]
            assert sizes == [3, 100, 4, 8]
            for t in (*partials, *lines):
                t.fill_(k + 1)
            assert all((t == k + 1).all() for t in (*partials, *lines)), "they lie apart"
            thread = Thread(target=shared._lock.__enter__, daemon=True)
            thread.start()
            thread.join(0.01)
            assert thread.is_alive(), "another thread waits"
        thread.join()
        shared._lock.free()
        with shared.lent((3, 100), torch.float32, words, device) as (again, lines):
            assert [t.data_ptr() for t in again] == [t.data_ptr() for t in partials]
            assert not any(t.any() for t in lines), "cleared"
        assert len(shared._lenders) <= 4
    with shared.lent((shared.LARGEST_LOAN,), torch.float32, words, device) as (large, _):
        assert large[0].untyped_storage().nbytes() == 4 * shared.LARGEST_LOAN, "its own"
    with pytest.raises(RuntimeError, match="a launch"), shared.lent((3,), torch.float32, words, device):
        raise RuntimeError("a launch")
    with shared.lent((3,), torch.float32, words, device):
        pass


def test_packed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layouts of packed heads as there are numbers of tokens, and of their gradients."""
    monkeypatch.setattr(packed, "_seen", {})
    monkeypatch.setattr(packed, "LARGEST_CACHE", 4)
    module = warpnorm.nn.QKNorm(72, 2, 1)
    for tokens in range(1, 11):
        x = torch.randn(tokens, 4, 72, requires_grad=True)
        q, _, _ = module(x)
        for k in range(6):
            grad = torch.randn(2, tokens, 72 + k)[..., :72].transpose(0, 1)
            torch.autograd.grad(q, x, grad, retain_graph=True)
            assert all(len(seen.launches) <= 4 for seen in packed._seen.values())
        assert 0 < len(packed._seen) <= 4


# What ends each table that begins empty: a test above or in test_memory_flat.py, or that few things are in it
TABLES = {
    "warpnorm.blocks._queries": "numbers of heads, and devices",
    "warpnorm.codegen.cache._modules": "test_generated_modules",
    "warpnorm.cpu.build._libraries": "test_libraries_that_nobody_has_are_closed",
    "warpnorm.cpu.memory._kept": "WARPNORM_KEEP_MB",
    "warpnorm.folder._told": "cache folders that were refused, or cannot be made",
    "warpnorm.integrate.patch._classes": "classes of modules",
    "warpnorm.launch.shared._left": "devices",
    "warpnorm.launch.shared._lenders": "test_lenders",
    "warpnorm.launch.shared._mailboxes": "test_mailboxes",
    "warpnorm.launch.shared._stock": "MOST_STOCKS",
    "warpnorm.library._seen": "LARGEST_CACHE",
    "warpnorm.locks._all": "locks that somebody has",
    "warpnorm.packed._seen": "test_packed_calls",
    "warpnorm.parallel.exchange._tallies": "blocks that are open",
    "warpnorm.plan.device._without_teams": "devices",
    "warpnorm.repeat_fused._offered": "test_more_shapes_than_a_cache_takes",
    "warpnorm.repeat._scratch": "powers of two up to LARGEST_SCRATCH",
    "warpnorm.repeat._seen": "test_more_shapes_than_a_cache_takes",
    "warpnorm.repeat_channels._seen": "test_more_shapes_than_a_cache_takes",
    "warpnorm.settings._known": "settings that a program has had",
    "warpnorm.trace.environment._reads": "test_functions_made_of_texts",
}
EMPTY = ("dict", "set", "list", "OrderedDict", "defaultdict", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary")


def begins_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(begins_empty, value.elts))
    if isinstance(value, ast.Call) and not value.args:
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in EMPTY
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def tables() -> list[str]:
    home = Path(warpnorm.__file__).parent
    found = []
    for path in home.rglob("*.py"):
        module = ".".join(("warpnorm", *path.relative_to(home).with_suffix("").parts))
        for line in ast.parse(path.read_text()).body:
            if isinstance(line, (ast.Assign, ast.AnnAssign)) and begins_empty(line.value):
                target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                found.append(f"{module}.{getattr(target, 'id', '?')}")
    return sorted(found)


def test_every_table_of_the_package_has_an_end() -> None:
    assert tables() == sorted(TABLES), "one that is new needs an end, and a test of it"
