"""The demo's picture: both loss curves, and saved bytes by operation."""

from __future__ import annotations

from pathlib import Path

from fp8hooks.demo.train import Run

_EXACT, _COMPRESSED = "#4c566a", "#d08770"


def save(exact: Run, compressed: Run, title: str, path: Path) -> None:
    """Write the picture as PNG to `path`; folders on the way are made."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    left.plot(exact.losses, color=_EXACT, label=f"exact, held-out {exact.held_out:.3f}", linewidth=2.5)
    left.plot(compressed.losses, color=_COMPRESSED, label=f"fp8hooks, held-out {compressed.held_out:.3f}", linewidth=1)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="training loss")
    left.legend()
    left.grid(alpha=0.3)

    ops = sorted(exact.stats.by_op, key=lambda op: exact.stats.by_op[op].original_bytes)[-8:]
    rows = range(len(ops))
    after = [compressed.stats.by_op[op].stored_bytes if op in compressed.stats.by_op else 0 for op in ops]
    right.barh([row + 0.2 for row in rows], [_mib(exact.stats.by_op[op].stored_bytes) for op in ops], 0.4, color=_EXACT)
    right.barh([row - 0.2 for row in rows], [_mib(count) for count in after], 0.4, color=_COMPRESSED)
    right.set_yticks(list(rows), [op.replace("scaled_dot_product_attention", "attention") for op in ops])
    share = compressed.stats.stored_bytes / exact.stats.stored_bytes
    right.set(xlabel="MiB held for backward", title=f"saved bytes by op: {share:.0%} of exact")
    right.grid(alpha=0.3, axis="x")

    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mib(count: int) -> float:
    return count / 2**20
