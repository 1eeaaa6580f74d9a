"""The example on one GPU, with NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    "options",
    [["--memory-savings", "0.5"], ["--memory-savings", "0.75", "--offload"], ["--engine", "ddp"], ["--exact"]],
)
def test_the_example_trains(tmp_path, options) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    arguments = ["--steps", "20", "--checkpoint", str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [*command, "-m", "fp8hooks.examples.fsdp", *arguments, *options],
        capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all ranks hold the same weights: True" in done.stdout
    assert "the checkpoint is what it was saved from: True" in done.stdout
