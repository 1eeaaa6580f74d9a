"""Settings are checked when they are made, and say what was wrong."""

from __future__ import annotations

import json

import pytest
import torch

import fp8hooks
from fp8hooks import CompressConfig, Rule


@pytest.mark.parametrize(
    ("setting", "value", "error", "words"),
    [
        ("memory_savings", 1.5, ValueError, ("memory_savings", "1.5", "0 to 1")),
        ("memory_savings", -0.1, ValueError, ("memory_savings", "-0.1", "0 to 1")),
        ("memory_savings", float("nan"), ValueError, ("memory_savings", "nan", "0 to 1")),
        ("memory_savings", "half", TypeError, ("memory_savings", "'half'", "0 to 1")),
        ("format", "fp9", ValueError, ("format", "'fp9'", "fp8_e4m3")),
        ("block_size", 100, ValueError, ("block_size", "100", "power of two")),
        ("block_size", 8, ValueError, ("block_size", "8", "16 to 1024")),
        ("block_size", 64.0, TypeError, ("block_size", "64.0", "whole number")),
        ("min_numel", -1, ValueError, ("min_numel", "-1", "from 0 up")),
        ("rules", ["int8"], TypeError, ("rules", "'int8'", "Rules")),
        ("rules", 3, TypeError, ("rules", "3", "Rules")),
        ("seed", True, TypeError, ("seed", "True", "whole number")),
        ("stochastic_rounding", 1, TypeError, ("stochastic_rounding", "1", "True or False")),
        ("offload", "yes", TypeError, ("offload", "'yes'", "True, False or None")),
        ("memory_savings", "most", TypeError, ("memory_savings", "'most'", '"max"')),
        ("device_budget", "24 parsecs", ValueError, ("device_budget", "'24 parsecs'", "GiB")),
        ("device_budget", -1, ValueError, ("device_budget", "-1", "GiB")),
        ("host_budget", 1.5, TypeError, ("host_budget", "1.5", "whole number")),
    ],
)
def test_bad_values_name_the_argument_the_value_and_what_is_allowed(setting, value, error, words) -> None:
    with pytest.raises(error) as caught:
        fp8hooks.compress(**{setting: value})
    for word in words:
        assert word in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match=r"unknown setting 'blocksize'; allowed: .*block_size"):
        fp8hooks.compress(blocksize=64)
    with pytest.raises(TypeError, match="unknown setting 'colour'"):
        CompressConfig.from_dict({"colour": 1})
    with pytest.raises(TypeError, match="config: 3 given, a CompressConfig allowed"):
        fp8hooks.compress(3)  # type: ignore[arg-type]


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Rule.codec: 'fp7' given, one of exact, .* allowed"):
        Rule("fp7")
    with pytest.raises(ValueError, match=r"Rule.codec: 'signs' given"):
        Rule("signs")  # it keeps no values
    with pytest.raises(TypeError, match=r"Rule.op: 3 given"):
        Rule("exact", op=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Rule.dtype: 'float32' given"):
        Rule("exact", dtype="float32")  # type: ignore[arg-type]


def test_a_config_survives_json() -> None:
    rules = [Rule("int8", module="layers.*", dtype=torch.bfloat16), Rule("exact", op="gelu", role="activation")]
    config = CompressConfig(memory_savings=0.5, format="int8", rules=rules, min_numel=7)
    assert CompressConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_overrides_go_over_the_config() -> None:
    session = fp8hooks.compress(CompressConfig(block_size=64, min_numel=5), min_numel=6, memory_savings=0.25)
    assert (session.config.block_size, session.config.min_numel, session.config.memory_savings) == (64, 6, 0.25)


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        CompressConfig().block_size = 64  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "nbytes"), [(5, 5), ("24GiB", 24 << 30), ("1.5 kib", 1536), ("500 MB", 500_000_000), ("7B", 7)]
)
def test_bytes_may_have_a_unit(given, nbytes) -> None:
    assert CompressConfig(device_budget=given).device_budget == nbytes
    assert CompressConfig.from_dict(CompressConfig(host_budget=given).to_dict()).host_budget == nbytes


def test_a_share_and_a_budget_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"device_budget: 5 given beside memory_savings=0\.5"):
        CompressConfig(memory_savings=0.5, device_budget=5)
