"""The commands as a person uses them, on a run of seconds. Each command line runs in a forked process, as a shell would start it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from surefoot.cli.main import main
from surefoot.config.codec import from_toml, to_toml
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Script, rehearsal, rehearse, write_corpus

LONG = 100_000


@dataclass
class Shell:
    """A working folder with a config; runs command lines there."""

    folder: Path

    def start(self, *words: str) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        os.chdir(self.folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        torch.set_num_threads(1)
        sys.argv = ["surefoot", *words]
        code = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def __call__(self, *words: str) -> int:
        return self.end(self.start(*words))

    def end(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def wait_for_step(self, run: str, step: int, pid: int = 0) -> None:
        deadline = time.monotonic() + 60
        beat = self.folder / run / "heartbeat.json"
        while time.monotonic() < deadline:
            found = json.loads(beat.read_text()) if beat.exists() else {"step": -1, "pid": 0}
            if found["step"] >= step and pid in (0, found["pid"]):
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached; stderr: {self.err}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    write_corpus(folder / "texts")
    config = rehearsal(folder / "texts", folder / "cache")
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, sample_tokens=8))
    (folder / "small.toml").write_text(to_toml(config))
    return folder


@pytest.fixture
def shell(shared: Path, tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def train(shell: Shell, shared: Path) -> Callable[..., int]:
    def run(*words: str) -> int:
        return shell("train", "tiny", "--config", str(shared / "small.toml"), "--run", "run", *words)

    return run


def test_a_run_trains_reports_and_says_how_it_went(shell: Shell, train: Callable[..., int], shared: Path) -> None:
    assert train() == 0
    assert "finished after step 24" in shell.out
    for word in ("zlib", "xz", "calm", "busy", "continued by the model", "report.html"):
        assert word in shell.out
    assert "parameters" in shell.err
    assert "step 10/24" in shell.err
    assert (shell.folder / "run" / "report.html").stat().st_size > 100_000
    assert {p.name for p in (shell.folder / "run").iterdir()} >= {
        "config.toml", "env.json", "ledger.jsonl", "heartbeat.json", "lock", "attempts", "checkpoints", "report.html",
    }  # fmt: skip

    before = (shell.folder / "run" / "ledger.jsonl").read_bytes()
    log = (shell.folder / "run" / "attempts" / "0001" / "logs" / "rank-00000.log").read_text()
    assert "rank 0 of 1: starting" in log
    assert "ended at step 24" in log

    assert train() == 0
    assert "is finished: nothing to do" in shell.err
    assert (shell.folder / "run" / "ledger.jsonl").read_bytes() == before

    assert shell("runs", "show", "run", "--json") == 0
    shown = json.loads(shell.out)
    assert (shown["step"], shown["batch_index"]) == (24, 24)
    assert len(shown["state_digest"]) == 16
    assert shown["bits_per_byte"].keys() == {"calm", "busy"}
    assert shown["last_losses"][-1]["batch_index"] == 23

    assert shell("sample", "run", "--prompt", "the step", "--tokens", "5", "--json") == 0
    first = json.loads(shell.out)["continuation"]
    assert shell("sample", "run", "--prompt", "the step", "--tokens", "5", "--json") == 0
    assert json.loads(shell.out)["continuation"] == first

    assert shell("export", "run", "--to", "hf", "--json") == 0
    told = json.loads(shell.out)
    assert told["files"] == ["model.safetensors"]
    assert {path.name for path in (shell.folder / "hf").iterdir()} >= {"model.safetensors", "config.json"}
    assert shell("export", "run", "--to", "hf", "--shard-gib", "0") == 2
    assert "exists; give a folder" in shell.err
    assert "must be more than 0" in shell.err

    assert shell("data", "audit", "run") == 0
    assert "exactly once per epoch" in shell.out

    assert shell("report", "run", "--out", "page.html") == 0
    assert (shell.folder / "page.html").exists()

    assert train("--fresh", "--steps", "6") == 0
    assert (shell.folder / "run.1" / "ledger.jsonl").read_bytes() == before
    assert shell("runs", "list", ".") == 0
    assert "run.1" in shell.out

    assert shell("runs", "diff", "run", "run.1") == 0
    assert "steps: 6 -> 24" in shell.out


def test_a_dry_run_writes_nothing(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--dry-run") == 0
    for word in ("parameters", "FLOPs", "memory", "one step", "nothing"):
        assert word in shell.out
    assert {p.name for p in shell.folder.iterdir()} == {"out", "err"}
    assert train("--dry-run", "--json") == 0
    assert json.loads(shell.out)["num_params"] > 10_000


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_continue(
    shell: Shell, shared: Path, number: signal.Signals, code: int
) -> None:
    words = ("train", "tiny", "--config", str(shared / "small.toml"), "--run", "run", "--checkpoint.every", "0")
    pid = shell.start(*words, "--steps", str(LONG))
    shell.wait_for_step("run", 5)
    os.kill(pid, number)
    assert shell.end(pid) == code
    run = Run(shell.folder / "run")
    newest = run.ledger.surviving_checkpoints()[-1]
    assert newest.step == run.rows[-1]["step"] >= 5
    assert run.status().state == "stopped"
    assert "surefoot train tiny" in shell.out
    assert "continue" in shell.out

    assert shell(*words, "--steps", str(newest.step + 3), "--allow-change", "steps") == 0
    assert f"from {newest.name}" in shell.err
    assert Run(shell.folder / "run").rows[-1]["step"] == newest.step + 3


def test_a_second_ctrl_c_stops_at_once(shell: Shell, shared: Path) -> None:
    words = ("train", "tiny", "--config", str(shared / "small.toml"), "--run", "run", "--steps", str(LONG))
    pid = shell.start(*words, "--data.batch_size", "512", "--optim.gated", "false")
    shell.wait_for_step("run", 1)
    os.kill(pid, signal.SIGINT)
    while "again stops at once" not in shell.err:  # two signals that come together are one
        time.sleep(0.001)
    os.kill(pid, signal.SIGINT)
    assert shell.end(pid) == 130
    assert "stopped at once" in shell.err


def test_a_second_job_is_refused_by_name(shell: Shell, shared: Path) -> None:
    words = ("train", "tiny", "--config", str(shared / "small.toml"), "--run", "run", "--steps", str(LONG))
    pid = shell.start(*words)
    shell.wait_for_step("run", 1)
    other = Shell(shell.folder / "other")
    other.folder.mkdir()
    assert other(*words[:5], str(shell.folder / "run"), *words[6:]) == 4
    assert f"process {pid}" in other.err
    os.kill(pid, signal.SIGKILL)
    assert shell.end(pid) == -signal.SIGKILL


def test_a_changed_setting_is_refused_by_name_and_fork_is_the_way(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--steps", "8") == 0
    assert train("--steps", "12") == 2
    assert "steps was 8 when run started and is 12 now" in shell.err
    assert "--allow-change steps" in shell.err
    before = {name: (shell.folder / "run" / name).read_bytes() for name in ("config.toml", "ledger.jsonl")}
    wider = ("--model.d_model", "64", "--steps", "12", "--allow-change", "model", "--allow-change", "steps")
    assert train(*wider) == 4
    assert "does not fit" in shell.err
    assert before == {name: (shell.folder / "run" / name).read_bytes() for name in before}
    assert train("--steps", "12", "--optim.lr", "1e-4", "--allow-change", "steps") == 2
    assert "optim.lr was" in shell.err
    assert "surefoot fork" in shell.err

    assert shell("fork", "run", "--at", "5", "--set", "optim.lr=1e-4", "--set", "steps=12", "--run", "branch") == 0
    assert "Forked" in shell.err or "forked from run at step 5" in shell.err
    branch = Run(shell.folder / "branch")
    assert branch.ledger.lineage is not None
    assert ["optim.lr", "0.003", "0.0001"] in [list(row) for row in branch.ledger.lineage["diff"]]
    joined = branch.history()
    assert joined["step"].tolist() == list(range(1, 13))
    parent = Run(shell.folder / "run").metrics()
    assert joined["train/loss"][:5].tolist() == parent["train/loss"][:5].tolist()
    assert shell("data", "audit", "branch") == 0

    assert shell("fork", "run", "--at", "7", "--run", "nowhere") == 2
    assert "there are: " in shell.err


def test_an_interrupted_fork_continues_by_the_same_command(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--steps", "8") == 0
    words = ("fork", "run", "--at", "5", "--set", f"steps={LONG}", "--set", "checkpoint.every=0", "--run", "branch")
    pid = shell.start(*words)
    shell.wait_for_step("branch", 8)
    os.kill(pid, signal.SIGKILL)
    shell.end(pid)
    pid = shell.start(*words)
    shell.wait_for_step("branch", 7, pid)
    os.kill(pid, signal.SIGTERM)
    assert shell.end(pid) == 75
    attempts = Run(shell.folder / "branch").attempts
    assert [(a.reason, a.from_step) for a in attempts] == [("fork", 5), ("resume", 5)]


def test_wrong_data_ends_with_3_and_a_wrong_config_with_2(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--data.sources.0.documents.glob", "/nowhere/*.txt") == 3
    assert "/nowhere/*.txt" in shell.err
    assert "Traceback" not in shell.err
    assert train("--optim.lrr", "1") == 2
    assert "optim.lr" in shell.err
    assert not (shell.folder / "run").exists()
    assert train("--dry-run", "--data.sources.0.documents.glob", "/nowhere/*.txt") == 3


def test_the_guard_gives_up_with_76(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--model.init.std", "1e30", "--guard.max_consecutive_skips", "3") == 76
    assert "3 skipped steps in a row" in shell.err
    assert Run(shell.folder / "run").status().state == "stopped"


def test_build_and_inspect_show_what_a_batch_holds(shell: Shell, shared: Path) -> None:
    words = ("tiny", "--config", str(shared / "small.toml"))
    assert shell("data", "build", *words) == 0
    assert "calm" in shell.out
    assert shell("data", "inspect", *words, "--batch", "3", "--json") == 0
    shown = json.loads(shell.out)
    assert len(shown["batch"]["rows"]) == 4
    assert len(shown["batch"]["digest"]) == 16
    assert shell("data", "inspect", *words, "--batch", "3") == 0
    assert "batch 3: 4 rows" in shell.out


def test_a_changed_environment_is_announced_at_resume(shell: Shell, shared: Path) -> None:
    words = ("train", "tiny", "--config", str(shared / "small.toml"), "--run", "run")
    pid = shell.start(*words, "--steps", str(LONG))
    shell.wait_for_step("run", 6)
    os.kill(pid, signal.SIGTERM)
    assert shell.end(pid) == 75
    path = shell.folder / "run" / "env.json"
    environment = json.loads(path.read_text())
    assert environment["versions"].keys() >= {"torch", "numpy", "tokenizers"}
    assert environment["threads"] == 1
    path.write_text(json.dumps(environment | {"threads": 64}))
    step = Run(shell.folder / "run").rows[-1]["step"]
    assert shell(*words, "--steps", str(step + 2), "--allow-change", "steps") == 0
    assert "threads was 64, is 1" in shell.err


def test_two_ranks_train_under_torchrun(shell: Shell, shared: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = ["surefoot.cli.main", "--", "train", "tiny", "--config", str(shared / "small.toml"), "--run", "run"]
    done = subprocess.run(
        [*launch, *words, "--parallel.data_parallel", "fsdp"],
        cwd=shell.folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks (fsdp 2)" in done.stderr
    assert done.stdout.count("finished after step 24") == 1
    logs = shell.folder / "run" / "attempts" / "0001" / "logs"
    assert {path.name for path in logs.iterdir()} == {"rank-00000.log", "rank-00001.log"}
    assert shell("data", "audit", "run") == 0


def test_a_fork_keeps_what_its_parent_excluded(shell: Shell, shared: Path) -> None:
    config = from_toml(RunConfig, shared / "small.toml")
    loader = Loader(config.data, prepare(config.data), config.seed)
    document = next(span.document for span in loader.row_documents(*loader.sample_ids(12)[0, [0, 2]].tolist()))
    script = Script(rollback_after=13, rollback_to=12, exclude=(document,))
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        rehearse(config, shell.folder / "run", script)
        os._exit(0)
    assert shell.end(pid) == 0
    assert shell("fork", "run", "--at", "20", "--set", "steps=30", "--run", "branch") == 0
    branch = Run(shell.folder / "branch").ledger
    assert [(item.document, item.from_batch) for item in branch.exclusions] == [(document, 12)]


def test_a_fork_with_another_model_is_continued_after_a_kill(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--steps", "8") == 0
    sets = ("--set", f"steps={LONG}", "--set", "checkpoint.every=0", "--set", "model.num_layers=3")
    words = ("fork", "run", "--at", "5", *sets, "--run", "branch")
    pid = shell.start(*words)
    shell.wait_for_step("branch", 7)
    os.kill(pid, signal.SIGKILL)
    shell.end(pid)
    assert "drawn anew: blocks.2" in shell.err
    pid = shell.start(*words)
    shell.wait_for_step("branch", 7, pid)
    os.kill(pid, signal.SIGTERM)
    assert shell.end(pid) == 75
    rows = Run(shell.folder / "branch")
    lost = {row["batch_index"]: row["train/loss"] for row in rows.abandoned_rows}
    assert lost[5] == rows.rows[0]["train/loss"]


def test_a_damaged_checkpoint_is_not_forked(shell: Shell, train: Callable[..., int]) -> None:
    assert train("--steps", "8") == 0
    shard = next((shell.folder / "run" / "checkpoints" / "step-000005-attempt-0001").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for _ in range(2):
        assert shell("fork", "run", "--at", "5", "--set", "steps=9", "--run", "branch") == 4
        assert "cannot be forked" in shell.err
    assert not (shell.folder / "branch").exists()
