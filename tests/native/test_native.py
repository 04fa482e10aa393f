"""What native code promises beside the contracts: what is compiled, and when, threads, processes, and no compiler."""

import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.running import check_accuracy
from warpnorm import pipeline, settings
from warpnorm.cpu import build, run
from warpnorm.norms import LAYER_NORM


def fused(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.silu(x) * r, x.shape[-1:], w, 1e-6)


def operands(rows: int, cols: int = 1500, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, r = (torch.randn(rows, cols, generator=generator) for _ in range(2))
    return [x, r, torch.randn(cols, generator=generator)]


def test_other_row_counts_compile_nothing() -> None:
    function = warpnorm.fuse(fused)
    for rows in (7, 8):
        function(*operands(rows))
    before = set(build._libraries)
    for rows in (1, 2, 33, 100):
        function(*operands(rows))
    assert set(build._libraries) <= before
    function(*(t.double() for t in operands(7)))
    assert len(set(build._libraries) - before) == 1, "the count must see a library where there is a new one"


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_bits_repeat_for_a_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        leaves = [t.requires_grad_() for t in operands(200, 2000)]
        found = []
        for _ in range(3):
            output = warpnorm.fuse(fused)(*leaves)
            found.append([output.detach(), *torch.autograd.grad(output.sum(), leaves)])
        assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
        torch.testing.assert_close(found[0][0], fused(*operands(200, 2000)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cols", [64, 100, 256, 768, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_rows_have_the_bits_of_any_batch(dtype: torch.dtype, cols: int) -> None:
    """Statistics of several are found together, of which the last batch has fewer."""
    x, r, w = (t.to(dtype) for t in operands(41, cols))
    for function in (warpnorm.fuse(fused), lambda x, r, w: warpnorm.layer_norm(x * r, cols, w)):
        with settings.override(route="native"):
            every = function(x, r, w)
            for first, last in ((0, 1), (3, 5), (7, 14), (1, 41)):
                assert torch.equal(function(x[first:last], r[first:last], w), every[first:last])


@pytest.mark.parametrize("cols", [100, 512, 768, 1000, 1024, 2048])
@pytest.mark.parametrize("values", [3.0, 100.0, 1e4])
def test_the_first_columns_may_be_far_from_the_others(values: float, cols: int) -> None:
    """Deviations are taken from their mean first, and would cancel out."""

    def make(seed: int) -> torch.Tensor:
        x = torch.randn(50, cols, generator=torch.Generator().manual_seed(seed))
        x[:, :16] += values
        return x

    with settings.override(route="native"):
        check_accuracy(LAYER_NORM, 1, make)


def test_several_python_threads_at_a_time() -> None:
    expected = {k: fused(*operands(100 + k, 2000, k)) for k in range(6)}
    found: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        for _ in range(5):
            found[k] = warpnorm.fuse(fused)(*operands(100 + k, 2000, k))

    workers = [threading.Thread(target=work, args=(k,)) for k in expected]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for k, result in expected.items():
        torch.testing.assert_close(found[k], result)


def in_child(queue: multiprocessing.Queue, x: torch.Tensor) -> None:  # type: ignore[type-arg]
    torch.use_deterministic_algorithms(False)  # PyTorch's own threads, which would fill memory, are gone too
    queue.put(warpnorm.layer_norm(x, 2000).numpy())


def test_after_a_fork() -> None:
    """The child has none of the parent's threads."""
    x = operands(500, 2000)[0]
    expected = warpnorm.layer_norm(x, 2000)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue, x), daemon=True)
    child.start()
    try:
        found = torch.from_numpy(queue.get(timeout=30))
    finally:
        child.kill()
    torch.testing.assert_close(found, expected)


def run_alone(code: str, tmp_path: Path, **variables: str) -> str:
    environment = {**os.environ, "WARPNORM_CACHE_DIR": str(tmp_path / "cache"), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_after_a_fork_that_nothing_ran_before(tmp_path: Path) -> None:
    """PyTorch's own threads ran, which the child does not have, and would wait for."""
    code = """
import os, torch, warpnorm
x = torch.randn(300, 2048)
expected = torch.nn.functional.layer_norm(x, (2048,))
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    found = warpnorm.layer_norm(x, (2048,))
    os._exit(0 if abs(found.numpy() - expected.numpy()).max() < 1e-4 else 1)
for _ in range(600):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    __import__("time").sleep(0.05)
else:
    os.kill(child, 9)
print("ended with", status if pid else "a hang")
"""
    assert run_alone(code, tmp_path) == "ended with 0\n"


CALL = """
import torch, warpnorm, torch.nn.functional as F
x = torch.randn(64, 4096, requires_grad=True)
torch.testing.assert_close(warpnorm.layer_norm(x, 4096), F.layer_norm(x, (4096,)))
function = warpnorm.fuse(lambda x: F.layer_norm(F.silu(x), (4096,)))
torch.testing.assert_close(function(x), F.layer_norm(F.silu(x), (4096,)))
function(x).sum().backward()
print(warpnorm.explain(function, x).route)
"""


@pytest.mark.parametrize(
    ("compiler", "says"),
    [("", "is empty"), ("false", "does not build it"), ("no-such-compiler", "is not there")],
)
def test_without_a_compiler(compiler: str, says: str, tmp_path: Path) -> None:
    said = run_alone(CALL, tmp_path, WARPNORM_CC=compiler)
    assert said.startswith("as plain PyTorch, because") and says in said  # noqa: PT018


def test_with_one(tmp_path: Path) -> None:
    assert "native code" in run_alone(CALL, tmp_path)
    folder = tmp_path / "cache"
    libraries = sorted(folder.glob("native_*.so"))
    assert len(libraries) == 4, "the pool, layer_norm, and the function in both directions"
    assert not [path for path in folder.iterdir() if path.suffix == ".c" or path.is_dir()], "nothing is left behind"
    assert folder.stat().st_mode & 0o077 == 0, "for the user alone"


def test_a_damaged_library_is_built_anew(tmp_path: Path) -> None:
    run_alone(CALL, tmp_path)
    for path in (tmp_path / "cache").glob("native_*.so"):
        path.write_bytes(b"not a library")
    assert "native code" in run_alone(CALL, tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert "native code" in run_alone(CALL, tmp_path)


def test_outside_nothing_is_written(tmp_path: Path) -> None:
    buffer = torch.full((12, 2100), 7.0)
    out = buffer[1:11, 30:1530]
    x, _, w = operands(10)
    with torch.no_grad():
        warpnorm.layer_norm(x, 1500, w, out=out)
    torch.testing.assert_close(out, F.layer_norm(x, (1500,), w))
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def build_otherwise(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    """Generated code, but not the pool of threads, is changed before it is built; nothing is taken from before."""
    load = build.load
    monkeypatch.setattr(build, "load", lambda text: load(change(text) if "pointwise.h" in text else text))
    run._function.cache_clear()
    pipeline.prepare_forward.cache_clear()
    pipeline.prepare_backward.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    yield
    run._function.cache_clear()
    pipeline.prepare_forward.cache_clear()
    pipeline.prepare_backward.cache_clear()


def both(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    channels = w[: x.shape[1]]
    mean, variance = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    image = leaves[0].view(*x.shape, 1).expand(*x.shape, 2)
    outputs = [
        warpnorm.layer_norm(leaves[0], x.shape[-1:], leaves[1]),
        warpnorm.rms_norm(leaves[0], x.shape[-1:], leaves[1], 1e-6),
        warpnorm.batch_norm(image, mean, variance, channels, training=True),
        warpnorm.group_norm(image, 5, channels),
        warpnorm.fuse(fused)(leaves[0], x, leaves[1]),
    ]
    gradients = torch.autograd.grad([o.square().sum() for o in outputs], leaves)
    return [*outputs, *gradients, mean, variance]


@pytest.mark.parametrize("said", ["", "#error for once", "/* "], ids=["right", "refused", "unfinished"])
def test_a_compiler_that_refuses_a_call(said: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """The call goes to PyTorch's operators."""
    monkeypatch.undo()  # here a fallback is what is tested
    x, _, w = operands(40)
    with settings.override(route="reference"):
        expected = both(x, w)
    build_otherwise(monkeypatch, lambda text: text.replace("#include", f"{said}\n#include", 1))
    for found, truth in zip(both(x, w), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_a_compiler_that_refuses_the_backward_of_a_dropout(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Which begins with the sum, and draws the mask again: by PyTorch's operators."""
    monkeypatch.undo()

    def dropped(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.dropout(x, 0.3) + r
        return F.rms_norm(h, h.shape[-1:], eps=1e-6), h

    def refuse(*args: Any) -> Any:
        raise build.CompilerError("for once")

    leaves = [t.requires_grad_() for t in operands(40)[:2]]
    gradients = []
    for prepare in (run.prepare_backward, refuse):
        monkeypatch.setattr(run, "prepare_backward", prepare)
        pipeline.prepare_backward.cache_clear()
        torch.manual_seed(0)
        outputs = warpnorm.fuse(dropped)(*leaves)
        gradients.append(torch.autograd.grad(outputs, leaves, [o.detach().sin() for o in outputs]))
    for found, right in zip(*gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_explain_says_what_runs(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    x, r, w = (t.requires_grad_() for t in operands(40))
    found = warpnorm.explain(fused, x, r, w)
    assert found.route == "as native code on the CPU"
    assert "C of forward" in str(found)
    assert "C of backward" in str(found)
    build_otherwise(monkeypatch, lambda text: "#error for once\n" + text)
    refused = warpnorm.explain(fused, x, r, w)
    assert refused.route.startswith("as plain PyTorch, because native code does not do it")
    assert "for once" in refused.route
    assert "C of forward" not in str(refused)


def test_no_memory(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    change = '#include "pointwise.h"\nstatic void *none(size_t size) { return 0; }\n'
    build_otherwise(
        monkeypatch, lambda text: text.replace('#include "pointwise.h"', change).replace("malloc(", "none(")
    )
    with pytest.raises(torch.OutOfMemoryError, match="native code has to keep"):
        warpnorm.fuse(fused)(*operands(40))


SANITIZED = """#!/bin/sh
for word in "$@"; do shift; [ "$word" = -w ] || set -- "$@" "$word"; done
exec {compiler} "$@" -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wno-unused -Werror
"""


def run_sanitized(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The sample, by a compiler that adds sanitizers and takes no code that it has to warn about."""
    compiler = build.compiler()
    assert compiler is not None
    script = tmp_path / "sanitized-cc"
    script.write_text(SANITIZED.format(compiler=compiler))
    script.chmod(0o700)
    names = [
        subprocess.check_output([compiler, f"-print-file-name={n}"], text=True).strip()
        for n in ("libasan.so", "libubsan.so")
    ]
    if not all(os.path.isabs(name) for name in names):
        pytest.skip("the compiler has no sanitizers")
    variables = {
        **os.environ, "WARPNORM_CC": str(script), "WARPNORM_CACHE_DIR": str(tmp_path / "cache"),
        "LD_PRELOAD": " ".join(names),
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # fmt: skip
    sample = Path(__file__).with_name("sample.py")
    return subprocess.run(
        [sys.executable, str(sample), *arguments], env=variables, capture_output=True, text=True, check=False
    )


def test_sanitized_builds(tmp_path: Path) -> None:
    done = run_sanitized(tmp_path, *([] if os.environ.get("WARPNORM_TEST_ALL") == "1" else ["short"]))
    assert (done.returncode, done.stdout) == (0, "the sample ran\n"), done.stderr[-3000:]


def test_sanitizers_see_what_is_wrong(tmp_path: Path) -> None:
    done = run_sanitized(tmp_path, "broken")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_the_route_can_be_forced() -> None:
    x = torch.randn(3, 8)
    with settings.override(route="native"):
        torch.testing.assert_close(warpnorm.layer_norm(x, 8), F.layer_norm(x, (8,)))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("elements", [1, 1 << 18, (3 << 20) + 7], ids=["one", "a_page", "pages_and_a_rest"])
def test_asking_for_huge_pages_leaves_what_is_there(elements: int, parts: int) -> None:
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(parts))
    before = tensor.clone()
    start, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
    build.pool().ask_for_huge_pages(start, size, ctypes.c_int64(parts))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("name", ["fused", "dropout", "batch_norm_relu", "layer_norm", "group_norm", "instance_norm"])
def test_a_default_device_is_not_where_native_code_computes(name: str) -> None:
    """It is told where its own memory lies; that on "meta" has no address, and the process ended."""

    def batch_norm_relu(x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, None, None, training=True))

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "fused": warpnorm.fuse(lambda x: F.silu(F.layer_norm(x * 2.5, x.shape[-1:]))),
        "dropout": warpnorm.fuse(lambda x: F.dropout(F.rms_norm(x, x.shape[-1:]), 0.5)),
        "batch_norm_relu": warpnorm.fuse(batch_norm_relu),
        "layer_norm": lambda x: warpnorm.layer_norm(x, x.shape[-1:]),
        "group_norm": lambda x: warpnorm.group_norm(x, 4),
        "instance_norm": warpnorm.instance_norm,
    }
    results = []
    for device in ("cpu", "meta"):
        x = torch.randn(4, 8, 40, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with settings.override(route="native"), torch.device(device):
            torch.manual_seed(1)
            y = functions[name](x)
            results.append((y.detach(), *torch.autograd.grad(y, x, x.detach().flip(0))))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_sums_of_float64_along_columns_that_lie_apart() -> None:
    """A gradient that is a sum over the columns of lines which lie side by side: one after another, without what is rounded
    off, 2047 of them were five times as far off as PyTorch's."""

    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 3) * scale

    errors = {"ours": 0.0, "theirs": 0.0}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x, grad = (torch.randn(2, 2047, 6, generator=generator, dtype=torch.float64).mT for _ in range(2))
        scale = torch.randn(6, 1, generator=generator, dtype=torch.float64).requires_grad_()
        wide = x.numpy().astype(numpy.longdouble).reshape(2, 3, -1)
        variance = wide.var(-1, keepdims=True) + numpy.longdouble(1e-5)
        xhat = ((wide - wide.mean(-1, keepdims=True)) / numpy.sqrt(variance)).reshape(x.shape)
        truth = (xhat * grad.numpy().astype(numpy.longdouble)).sum((0, 2))
        for name, function in (("ours", warpnorm.fuse(scaled)), ("theirs", scaled)):
            (found,) = torch.autograd.grad(function(x, scale), scale, grad)
            errors[name] += float(abs(found.numpy()[:, 0] - truth).mean())
    assert errors["ours"] <= errors["theirs"]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_mean_between_two_neighbours(steps: int) -> None:
    """Which no float32 is, where channels lie side by side: what it is rounded off by would be half of the deviation."""
    step = 2.0**-10  # of numbers near 10,000
    x = torch.tensor([1e4, 1e4 + steps * step]).expand(2, 40, 2).mT.contiguous().mT
    with settings.override(route="native"):
        found = warpnorm.instance_norm(x, eps=1e-8)
    variance = (steps * step / 2) ** 2
    expected = torch.tensor([-1.0, 1.0]) * (variance / (variance + 1e-8)) ** 0.5
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-6, atol=0.0)


def silu_before(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.silu(x) * r, x.shape[-1:], w, b)


def two_before(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(torch.tanh(torch.exp(x * 0.1)) * r, x.shape[-1:], w, b)


def silu_behind(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x + r, 2, w, b))


def gate_behind(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 2, w, b)) * r


@pytest.mark.parametrize(
    ("function", "shape", "again"),
    [
        (silu_before, (12, 2048), r"second_t\d+ = sigmoid_f|kept_c\b"),
        (two_before, (12, 2048), r"second_t\d+ = (tanh|exp)_f|kept_c\b"),
        (silu_behind, (3, 8, 40, 40), r"from_epilogue0 = first_"),
        (gate_behind, (3, 8, 40, 40), ""),  # whose gradient needs it in the second walk
    ],
    ids=["before", "two before", "behind", "gate"],
)
def test_what_takes_long_is_computed_once_a_backward(
    function: Callable[..., Any], shape: tuple[int, ...], again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second walk reads what the first one kept, or left in the gradient's own memory."""
    texts: list[str] = []
    text_of = run.text_of

    def noted(problem: Any) -> str:
        texts.append(text_of(problem))
        return texts[-1]

    monkeypatch.setattr(run, "text_of", noted)
    pipeline.prepare_backward.cache_clear()
    generator = torch.Generator().manual_seed(0)
    is_image = len(shape) == 4
    width = shape[1]
    tensors = [torch.randn(size, generator=generator) for size in (shape, shape, (width,), (width,), shape)]
    x, r, w, b, grad = (t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors)
    leaves = [t.requires_grad_() for t in (x, r, w, b)]
    found = torch.autograd.grad(warpnorm.fuse(function)(*leaves), leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = torch.autograd.grad(function(*wide), wide, grad.double())
    for ours, true in zip(found, truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-4)
    (backward,) = (text for text in texts if "*gradient0_p" in text)
    assert is_image == ("int last(" in backward)
    assert not again or re.search(again, backward) is None
