"""Export straight from a sharded checkpoint: the weights of the live model, with little more than one tensor in memory."""

import dataclasses
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from surefoot.cli.main import main
from surefoot.config.model import GroupedQueryAttention, ModelConfig, MuP, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.interop import sharded_export
from surefoot.interop.huggingface import HuggingFaceError, load_folder, to_config, to_state
from surefoot.interop.sharded_export import export_checkpoint
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from surefoot.parallel.boxes import cut_box
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import rehearse_on_rank
from surefoot.train.checkpoint import own_group, save
from surefoot.train.checkpoint_io import VerifiedReader
from surefoot.train.manifest import CheckpointError
from surefoot.train.restored import open_model
from tolerances import HUGGING_FACE

READER = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
folder = Path(sys.argv[1])
kept = torch.load(folder.parent / "kept.pt", weights_only=True)
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=kept["tokens"], use_cache=False).logits
assert not any(name.split(".")[0] == "surefoot" for name in sys.modules)
print(float((logits - kept["logits"]).norm() / kept["logits"].norm()))
"""
KIB = 1 / 1024**2
"""GiB in a KiB."""


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_config(request: pytest.FixtureRequest) -> ModelConfig:
    """Multipliers that are no powers of two, and that part a tied model's two uses of its embedding."""
    return ModelConfig(
        vocab_size=90,
        d_model=24,
        num_layers=12,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=10),
        feed_forward=SwiGLU(d_ff=36),
        tie_embeddings=request.param,
        parametrization=MuP(base_d_model=16, base_d_head=5),
    )


def drawn(cfg: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Transformer(cfg, torch.float32)
    initialise(model, cfg, seed=5)
    return {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}


def save_stages(rank: int, world: int, folder: Path, cfg: ModelConfig, dtype: torch.dtype) -> None:
    """Two stages of two ranks that shard rows; moments as well, which nobody exports."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))["shard"]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None

    def pieces(tensor: Tensor) -> DTensor:
        box = cut_box(tuple(tensor.shape), tuple(mesh.shape), (Shard(0),), coordinate)
        return DTensor.from_local(
            tensor[box.slices].clone(), mesh, (Shard(0),), shape=tensor.shape, stride=tensor.stride()
        )

    weights = drawn(cfg, dtype)
    first = {name for name in weights if name.startswith(("embedding", *(f"blocks.{n}." for n in range(6))))}
    mine = {name: t for name, t in weights.items() if (name in first) == (rank < 2)}
    tensors = {f"weights/{name}": pieces(tensor) for name, tensor in mine.items()}
    tensors |= {f"exp_avg/{name}": pieces(tensor.float() * 2) for name, tensor in mine.items()}
    save(folder, tensors, {}, group=own_group()).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_writes_the_weights_of_the_live_model_in_files_of_bounded_size(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    run_ranks(4, save_stages, tmp_path / "checkpoint", model_config, dtype)
    config = dataclasses.replace(config, model=model_config)
    (tmp_path / "tokenizer.json").write_text("{}")
    exported = export_checkpoint(
        tmp_path / "checkpoint", config, tmp_path / "hf", tokenizer=tmp_path / "tokenizer.json", shard_gib=40 * KIB
    )
    expected = to_state(drawn(model_config, dtype), model_config)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values()) == exported.num_bytes
    assert exported.num_parameters == sum(tensor.numel() for tensor in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    assert len(exported.files) >= 3
    for name in exported.files:
        held = load_file(tmp_path / "hf" / name)
        assert sum(tensor.nbytes for tensor in held.values()) <= 40 * 1024
        assert held.keys() == {ours for ours, file in index["weight_map"].items() if file == name}
        for weight, tensor in held.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[weight]), weight
        with safe_open(tmp_path / "hf" / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == to_config(
        model_config, max_positions=config.data.seq_len
    )
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    _, back = load_folder(tmp_path / "hf")
    assert len(back) == len(expected)


class Alive:
    """Bytes of the tensors that reading and writing hold at one time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def note(self, tensor: Tensor) -> Tensor:
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


def test_no_more_than_a_tensor_and_one_stored_piece_are_in_memory_at_once(
    config: RunConfig, model_config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(4, save_stages, tmp_path / "checkpoint", model_config, torch.float32)
    alive = Alive()
    read: Callable[..., Tensor] = VerifiedReader._read
    empty = torch.empty
    monkeypatch.setattr(VerifiedReader, "_read", lambda *args: alive.note(read(*args)))

    def target(*args: Any, **settings: Any) -> Tensor:
        return alive.note(empty(*args, **settings))

    monkeypatch.setattr(sharded_export.torch, "empty", target)
    export_checkpoint(tmp_path / "checkpoint", dataclasses.replace(config, model=model_config), tmp_path / "hf")
    weights = drawn(model_config, torch.float32)
    largest = max(tensor.nbytes for tensor in weights.values())
    assert largest < alive.most <= 2 * largest
    assert alive.most < sum(tensor.nbytes for tensor in weights.values()) / 5
    assert alive.now == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()


def test_damage_and_a_folder_that_is_there_are_refused_and_leave_nothing(
    config: RunConfig, model_config: ModelConfig, tmp_path: Path
) -> None:
    weights = {f"weights/{name}": tensor for name, tensor in drawn(model_config, torch.float32).items()}
    save(tmp_path / "checkpoint", weights, {}).wait()
    config = dataclasses.replace(config, model=model_config)
    (tmp_path / "there").mkdir()
    with pytest.raises(HuggingFaceError, match="there exists"):
        export_checkpoint(tmp_path / "checkpoint", config, tmp_path / "there")
    path = tmp_path / "checkpoint" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its content changed"):
        export_checkpoint(tmp_path / "checkpoint", config, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "there"]


@pytest.mark.proof
def test_the_command_exports_a_run_in_stages_that_transformers_reads_to_the_same_logits(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {"parallel.pp": 2, "parallel.data_parallel": "fsdp", "parallel.micro_batch_size": 1, "eval.every": 0}
    run_ranks(4, rehearse_on_rank, vary(config, steps=3, **stages), tmp_path / "run")
    words = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), "--shard-gib", str(50 * KIB), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    restored = open_model(tmp_path / "run")
    assert told["checkpoint"] == restored.checkpoint == "step-000003-attempt-0001"
    assert told["num_parameters"] == sum(parameter.numel() for parameter in restored.model.parameters())
    assert len(told["files"]) > 1
    tokens = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = restored.model(tokens, torch.arange(40).expand(2, 40), None)
    torch.save({"tokens": tokens, "logits": logits}, tmp_path / "kept.pt")
    command = [sys.executable, "-c", READER, str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= HUGGING_FACE
    assert main(words) == 2
    assert "exists; give a folder that is not there yet" in capsys.readouterr().err
