"""The demo, as a user runs it: small."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")

from fp8hooks import cli
from fp8hooks.demo import text


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["demo", *arguments])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_trains_twice_and_writes_a_table_and_a_picture(capsys, tmp_path) -> None:
    picture = tmp_path / "deep" / "demo.png"
    code, out, _ = run(capsys, "--steps", "4", "--seed", "3", "--out", str(picture))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("held-out loss", "held for backward", "time a step", "gradient error"):
        assert words in out
    ratio = float(re.search(r"held for backward.*?([\d.]+)\s*│\s*$", out, re.MULTILINE).group(1))
    assert 0.1 < ratio <= 0.30
    errors = re.search(r"gradient error.*?([\d.]+), ([\d.]+)", out)
    assert all(0 < float(error) < 0.1 for error in errors.groups())


def test_in_bfloat16_and_with_a_share(capsys, tmp_path) -> None:
    options = ("--steps", "3", "--dtype", "bfloat16", "--memory-savings", "0.4", "--out", str(tmp_path / "a.png"))
    code, out, _ = run(capsys, *options)
    assert code == 0
    ratio = float(re.search(r"held for backward.*?([\d.]+)\s*│\s*$", out, re.MULTILINE).group(1))
    assert 0.5 < ratio <= 0.6


def test_a_text_of_ones_own(capsys, tmp_path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("All happy families are alike. " * 200)
    code, out, _ = run(capsys, "--steps", "2", "--text", str(own), "--out", str(tmp_path / "a.png"))
    assert code == 0
    assert "held-out loss" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nonsense"], "--nonsense"),
        (["--steps", "0"], "--steps: 0 given"),
        (["--steps", "many"], "--steps"),
        (["--text", "no/such/file"], "--text: can't read 'no/such/file'"),
        (["--text", "EMPTY"], "is empty"),
        (["--text", "SHORT"], "shorter than one batch"),
        (["--device", "cuda:99"], "--device: no device 'cuda:99' here"),
        (["--device", "abacus"], "--device: no device 'abacus' here"),
        (["--device", "meta"], "--device: 'meta' given, cpu or cuda allowed"),
        (["--memory-savings", "1.5"], "--memory-savings: 1.5 given, a number from 0 to 1"),
        (["--memory-savings", "-1"], "--memory-savings: -1.0 given, a number from 0 to 1"),
        (["--seed", "-1"], "--seed: -1 given"),
        (["--dtype", "float8"], "--dtype"),
    ],
)
def test_bad_input_gives_one_line_and_code_2(capsys, tmp_path, arguments, words) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "SHORT").write_text("To be or not to be")
    arguments = [str(tmp_path / a) if a in ("EMPTY", "SHORT") else a for a in arguments]
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_no_command_and_an_unknown_one(capsys) -> None:
    for arguments in ([], ["dance"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_default_text_is_long_enough_and_english() -> None:
    corpus = text.load(None)
    assert len(corpus) > 300_000
    assert b"The standard type hierarchy" in bytes(corpus.tolist())
