"""Kernels that are compiled while something goes wrong: an interrupt, other processes at the same moment. That needs no
GPU."""

import os
import traceback
from pathlib import Path

import pytest
import torch

from compiled.test_compiled import forward_problem
from warpnorm import settings
from warpnorm.codegen import bind, kernel
from warpnorm.norms import RMS_NORM
from warpnorm.plan import choose
from warpnorm.plan.device import KNOWN

DEVICE = KNOWN["sm_90"]


def test_four_processes_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in the cache folders, neither ours nor Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    problem = forward_problem(RMS_NORM, 640, torch.float16)
    plan = choose.forward(problem, DEVICE)
    ready, go = os.pipe()

    def work() -> None:
        os.close(go)
        os.read(ready, 1)  # which ends for all at the same moment
        with settings.override(cache_dir=tmp_path / "ours"):
            code = bind.forward.__wrapped__(problem, plan, DEVICE, 0).compiled.asm["cubin"]
        (tmp_path / f"{os.getpid()}.cubin").write_bytes(code)

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    os.close(go)
    os.close(ready)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    codes = [path.read_bytes() for path in tmp_path.glob("*.cubin")]
    assert len(codes) == 4
    assert len(set(codes)) == 1
    assert list((tmp_path / "triton").rglob("*.cubin")), "they shared a folder"


def test_an_interrupt_while_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes through; the next call compiles, and other threads find the lock free."""
    problem = forward_problem(RMS_NORM, 896, torch.float16)
    key = (problem, choose.forward(problem, DEVICE), DEVICE, 0)
    bind.forward.built.pop(key, None)
    compile, asked = kernel.triton.compile, []

    def interrupted(*args: object, **kwargs: object) -> object:
        asked.append(args)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return compile(*args, **kwargs)

    monkeypatch.setattr(kernel.triton, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bind.forward(*key)
    assert key not in bind.forward.built
    assert not bind._lock._lock._is_owned()
    assert bind.forward(*key).compiled.asm["cubin"]
    assert len(asked) == 2
