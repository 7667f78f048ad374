"""The frame of the command line: commands, exit codes, errors as text."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.cli import exit_codes, main
from surefoot.config.errors import ConfigError
from surefoot.parallel.mesh import EnvironmentFault

PACKAGE = Path(surefoot.__file__).parent
INSIDE = {
    "surefoot.config.text_value.NotReadable",  # becomes a ConfigError in the decoder
    "surefoot.train.rollback.NoTarget",  # becomes a halt in the loop
    "surefoot.proof.rehearsal.Crashed",  # an injected death
    "surefoot.proof.parity_trace.Incoherent",  # becomes the verdict on a layout
    "surefoot.parallel.fork_launch.RankFailed",  # of the launcher that tests use
    "surefoot.interop.trainers.GuardHalted",  # raised into somebody else's loop
}
"""Errors that never end a command."""


def imports_after(*argv: str) -> set[str]:
    """Top-level modules loaded in a fresh process after one command line."""
    code = "import sys; from surefoot.cli.main import main; main(sys.argv[1:]); print('|' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.rpartition("|")[2].split()}


def command_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def refuse(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(main, "_dispatch", refuse)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "tiny", "--help-all"],
        ["train", "tyny", "--optim.lrr", "3"],
        ["doctor", "--help"],
        ["sweep", "--help"],
        ["sweep", "tiny", "--vary", "optim.lrr=1e-3,1e-2"],
        ["config", "--help"],
        ["coordcheck", "--help"],
        ["parity", "--help"],
        ["config", "show", "tiny", "--optim.lr", "1e-3"],
        ["config", "diff", "tiny", "nothing-there"],
        ["--complete", "train", ""],
    ],
    ids=" ".join,
)
def test_help_and_config_errors_import_neither_torch_nor_numpy(argv: list[str]) -> None:
    assert not {"torch", "numpy", "tokenizers", "rich", "plotly"} & imports_after(*argv)


def test_help_lists_every_command_and_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and help_text in text for name, (_, help_text) in main.COMMANDS.items())
    assert main.main([]) == 2


def test_the_issues_commands_are_there() -> None:
    assert list(main.COMMANDS) == [
        "train",
        "fork",
        "runs",
        "report",
        "sample",
        "export",
        "data",
        "guard",
        "drill",
        "parity",
        "coordcheck",
        "sweep",
        "transfer",
        "advise",
        "doctor",
        "config",
    ]


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctr"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "command = 'doctr' is not one of train, fork, runs, report, sample, export, data, guard, drill, parity, coordcheck, sweep, transfer, advise, doctor, config; nearest: 'doctor'\n"
    )


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("surefoot 0.")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError(["a"]), 2, "a\n"),
        (ConfigError(["a", "b"]), 2, "2 mistakes:\na\nb\n"),
        (EnvironmentFault("no GPU; use --parallel.device cpu"), 4, "no GPU; use --parallel.device cpu\n"),
        (FileNotFoundError(2, "No such file or directory", "x.toml"), 4, "x.toml: No such file or directory\n"),
        (OSError(28, "No space left on device"), 4, "operating system: No space left on device\n"),
        (
            ModuleNotFoundError("No module named 'wandb'"),
            4,
            f"No module named 'wandb': install it into this environment ({sys.prefix})\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("oh"), 1, "internal error: ZeroDivisionError: oh\n--debug shows where; please report it\n"),
        (SystemExit(2), 2, ""),
        (SystemExit(), 0, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_becomes_a_text_and_its_exit_code(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that_raises(monkeypatch, error)
    assert main.main(["anything"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", text)


def test_debug_anywhere_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that_raises(monkeypatch, ConfigError(["a"]))
    assert main.main(["train", "--debug", "x"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_is_not_passed_on_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--debug", "config", "--debug", "diff", "tiny", "tiny"]) == 0
    assert capsys.readouterr().out == "the same config\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "from surefoot.cli.main import main; import sys; sys.exit(main(['train', 'tiny', '--help-all']))"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.wait(timeout=30) == 0
    assert writer.stderr is not None
    assert writer.stderr.read() == b""
    writer.stderr.close()


def test_every_error_with_an_exit_code_exists() -> None:
    for name in exit_codes.ERRORS:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), BaseException), name


def test_every_error_of_the_package_has_an_exit_code() -> None:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(("surefoot", *file.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(file.read_text())):
            bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
            if isinstance(node, ast.ClassDef) and bases & {"Exception", "ValueError", "RuntimeError", "TypeError"}:
                found.add(f"{module}.{node.name}")
    assert found - set(exit_codes.ERRORS) - INSIDE == set()


def test_every_exit_code_is_explained_in_the_help_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert codes == set(exit_codes.MEANINGS) == {0, 1, 2, 3, 4, 75, 76, 130}
    main.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{code} {meaning}" in text for code, meaning in exit_codes.MEANINGS.items())
