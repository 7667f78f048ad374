"""Probes against plain computations, under every layout, and without a trace."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from surefoot.config.model import Custom
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.guard.signals import ProbeSignals
from surefoot.model.attention import GroupedAttention
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.train.evaluate import TrainingData, evaluate
from surefoot.train.layer_probes import attention_figures
from surefoot.train.probes import CHUNK, probe_metrics, probe_rows, take_probe
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import train_step
from tolerances import FP64_KERNEL, FP64_RANKS

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


@pytest.fixture
def fp64(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    return vary(config, **{"parallel.precision": "fp64", "data.seq_len": 160, "guard.probe_rows": 3})


def after_steps(config: RunConfig, world: World, steps: int = 3) -> tuple[Setup, TrainState, TrainingData, float]:
    """The state after some steps, gradients still there, and the rate of the last."""
    setup, state = set_up(config, world)
    data = TrainingData.open(config, prepare(config.data))
    lr = 0.0
    for index in range(steps):
        lr = train_step(state, data.loader.batch(index, (), world.rank, world.size), setup).signals.lr
    return setup, state, data, lr


def role_of(probe: ProbeSignals, role: str) -> dict[str, float]:
    return next(asdict(r) for r in probe.roles if r.role == role)


def test_the_update_recomputed_from_the_moments_is_the_one_that_was_made(fp64: RunConfig) -> None:
    setup, state, data, _ = after_steps(fp64, ALONE)
    before = {name: p.detach().clone() for name, p in state.parameters.items()}
    lr = train_step(state, data.loader.batch(3), setup).signals.lr
    probe = take_probe(state, setup, probe_rows(data, setup), lr, with_layers=False)
    assert [r.role for r in probe.roles] == ["embedding", "norm", "hidden"]
    assert (probe.step, probe.layers, probe.weights_finite) == (4, (), True)
    for role in probe.roles:
        names = [name for name, of in setup.roles.items() if of == role.role]
        weights = [state.parameters[name].detach() for name in names]
        moved = [state.parameters[name].detach() - before[name] for name in names]
        assert role.update_norm == pytest.approx(math.sqrt(sum(float(m.square().sum()) for m in moved)), rel=1e-10)
        assert role.weight_norm == pytest.approx(math.sqrt(sum(float(w.square().sum()) for w in weights)), rel=1e-12)
        assert role.update_ratio == role.update_norm / role.weight_norm
        assert role.largest_weight == pytest.approx(
            max(float(w.abs().max() / w.square().mean().sqrt()) for w in weights), rel=1e-12
        )


def test_the_stale_moment_ratio_is_of_the_gradient_that_the_moment_has_seen(fp64: RunConfig) -> None:
    setup, state, data, lr = after_steps(fp64, ALONE)
    settings = fp64.optim.optimizer
    probe = take_probe(state, setup, probe_rows(data, setup), lr, with_layers=False)
    assert probe.beta2 == settings.beta2
    squares, size = 0.0, 0
    for name, parameter in state.parameters.items():
        if setup.roles[name] != "hidden":
            continue
        v = state.tensors()[f"exp_avg_sq/{name}"] / (1 - settings.beta2**3)
        assert parameter.grad is not None
        squares += float((parameter.grad**2 / torch.clamp(v, min=settings.eps**2)).sum())
        size += parameter.numel()
    assert role_of(probe, "hidden")["rms_t"] == pytest.approx(math.sqrt(squares / size), rel=1e-12)
    assert 0 < role_of(probe, "hidden")["rms_t"] < 1 / math.sqrt(1 - settings.beta2)
    assert math.isnan(role_of(probe, "embedding")["rms_t"])


def test_after_one_step_every_gradient_is_as_large_as_its_moment_says(fp64: RunConfig) -> None:
    setup, state, data, lr = after_steps(fp64, ALONE, steps=1)
    probe = take_probe(state, setup, probe_rows(data, setup), lr, with_layers=False)
    assert role_of(probe, "norm")["rms_t"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("missing", ["gradients", "update"])
def test_without_a_gradient_that_the_moments_saw_the_ratio_is_missing(fp64: RunConfig, missing: str) -> None:
    setup, state, data, lr = after_steps(fp64, ALONE)
    if missing == "gradients":
        state.optimizer.zero_grad()
    probe = take_probe(state, setup, probe_rows(data, setup), lr, with_layers=False, applied=missing != "update")
    assert all(math.isnan(role.rms_t) for role in probe.roles)
    assert all(role.update_norm > 0 for role in probe.roles)


def test_before_the_first_update_there_is_none_to_speak_of(fp64: RunConfig) -> None:
    setup, state = set_up(fp64, ALONE)
    data = TrainingData.open(fp64, prepare(fp64.data))
    probe = take_probe(state, setup, probe_rows(data, setup), 1e-3)
    assert all(math.isnan(role.update_norm) for role in probe.roles)
    assert all(role.weight_norm > 0 for role in probe.roles)
    assert len(probe.layers) == fp64.model.num_layers


def test_the_updates_of_a_large_model_are_recomputed_a_chunk_at_a_time(
    fp64: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, state, data, lr = after_steps(fp64, ALONE)
    whole = take_probe(state, setup, probe_rows(data, setup), lr)
    assert sum(p.numel() for p in state.parameters.values()) < CHUNK
    monkeypatch.setattr("surefoot.train.probes.CHUNK", 2000)
    assert flat(take_probe(state, setup, probe_rows(data, setup), lr)) == pytest.approx(flat(whole), nan_ok=True)


def test_one_flipped_exponent_shows_as_the_largest_weight_and_a_nan_as_broken_weights(
    config: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    config = vary(config, **{"parallel.precision": "fp32"})
    setup, state, data, lr = after_steps(config, ALONE)
    rows = probe_rows(data, setup)
    with torch.no_grad():
        weight = state.parameters["blocks.0.attention.query.weight"]
        healthy = role_of(take_probe(state, setup, rows, lr, with_layers=False), "hidden")["largest_weight"]
        weight[3, 4] = 1e30
        probe = take_probe(state, setup, rows, lr, with_layers=False)
        assert probe.weights_finite
        assert role_of(probe, "hidden")["largest_weight"] == pytest.approx(math.sqrt(weight.numel()), rel=1e-3)
        assert role_of(probe, "hidden")["largest_weight"] > 4 * healthy
        weight[3, 4] = math.nan
        assert not take_probe(state, setup, rows, lr, with_layers=False).weights_finite


# Layers


def watched(model: torch.nn.Module, rows: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input of the attention, output) of every block, by hooks of the test's own."""
    seen: list[list[torch.Tensor]] = []
    handles = []
    for block in model.get_submodule("blocks").children():
        mine: list[torch.Tensor] = []
        seen.append(mine)
        handles.append(block.attention.register_forward_hook(lambda m, i, o, mine=mine: mine.append(i[0])))
        handles.append(block.register_forward_hook(lambda m, i, o, mine=mine: mine.append(o)))
    with torch.no_grad():
        model(*rows)
    for handle in handles:
        handle.remove()
    return [(a, b) for a, b in seen]


def test_logits_entropy_and_activations_are_those_of_a_plain_computation(fp64: RunConfig) -> None:
    setup, state, data, lr = after_steps(fp64, ALONE)
    rows = probe_rows(data, setup)
    assert rows.documents_BT is not None
    probe = take_probe(state, setup, rows, lr)
    assert [layer.layer for layer in probe.layers] == list(range(fp64.model.num_layers))
    for layer, (x, out) in zip(probe.layers, watched(state.model, rows), strict=True):
        attention = state.model.get_submodule(f"blocks.{layer.layer}.attention")
        assert isinstance(attention, GroupedAttention)
        largest, shares = -math.inf, []
        context = state.model._context(x, rows.positions_BT, rows.documents_BT)  # type: ignore[operator]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def kernel(q, k, v, mask, kept=kept):  # type: ignore[no-untyped-def]
            kept.append((q, k))
            return q

        with torch.no_grad():
            attention(x, replace(context, attend=kernel))
        [(q, k)] = kept
        for row in range(x.shape[0]):
            documents = rows.documents_BT[row].tolist()
            for head in range(q.shape[2]):
                scores = q[row, :, head] @ k[row, :, head // (q.shape[2] // k.shape[2])].T / math.sqrt(q.shape[3])
                for t, document in enumerate(documents):
                    keys = [s for s in range(t + 1) if documents[s] == document]
                    if document < 0:
                        continue
                    visible = scores[t, keys]
                    largest = max(largest, float(visible.max()))
                    if len(keys) >= 16:
                        p = torch.softmax(visible, 0)
                        shares.append(float(-(p * p.log()).sum()) / math.log(len(keys)))
        assert layer.attention_logit_max == pytest.approx(largest, rel=1e-12)
        assert layer.attention_entropy == pytest.approx(sum(shares) / len(shares), rel=1e-12)
        assert 0 < layer.attention_entropy < 1
        real = out[rows.documents_BT >= 0]
        assert layer.activation_rms == pytest.approx(float(real.square().mean().sqrt()), rel=1e-12)
        assert layer.activation_max == float(real.abs().max())


@pytest.mark.parametrize("masked", [True, False])
def test_uniform_attention_has_entropy_one_and_attention_to_one_key_zero(masked: bool) -> None:
    documents = torch.zeros(1, 200, dtype=torch.int32) if masked else None
    q, k = torch.zeros(1, 200, 2, 4), torch.ones(1, 200, 1, 4)
    top, shares, queries = attention_figures(q, k, documents).tolist()
    assert (top, shares / queries) == (0.0, pytest.approx(1.0, rel=1e-6))
    k[:, 1:] = -1
    top, shares, queries = attention_figures(q + 100, k, documents).tolist()
    assert (top, shares / queries) == (200.0, pytest.approx(0.0, abs=1e-6))


def test_blanked_tokens_have_no_say_and_without_any_other_nothing_is_measured() -> None:
    q, k = torch.randn(1, 100, 1, 8, dtype=torch.float64), torch.randn(1, 100, 1, 8, dtype=torch.float64)
    documents = torch.zeros(1, 100, dtype=torch.int32)
    documents[:, 60:] = -1
    short = attention_figures(q[:, :60], k[:, :60], documents[:, :60])
    torch.testing.assert_close(attention_figures(q, k, documents), short, rtol=FP64_KERNEL, atol=0)
    assert attention_figures(q, k, torch.full_like(documents, -1)).tolist() == [-math.inf, 0.0, 0.0]


def test_custom_attention_has_activations_and_no_logits(fp64: RunConfig, vary: Callable[..., RunConfig]) -> None:
    custom = vary(fp64, **{"model.attention": Custom(build="model.out_of_tree:build", kwargs={"width": 8})})
    setup, state, data, lr = after_steps(custom, ALONE)
    for layer in take_probe(state, setup, probe_rows(data, setup), lr).layers:
        assert math.isnan(layer.attention_logit_max)
        assert math.isnan(layer.attention_entropy)
        assert layer.activation_rms > 0


# Layouts and traces


def probed(rank: int, world: int, config: RunConfig) -> tuple[ProbeSignals, float, float]:
    """A probe after three steps, the loss of the step after it, and the held-out loss."""
    here = join_world(config.parallel)
    setup, state, data, lr = after_steps(config, here)
    probe = take_probe(state, setup, probe_rows(data, setup), lr)
    after = train_step(state, data.loader.batch(3, (), rank, world), setup).signals.loss
    return probe, after, evaluate(setup, data.held_out[0], 4).loss


def flat(probe: ProbeSignals) -> list[float]:
    return [
        float(value)
        for part in (*probe.roles, *probe.layers)
        for value in asdict(part).values()
        if not isinstance(value, str)
    ]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_give_every_figure_of_one(fp64: RunConfig, vary: Callable[..., RunConfig], layout: str) -> None:
    [alone] = run_ranks(1, probed, fp64)
    first, second = run_ranks(2, probed, vary(fp64, **{"parallel.data_parallel": layout}))
    assert flat(first[0]) == pytest.approx(flat(second[0]), rel=0, abs=0, nan_ok=True)
    assert flat(first[0]) == pytest.approx(flat(alone[0]), rel=FP64_RANKS, nan_ok=True)
    assert first[1:] == pytest.approx(alone[1:], rel=FP64_RANKS)


def trace(rank: int, world: int, config: RunConfig) -> tuple[object, object]:
    """Everything a probe might disturb, before and after it."""
    here = join_world(config.parallel)
    setup, state, data, lr = after_steps(config, here)

    def now() -> object:
        grads = {n: p.grad for n, p in state.parameters.items() if p.grad is not None}
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in state.model.modules()]
        draws = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        flags = [(p.requires_grad, type(p).__name__) for p in state.model.parameters()]
        counts = [float(rule.step_count()) for rule in state.optimizer.rules]
        return digest_tensors(state.tensors() | grads), hooks, draws, flags, counts, state.counters()

    before = now()
    take_probe(state, setup, probe_rows(data, setup), lr)
    return before, now()


@pytest.mark.parametrize(("ranks", "layout"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_probe_leaves_no_trace(config: RunConfig, vary: Callable[..., RunConfig], ranks: int, layout: str) -> None:
    for before, after in run_ranks(ranks, trace, vary(config, **{"parallel.data_parallel": layout})):
        assert after == before


@pytest.mark.filterwarnings("ignore")
def test_a_probe_looks_into_compiled_blocks_and_compiles_nothing_for_it(
    config: RunConfig, vary: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks make a block another one to the compiler, at every probe anew. Graphs are only captured here: generating code takes long."""
    compile_module = torch.nn.Module.compile
    captured: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        captured.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=backend))
    config = vary(config, **{"model.num_layers": 1})
    figures = []
    for compile in ("off", "on"):
        setup, state, data, lr = after_steps(vary(config, **{"parallel.compile": compile}), ALONE, steps=0)
        rows = probe_rows(data, setup)
        with torch.no_grad():
            state.model(*rows)
        before = len(captured)
        figures.append([asdict(layer) for layer in take_probe(state, setup, rows, lr).layers])
        with torch.no_grad():
            state.model(*rows)
        assert len(captured) == before
        assert (before > 0) == (compile == "on")
    assert figures[1] == [pytest.approx(layer, rel=1e-5) for layer in figures[0]]


def test_the_rows_are_real_ones_of_all_domains(fp64: RunConfig, vary: Callable[..., RunConfig]) -> None:
    data = TrainingData.open(fp64, prepare(fp64.data))
    for count in (1, 2, 3, 5):
        setup, _ = set_up(vary(fp64, **{"guard.probe_rows": count}), ALONE)
        rows, again = probe_rows(data, setup), probe_rows(data, setup)
        assert len(rows.tokens_BT) == count
        assert torch.equal(rows.tokens_BT, again.tokens_BT)
        assert rows.documents_BT is not None
        assert (rows.documents_BT >= 0).all()
        calm, busy = (data.held_out[at].rows(0, 10**6).batch.tokens_BT.tolist() for at in (0, 1))
        assert sum(row in calm for row in rows.tokens_BT.tolist()) == (count + 1) // 2
        assert sum(row in busy for row in rows.tokens_BT.tolist()) == count // 2


def test_metrics_hold_what_was_measured(fp64: RunConfig) -> None:
    setup, state, data, lr = after_steps(fp64, ALONE)
    probe = take_probe(state, setup, probe_rows(data, setup), lr)
    metrics = probe_metrics(probe)
    assert (
        metrics["inside/hidden/update_ratio"]
        == role_of(probe, "hidden")["update_norm"] / role_of(probe, "hidden")["weight_norm"]
    )
    assert metrics["inside/layer_1/attention_entropy"] == probe.layers[1].attention_entropy
    assert "inside/embedding/rms_t" not in metrics
    assert len(metrics) == 6 * 3 - 1 + 4 * 2
