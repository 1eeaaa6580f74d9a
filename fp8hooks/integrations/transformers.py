"""Hugging Face `transformers`: a callback for its Trainer.

trainer = Trainer(model, ..., callbacks=[CompressCallback(memory_savings=0.5)])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import fp8hooks
from fp8hooks.config import CompressConfig
from fp8hooks.session import Session


class CompressCallback(TrainerCallback):
    """Enables the model while the Trainer trains it.

    Args:
        config, memory_savings, overrides: as for `fp8hooks.compress`, checked at once.

    Attributes:
        session: that of the latest training; None before the first.

    Raises:
        ValueError: when training begins, if the Trainer checkpoints activations too.
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if args.gradient_checkpointing:
            raise ValueError(
                "gradient_checkpointing: True given beside CompressCallback, and checkpointing saves nothing that "
                "could be compressed; only one of the two is allowed"
            )
        fp8hooks.disable(model)  # left by a training that an error ended
        self.session = fp8hooks.enable(model, self._config)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        fp8hooks.disable(model)
