"""`enable`, `compress_wrapper` and `disable`: the model stays what it is, and its forward runs in a session."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fp8hooks
from fp8hooks import CompressConfig
from tests import models


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[models.Block() for _ in range(3)])


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 64)


def test_enabled_is_as_in_a_session() -> None:
    model, x = network(), batch()
    want = models.step(model, x, fp8hooks.compress())
    session = fp8hooks.enable(model)
    loss, grads = models.step(model, x)
    assert torch.equal(loss, models.step(network(), x)[0])
    # The loss was outside: its own save is exact.
    assert models.relative_error(grads, want[1]) < 0.01
    assert session.stats.savings > 0.5
    assert fp8hooks.sessions(model) == {"": session}
    fp8hooks.disable(model)
    assert all(torch.equal(a, b) for a, b in zip(models.step(model, x)[1], models.step(network(), x)[1], strict=True))
    assert fp8hooks.sessions(model) == {}
    assert model.__dict__.keys() == network().__dict__.keys()


def test_blocks_by_torchs_own_api_with_settings() -> None:
    model, x = network(), batch()
    names, keys, kinds = dict(model.named_parameters()).keys(), model.state_dict().keys(), [*map(type, model.modules())]
    wrapper = functools.partial(fp8hooks.compress_wrapper, config=CompressConfig(format="int8"))
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, models.Block)
    )
    assert dict(model.named_parameters()).keys() == names
    assert model.state_dict().keys() == keys
    assert [*map(type, model.modules())] == kinds
    models.step(model, x)
    found = fp8hooks.sessions(model)
    assert list(found) == ["0", "1", "2"]
    for session in found.values():
        assert session.stats.savings > 0.6
        assert "int8" in session.stats.by_codec
        assert {site.module.split(".")[0] for site, _ in session.stats.sites} <= {"0", "1", "2"}
    model.load_state_dict(network().state_dict())
    fp8hooks.disable(model)
    assert fp8hooks.sessions(model) == {}


def test_copies_and_pickles_are_enabled_for_themselves() -> None:
    model, x = network(), batch()
    session = fp8hooks.enable(model, memory_savings=0.6)
    for _ in range(2):
        models.step(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        (own,) = fp8hooks.sessions(other).values()
        assert own is not session
        assert own.plan == session.plan
        doubled = network()
        with torch.no_grad():
            for parameter in doubled.parameters():
                parameter.mul_(2)
        assert torch.equal(other(x), doubled(x))
        assert not torch.equal(other(x), model(x))
        fp8hooks.disable(other)
        assert fp8hooks.sessions(model) == {"": session}


def test_nothing_keeps_a_model_alive() -> None:
    gc.disable()
    try:
        model = network()
        fp8hooks.enable(model)
        models.step(model, batch())
        found = weakref.ref(model)
        del model
        assert found() is None
    finally:
        gc.enable()


def test_the_signature_stays() -> None:
    class Model(nn.Module):
        def forward(self, input_ids, labels=None, *, mask=None):
            return input_ids

    model = Model()
    before = inspect.signature(model.forward)
    fp8hooks.enable(model)
    assert inspect.signature(model.forward) == before


def test_another_method_than_forward() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = models.mlp()

        def training_step(self, x):
            return self.inner(x).square().mean()

    model = Model()
    session = fp8hooks.enable(model, method="training_step")
    model.training_step(batch()).backward()
    assert session.stats.tensors > 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_installed(error) -> None:
    class Fails(nn.Module):
        def forward(self, x):
            raise error

    model = nn.Sequential(nn.Linear(64, 64), Fails())
    fp8hooks.enable(model)
    with pytest.raises(error):
        model(batch())
    assert not torch._C._autograd._top_saved_tensors_default_hooks(False)


def test_others_may_wrap_the_same_forward() -> None:
    model, x = network(), batch()
    calls = []
    plain = model.forward
    model.forward = lambda *args: calls.append("before") or plain(*args)
    session = fp8hooks.enable(model)
    ours = model.forward
    model.forward = lambda *args: calls.append("after") or ours(*args)
    models.step(model, x)
    assert calls == ["after", "before"]
    assert session.stats.savings > 0.5
    fp8hooks.disable(model)
    steps = session.stats.steps
    models.step(model, x)
    assert calls == ["after", "before"] * 2
    assert session.stats.steps == steps


def test_bad_use_is_one_clear_error() -> None:
    model = network()
    fp8hooks.enable(model)
    with pytest.raises(ValueError, match="Sequential is enabled already"):
        fp8hooks.enable(model)
    with pytest.raises(ValueError, match="compress_wrapper: Sequential is enabled already"):
        fp8hooks.compress_wrapper(model)
    with pytest.raises(ValueError, match="checkpointed already"):
        fp8hooks.compress_wrapper(checkpoint_wrapper(models.mlp()))
    with pytest.raises(TypeError, match="enable: int given"):
        fp8hooks.enable(3)
    with pytest.raises(TypeError, match="method: 'backward_step' given"):
        fp8hooks.enable(network(), method="backward_step")
    with pytest.raises(TypeError, match="unknown setting 'colour'"):
        fp8hooks.enable(network(), colour="red")
    other = network()
    with pytest.raises(ValueError, match="memory_savings: 7"):
        fp8hooks.enable(other, memory_savings=7)
    assert fp8hooks.sessions(other) == {}
    fp8hooks.disable(other)


def test_a_model_on_the_meta_device_says_so_and_runs_once_it_has_values() -> None:
    with torch.device("meta"):
        model = network()
    fp8hooks.enable(model)
    with pytest.raises(RuntimeError, match=r"parameter '0.mlp.0.weight' of Sequential is on the meta device"):
        model(torch.empty(4, 64, device="meta"))
    model.to_empty(device="cpu")
    model.load_state_dict(network().state_dict())
    assert torch.equal(model(batch()), network()(batch()))


def test_a_block_inside_an_enabled_model_keeps_its_own_settings() -> None:
    model, x = network(), batch()
    inner = fp8hooks.compress_wrapper(model[1], CompressConfig(format="exact"))
    session = fp8hooks.enable(model)
    models.step(model, x)
    assert fp8hooks.sessions(model) == {"": session, "1": fp8hooks.sessions(inner)[""]}
    assert "square8" not in fp8hooks.sessions(model)["1"].stats.by_codec
    assert "square8" in session.stats.by_codec


# What training loops do besides


def train(model, step, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return [parameter.detach().clone() for parameter in model.parameters()]


def scaled(model, optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def accumulated_and_clipped(model, optimizer) -> None:
    optimizer.zero_grad()
    for part in batch().chunk(4):
        (model(part).square().mean() / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def partly_checkpointed(model, optimizer) -> None:
    optimizer.zero_grad()
    h = checkpoint(model[0], batch(), use_reentrant=False)
    model[2](model[1](h)).square().mean().backward()
    optimizer.step()


def with_an_average(model, optimizer) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()
    average.update_parameters(model)
    with torch.no_grad():
        distance = (average(batch()) - model(batch())).abs().max()
    assert 0 <= distance < 1


def frozen(model, optimizer) -> None:
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("step", [scaled, accumulated_and_clipped, partly_checkpointed, with_an_average, frozen])
def test_what_training_loops_do_ends_where_it_ends_without(step) -> None:
    enabled = network()
    session = fp8hooks.enable(enabled)
    got, want, start = train(enabled, step), train(network(), step), list(network().parameters())
    moved = [(a - b).flatten() for a, b in zip(want, start, strict=True)]
    apart = [(a - b).flatten() for a, b in zip(got, want, strict=True)]
    assert torch.cat(apart).norm() < 0.05 * torch.cat(moved).norm()
    assert session.held_bytes == 0


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(512, 64), models.mlp(), nn.Linear(64, 512, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return F.cross_entropy(self.head(self.body(self.embedding(tokens))).flatten(0, 1), tokens.flatten())

    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(512, (8, 64))
    model(tokens).backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    session = fp8hooks.enable(model)
    model(tokens).backward()
    assert models.relative_error([p.grad for p in model.parameters()], want) < 0.02
    assert session.stats.weight_bytes >= model.head.weight.nbytes
