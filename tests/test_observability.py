"""What users see: logs, pictures, profiles, notebooks, and the doctor."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import fp8hooks
from fp8hooks import cli, doctor
from tests import models


def stepped(**settings) -> fp8hooks.Session:
    session = fp8hooks.compress(**settings)
    for _ in range(3):
        models.step(models.mlp(), torch.randn(512, 64), session)
    return session


def test_the_log_tells_of_plans_and_once_of_each_shortfall(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="fp8hooks"):
        stepped(memory_savings=0.99)
    plans = [record for record in caplog.records if record.levelno == logging.INFO]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(plans) == len(warnings) == 1
    assert "a plan was made in step 1" in plans[0].getMessage()
    assert "memory_savings=0.99 can't be reached" in warnings[0].getMessage()
    assert all(record.name.startswith("fp8hooks.") for record in caplog.records)


def test_it_is_quiet_by_default() -> None:
    code = (
        "import torch, fp8hooks\n"
        "with fp8hooks.compress(memory_savings=0.99): loss = torch.nn.Linear(64, 64)(torch.randn(64, 64)).sum()\n"
        "loss.backward()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_pictures(tmp_path) -> None:
    session = stepped(memory_savings=0.9, offload=None)
    path = tmp_path / "saved.png"
    figure = session.plot(path)
    assert path.stat().st_size > 5000
    left, right = figure.axes
    assert {"linear", "gelu"} <= {label.get_text() for label in left.get_yticklabels()}
    assert "activation" in {label.get_text() for label in right.get_yticklabels()}
    assert "in host memory" in {text.get_text() for text in left.get_legend().get_texts()}
    widths = sum(bar.get_width() for bar in left.containers[0]) * 2**20
    assert widths == pytest.approx(session.stats.original_bytes)


def test_without_matplotlib_the_error_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"session.plot needs matplotlib: pip install"):
        fp8hooks.compress().plot()


def test_reports_in_notebooks_terminals_and_logs() -> None:
    report = stepped().report()
    html = report._repr_html_()
    assert html.startswith("<pre")
    assert html.rstrip().endswith("</pre>")
    assert "linear" in html
    assert "gelu" in str(report)
    assert "\x1b" not in str(report)


def test_profiles_show_our_ranges() -> None:
    session, model = fp8hooks.compress(), models.mlp()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        models.step(model, torch.randn(512, 64), session)
    names = [event.key for event in profile.key_averages()]
    assert "fp8hooks.encode linear" in names
    assert "fp8hooks.encode layer_norm" in names
    assert "fp8hooks.decode" in names


def test_stats_go_to_tensorboard(tmp_path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    session = stepped()
    with tensorboard.SummaryWriter(tmp_path) as writer:
        figures = {name: value for name, value in session.stats.to_dict().items() if isinstance(value, int | float)}
        writer.add_scalars("fp8hooks", figures, session.stats.steps)
    assert {"savings", "original_bytes", "stored_bytes", "host_bytes"} <= set(figures)
    assert any(tmp_path.iterdir())


def test_the_doctor(capsys) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for what in (
        "torch",
        "GPU",
        "FP8 instructions",
        "Triton kernels",
        "compiled graphs",
        "offload",
        "TransformerEngine",
    ):
        assert what in text
    assert torch.__version__ in text
    findings = {finding.what: finding for finding in doctor.examine()}
    assert findings["torch"].verdict == doctor.YES
    assert findings["saved-tensor hooks"].verdict == doctor.YES
    assert findings["compiled graphs"].verdict == doctor.YES
    assert doctor.FAULT not in {finding.verdict for finding in findings.values()}


def test_the_doctor_goes_on_after_a_fault(monkeypatch) -> None:
    def broken(what: str) -> doctor.Finding:
        raise OSError("the disk is gone")

    monkeypatch.setitem(doctor._CHECKS, "Triton kernels", broken)
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu118")
    findings = {finding.what: finding for finding in doctor.examine()}
    assert findings["Triton kernels"] == doctor.Finding("Triton kernels", doctor.FAULT, "OSError: the disk is gone")
    assert findings["torch"].verdict == doctor.FAULT
    assert "tested on 2.8 to 2.15" in findings["torch"].text
    assert findings["saved-tensor hooks"].verdict == doctor.YES
