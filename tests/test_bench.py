"""The benches run and say what they measured; figures are for the GPU and the README, not for tests."""

from __future__ import annotations

import importlib
import importlib.util
import json

import pytest
import torch

pytest.importorskip("sklearn", reason="bench numerics trains on scikit-learn's digits")

from rich.console import Console

from fp8hooks import cli
from fp8hooks.bench import everything, families, fit
from fp8hooks.bench.host import CONTEXTS
from fp8hooks.bench.models import SUBJECTS
from fp8hooks.bench.numerics import NOISE, SETTINGS
from fp8hooks.bench.steps import Way, measure, table


def test_numerics_measures_every_setting_on_every_model(capsys, tmp_path) -> None:
    out = tmp_path / "numerics.json"
    assert cli.main(["bench", "numerics", "--steps", "3", "--batches", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(out.read_text())
    assert {(r["model"], r["setting"]) for r in results} == {(m, s) for m in SUBJECTS for s in (*SETTINGS, NOISE)}
    for name in SUBJECTS:
        assert f"{name}: relative error" in printed
    for result in results:
        if result["setting"] == "policy":
            assert 0 < result["error"] < 0.1
            assert result["median"] <= result["worst"]
            assert 0 < result["channel"] < 1
            assert 1.0 < result["bytes_per_element"] <= 1.05


@pytest.mark.parametrize("name", SUBJECTS)
def test_subjects_learn(name) -> None:
    torch.manual_seed(0)
    subject = SUBJECTS[name](torch.device("cpu"))
    batches = [subject.next_batch() for _ in range(2)]
    with torch.no_grad():
        before = sum(float(subject.model(*batch)) for batch in batches)
    subject.train(8)
    with torch.no_grad():
        after = sum(float(subject.model(*batch)) for batch in batches)
    assert after < before


def test_numerics_by_operation(tmp_path) -> None:
    out = tmp_path / "numerics.json"
    arguments = ["--steps", "3", "--batches", "1", "--by-op", "int4", "--out", str(out)]
    assert cli.main(["bench", "numerics", *arguments]) == 0
    of = {(one["model"], one["setting"]): one for one in json.loads(out.read_text())}
    policy, silu = of["language model", "policy"], of["language model", "silu (activation) in int4"]
    linear = of["language model", "linear (activation) in int4"]
    assert policy["error"] < silu["error"] < linear["error"]
    assert silu["bytes_per_element"] < policy["bytes_per_element"]


def test_convergence_compares_settings_over_seeds(capsys, tmp_path) -> None:
    out, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    formats = ["square8", "fp8_e4m3"]
    arguments = ["--steps", "4", "--seeds", "2", "--out", str(out), "--plot", str(picture), "--formats", *formats]
    assert cli.main(["bench", "convergence", *arguments]) == 0
    curves = json.loads(out.read_text())
    assert [(c["setting"], c["seed"]) for c in curves] == [(s, i) for s in ("exact", *formats) for i in (0, 1)]
    assert all(len(c["losses"]) == 4 for c in curves)
    assert curves[0]["losses"] != curves[1]["losses"]
    assert curves[0]["losses"][0] == curves[2]["losses"][0]
    assert picture.stat().st_size > 1000
    assert "minus exact" in capsys.readouterr().out


def test_kernels_measures_both_ways_on_any_device(capsys, tmp_path) -> None:
    out = tmp_path / "kernels.json"
    arguments = ["--device", "cpu", "--mib", "1", "--repeats", "1", "--codecs", "int8", "square8", "--out", str(out)]
    assert cli.main(["bench", "kernels", *arguments]) == 0
    results = json.loads(out.read_text())
    assert {(r["codec"], r["what"]) for r in results} == {
        (codec, what) for codec in ("int8", "square8") for what in ("encode", "decode")
    }
    assert all(r["gbytes_per_second"] > 0 and r["ratio"] > 0 for r in results)
    assert "square8" in capsys.readouterr().out


def bench(tmp_path, *arguments: str):
    """A bench on the CPU, and what it wrote."""
    out = tmp_path / "out.json"
    assert cli.main(["bench", *arguments, "--device", "cpu", "--repeats", "1", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_eager_measures_every_way_on_every_family(capsys, tmp_path) -> None:
    picture = tmp_path / "eager.png"
    found = bench(tmp_path, "eager", "--models", "tiny", "tiny-vit", "tiny-moe", "--plot", str(picture))
    assert [one["model"] for one in found] == ["tiny", "tiny-vit", "tiny-moe"]
    for one in found:
        assert list(one["ways"]) == ["plain", "fp8hooks", "checkpoint each layer", "selective checkpoint"]
        assert all(way["milliseconds"] > 0 and way["failure"] is None for way in one["ways"].values())
        plain, ours = one["ways"]["plain"], one["ways"]["fp8hooks"]
        assert plain["error"] == 0 < ours["error"] < 0.05
        # bfloat16 has an error of its own, to which ours adds little.
        assert 0 < plain["truth"] < 0.05
        assert ours["truth"] < plain["truth"] + 0.02
    assert found[0]["tokens"] == 64
    assert picture.stat().st_size > 1000
    text = capsys.readouterr().out
    assert "from float32" in text
    assert "GACT is not measured" in text
    assert "No GPU" in text


def test_eager_at_several_sizes(tmp_path) -> None:
    sizes = ["--lengths", "16", "32", "--layers", "1", "2", "--batches", "1"]
    found = bench(tmp_path, "eager", "--models", "tiny", *sizes, "--only", "fp8hooks", "--no-truth")
    assert [(one["shape"]["layers"], one["shape"]["length"]) for one in found] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    assert list(found[0]["ways"]) == ["plain", "fp8hooks"]


def test_a_vit_has_no_length(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "eager", "--device", "cpu", "--models", "tiny-vit", "--lengths", "7"])
    assert "length: 7 given" in capsys.readouterr().err


def test_a_way_that_runs_out_of_memory_is_recorded_and_the_others_go_on() -> None:
    model = families.build("tiny", torch.device("cpu"), torch.bfloat16)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate all there is.\nAnd more.")

    ways = {"plain": Way(model), "hungry": Way(fails), "again": Way(model)}
    results = measure(model, model.inputs(), ways, 1)
    assert list(results) == ["plain", "hungry", "again"]
    assert results["hungry"].failure == "OutOfMemoryError: CUDA out of memory. Tried to allocate all there is."
    assert results["again"].milliseconds > 0
    assert results["again"].error == 0
    console = Console(record=True, width=120)
    console.print(table("title", results))
    assert "OutOfMemoryError" in console.export_text()
    with pytest.raises(torch.OutOfMemoryError):
        measure(model, model.inputs(), {"hungry": Way(fails)}, 1)
    with pytest.raises(ValueError, match="boom"):
        measure(model, model.inputs(), {"plain": Way(model), "broken": Way(boom)}, 1)


def test_growth_measures_every_size(tmp_path, capsys) -> None:
    points = bench(tmp_path, "growth", "--model", "tiny", "--axes", "layers", "batch")
    assert [(point["axis"], point["size"]) for point in points] == [
        ("layers", 1), ("layers", 2), ("layers", 4), ("batch", 1), ("batch", 2), ("batch", 4),
    ]  # fmt: skip
    saves = {(point["axis"], point["size"]): point["saves"] for point in points}
    # A norm besides, as often whatever the size.
    assert saves["layers", 4] - saves["layers", 2] == 2 * (saves["layers", 2] - saves["layers", 1])
    size = {(point["axis"], point["size"]): point["gigabytes"] for point in points}
    assert size["batch", 4] == pytest.approx(2 * size["batch", 2], rel=0.1)
    assert "us a save" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 100, 1000])
def test_the_search_finds_the_largest(limit: int) -> None:
    tried = []

    def works(size: int) -> float:
        tried.append(size)
        return size * 10.0 if size <= limit else 0.0

    found, value = fit.largest_that(works, 1)
    assert value == found * 10
    assert found <= limit
    assert limit == found or limit - found <= found / 8
    assert len(tried) == len(set(tried)) < 20
    assert fit.largest_that(lambda size: size <= 5000, 1024)[0] == 4096


def test_fit_takes_what_works_and_needs_a_gpu(capsys) -> None:
    for name in fit.WAYS:
        assert fit.tokens_per_second(name, "tiny", 1, 2, 32, torch.device("cpu")) > 0
    fits = [fit.Fit("exact", "batch", 24 * 10**9, 7, 1234.5), fit.Fit("exact", "length", 24 * 10**9, 0, 0.0)]
    console = Console(record=True, width=100)
    console.print(fit.table("title", fits))
    text = console.export_text()
    assert "batch, 24 GB" in text
    assert "1,23" in text
    assert "none" in text
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            cli.main(["bench", "fit"])
        assert "needs a GPU" in capsys.readouterr().err


def test_all_goes_on_and_says_what_it_can_not_measure(monkeypatch, tmp_path, capsys) -> None:
    def broken(options, console):
        raise RuntimeError("the moon is full")

    monkeypatch.setattr("fp8hooks.bench.kernels.run", broken)
    names = ["kernels", "host", "growth", "te", "fit"]
    assert cli.main(["bench", "all", "--device", "cpu", "--out", str(tmp_path), "--only", *names]) == 0
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["benches"] == {
        "kernels": "kernels failed: RuntimeError: the moon is full",
        "host": "done",
        "growth": "done",
        "te": "not measured: it needs a GPU",
        "fit": "not measured: it needs a GPU",
    }
    assert index["torch"] == torch.__version__
    assert json.loads((tmp_path / "host.json").read_text())["no hook"] > 0
    assert "2 of 5 done" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["bench", "all", "--device", "cpu", "--full", "--out", str(tmp_path)])
    assert "--full" in capsys.readouterr().err


@pytest.mark.parametrize("name", everything.RUNS)
def test_all_calls_benches_by_options_that_they_have(monkeypatch, tmp_path, name) -> None:
    seen = []
    module = {"all": everything}.get(name) or importlib.import_module(f"fp8hooks.bench.{name}")
    monkeypatch.setattr(module, "run", lambda options, console: seen.append(options))
    for device, full in (("cpu", False), ("cuda", False), ("cuda", True)):
        if device == "cpu" and name in ("te", "fit"):
            continue
        arguments = everything.arguments_of(name, torch.device(device), full, tmp_path)
        assert cli.main(arguments) == 0
    assert len(seen) == (2 if name in ("te", "fit") else 3)


def test_convergence_by_shares(tmp_path, capsys) -> None:
    out = tmp_path / "curves.json"
    arguments = ["--steps", "3", "--seeds", "1", "--formats", "--savings", "0.5", "0.9", "--out", str(out)]
    assert cli.main(["bench", "convergence", *arguments]) == 0
    assert [curve["setting"] for curve in json.loads(out.read_text())] == ["exact", "savings 0.5", "savings 0.9"]
    with pytest.raises(SystemExit):
        cli.main(["bench", "convergence", "--savings", "2"])
    assert "memory_savings: 2.0 given" in capsys.readouterr().err


def boom(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("boom")


def test_compile_measures_the_ways_asked_for(capsys, tmp_path) -> None:
    out = tmp_path / "compile.json"
    arguments = ["--shape", "tiny", "--vocab", "64", "--device", "cpu", "--repeats", "1", "--out", str(out)]
    assert cli.main(["bench", "compile", *arguments, "--only", "compiled, fp8hooks", "quantization"]) == 0
    results = json.loads(out.read_text())
    assert list(results) == ["compiled", "compiled, Inductor's quantization (E4M3)", "compiled, fp8hooks"]
    assert results["compiled"]["error"] == 0
    assert 0 < results["compiled, fp8hooks"]["error"] < 0.05
    with pytest.raises(SystemExit):
        cli.main(["bench", "compile", *arguments, "--only", "sorcery"])
    assert "--only: 'sorcery' given" in capsys.readouterr().err


def test_knob_measures_every_share_and_peer(capsys, tmp_path) -> None:
    out, picture = tmp_path / "knob.json", tmp_path / "knob.png"
    arguments = ["--shape", "tiny", "--device", "cpu", "--repeats", "1", "--savings", "0", "0.4"]
    assert cli.main(["bench", "knob", *arguments, "--out", str(out), "--plot", str(picture)]) == 0
    results = json.loads(out.read_text())
    assert {"eager", "fp8hooks, 0", "fp8hooks, 0.4", "checkpoint each layer", "compiled, budget 0.5"} <= set(results)
    assert results["fp8hooks, 0"]["error"] == 0 < results["fp8hooks, 0.4"]["error"] < 0.05
    assert 0.38 <= results["fp8hooks, 0.4"]["given_back"] <= 0.45
    assert results["selective checkpoint"]["error"] == 0
    assert picture.stat().st_size > 0
    with pytest.raises(SystemExit):
        cli.main(["bench", "knob", *arguments, "--savings", "1.5"])
    assert "--savings: memory_savings: 1.5 given" in capsys.readouterr().err


def test_bad_options(capsys) -> None:
    for arguments, words in ((["--steps", "0"], "--steps"), (["--device", "abacus"], "no device 'abacus'")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "numerics", *arguments])
        assert stop.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
@pytest.mark.parametrize("bench", ["te", "te-training"])
def test_benches_of_transformer_engine_say_how_to_install_it(capsys, bench) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", bench])
    assert stop.value.code == 2
    assert "pip install --no-build-isolation 'fp8hooks[te]'" in capsys.readouterr().err


def test_host_measures_every_context(capsys, tmp_path) -> None:
    out = tmp_path / "host.json"
    assert cli.main(["bench", "host", "--numel", "2048", "--calls", "20", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert set(results) == set(CONTEXTS)
    assert results["session, int8"] > results["no hook"]
    assert "identity hook" in capsys.readouterr().out
