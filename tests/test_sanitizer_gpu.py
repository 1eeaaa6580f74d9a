"""NVIDIA's compute-sanitizer finds nothing in the kernels: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.every_kernel"]
    # Each tensor in an allocation of its own: the caching allocator's neighbours would hide an access past the end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer can't watch this machine's GPU")
    assert done.returncode == 0, output[-4000:]
    assert "ran every kernel" in output
