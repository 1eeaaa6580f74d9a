"""Settings: `CompressConfig` and `Rule`, checked when they are made."""

from __future__ import annotations

import dataclasses
import numbers
import re
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
        memory_savings: share, 0 to 1, of the bytes that autograd would hold on the device to be given back, or `"max"`.
            None (default) compresses all that the policy allows. Otherwise the first step does the same and is
            measured; from the second on a plan (`Session.plan`) gives back what was asked at the least cost in time
            and error.
        device_budget: in place of `memory_savings`: the bytes that saved tensors may take on the device, a whole
            number or a string with a unit (`"24GiB"`, `"500 MB"`).
        format: codec of saved tensors in role `activation`; `square8` by default.
        block_size: elements that share a scale, a power of two from 16 to 1024; 128 by default.
        min_numel: tensors of fewer elements stay exact; 1024 by default.
        rules: `Rule`s, tried in order before the default policy.
        stochastic_rounding: whether lossy codecs round up or down at random, so that the mean is right, in place of
            to the nearest (default): unbiased over many steps, but with some twice the error in each. `int4` always
            does, but in compiled graphs.
        seed: of stochastic rounding: the same seed gives the same bytes in the same step.
        offload: whether what is stored may go to host memory: True, all of it, or, with `memory_savings` or
            `device_budget`, what these ask for beyond 8 bits; None, the latter only; False (default), nothing.
        host_budget: the most host memory that may take, in bytes or with a unit as above; None: half of the machine's,
            shared between the local ranks of a distributed run.

    Raises:
        ValueError, TypeError: name the argument, what was given and what is allowed.
    """

    memory_savings: float | str | None = None
    device_budget: int | str | None = None
    format: str = "square8"
    block_size: int = 128
    min_numel: int = 1024
    rules: tuple[Rule, ...] = ()
    stochastic_rounding: bool = False
    seed: int = 0
    offload: bool | None = False
    host_budget: int | str | None = None

    def __post_init__(self) -> None:
        _check_savings(self.memory_savings)
        if self.memory_savings is not None and self.device_budget is not None:
            raise ValueError(
                f"device_budget: {self.device_budget!r} given beside memory_savings={self.memory_savings!r}, "
                "only one of the two allowed"
            )
        for field in ("device_budget", "host_budget"):
            value = getattr(self, field)
            object.__setattr__(self, field, None if value is None else parse_bytes(field, value))
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
        if self.offload is not None and not isinstance(self.offload, bool):
            raise TypeError(f"offload: {self.offload!r} given, True, False or None allowed")

    @property
    def planned(self) -> bool:
        """Whether a share of memory, or a budget, is asked for."""
        return self.memory_savings is not None or self.device_budget is not None

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


_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
    "TIB": 1 << 40,
}  # fmt: skip


def parse_bytes(name: str, value: object) -> int:
    """The number of bytes that a setting called `name` gives: a whole number, or a string as `"1.5 GiB"`.

    Raises:
        TypeError, ValueError: it is neither.
    """
    allowed = 'a whole number of bytes from 0 up, or one with a unit, as "24GiB" or "500 MB",'
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value, re.IGNORECASE)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(f"{name}: {value!r} given, {allowed} allowed")
        return int(float(found[1]) * _UNITS[found[2].upper()])
    _typed(name, value, numbers.Integral, allowed)
    number = int(value)  # type: ignore[call-overload]
    if number < 0:
        raise ValueError(f"{name}: {value!r} given, {allowed} allowed")
    return number


def _check_savings(value: object) -> None:
    allowed = 'a number from 0 to 1, "max" or None'
    if value is None or value == "max":
        return
    _typed("memory_savings", value, numbers.Real, allowed)
    if not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"memory_savings: {value!r} given, {allowed} allowed")


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
