"""Published laws against hand computation and against runs that were published with them; own sweeps; what lies outside is said."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from surefoot.cli.main import main
from surefoot.config.codec import to_toml
from surefoot.config.run import RunConfig
from surefoot.scale.advise import Advice, Run, advise, critical_batch, parse_count, short, timescale_decay
from tolerances import LAW_BY_HAND, LAW_ROUNDED


def of(law: str, num_params: float, num_tokens: float, loss: float | None = None) -> Advice:
    return next(one for one in advise(Run(num_params, num_tokens), loss=loss) if one.law == law)


def test_step_law_by_hand() -> None:
    # 10^(log10(1.79) - 0.713 x 9 + 0.307 x 11), 10^(log10(0.58) + 0.571 x 11)
    found = of("Step Law", 1e9, 1e11)
    assert found.lr == pytest.approx(10 ** (0.2528530 - 6.417 + 3.377), rel=LAW_BY_HAND)
    assert found.batch_tokens == pytest.approx(10 ** (-0.2365720 + 6.281), rel=LAW_BY_HAND)
    assert found.outside == ()


@pytest.mark.parametrize(
    ("num_params", "lr", "rows"), [(7e9, 4.2e-4, 2304), (67e9, 3.2e-4, 4608)], ids=["DeepSeek 7B", "DeepSeek 67B"]
)
def test_deepseeks_law_gives_the_rate_and_batch_of_deepseeks_own_models(
    num_params: float, lr: float, rows: int
) -> None:
    found = of("DeepSeek LLM", num_params, 2e12)
    assert found.lr == pytest.approx(lr, rel=LAW_ROUNDED)
    assert found.batch_tokens == pytest.approx(rows * 4096, rel=LAW_ROUNDED)
    assert found.outside == ()


def test_porians_law_gives_the_figures_that_olmo_core_quotes_of_it() -> None:
    found = of("Porian et al.", 108e6, 20 * 108e6)
    assert found.lr == pytest.approx(0.0047, rel=LAW_ROUNDED)
    assert found.batch_tokens == pytest.approx(160 * 2048, rel=LAW_ROUNDED)
    assert found.warmup_tokens == 108e6
    assert found.outside == ()
    assert of("Porian et al.", 1e8, 2e9).lr == pytest.approx(3.7 * 10**-2.88, rel=LAW_BY_HAND)


def test_the_olmo_core_ladder_at_its_reference_and_eight_times_larger() -> None:
    small, large = of("OLMo-core ladder", 108e6, 2.16e9), of("OLMo-core ladder", 864e6, 17.28e9)
    assert (small.lr, small.batch_tokens, small.beta2) == (0.0047 / 2, 327_680, 0.99)
    assert large.lr == pytest.approx(0.0047 / 4)
    assert large.batch_tokens == pytest.approx(4 * 327_680)
    assert (large.beta2, large.weight_decay, large.warmup_tokens) == (0.95, 0.1, 864e6)


def test_power_lines_batches_by_hand() -> None:
    assert of("Power Lines: optimal batch", 1e9, 1e10).batch_tokens == pytest.approx(
        2048 * 0.0306 * 10**3.83, rel=LAW_BY_HAND
    )
    assert of("Power Lines: critical batch", 1e9, 1e10).batch_tokens == pytest.approx(
        2048 * 0.0471 * 10**4.62, rel=LAW_BY_HAND
    )


def test_the_timescale_decay_by_hand_and_in_proportion_to_the_batch() -> None:
    run = Run(1e9, 20e9)
    # 1e6 / (1e-3 x 2e10 x tau), tau = 1.084 x 10^(-0.527 x log10(20))
    assert timescale_decay(run, 1e-3, 1e6) == pytest.approx(
        0.05 / (1.084 * 10 ** (-0.527 * 1.3010300)), rel=LAW_BY_HAND
    )
    assert timescale_decay(run, 1e-3, 2e6) == pytest.approx(2 * timescale_decay(run, 1e-3, 1e6))
    assert timescale_decay(run, 2e-3, 1e6) == pytest.approx(timescale_decay(run, 1e-3, 1e6) / 2)
    found = of("Step Law", 1e9, 20e9)
    assert found.lr is not None
    assert found.batch_tokens is not None
    assert found.weight_decay == timescale_decay(run, found.lr, found.batch_tokens)
    assert found.decay_source == "arXiv:2505.13738"


def test_kaplans_critical_batch_by_hand_and_only_with_a_loss() -> None:
    assert critical_batch(2.5) == pytest.approx(2.1e8 / math.exp(math.log(2.5) / 0.21), rel=LAW_BY_HAND)
    assert critical_batch(1.0) == 2.1e8
    assert not [one for one in advise(Run(1e9, 2e10)) if "Kaplan" in one.law]
    assert of("Kaplan et al.: critical batch", 1e9, 2e10, loss=2.5).outside == ()
    assert of("Kaplan et al.: critical batch", 1e9, 2e10, loss=1.2).outside == (
        "loss 1.2 nats per token, fitted from 2.4 to 7",
    )


@pytest.mark.parametrize(
    ("law", "num_params", "num_tokens", "text"),
    [
        ("Step Law", 2e6, 1e10, "parameters 2M, fitted from 215M to 1.07B"),
        ("Step Law", 1e9, 1e12, "tokens 1T, fitted from 4B to 100B"),
        ("DeepSeek LLM", 1e6, 1e6, "compute 6T FLOP, fitted from 1.00e17 to 8.00e23"),
        ("Porian et al.", 1e8, 1e10, "tokens per parameter 100, fitted from 10 to 40"),
        ("OLMo-core ladder", 1e7, 1e9, "parameters 10M, fitted from 60M to 13B"),
        ("Power Lines: optimal batch", 7e9, 1e10, "parameters 7B, fitted from 111M to 3.3B"),
    ],
)
def test_a_run_beyond_what_was_fitted_is_told_so(law: str, num_params: float, num_tokens: float, text: str) -> None:
    assert text in of(law, num_params, num_tokens).outside


@pytest.mark.parametrize(
    ("text", "value"),
    [("125M", 125e6), ("2.5b", 2.5e9), ("1e9", 1e9), ("300_000", 3e5), ("4K", 4e3), (" 1.5T ", 1.5e12)],
)
def test_counts_are_read_as_people_write_them(text: str, value: float) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(("value", "text"), [(999, "999"), (327_680, "328K"), (1.31e6, "1.31M"), (1.29e20, "1.29e20")])
def test_counts_are_written_short(value: float, text: str) -> None:
    assert short(value) == text


def test_the_table_prints_the_laws_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--params", "108M", "--tokens", "2.16B"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("OLMo-core ladder "))
    assert line.split()[2:] == ["2.35e-03", "328K", "6,592", "330", "0.1", "0.99", "inside"]
    assert "Step Law (arXiv:2503.04715): OUTSIDE: parameters 108M, fitted from 215M to 1.07B" in out
    assert main(["advise", "--params", "108M", "--tokens", "2.16B", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ladder = next(law for law in facts["laws"] if law["law"] == "OLMo-core ladder")
    assert (ladder["lr"], ladder["batch_tokens"], ladder["inside"]) == (0.00235, 327_680, True)
    assert facts["own"] == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--params", "12X", "--tokens", "1B"], "--params 12X: not a count above 0; write it as 125M, 2.5B or 1e9"),
        (["--params", "1M", "--tokens", "-3"], "--tokens -3: not a count above 0"),
        (["--params", "1M", "--tokens", "1B", "--loss", "0"], "--loss 0: nats per token, above 0"),
        (["--params", "1M", "--tokens", "1B", "--sweep", "/nowhere"], "holds neither sweep.json nor transfer.json"),
    ],
)
def test_a_wrong_question_is_answered(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *words]) == 2
    assert text in capsys.readouterr().err


def a_sweep(folder: Path, config: RunConfig, losses: dict[float, float]) -> None:
    """A sweep's folder as ``surefoot sweep`` leaves it: what advise reads of it."""
    settings = []
    for lr, loss in losses.items():
        name = f"lr={lr}"
        (folder / name).mkdir(parents=True)
        (folder / name / "ledger.jsonl").write_text("")
        mine = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=lr))
        (folder / name / "config.toml").write_text(to_toml(mine))
        run = {"seed": 0, "name": name, "ending": "done", "num_params": 20_000, "steps": 100, "loss": loss}
        settings.append({"values": {"optim.lr": lr}, "loss": loss, "runs": [run]})
    settings.append(
        {"values": {"optim.lr": 1.0}, "loss": None, "runs": [{"seed": 0, "name": "x", "ending": "diverged"}]}
    )
    (folder / "sweep.json").write_text(json.dumps({"settings": settings}))


def test_the_users_own_sweep_gives_the_best_rate_of_its_size(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(tmp_path / "s", config, {0.001: 2.2, 0.002: 2.0, 0.004: 2.1})
    words = ["advise", "--params", "20K", "--tokens", "25.6K", "--sweep", str(tmp_path / "s")]
    assert main([*words, "--json"]) == 0
    [own] = json.loads(capsys.readouterr().out)["own"]
    assert (own["lr"], own["low"], own["high"], own["loss"], own["how"]) == (0.002, 0.001, 0.004, 2.0, "best run")
    # 100 steps of 4 rows of 64
    assert (own["num_tokens"], own["batch_tokens"], own["same_size"], own["same_length"]) == (25_600, 256, True, True)
    assert main(words) == 0
    assert "lr 2.00e-03 (1.00e-03 to 4.00e-03), loss 2.0000; best run; this size and length" in capsys.readouterr().out
    other = ["advise", "--params", "1B", "--tokens", "20B", "--sweep", str(tmp_path / "s")]
    assert main(other) == 0
    assert "another size: holds here only under a parametrization that transfers" in capsys.readouterr().out


def test_a_best_rate_at_the_edge_is_said_to_be_there(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(tmp_path / "s", config, {0.001: 2.0, 0.002: 2.1})
    assert main(["advise", "--params", "20K", "--tokens", "1M", "--sweep", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert "best run, at the edge of what was tried" in out
    assert "this size, but 25.6K tokens" in out


def test_a_transfer_sweep_gives_its_fitted_optima(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimum = {"lr": 0.004, "low": 0.0035, "high": 0.0045, "loss": 1.9, "edge": "none", "num_seeds": 3}
    facts = {
        "sizes": [{"parametrization": "mup", "axis": "width", "size": 64, "num_params": 1000, "optimum": optimum}],
        "runs": [{"num_params": 1000, "num_tokens": 5000, "batch_tokens": 50}],
    }
    (tmp_path / "transfer.json").write_text(json.dumps(facts))
    assert main(["advise", "--params", "1K", "--tokens", "5K", "--sweep", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "lr 4.00e-03 (3.50e-03 to 4.50e-03), loss 1.9000; fitted optimum under mup; this size and length" in out
