"""The audit: exact against compressed, with everything left as it was."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fp8hooks
from fp8hooks import CompressConfig, Rule, cli
from tests import models


def loss_fn(model, x):
    return model(x).float().square().mean()


def factory():
    torch.manual_seed(0)
    return models.encoder(), torch.randn(8, 32, 64), loss_fn


def nothing():
    return 3


def test_the_error_is_that_of_two_steps_done_by_hand() -> None:
    model, x, _ = factory()
    result = fp8hooks.audit(model, x, loss_fn)
    _, exact = models.step(model, x)
    _, compressed = models.step(model, x, fp8hooks.compress())
    assert result.overall.error == pytest.approx(models.relative_error(compressed, exact), rel=1e-6)
    assert 0.5 < result.savings < 0.8
    assert [p.error for p in result.parameters] == sorted((p.error for p in result.parameters), reverse=True)
    assert {p.name for p in result.parameters} == {name for name, _ in model.named_parameters()}


def test_an_exact_config_has_no_error() -> None:
    model, x, _ = factory()
    result = fp8hooks.audit(model, x, loss_fn, CompressConfig(rules=(Rule("exact"),)))
    assert result.overall.error == 0
    assert result.overall.cosine == pytest.approx(1)
    assert result.savings == 0


def test_everything_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8))
    x = torch.randn(32, 64)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    result = fp8hooks.audit(model, x, loss_fn, sites=True)
    # Dropout drew the same numbers in both steps, or the error would be of the order of one.
    assert result.overall.error < 0.1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_sites_add_up_and_come_worst_first() -> None:
    model, x, _ = factory()
    result = fp8hooks.audit(model, x, loss_fn, sites=True)
    errors = [site.error for site in result.sites]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0
    # Independent noises add up in squares, about.
    assert sum(e * e for e in errors) ** 0.5 == pytest.approx(result.overall.error, rel=0.5)
    assert {site.module for site in result.sites} >= {"layers.0.self_attn", "layers.1.linear1"}
    assert all(site.saved_bytes >= 0 for site in result.sites)


def test_noise_floors() -> None:
    model, x, _ = factory()
    single = fp8hooks.audit(model, x, loss_fn, other_batch=torch.randn(8, 32, 64))
    assert single.precision_noise is None
    assert single.batch_noise > 0.05
    half = fp8hooks.audit(model.bfloat16(), x.bfloat16(), loss_fn)
    assert 0.001 < half.precision_noise < 0.1


def test_bad_losses() -> None:
    model, x, _ = factory()
    with pytest.raises(TypeError, match="loss_fn: gave a float"):
        fp8hooks.audit(model, x, lambda m, b: 1.0)
    with pytest.raises(ValueError, match=r"loss_fn: gave a loss of shape \[8, 32, 64\]"):
        fp8hooks.audit(model, x, lambda m, b: m(b))
    with pytest.raises(ValueError, match="model: no parameter got a gradient"):
        fp8hooks.audit(model, x, lambda m, b: torch.ones(1, requires_grad=True).sum())


def test_the_command(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    out, picture = tmp_path / "audit.json", tmp_path / "audit.png"
    arguments = ["audit", "tests.test_audit:factory", "--sites", "--json", str(out), "--plot", str(picture)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    for words in ("over all parameters", "parameters, worst first", "sites, worst first", "layers.0.self_attn"):
        assert words in printed
    data = json.loads(out.read_text())
    assert data["overall"]["error"] > 0
    assert len(data["parameters"]) == len(list(factory()[0].parameters()))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.test_audit", "package.module:function allowed"),
        ("no.such.module:f", "can't import 'no.such.module'"),
        ("tests.test_audit:missing", "has no 'missing'"),
        ("tests.test_audit:nothing", "gave 3, (model, batch, loss_fn) allowed"),
    ],
)
def test_bad_names_give_one_line(capsys, name, words) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit", name])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_rules_that_match_nothing_are_reported() -> None:
    model, x, _ = factory()
    session = fp8hooks.compress(rules=[Rule("int8", op="linear"), Rule("exact", module="decoder.*")])
    models.step(model, x, session)
    text = " ".join(str(session.report()).split())
    assert "module='decoder.*', op=None, role=None, dtype=None) matched nothing" in text
    assert text.count("matched nothing") == 1
