"""An edit in place between forward and backward: an error as in autograd, or the right gradient; never a wrong one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8hooks
from tests import models


def exact_session(**settings) -> fp8hooks.Session:
    return fp8hooks.compress(rules=[fp8hooks.Rule("exact")], **settings)


@pytest.mark.parametrize("size", [4, 64])
def test_the_error_names_op_module_and_shape(size) -> None:
    class Exponential(nn.Module):
        def forward(self, x):
            return x.exp()

    model = nn.Sequential(nn.Linear(size, size), Exponential())
    with exact_session():
        y = model(torch.randn(size, size))
        loss = y.sum()
    y.mul_(2)
    message = rf"inplace operation.*\[{size}, {size}\].*'exp'.*'1'.*is at version 1; expected version 0"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_autograd_without_us_raises_in_the_same_places() -> None:
    """For edits of each kind: with everything exact, we raise exactly where autograd does."""

    def edit_input(x, y):
        x.add_(1)

    def edit_output(x, y):
        y.add_(1)

    def edit_view(x, y):
        y[0].zero_()

    def edit_through_detach(x, y):
        y.detach().zero_()

    def nothing(x, y):
        pass

    ops = [torch.exp, torch.sin, torch.relu, torch.sigmoid, torch.square, lambda x: x * x, lambda x: x + 1]
    for op in ops:
        for edit in (edit_input, edit_output, edit_view, edit_through_detach, nothing):
            raised = []
            for session in (None, exact_session(min_numel=0)):
                x = torch.randn(8, 8, requires_grad=True).clone()
                if session is None:
                    y = op(x)
                else:
                    with session:
                        y = op(x)
                with torch.no_grad():
                    edit(x, y)
                try:
                    y.sum().backward()
                    raised.append(False)
                except RuntimeError as error:
                    raised.append("modified by an inplace operation" in str(error))
            assert raised[0] == raised[1], (op, edit)


def test_compressed_tensors_give_the_gradient_of_what_was_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress():
        h = x * 1
        loss = h.square().sum()
    with torch.no_grad():
        h.zero_()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1 / 15, atol=1e-2)


def test_a_tensor_that_changed_between_two_saves_is_saved_twice() -> None:
    """The same memory at another version is another tensor: a key without the version gives wrong gradients."""
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress() as session:
        h = x * 1
        a = h.square().sum()
        h = h.mul_(3)
        b = h.square().sum()
    assert session.stats.by_op["square"].stored_bytes == 2 * (64 * 64 + 64)
    (a + b).backward()
    torch.testing.assert_close(x.grad, 20 * x.detach(), rtol=1 / 15, atol=1e-1)


@pytest.mark.parametrize("settings", [{}, {"min_numel": 0}])
def test_no_false_alarm_for_batch_norm_and_in_place_activations(settings) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1, inplace=True),
        nn.SiLU(inplace=True),
    )
    session = fp8hooks.compress(**settings)
    x = torch.randn(4, 3, 16, 16)
    losses = []
    for _ in range(3):
        with session:
            losses.append(model(x).square().mean())
    for loss in losses:
        loss.backward()


def test_no_false_alarm_for_optimizer_steps_after_backward() -> None:
    model = models.encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    session = fp8hooks.compress()
    for _ in range(3):
        models.step(model, torch.randn(2, 32, 64), session)
        optimizer.step()


def test_an_optimizer_step_before_backward_is_an_error() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    models.step(model, torch.randn(4, 64))
    with fp8hooks.compress():
        loss = model(torch.randn(4, 64)).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*'linear'"):
        loss.backward()


def test_a_parameter_that_is_freed_and_refilled_as_fsdp_does() -> None:
    """FSDP frees a parameter's storage after forward and fills it again before backward, without a new version."""
    lin = nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    F.linear(x, lin.weight, lin.bias).sum().backward()
    want, x.grad = x.grad.clone(), None
    with fp8hooks.compress():
        loss = lin(x).sum()
    kept = lin.weight.detach().clone()
    storage = lin.weight.untyped_storage()
    size = storage.nbytes()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(lin.weight):
        storage.resize_(0)
        storage.resize_(size)
        lin.weight.copy_(kept)
    loss.backward()
    torch.testing.assert_close(x.grad, want)
