"""What goes wrong around a call on a GPU: memory ends, processes begin at once, a process forks after a call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.scarce_contract import *  # noqa: F403
from warpnorm import repeat, settings


@pytest.mark.unpoisoned
@pytest.mark.parametrize("launcher", ["python", "compiled"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_device_has_no_more_memory(direction: str, launcher: str, device: str) -> None:
    """Really: the process may have no more than it has. Then it may again."""
    x = torch.randn(1 << 14, 4096, device=device, requires_grad=True)
    images = torch.randn(64, 64, 128, 128, device=device)
    weight = torch.rand(4096, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    module = warpnorm.nn.BatchNorm2d(64).to(device)
    with settings.override(launcher=launcher):
        if launcher == "compiled" and (why := repeat.prepare_launcher()):
            pytest.skip(why)
        for _ in range(4):  # the compiled launcher takes over
            warpnorm.rms_norm(x, (4096,), weight).backward(grad)
        warpnorm.nn.BatchNorm2d(64).to(device)(images)
        x.grad = weight.grad = None
        output = warpnorm.rms_norm(x, (4096,), weight) if direction == "backward" else None
        before = [t.detach().clone() for t in (weight, *module.state_dict().values())]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                warpnorm.rms_norm(x, (4096,), weight) if output is None else output.backward(grad)
            with pytest.raises(torch.OutOfMemoryError):
                module(images)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert x.grad is None
        assert weight.grad is None
        assert all(map(torch.equal, (weight, *module.state_dict().values()), before))
        output = warpnorm.rms_norm(x, (4096,), weight) if output is None else output
        output.backward(grad)
        module(images)
    expected = F.rms_norm(x, (4096,), weight)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip((x.grad, weight.grad), torch.autograd.grad(expected, (x, weight), grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(module.running_mean, 0.1 * images.mean((0, 2, 3)), rtol=1e-3, atol=1e-6)


FIRST = """
import os, sys
import torch, torch.nn.functional as F
import warpnorm

def function(x, w):
    return F.layer_norm(F.silu(x), (760,), w)

x, w = torch.randn(40, 760, device="cuda", requires_grad=True), torch.randn(760, device="cuda", requires_grad=True)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
ours, theirs = warpnorm.fuse(function)(x, w), function(x, w)
torch.testing.assert_close(ours, theirs)
for a, b in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (ours, theirs))):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
print("done", flush=True)
os._exit(0)
"""


def test_four_processes_make_the_first_call(tmp_path: Path) -> None:
    """With nothing in the cache folders, neither ours nor Triton's: at the same moment. They do not wait for the end of the
    interpreter, in which autograd's thread may still have tensors to let go of, and abort: on a busy machine 2 of 32
    processes did with PyTorch alone, and 5 of 24 with a function of their own."""
    folders = {name: str(tmp_path / name) for name in ("WARPNORM_CACHE_DIR", "TRITON_CACHE_DIR")}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST], env=os.environ | folders, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        said = []
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            child.stdin = None
        for child in children:
            out, err = child.communicate(timeout=300)
            said.append((child.returncode, out, err))
    finally:
        for child in children:
            child.kill()
    wrong = [f"status {status}, said {out!r}\n{err}" for status, out, err in said if status or out != "done\n"]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_a_fork_after_a_call(device: str) -> None:
    """CUDA's own error on the GPU, which no library can do without; on the CPU the child goes on."""
    x = torch.randn(4, 2048)
    warpnorm.rms_norm(x.to(device), (2048,))
    torch.cuda.synchronize()
    expected = F.rms_norm(x, (2048,))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            is_right = torch.allclose(warpnorm.rms_norm(x, (2048,)), expected, atol=1e-5)
            try:
                warpnorm.rms_norm(torch.empty(4, 2048, device=device), (2048,))
            except RuntimeError as error:
                status = 0 if is_right and "CUDA" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.testing.assert_close(warpnorm.rms_norm(x.to(device), (2048,)).cpu(), expected, rtol=1e-5, atol=1e-5)
