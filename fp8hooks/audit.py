"""Gradient fidelity: what compression does to the gradient of one step, beside what is noise anyway."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, nn

from fp8hooks import codecs, gradients
from fp8hooks.config import CompressConfig, Rule
from fp8hooks.gradients import ParameterError
from fp8hooks.report import format_bytes
from fp8hooks.saved import Site
from fp8hooks.session import Session

#: From a model and a batch to a scalar loss.
LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class SiteError:
    """What one site contributes.

    Attributes:
        module, op, role: the site.
        codec: what it is stored as.
        error: relative error of the whole gradient if this site alone is compressed.
        saved_bytes: bytes given back there.
    """

    module: str
    op: str
    role: str
    codec: str
    error: float
    saved_bytes: int


@dataclass(frozen=True)
class Audit:
    """The result of `audit`. Errors are relative: ||g - g_exact|| / ||g_exact||.

    Attributes:
        overall: the error over all parameters as one vector.
        parameters: the error of each, worst first.
        precision_noise: the error of the exact step itself against the same step in float32; None where the model
            is in float32, or can't be run in it.
        savings: share of the saved bytes that was given back.
        sites: the sites by error, worst first; empty unless asked for.
        batch_noise: how far the gradient of another batch is; None unless one was given.
    """

    overall: ParameterError
    parameters: list[ParameterError]
    precision_noise: float | None
    batch_noise: float | None
    savings: float
    sites: list[SiteError] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw the error of the worst parameters, and of the worst sites if there are any, as PNG. Needs matplotlib."""
        from matplotlib.figure import Figure

        panels = [("parameters", [(item.name, item.error) for item in self.parameters[:20]])]
        if self.sites:
            panels.append(("sites", [(f"{s.module} {s.op} {s.role}", s.error) for s in self.sites[:20]]))
        figure = Figure(figsize=(7 * len(panels), 6))
        for axes, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.barh([name for name, _ in bars][::-1], [error for _, error in bars][::-1], color="#d08770")
            axes.axvline(self.overall.error, color="#4c566a", label=f"all parameters: {self.overall.error:.4f}")
            if self.precision_noise is not None:
                noise = self.precision_noise
                axes.axvline(noise, color="#4c566a", linestyle=":", label=f"training precision: {noise:.4f}")
            axes.set(title=f"relative error of the gradient, {title}")
            axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._summary()
        yield self._worst_parameters()
        if self.sites:
            yield self._site_table()

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=110).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _summary(self) -> Table:
        table = Table(title="fp8hooks audit: error of the gradient", box=SIMPLE_HEAD, show_header=False)
        table.add_row("over all parameters", f"{self.overall.error:.4f}", f"cosine {self.overall.cosine:.5f}")
        if self.precision_noise is not None:
            table.add_row("of the training precision itself", f"{self.precision_noise:.4f}", "")
        if self.batch_noise is not None:
            table.add_row("of another batch", f"{self.batch_noise:.4f}", "")
        table.add_row("saved bytes given back", f"{self.savings:.1%}", "")
        return table

    def _worst_parameters(self, most: int = 12) -> Table:
        table = Table(title="parameters, worst first", box=SIMPLE_HEAD)
        for column in ("parameter", "error", "cosine", "norm"):
            table.add_column(column, overflow="fold", justify="left" if column == "parameter" else "right")
        for item in self.parameters[:most]:
            table.add_row(item.name, f"{item.error:.4f}", f"{item.cosine:.5f}", f"{item.norm:.3g}")
        return table

    def _site_table(self) -> Table:
        table = Table(title="sites, worst first: the gradient's error if only that one is compressed", box=SIMPLE_HEAD)
        for column in ("module", "op", "role", "codec"):
            table.add_column(column, overflow="fold")
        table.add_column("error", justify="right")
        table.add_column("given back", justify="right")
        for site in self.sites:
            names = (site.module, site.op, site.role, site.codec)
            table.add_row(*names, f"{site.error:.5f}", format_bytes(site.saved_bytes))
        return table


def audit(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    config: CompressConfig | None = None,
    *,
    sites: bool = False,
    other_batch: Any = None,
) -> Audit:
    """Run one exact and one compressed step from the same state, and compare their gradients.

    Parameters, buffers, gradients and random number generators are left as they were.

    Args:
        model: any module; steps run in its present mode and precision.
        batch: what `loss_fn` takes.
        loss_fn: `loss_fn(model, batch)` gives a scalar loss with a graph.
        config: of the compressed step; the default config if None.
        sites: also measure each site by itself: one more step a site.
        other_batch: another batch of the same kind, to show how far apart gradients of batches are.

    Raises:
        TypeError: `loss_fn` gives no tensor.
        ValueError: the loss is not a scalar with a graph, or no parameter gets a gradient.
    """
    config = config or CompressConfig()
    with _restored(model):
        exact = _gradient(model, batch, loss_fn, None)
        session = Session(config)
        compressed = _gradient(model, batch, loss_fn, session)
        stats = session.stats
        found: list[SiteError] = []
        if sites:
            found = sorted(_site_errors(model, batch, loss_fn, config, session, exact), key=lambda site: -site.error)
        noise = _precision_noise(model, batch, loss_fn, exact)
        other = None
        if other_batch is not None:
            other = gradients.overall(_gradient(model, other_batch, loss_fn, None), exact).error
    return Audit(
        overall=gradients.overall(compressed, exact),
        parameters=sorted(gradients.compare(compressed, exact), key=lambda item: -item.error),
        precision_noise=noise,
        batch_noise=other,
        savings=stats.savings,
        sites=found,
    )


def _site_errors(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    config: CompressConfig,
    session: Session,
    exact: dict[str, Tensor],
) -> Iterator[SiteError]:
    for (site, codec), bucket in session.stats.sites.items():
        saved = bucket.original_bytes - bucket.stored_bytes
        if codec not in codecs.LOSSY:
            continue
        alone = Session(_only(config, site, codec))
        error = gradients.overall(_gradient(model, batch, loss_fn, alone), exact).error
        yield SiteError(*site, codec, error, saved)


def _only(config: CompressConfig, site: Site, codec: str) -> CompressConfig:
    """The config with nothing compressed but what is saved at `site`."""
    names = (_literal(site.module), _literal(site.op), _literal(site.role))
    rules = (Rule(codec, *names), Rule("exact"))
    return CompressConfig(block_size=config.block_size, min_numel=config.min_numel, rules=rules)


def _literal(name: str) -> str:
    """A glob pattern that matches `name` alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _gradient(model: nn.Module, batch: Any, loss_fn: LossFn, session: Session | None) -> dict[str, Tensor]:
    def loss() -> Tensor:
        value = loss_fn(model, batch)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss_fn: gave a {type(value).__name__}, a scalar tensor allowed")
        if value.numel() != 1 or not value.requires_grad:
            raise ValueError(f"loss_fn: gave a loss of shape {list(value.shape)}, a scalar that requires grad allowed")
        return value

    found = gradients.of_step(model, loss, session or contextlib.nullcontext())
    if not found:
        raise ValueError("model: no parameter got a gradient")
    return found


def _precision_noise(model: nn.Module, batch: Any, loss_fn: LossFn, exact: dict[str, Tensor]) -> float | None:
    """The exact gradient's own error: against the same step in float32."""
    if all(p.dtype is torch.float32 for p in model.parameters()):
        return None
    try:
        single = copy.deepcopy(model).float()
        in_single = _gradient(single, _to_float(batch), loss_fn, None)
    except (RuntimeError, TypeError):
        return None  # a model that can't be copied, or not run in float32
    return gradients.overall(exact, in_single).error


def _to_float(batch: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, batch)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Gradients that were there before are there after."""
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad
