"""QK-clip on weights: which rows, by how much, and that all others keep their bits."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from surefoot.config.model import Custom, GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.model.attention_maxima import AttentionMaxima
from surefoot.optim.qk_clip import QKClip, build_qk_clip
from surefoot.parallel.boxes import Box, box_of, cut_box
from surefoot.parallel.fork_launch import run_ranks

HEADS, WIDTH, MODEL = 6, 5, 7
INF = math.inf


def weights(kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """With values that a product by anything but exactly 1 would change, and NaN and -0, which some products change even then."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS * WIDTH, MODEL, generator=generator).to(dtype)
    key = torch.randn(kv_heads * WIDTH, MODEL, generator=generator).to(dtype)
    query[0, :3] = torch.tensor([-0.0, 1e-42, math.nan], dtype=dtype)
    return query, key


def clip_of(query: Tensor, key: Tensor, threshold: float = 100.0) -> QKClip:
    attention = GroupedQueryAttention(num_heads=HEADS, num_kv_heads=key.shape[0] // WIDTH, d_head=WIDTH)
    return QKClip(threshold, attention, {0: (query, key)}, AttentionMaxima(threshold, 1, HEADS))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_with_its_own_key_each_head_takes_the_root_twice_and_the_rest_keep_their_bits() -> None:
    query, key = weights(HEADS)
    old_query, old_key = query.clone(), key.clone()
    largest = [-INF, 400.0, 100.0, 99.0, 250.0, 0.0]
    assert clip_of(query, key).apply([largest]) == 2
    for head, factor in enumerate([1, 0.5, 1, 1, math.sqrt(0.4), 1]):
        rows = slice(head * WIDTH, (head + 1) * WIDTH)
        for new, old in ((query, old_query), (key, old_key)):
            if factor == 1:
                assert torch.equal(bits(new[rows]), bits(old[rows]))
            else:
                torch.testing.assert_close(new[rows], old[rows] * factor)


def test_a_shared_key_head_keeps_its_bits_and_the_query_takes_all() -> None:
    query, key = weights(2)
    old_query, old_key = query.clone(), key.clone()
    assert clip_of(query, key).apply([[-INF, 400.0, 1.0, 1.0, 1.0, 1000.0]]) == 2
    assert torch.equal(bits(key), bits(old_key))
    for head, factor in enumerate([1, 0.25, 1, 1, 1, 0.1]):
        rows = slice(head * WIDTH, (head + 1) * WIDTH)
        same = torch.equal(bits(query[rows]), bits(old_query[rows]))
        assert same == (factor == 1)
        if not same:
            torch.testing.assert_close(query[rows], old_query[rows] * factor)


@pytest.mark.parametrize("largest", [math.nan, INF, -INF, 100.0, 7.0])
def test_what_is_not_above_the_threshold_or_not_a_number_clips_nothing(largest: float) -> None:
    query, key = weights(HEADS)
    before = bits(query).clone(), bits(key).clone()
    assert clip_of(query, key).apply([[largest] * HEADS]) == 0
    assert torch.equal(bits(query), before[0])
    assert torch.equal(bits(key), before[1])


def test_bf16_weights_are_rounded_to_nearest() -> None:
    query, key = weights(2, torch.bfloat16)
    old = query.clone()
    clip_of(query, key).apply([[1.0, 300.0, 1.0, 1.0, 1.0, 1.0]])
    rows = slice(WIDTH, 2 * WIDTH)
    assert torch.equal(query[rows], (old[rows].float() * (100.0 / 300.0)).bfloat16())


PLACED: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((1, 4), (Replicate(), Shard(0))),
    "rows of rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
}
"""Four ranks hold up to 8 of 30 query rows: heads of 5 rows lie across them."""


def shards_of_one_rank(rank: int, world: int, layout: str) -> tuple[list[tuple[Box, Tensor]], int]:
    axes, placements = PLACED[layout]
    mesh = init_device_mesh("cpu", axes)
    placed = []
    for whole in weights(HEADS):
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        box = cut_box(tuple(whole.shape), axes, placements, coordinate)
        local = whole[box.slices].clone()
        placed.append(DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride()))
    clipped = clip_of(placed[0], placed[1]).apply([[-INF, 400.0, 1.0, 250.0, 1.0, 5000.0]])
    return [(box_of(tensor), tensor.to_local()) for tensor in placed], clipped


@pytest.mark.parametrize("layout", PLACED)
def test_shards_that_cut_through_heads_are_scaled_as_the_whole_to_the_bit(layout: str) -> None:
    query, key = weights(HEADS)
    clip_of(query, key).apply([[-INF, 400.0, 1.0, 250.0, 1.0, 5000.0]])
    for placed, clipped in run_ranks(4, shards_of_one_rank, layout):
        assert clipped == 3
        for (box, local), whole in zip(placed, (query, key), strict=True):
            assert torch.equal(bits(local), bits(whole[box.slices]))


def test_it_is_built_over_every_layer_and_only_where_it_is_on() -> None:
    attention = GroupedQueryAttention(num_heads=2, num_kv_heads=2, d_head=4)
    model = ModelConfig(vocab_size=8, d_model=8, num_layers=2, attention=attention, feed_forward=SwiGLU(d_ff=8))
    parameters = {
        f"blocks.{layer}.attention.{part}.weight": nn.Parameter(torch.randn(8, 8))
        for layer in range(2)
        for part in ("query", "key")
    }
    assert build_qk_clip(parameters, model, 0.0, compiled=False) is None
    clip = build_qk_clip(parameters, model, 30.0, compiled=False)
    assert clip is not None
    assert (clip.threshold, clip.maxima.threshold, clip.maxima.shape) == (30.0, 30.0, (2, 2))
    assert [
        w is parameters[f"blocks.1.attention.{p}.weight"] for w, p in zip(clip.layers[1], ("query", "key"), strict=True)
    ]
    custom = ModelConfig(
        vocab_size=8, d_model=8, num_layers=2, attention=Custom(build="a:b"), feed_forward=SwiGLU(d_ff=8)
    )
    assert build_qk_clip({}, custom, 30.0, compiled=False) is None
