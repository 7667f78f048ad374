"""``surefoot``: finds the command, runs it, and turns errors into a text and an exit code."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from surefoot.cli import exit_codes
from surefoot.config.errors import ConfigError, unknown_choice

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("surefoot.cli.train", "train a recipe, or continue its run"),
    "fork": ("surefoot.cli.fork", "start a new run from a checkpoint, with changed settings"),
    "runs": ("surefoot.cli.runs", "list, show and compare runs"),
    "report": ("surefoot.cli.report", "write a run's report as one offline page"),
    "sample": ("surefoot.cli.sample", "continue a text with a trained model"),
    "export": ("surefoot.cli.export", "write a run's weights for Hugging Face transformers"),
    "data": ("surefoot.cli.data", "build, inspect and audit token shards"),
    "guard": ("surefoot.cli.guard", "say what the guard would have done on a training log"),
    "drill": ("surefoot.cli.drill", "put faults into small runs and keep the score of the guard"),
    "parity": (
        "surefoot.cli.parity",
        "see whether layout changes training: a recipe on one process and under every layout",
    ),
    "coordcheck": ("surefoot.cli.coordcheck", "see whether activations keep their size as a recipe grows"),
    "sweep": ("surefoot.cli.sweep", "try many settings of a recipe, several runs at once, and say which is best"),
    "transfer": ("surefoot.cli.transfer", "see whether the best learning rate stays where it is as a recipe grows"),
    "advise": ("surefoot.cli.advise", "say what published laws and your own sweeps advise for a run"),
    "doctor": ("surefoot.cli.doctor", "measure what this machine can do"),
    "config": ("surefoot.cli.config", "show a config, or what differs between two"),
}
"""Command, the module whose ``main(argv)`` runs it and returns the exit code, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. ``--debug`` anywhere shows tracebacks."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "RANK" in os.environ:
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # DDP warns in C++, per rank, of what strict mode does on purpose
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words[:1] == ["--"]:  # torchrun needs it before flags of ours that look like the beginning of its own (--run)
        del words[0]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has gone (`surefoot ... | head`); closing must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.DONE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else exit_codes.DONE
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last frame of the program: everything becomes a text here
        if debug:
            traceback.print_exc()
        code = exit_codes.code_of(error)
        print(_text(error, code), file=sys.stderr)
    if "RANK" in os.environ and "torch" in sys.modules:
        # A process group that something still refers to aborts an orderly exit (pytorch issue 190489), which torchrun would take for a fault.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")


def usage() -> str:
    """The help of ``surefoot`` itself."""
    width = max(map(len, COMMANDS))
    lines = ["usage: surefoot COMMAND ...", "", "Pretrains language models and keeps the run on its feet.", ""]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "surefoot COMMAND --help says more. Start with: surefoot train tiny",
        "--debug anywhere shows the traceback of an error; --version prints the version;",
        '--completion bash|zsh prints a completion script: eval "$(surefoot --completion bash)".',
    ]
    return "\n".join(lines)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.DONE if words else exit_codes.CONFIG
    name, *rest = words
    if name == "--version":
        print(_version())
        return exit_codes.DONE
    if name in ("--completion", "--complete"):
        return int(importlib.import_module("surefoot.cli.completion").main(name, rest))
    if name not in COMMANDS:
        raise ConfigError([unknown_choice("command", name, COMMANDS)])
    return int(importlib.import_module(COMMANDS[name][0]).main(rest))


def _version() -> str:
    # 20 ms that no other command needs.
    from importlib.metadata import version

    return f"surefoot {version('surefoot')}"


def _text(error: Exception, code: int) -> str:
    """What a person reads of an error that ended a command."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and any(sign in str(error) for sign in _PEER_GONE):
        return f"rank {os.environ.get('RANK')}: another rank ended; its own message says why ({type(error).__name__})"
    if code == exit_codes.INTERNAL:
        return f"internal error: {type(error).__name__}: {error}\n--debug shows where; please report it"
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        return f"{len(error.problems)} mistakes:\n{error}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: install it into this environment ({sys.prefix})"
    if type(error) in (OSError, *OSError.__subclasses__()) and error.strerror:  # type: ignore[attr-defined]
        return f"{error.filename or 'operating system'}: {error.strerror}"  # type: ignore[attr-defined]
    return str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
