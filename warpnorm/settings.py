"""The only reader of the environment. Read at first use, never at import; can be overridden in a block."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from warpnorm.errors import SettingError

ROUTES = ("auto", "kernels", "native", "reference")
LAUNCHERS = ("auto", "compiled", "python")
KEEP_MB = 256
MOST_KEPT = 1 << 62  # bytes; more is as much
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Settings:
    """`route`: auto (kernels on a GPU, native code on a CPU, PyTorch's operators elsewhere), or one of the three forced.
    `cache_dir`: where generated source files and libraries live. `compiler`: the C compiler's name; empty is none, None
    whichever there is. `keep_bytes`: memory of results on a CPU that may be kept for later ones. `launcher`: of calls that
    were seen before, auto (the compiled one once it is there), or one of the two forced; `cxx_compiler` builds it."""

    route: str
    cache_dir: Path
    compiler: str | None = None
    keep_bytes: int = KEEP_MB << 20
    launcher: str = "auto"
    cxx_compiler: str | None = None


_current: Settings | None = None
_known: dict[
    Settings, Settings
] = {}  # equal ones are the same object, which is how calls that were seen before know them
_is_interpreting: bool | None = None


def constant(function: F) -> F:
    """Marks a function whose answer a compiler may keep. As `torch.compiler.assume_constant_result`, without the second that
    its import takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def prepare() -> None:
    """Reads the environment if nobody has, so that a compiler that traces a call finds everything settled."""
    current()
    is_interpreting()


def current() -> Settings:
    global _current
    if _current is None:
        _current = _same(_read())
    return _current


def _same(settings: Settings) -> Settings:
    return _known.setdefault(settings, settings)


def _read() -> Settings:
    route = os.environ.get("WARPNORM_ROUTE", "auto")
    if route not in ROUTES:
        raise SettingError(f"WARPNORM_ROUTE is {route!r}, but must be one of {', '.join(ROUTES)}")
    root = os.environ.get("WARPNORM_CACHE_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "warpnorm")
    keep = os.environ.get("WARPNORM_KEEP_MB", str(KEEP_MB))
    if not keep.isdecimal():
        raise SettingError(f"WARPNORM_KEEP_MB is {keep!r}, but must be a number of megabytes, 0 to keep none")
    launcher = os.environ.get("WARPNORM_LAUNCHER", "auto")
    if launcher not in LAUNCHERS:
        raise SettingError(f"WARPNORM_LAUNCHER is {launcher!r}, but must be one of {', '.join(LAUNCHERS)}")
    return Settings(
        route=route, cache_dir=Path(root), compiler=os.environ.get("WARPNORM_CC"),
        keep_bytes=min(int(keep) << 20, MOST_KEPT),
        launcher=launcher, cxx_compiler=os.environ.get("WARPNORM_CXX"),
    )  # fmt: skip


def is_interpreting() -> bool:
    """Whether Triton was told to run kernels in its interpreter (tests only), when it was first asked."""
    global _is_interpreting
    if _is_interpreting is None:
        _is_interpreting = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    return _is_interpreting


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Other settings inside a `with` block, for the whole process."""
    global _current
    before = current()
    if changes.get("route", "auto") not in ROUTES:
        raise SettingError(f"route is {changes['route']!r}, but must be one of {', '.join(ROUTES)}")
    if changes.get("launcher", "auto") not in LAUNCHERS:
        raise SettingError(f"launcher is {changes['launcher']!r}, but must be one of {', '.join(LAUNCHERS)}")
    keep = changes.get("keep_bytes", 0)
    if type(keep) is not int or not 0 <= keep <= MOST_KEPT:
        raise SettingError(f"keep_bytes is {keep!r}, but must be a number of bytes, 0 to keep none")
    _current = _same(replace(before, **changes))
    try:
        yield _current
    finally:
        _current = before
