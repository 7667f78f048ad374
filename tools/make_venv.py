"""Make .venv and install Surefoot into it; run by the Makefile with the system's Python, standard library only.

    python3 tools/make_venv.py [extra ...]

Takes the CPU build of torch where no NVIDIA GPU is seen, and says what is missing on the machine with its remedy.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH = "torch>=2.13,<2.14"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(extras: list[str]) -> int:
    if sys.version_info < (3, 11):
        return fail(
            f"Python {platform.python_version()} is too old: Surefoot needs 3.11 or newer. Name one: make PYTHON=python3.12 train"
        )
    wanted = stamp(extras)
    marker = VENV / ".surefoot-installed"
    installed = marker.read_text().split() if marker.exists() else []
    if PYTHON.exists() and wanted in installed:
        return 0
    if not PYTHON.exists():
        if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            return fail(
                f"this Python has no venv module. Debian and Ubuntu: apt-get install python{version}-venv. "
                "Fedora and Arch ship it with python. Then run the same command again."
            )
        say("making .venv")
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            return fail("python -m venv failed, see above; nothing is left behind")
    gpu = has_nvidia_gpu()
    say(
        "NVIDIA GPU seen: installing torch with CUDA"
        if gpu
        else "no NVIDIA GPU seen: installing the CPU build of torch"
    )
    if pip_install([TORCH], cpu_index=not gpu):
        return fail(
            "installing torch failed, see above. pip needs a package index that has torch 2.13 for this Python and platform"
        )
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    say(f"installing Surefoot and its dependencies{' with ' + ', '.join(extras) if extras else ''}")
    if pip_install(["-e", target], cpu_index=False):
        return fail("pip install failed, see above; the same command tries again")
    marker.write_text("\n".join([*installed, wanted]) + "\n")
    if shutil.which("g++") is None and shutil.which("c++") is None and shutil.which("clang++") is None:
        say("no C++ compiler seen: training works, only --parallel.compile needs one (Debian: apt-get install g++)")
    return 0


def stamp(extras: list[str]) -> str:
    """What was installed: changes with pyproject.toml and the extras."""
    text = (ROOT / "pyproject.toml").read_bytes() + ",".join(sorted(extras)).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout.strip() != b""


def pip_install(arguments: list[str], *, cpu_index: bool) -> int:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if cpu_index and sys.platform == "linux" and platform.machine() == "x86_64" and reachable(CPU_INDEX):
        # A local version (2.13.0+cpu) sorts above the plain one, so pip prefers the CPU build of the same release.
        command += ["--extra-index-url", CPU_INDEX]
    env = dict(os.environ, PIP_ROOT_USER_ACTION="ignore")
    return subprocess.run(command, env=env, check=False).returncode


def reachable(url: str) -> bool:
    """Asked first, because pip would retry an unreachable index for minutes."""
    try:
        urllib.request.urlopen(url + "/torch/", timeout=5).close()
    except (urllib.error.URLError, OSError, ValueError):
        return False
    return True


def say(text: str) -> None:
    print(f"surefoot: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> int:
    say(text)
    return 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
