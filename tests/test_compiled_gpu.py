"""Compiled models on a GPU: CUDA graphs, autotuning, fused kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config

import fp8hooks
from tests import models

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes(mode: str) -> None:
    torch.manual_seed(0)
    model = models.Block(256).cuda().bfloat16()
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    fast = torch.compile(model, mode=mode, fullgraph=True)
    session = fp8hooks.compress()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x.copy_(torch.randn_like(x))
        want = models.step(model, x)[1]
        got = models.step(fast, x, session)[1]
        assert 0 < models.relative_error(got, want) < 0.03
    assert {"square8", "int8"} <= {entry.codec for entry in session.compiled}


def test_attention_by_role() -> None:
    torch.manual_seed(0)
    model = models.encoder(256).cuda().bfloat16()
    x = torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16)
    fast = torch.compile(model)
    want = models.step(fast, x)[1]
    session = fp8hooks.compress()
    assert models.relative_error(models.step(fast, x, session)[1], want) < 0.03
    codecs = {entry.site.role: entry.codec for entry in session.compiled}
    assert (codecs["attention_qk"], codecs["attention_vo"]) == ("int10", "int8")


def test_a_hundred_steps_compile_nothing_after_the_first() -> None:
    model = models.Block(256).cuda().bfloat16()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    fast = torch.compile(model, backend=counter, fullgraph=True)
    session = fp8hooks.compress()
    for step in range(100):
        models.step(fast, torch.randn(512, 256, device="cuda", dtype=torch.bfloat16), session)
        if step == 1:
            compiled = counter.frame_count
    assert counter.frame_count == compiled


def test_memory_is_given_back() -> None:
    model = torch.nn.Sequential(*(models.Block(512) for _ in range(4))).cuda().bfloat16()
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    held = []
    for session in (None, fp8hooks.compress()):
        torch._dynamo.reset()
        fast = torch.compile(model, fullgraph=True)
        models.step(fast, x, session)
        before = torch.cuda.memory_allocated()
        if session is None:
            loss = fast(x).float().square().mean()
        else:
            with session:
                loss = fast(x).float().square().mean()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
    assert held[1] < 0.6 * held[0]
