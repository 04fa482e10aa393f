"""Other versions of PyTorch and Triton than those known: they run, or one sentence says what is needed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import warpnorm
from warpnorm import pipeline, routing, settings, version
from warpnorm.cpu import run

pytestmark = pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")

COLS = 2048


def test_an_older_pytorch_is_refused_in_a_sentence() -> None:
    for old in ("2.9.1", "2.9.0+cu128", "1.13.0"):
        with pytest.raises(ImportError, match=rf"needs PyTorch 2\.10 or later, but {old.split('+')[0]}"):
            version.require_torch(old)
    for fine in ("2.10.0", "2.13.0+cpu", "3.0.0a0+git1234", "unknown"):
        version.require_torch(fine)


@pytest.fixture
def triton_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """As if this version of it were installed."""

    def install(number: str) -> None:
        (tmp_path / "__init__.py").write_text(f'"""isort:skip_file"""\n__version__ = {number!r}\n')
        spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py") if number else None})
        monkeypatch.setattr(routing, "find_spec", lambda _: spec)
        monkeypatch.setattr(pipeline.sys, "platform", "linux")
        routing.why_no_triton.cache_clear()

    yield install
    routing.why_no_triton.cache_clear()


def test_an_older_triton_is_refused_in_a_sentence(triton_of: Callable[[str], None]) -> None:
    triton_of("3.5.1")
    why = r"need Triton 3\.6 or later, but 3\.5\.1 is installed"
    with settings.override(route="kernels"), pytest.raises(warpnorm.UnavailableError, match=why):
        warpnorm.rms_norm(torch.randn(2, 8), (8,))
    triton_of("")
    assert routing.why_no_triton() == "Triton is not installed", "an empty folder of this name is not it"
    for fine in ("3.6.0", "3.10.0+git1234", "4.0.0"):
        triton_of(fine)
        assert routing.has_triton(), fine


def test_a_newer_triton_that_compiles_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("warpnorm.codegen.kernel")

    def compile(*_: Any, **__: Any) -> None:
        raise TypeError("compile() got an unexpected keyword argument 'target'")

    def launch() -> None:
        kernel._compile((run.text_of, {}, {}, {}), ("cuda", 90, 32), {})

    monkeypatch.setattr(kernel, "ASTSource", lambda *_: None)
    monkeypatch.setattr(kernel.triton, "compile", compile)
    monkeypatch.setattr(kernel.triton, "__version__", "4.1.0")
    with pytest.raises(warpnorm.UnavailableError, match=r"Triton 4.1.0 does not compile text_of.*install 3\.6, or set"):
        launch()
    monkeypatch.setattr(kernel.triton, "__version__", "3.6.0")
    with pytest.raises(TypeError, match="unexpected keyword"):
        launch()


def test_a_newer_triton_without_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    import warpnorm.codegen as package

    original = builtins.__import__

    def missing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "warpnorm.codegen" and "bind" in (fromlist or ()):
            raise ImportError("cannot import name 'GPUTarget'")
        return original(name, globals, locals, fromlist, level)

    assert package
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(warpnorm.UnavailableError, match=r"not one that the kernels are written for.*'GPUTarget'"):
        pipeline.binder()
