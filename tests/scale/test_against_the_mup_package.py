"""Coordinate data of Microsoft's mup package, on transformers' Llama, and ours on our own model, from the same weights.

Needs the package, which is not a dependency: ``pip install --no-deps --target FOLDER mup==1.0.0`` and ``SUREFOOT_MUP=FOLDER`` (or installed).
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sample_config import tiny
from surefoot.config.model import GroupedQueryAttention, MuP, SwiGLU
from surefoot.config.optim import AdamW, Constant, OptimConfig, RolesConfig, RoleSettings
from surefoot.config.run import RunConfig
from surefoot.interop.huggingface import to_config, to_name
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from surefoot.parallel.mesh import World
from surefoot.recipes.resize import with_width
from surefoot.scale.coord_data import coordinates, synthetic_batch
from tolerances import MUP_PACKAGE

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
BASE, WIDTHS, STEPS, LR, WEIGHT_DECAY = 32, (64, 128, 256), 4, 3e-3, 1.0


@pytest.fixture(scope="module")
def mup() -> Iterator[Any]:
    folder = os.environ.get("SUREFOOT_MUP", "")
    if folder:
        sys.path.insert(0, str(Path(folder)))
    try:
        yield importlib.import_module("mup"), importlib.import_module("mup.coord_check")
    except ModuleNotFoundError:
        pytest.skip(
            "the mup package is not installed: pip install --no-deps --target FOLDER mup==1.0.0; SUREFOOT_MUP=FOLDER"
        )
    finally:
        if folder:
            sys.path.remove(str(Path(folder)))


def config(width: int) -> RunConfig:
    """As MuAdamW moves things: all roles decay, epsilon is the same at all widths, no clipping."""
    run = tiny()
    model = dataclasses.replace(
        run.model,
        vocab_size=64,
        d_model=BASE,
        num_layers=2,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8),
        feed_forward=SwiGLU(d_ff=64),
        tie_embeddings=False,
        parametrization=MuP(base_d_model=BASE),
        init=dataclasses.replace(run.model.init, std=0.1, depth_scaled=False),
    )
    m = width / BASE
    role = RoleSettings(eps=m)
    roles = RolesConfig(embedding=role, hidden=role, output=role, norm=role)
    optimizer = AdamW(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=WEIGHT_DECAY)
    optim = OptimConfig(optimizer=optimizer, lr=LR, roles=roles, schedule=Constant(), warmup_steps=0, clip_norm=0.0)
    data = dataclasses.replace(run.data, batch_size=2, seq_len=16, document_mask=False)
    parallel = dataclasses.replace(run.parallel, precision="fp64", device="cpu", compile="off")
    run = dataclasses.replace(run, steps=STEPS, model=model, optim=optim, data=data, parallel=parallel)
    return with_width(run, width)


def llama(mup: Any, run: RunConfig) -> Any:
    """Their model of ours, its output a readout of mup's, without initialisation of its own."""
    standard = dataclasses.replace(run.model, parametrization=tiny().model.parametrization)
    model = LlamaForCausalLM(LlamaConfig(**to_config(standard, max_positions=64), attn_implementation="eager"))
    model.lm_head = mup.MuReadout(run.model.d_model, run.model.vocab_size, bias=False)
    return model.double()


def with_our_weights(mup: Any, run: RunConfig) -> Any:
    model = llama(mup, run)
    base, delta = (llama(mup, with_width(run, width)) for width in (BASE, 2 * BASE))
    mup.set_base_shapes(model, base, delta=delta, rescale_params=False)
    ours = Transformer(run.model, torch.float64)
    initialise(ours, run.model, run.seed)
    with torch.no_grad():
        by_name = dict(model.named_parameters())
        for name, weight in ours.state_dict().items():
            by_name[to_name(name)].copy_(weight)
    return model


THEIRS = {
    "model.embed_tokens": "embedding",
    **{f"model.layers.{n}.self_attn:out[0]": f"blocks.{n}.attention" for n in range(2)},
    **{f"model.layers.{n}.mlp": f"blocks.{n}.feed_forward" for n in range(2)},
    **{f"model.layers.{n}": f"blocks.{n}.residual" for n in range(2)},
    "lm_head": "logits",
}


def test_coordinate_data_equal_those_of_the_mup_package(mup: Any) -> None:
    package, coord_check = mup
    far: dict[tuple[int, int, str], float] = {}
    for width in WIDTHS:
        run = config(width)
        batch = synthetic_batch(run)
        ids = torch.from_numpy(batch.tokens_BT)
        targets = torch.from_numpy(batch.targets_BT)
        inputs = {"input_ids": ids, "labels": targets, "shift_labels": targets, "use_cache": False}
        table = coord_check._get_coord_data(
            {width: lambda run=run: with_our_weights(package, run)},
            [inputs],
            lambda model: package.MuAdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.999)),
            nsteps=STEPS,
            dict_in_out=True,
            cuda=False,
            show_progress=False,
            filter_module_by_name=lambda name: name in {key.partition(":")[0] for key in THEIRS},
        )
        ours = coordinates(run, ALONE, STEPS)
        seen = set()
        for row in table.to_dict("records"):
            if (name := THEIRS.get(row["module"])) is None:
                continue
            seen.add(name)
            mine = ours[row["t"] - 1].sizes[name].mean_abs
            far[width, row["t"] - 1, name] = abs(mine / row["l1"] - 1)
        assert seen == set(THEIRS.values())
    assert len(far) == len(WIDTHS) * STEPS * len(THEIRS)
    worst = max(far.items(), key=lambda item: item[1])
    assert worst[1] <= MUP_PACKAGE, worst
