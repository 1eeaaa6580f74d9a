"""Settings: `CompressConfig` and `Rule`, checked when they are made."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8hooks import codecs

#: Role names, as `fp8hooks.roles` gives them out.
ROLES = (
    "weight",
    "statistic",
    "attention_qk",
    "attention_vo",
    "log_prob",
    "probability",
    "mask",
    "index",
    "activation",
)


@dataclass(frozen=True)
class Rule:
    """Which codec to use for the saved tensors that match; the first rule that matches wins, before the default policy.

    A pattern that is None matches everything; a rule does not match a tensor whose dtype its codec can't hold.
    Weights, and tensors smaller than `CompressConfig.min_numel`, stay exact whatever a rule says.

    Attributes:
        codec: name of a codec: `exact`; for float32, bfloat16 and float16 `square8`, `fp8_e4m3`, `fp8_e3m4`,
            `fp8_e5m2`, `int8`, `int10`, `int4`, `cubic8`; without loss, `bits` (bool, and floats of two values one of
            which is 0) and `narrow` (int64, int32).
        module: glob pattern for the path of the module that saves, as in `named_modules()`: `"layers.*.mlp"`.
        op: glob pattern for the operation: `"linear"`, `"scaled_dot_product_*"`; a custom `autograd.Function` is
            `"Function.<its class>"`.
        role: glob pattern for the role: `"attention_*"`.
        dtype: dtype of the saved tensor.

    Raises:
        ValueError: unknown codec.
        TypeError: a pattern that is no string, a dtype that is no dtype.
    """

    codec: str
    module: str | None = None
    op: str | None = None
    role: str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _one_of("Rule.codec", self.codec, codecs.NAMES)
        for field in ("module", "op", "role"):
            _typed(f"Rule.{field}", getattr(self, field), (str, type(None)), "a glob pattern or None")
        _typed("Rule.dtype", self.dtype, (torch.dtype, type(None)), "a torch.dtype or None")


@dataclass(frozen=True)
class CompressConfig:
    """Every setting of a session.

    Attributes:
        memory_savings: share, 0 to 1, of the bytes that autograd would hold to be given back. None (default)
            compresses all that the policy allows. With a number the first step does the same and is measured; from
            the second on, as much is kept exact as the share leaves room for.
        format: codec of saved tensors in role `activation`; `square8` by default.
        block_size: elements that share a scale, a power of two from 16 to 1024; 128 by default.
        min_numel: tensors of fewer elements stay exact; 1024 by default.
        rules: `Rule`s, tried in order before the default policy.
        stochastic_rounding: whether lossy codecs round up or down at random, so that the mean is right, in place of
            to the nearest (default): unbiased over many steps, but with some twice the error in each. `int4` always
            does, but in compiled graphs.
        seed: of stochastic rounding: the same seed gives the same bytes in the same step.
        offload: False; payloads stay on the device of the tensor they stand for.

    Raises:
        ValueError, TypeError: name the argument, what was given and what is allowed.
    """

    memory_savings: float | None = None
    format: str = "square8"
    block_size: int = 128
    min_numel: int = 1024
    rules: tuple[Rule, ...] = ()
    stochastic_rounding: bool = False
    seed: int = 0
    offload: bool = False

    def __post_init__(self) -> None:
        if self.memory_savings is not None:
            _typed("memory_savings", self.memory_savings, numbers.Real, "a number from 0 to 1, or None")
            if not 0 <= self.memory_savings <= 1:
                raise ValueError(f"memory_savings: {self.memory_savings!r} given, a number from 0 to 1 allowed")
        _one_of("format", self.format, (codecs.EXACT, *codecs.LOSSY))
        _whole("block_size", self.block_size, 16, 1024)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size: {self.block_size} given, a power of two from 16 to 1024 allowed")
        _whole("min_numel", self.min_numel, 0)
        _whole("seed", self.seed, 0)
        _typed("rules", self.rules, Iterable, "Rules")
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            _typed("rules", rule, Rule, "Rules")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(f"stochastic_rounding: {self.stochastic_rounding!r} given, True or False allowed")
        if self.offload is not False:
            raise ValueError(f"offload: {self.offload!r} given, only False allowed in this version")

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON can hold it) from which `from_dict` makes an equal config."""
        data = dataclasses.asdict(self)
        data["rules"] = [
            {**rule, "dtype": None if rule["dtype"] is None else str(rule["dtype"]).removeprefix("torch.")}
            for rule in data["rules"]
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompressConfig:
        """The config that `to_dict` described; fields that are not named keep their defaults."""
        check_fields(data)
        rules = data.get("rules", ())
        return cls(**{**data, "rules": tuple(_rule_from(rule) for rule in rules)})


def check_fields(names: Iterable[str]) -> None:
    """Raise TypeError if a name is not a field of `CompressConfig`."""
    allowed = [field.name for field in dataclasses.fields(CompressConfig)]
    for name in names:
        if name not in allowed:
            raise TypeError(f"unknown setting {name!r}; allowed: {', '.join(allowed)}")


def _rule_from(data: Mapping[str, Any] | Rule) -> Rule:
    if isinstance(data, Rule):
        return data
    dtype = data.get("dtype")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    return Rule(**{**data, "dtype": dtype})


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} given, one of {', '.join(allowed)} allowed")


def _typed(name: str, value: object, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} given, {allowed} allowed")


def _whole(name: str, value: object, least: int, most: int | None = None) -> None:
    limits = f"{least} to {most}" if most is not None else f"{least} up"
    _typed(name, value, numbers.Integral, f"a whole number from {limits}")
    number = int(value)  # type: ignore[call-overload]
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}: {value} given, a whole number from {limits} allowed")
