"""The version, where everything may read it, and those of PyTorch and Triton that it runs with."""

import re

VERSION = "0.1.0"
# The oldest, as pyproject.toml has them
TORCH = (2, 10)
TRITON = (3, 6)
KNOWN_TRITON = (3, 6)  # the newest whose compiler was measured; errors of newer ones may be theirs


def numbers(version: str) -> tuple[int, int]:
    """The first two of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def spelled(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def require_torch(version: str) -> None:
    if (0, 0) < numbers(version) < TORCH:
        raise ImportError(f"warpnorm {VERSION} needs PyTorch {spelled(TORCH)} or later, but {version} is installed")
