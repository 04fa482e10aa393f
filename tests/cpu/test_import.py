"""What `import warpnorm` does not do: it needs no Triton, asks no GPU, reads no setting, writes no file. Each check runs
in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Triton looks as if it were not installed: every finder answers that it knows no such module.
WITHOUT_TRITON = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
try:
    import triton
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("triton is still there")
"""


def run(script: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WARPNORM_", "TRITON_", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**kept, "PYTHONPATH": str(ROOT), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def check(script: str, home: Path, **environment: str) -> None:
    result = run(script, home, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done"], result.stdout


def test_works_where_triton_does_not_exist(tmp_path: Path) -> None:
    script = """
        import torch
        import torch.nn.functional as F
        import warpnorm
        from warpnorm import pipeline, routing

        x, w, b = torch.randn(3, 8, requires_grad=True), torch.randn(8), torch.randn(8)
        assert torch.equal(warpnorm.layer_norm(x, 8, w, b), F.layer_norm(x, (8,), w, b))
        assert torch.equal(warpnorm.rms_norm(x, 8, w), F.rms_norm(x, (8,), w))
        warpnorm.layer_norm(x, 8, w, b, weight_offset=1.0, return_stats=True)[0].sum().backward()
        warpnorm.nn.RMSNorm(8)(x).sum().backward()
        assert x.grad.isfinite().all()
        gated = lambda x, r: F.rms_norm(x + r, (8,), w) * torch.sigmoid(r)
        assert torch.equal(warpnorm.fuse(gated)(x, b), gated(x, b))
        assert not routing.has_triton()
        assert not any(name.split(".")[0] == "triton" for name in sys.modules)
        print("done")
    """
    check(WITHOUT_TRITON + textwrap.dedent(script), tmp_path)


def test_import_touches_nothing(tmp_path: Path) -> None:
    """Every question to the GPU is replaced by one that is recorded, so that this can fail without a GPU as well."""
    check(
        """
        import os, sys
        import torch

        asked = []

        class Recorder(type(os.environ)):
            def __getitem__(self, key):
                asked.append(key)
                return super().__getitem__(key)

            def __contains__(self, key):
                asked.append(key)
                return super().__contains__(key)

        os.environ.__class__ = Recorder
        for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
            setattr(torch.cuda, name, lambda *a, _name=name, **k: asked.append("WARPNORM_cuda." + _name))

        import warpnorm

        forbidden = ("WARPNORM_", "TRITON_", "XDG_", "HOME", "CUDA_")
        assert not [name for name in asked if name.startswith(forbidden)], asked
        assert not {"triton", "torch.distributed.tensor"} & set(sys.modules)
        assert warpnorm.settings._current is None
        assert not torch.cuda.is_initialized()
        assert os.environ.get("WARPNORM_ROUTE") is None and "WARPNORM_ROUTE" in asked  # the recorder records
        print("done")
        """,
        tmp_path,
        WARPNORM_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert list(tmp_path.rglob("*")) == []


def test_small_call_on_the_cpu_keeps_graphs_at_most_and_loads_no_triton(tmp_path: Path) -> None:
    check(
        """
        import os, sys
        import torch, warpnorm

        x = torch.randn(3, 8, requires_grad=True)
        warpnorm.layer_norm(x, 8, torch.randn(8), weight_offset=1.0).sum().backward()
        warpnorm.rms_norm(x, normalized_dim=-1, return_stats=True)
        assert not os.path.exists(os.environ["WARPNORM_CACHE_DIR"])
        warpnorm.fuse(lambda x: torch.nn.functional.layer_norm(x, (8,)) + x)(x).sum().backward()
        assert not {"triton", "torch._dynamo"} & set(sys.modules)
        assert not torch.cuda.is_initialized()
        print("done")
        """,
        tmp_path,
        WARPNORM_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".json"}
    assert not (tmp_path / ".cache" / "warpnorm").exists()


def test_unknown_route_fails_at_the_first_call_and_names_what_is_allowed(tmp_path: Path) -> None:
    check(
        """
        import torch, warpnorm

        x = torch.randn(3, 8)
        for call in (
            lambda: warpnorm.layer_norm(x, (8,)),
            lambda: warpnorm.rms_norm(x, 8, return_stats=True),
            lambda: warpnorm.nn.LayerNorm(8)(x),
        ):
            try:
                call()
            except ValueError as error:
                assert str(error) == "WARPNORM_ROUTE is 'gpu', but must be one of auto, kernels, native, reference", error
            else:
                raise SystemExit("took an unknown route")
        print("done")
        """,
        tmp_path,
        WARPNORM_ROUTE="gpu",
    )


def test_kernels_forced_without_a_gpu_say_what_to_do(tmp_path: Path) -> None:
    check(
        """
        import torch, warpnorm

        for call in (lambda x: warpnorm.layer_norm(x, (8,)), lambda x: warpnorm.rms_norm(x, (8,))):
            try:
                call(torch.randn(3, 8))
            except warpnorm.UnavailableError as error:
                assert isinstance(error, RuntimeError) and "cpu" in str(error) and "WARPNORM_ROUTE=auto" in str(error)
            else:
                raise SystemExit("ran without a GPU")
        print("done")
        """,
        tmp_path,
        WARPNORM_ROUTE="kernels",
    )
