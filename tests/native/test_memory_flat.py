"""Memory of the process: thousands of calls with changing shapes leave it flat, and every cache has an end."""

import functools
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import repeat, repeat_channels, repeat_fused

CALLS = """
import gc, os, sys
import torch, torch.nn.functional as F
import warpnorm

torch.set_num_threads(1)

@warpnorm.fuse
def fused(x, r, w):
    return F.rms_norm(F.silu(x) + r, x.shape[-1:], w)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def call(k):
    rows, cols = 2 + k % 7, 66 + 2 * (k % 5)
    x, w = torch.ones(rows, cols, requires_grad=k % 3 == 0), torch.ones(cols)
    if k % 4 == 0:
        y = warpnorm.layer_norm(x, (cols,), w)
    elif k % 4 == 1:
        y = warpnorm.rms_norm(x, (cols,), w)
    elif k % 4 == 2:
        y = fused(x, x.detach(), w)
    else:
        y = warpnorm.group_norm(x.view(rows, 2, cols // 2), 1)
    if y.requires_grad:
        y.sum().backward()

calls = int(sys.argv[1])
for k in range(calls // 3):
    call(k)
before = resident()
for k in range(calls // 3, calls):
    call(k)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_ten_thousand_calls_leave_memory_flat() -> None:
    """All shapes are met in the first third."""
    variables = {**os.environ, "WARPNORM_ROUTE": "native", "WARPNORM_LAUNCHER": "python"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, "10000"], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 << 20


# by devices, by names of modules, by the norms and by the operators of PyTorch, of which there are few
ENDLESS = [
    "warpnorm.plan.device._numbers",
    "warpnorm.trace.bytecode.trusted",
    "warpnorm.trace.handlers._signature",
    "warpnorm.trace.store._arity",
]


def test_every_cache_of_a_function_with_arguments_has_an_end() -> None:
    endless = []
    for found in pkgutil.walk_packages(warpnorm.__path__, "warpnorm."):
        if found.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(found.name)).items():
            if isinstance(value, functools._lru_cache_wrapper) and value.cache_parameters()["maxsize"] is None:
                takes = value.__wrapped__.__code__.co_argcount
                if takes and value.__module__ == found.name:
                    endless.append(f"{found.name}.{name}")
    assert endless == ENDLESS


def test_more_shapes_than_a_cache_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "LARGEST_CACHE", 8)
    fusing = importlib.import_module("warpnorm.fuse")  # the name of the package's function too
    monkeypatch.setattr(fusing, "LARGEST_CACHE", 8)
    monkeypatch.setattr(fusing, "MOST_CAPTURES", 5)
    repeat._seen.clear()
    repeat_channels._seen.clear()
    repeat_fused._offered.clear()

    @warpnorm.fuse
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.sin(), x.shape[-1:])

    for k in range(40):
        x = torch.randn(2 + k % 3, 70 + k // 2, requires_grad=True)
        torch.testing.assert_close(function(x), F.rms_norm(x.sin(), x.shape[-1:]))
        function(x).sum().backward()
        warpnorm.rms_norm(x, x.shape[-1:])
        warpnorm.batch_norm(torch.randn(2, 4, 130, 70 + k), None, None, training=True)
        assert len(function._prepared) <= 8
        assert sum(map(len, function._captured.values())) <= 5
        assert len(function._differentiable) <= 8
        assert len(repeat._seen) <= 8
        assert len(repeat_channels._seen) <= 8
        assert len(repeat_fused._offered) <= 8
