"""torch's own engines over several processes: gradients as of one process that compresses, no hang, no false alarm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import distributed_workers

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.timeout(180),
]


@pytest.mark.parametrize("name", distributed_workers.WORKERS)
def test_gradients_are_those_of_one_process(name: str, tmp_path) -> None:
    distributed_workers.run(name, tmp_path)


@pytest.mark.parametrize("options", [["--memory-savings", "0.5"], ["--engine", "ddp", "--exact"]])
def test_the_example_trains_on_two_processes(tmp_path, options) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["--device", "cpu", "--size", "tiny", "--steps", "3", "--checkpoint", str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [*command, "-m", "fp8hooks.examples.fsdp", *arguments, *options],
        capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all ranks hold the same weights: True" in done.stdout
    assert "the checkpoint is what it was saved from: True" in done.stdout
    assert ("saved for backward in step 3" in done.stdout) == ("--exact" not in options)
