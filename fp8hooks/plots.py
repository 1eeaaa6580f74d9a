"""Pictures of what a step saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8hooks.stats import Bucket, Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BEFORE, _DEVICE, _HOST = "#4c566a", "#d08770", "#ebcb8b"
# More bars can't be read.
_MOST = 12


def saved_bytes(stats: Stats) -> Figure:
    """Bars of what autograd would have held, and of what is held, by operation and by role.

    Raises:
        ImportError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("session.plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, stats.by_op, "by operation")
    _bars(right, stats.by_role, "by role")
    host = f", {_mib(stats.host_bytes):.1f} MiB in host memory" if stats.host_bytes else ""
    figure.suptitle(
        f"saved for backward in step {stats.steps}: {_mib(stats.original_bytes):.1f} MiB, "
        f"{_mib(stats.stored_bytes):.1f} MiB held{host}"
    )
    return figure


def _bars(axes: Axes, buckets: dict[str, Bucket], title: str) -> None:
    largest = sorted(buckets, key=lambda name: buckets[name].original_bytes)[-_MOST:]
    rows = range(len(largest))
    before, device, host = (
        [_mib(getattr(buckets[name], field)) for name in largest]
        for field in ("original_bytes", "stored_bytes", "host_bytes")
    )
    axes.barh([row + 0.2 for row in rows], before, 0.4, color=_BEFORE, label="without fp8hooks")
    axes.barh([row - 0.2 for row in rows], device, 0.4, color=_DEVICE, label="held on the device")
    if any(host):
        axes.barh([row - 0.2 for row in rows], host, 0.4, left=device, color=_HOST, label="in host memory")
    axes.set_yticks(list(rows), largest)
    axes.set(xlabel="MiB", title=title)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="lower right")


def _mib(count: int) -> float:
    return count / 2**20
