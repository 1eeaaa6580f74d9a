"""Lightning: a callback.

trainer = Trainer(callbacks=[CompressCallback(memory_savings=0.5)], ...)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import fp8hooks
from fp8hooks.config import CompressConfig
from fp8hooks.session import Session

# Those that run torch's own autograd on tensors that saved-tensor hooks see as they are.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")


class CompressCallback(Callback):
    """Has every `training_step` run in a session, the loss included, while the Trainer fits.

    Args:
        config, memory_savings, overrides: as for `fp8hooks.compress`, checked at once.

    Attributes:
        session: that of the latest fit; None before the first.

    Raises:
        ValueError: when fitting begins, under a strategy that is not supported.
    """

    def __init__(
        self,
        config: CompressConfig | None = None,
        /,
        *,
        memory_savings: float | str | None = None,
        **overrides: Any,
    ) -> None:
        self._config = fp8hooks.compress(config, memory_savings=memory_savings, **overrides).config
        self.session: Session | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
        if not any(name in kinds for name in _STRATEGIES):
            raise ValueError(f"strategy: {kinds[0]} given, {', '.join(_STRATEGIES)} allowed with CompressCallback")
        fp8hooks.disable(pl_module)
        self.session = fp8hooks.enable(pl_module, self._config, method="training_step")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fp8hooks.disable(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        fp8hooks.disable(pl_module)
