"""torchtitan (0.3 and later): a policy to take the place of activation checkpointing in a Trainer's config.

config.activation_checkpoint = CompressedAC.Config(memory_savings=0.5)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

import fp8hooks
from fp8hooks.session import Session


class CompressedAC(ActivationCheckpointing):
    """Compresses what autograd saves, in place of computing it again.

    The session is opened in the forward of the model, or of its part on a pipeline stage, so that blocks may be
    compiled as wholes.

    Attributes:
        session: of the model that it was applied to.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """See `fp8hooks.CompressConfig`; what is inherited is for recomputation, and has no effect."""

        memory_savings: float | str | None = None
        format: str = "square8"
        offload: bool | None = False
        host_budget: int | str | None = None

    session: Session | None = None

    def apply(self, model: nn.Module) -> None:
        """Enable a model. Raises ValueError if it is enabled already, or a setting's value is not allowed."""
        config = cast("CompressedAC.Config", self.config)
        self.session = fp8hooks.enable(
            model,
            memory_savings=config.memory_savings,
            format=config.format,
            offload=config.offload,
            host_budget=config.host_budget,
        )
