"""torch's own engines over several processes: gradients as of one process that compresses, no hang, no false alarm."""

from __future__ import annotations

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
