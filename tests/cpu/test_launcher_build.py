"""How the compiled launcher is built, and what happens where it is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = """
import torch, warpnorm
x = torch.randn(4, 2048)
for _ in range(3):
    y = warpnorm.rms_norm(x, (2048,))
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (2048,)))
"""


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "WARPNORM_CACHE_DIR": str(folder), **environment}
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)


@pytest.fixture
def refusing(tmp_path: Path) -> str:
    """A compiler that builds nothing."""
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'launcher.cpp: error: not today' >&2\nexit 1\n")
    script.chmod(0o755)
    return str(script)


def test_a_compiler_that_refuses(refusing: str, tmp_path: Path) -> None:
    done = run(CALLS, tmp_path / "cache", WARPNORM_LAUNCHER="compiled", WARPNORM_CXX=refusing)
    assert "UnavailableError: there is no compiled launcher" in done.stderr
    assert "not today" in done.stderr
    many = CALLS.replace("range(3)", "range(1200)") + "from warpnorm import repeat; repeat.prepare_launcher()\n" + CALLS
    done = run(many, tmp_path / "cache", WARPNORM_CXX=refusing)
    assert done.returncode == 0, done.stderr
    assert not [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith("build-")]


def test_short_rows_are_pytorchs_where_building_failed(refusing: str, tmp_path: Path) -> None:
    """From the next process on: the bits of a row stay the same within one."""
    asked = "from warpnorm.launch import launcher; before = launcher.can_be_built()\n"
    again = "assert launcher.can_be_built() is before; print(before)"
    failing = asked + "from warpnorm import repeat; assert 'not today' in repeat.prepare_launcher()\n" + again
    for expected in ("True", "False"):
        assert run(failing, tmp_path / "cache", WARPNORM_CXX=refusing).stdout.strip() == expected
    os.utime(refusing, (0, 0))
    assert run(asked + again, tmp_path / "cache", WARPNORM_CXX=refusing).stdout.strip() == "True", "another compiler"


def test_no_compiler(tmp_path: Path) -> None:
    done = run(CALLS, tmp_path, WARPNORM_LAUNCHER="compiled", WARPNORM_CXX="")
    assert "WARPNORM_CXX is empty, which means none" in done.stderr
    assert run(CALLS, tmp_path, WARPNORM_CXX="").returncode == 0
    done = run(CALLS, tmp_path, WARPNORM_LAUNCHER="fortran")
    assert "WARPNORM_LAUNCHER is 'fortran', but must be one of auto, compiled, python" in done.stderr


def test_nothing_outlives_the_program(tmp_path: Path) -> None:
    """Neither a compiler that is still at work, nor its folder; and a child that ends does not end it."""
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    code = f"""
import os, pathlib, time
from warpnorm import repeat
from warpnorm.launch import launcher
launcher._start(repeat._set_up)
pid = pathlib.Path({str(tmp_path)!r}) / "pid"
while not pid.exists():
    time.sleep(0.05)
child = os.fork()
if child == 0:
    raise SystemExit
os.waitpid(child, 0)
os.kill(int(pid.read_text()), 0)  # still there
assert any(path.name.startswith("build-") for path in launcher.library().parent.iterdir())
"""
    done = run(code, tmp_path / "cache", WARPNORM_CXX=str(script))
    assert done.returncode == 0, done.stderr
    number = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{number}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert not [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith("build-")]
