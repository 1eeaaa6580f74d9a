"""Networks of random operations: the forward is identical, the gradient within bounds, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fp8hooks
from fp8hooks import Rule, gradients

CHANNELS = 8
# From [4, 8, 16, 16] to the same; some share memory, edit in place, expand, slice or view.
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu_(x * 1),
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "both relus": lambda x: F.leaky_relu(F.relu(x)),
    "residual": lambda x: x + F.relu(x),
    "silu by hand": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "square": lambda x: x * x * 0.1,
    "softmax": lambda x: x * F.softmax(x, 1),
    "dropout": lambda x: F.dropout(x, 0.2),
    "max pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "average of relu": lambda x: F.avg_pool2d(F.relu(x), 3, 1, 1),
    "chunk": lambda x: torch.cat([F.relu(x[:, :4]), x[:, 4:] * F.leaky_relu(x[:, 4:])], 1),
    "pad and slice": lambda x: F.relu(F.pad(x, (1, 1, 1, 1)))[:, :, 1:-1, 1:-1],
    "expand": lambda x: x + F.relu(x.mean(1, keepdim=True)).expand_as(x),
    "view": lambda x: x.flatten(1).view(x.shape).transpose(2, 3).contiguous().transpose(2, 3),
    "edit in place": lambda x: (F.relu(x) + 0).add_(1),
    "channels last": lambda x: F.silu(x.contiguous(memory_format=torch.channels_last)).contiguous(),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "prelu": lambda: nn.PReLU(CHANNELS),
}
SETTINGS = ({}, {"stochastic_rounding": True}, {"format": "fp8_e3m4"}, {"memory_savings": 0.4}, {"block_size": 16})


class Network(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.steps = nn.ModuleDict({str(i): MODULES[name]() for i, name in enumerate(names) if name in MODULES})
        self.head = nn.Linear(CHANNELS, 5)

    def forward(self, x: Tensor) -> Tensor:
        for i, name in enumerate(self.names):
            x = self.steps[str(i)](x) if name in MODULES else PLAIN[name](x)
        return self.head(x.mean((2, 3)))


@settings(max_examples=150, deadline=None)
@given(
    names=st.lists(st.sampled_from([*PLAIN, *MODULES]), min_size=1, max_size=6),
    options=st.sampled_from(SETTINGS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_network(names: list[str], options: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Network(names).to(dtype)
    x, y = torch.randn(4, CHANNELS, 16, 16).to(dtype).requires_grad_(), torch.randint(5, (4,))
    losses = []

    def loss() -> Tensor:
        torch.manual_seed(1)
        result = F.cross_entropy(model(x), y)
        losses.append(result.detach())
        return result

    exact = gradients.of_step(model, loss, fp8hooks.compress(rules=[Rule("exact")]))
    session = fp8hooks.compress(**options)
    for _ in range(2):  # the knob's plan holds from the second step on
        got = gradients.of_step(model, loss, session)
        assert torch.equal(losses[0], losses[-1])
        assert session.held_bytes == 0
    # A bias before a norm has no gradient but rounding; beside the whole it does not count.
    assert gradients.overall(got, exact).error < 0.06
    assert session.stats.stored_bytes <= session.stats.original_bytes
