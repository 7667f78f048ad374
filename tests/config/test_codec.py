"""Round trips, strictness and the texts of mistakes."""

import random
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from sample_config import tiny
from surefoot.config.codec import from_dict, from_toml, resolve, to_dict, to_toml
from surefoot.config.data import DataConfig
from surefoot.config.diff import diff
from surefoot.config.errors import ConfigError
from surefoot.config.model import Custom, ModelConfig
from surefoot.config.optim import WSD, AdamW, Cosine, OptimConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from surefoot.config.schema import element, settings, variants

TEXTS = (
    "",
    "plain",
    'quo"te',
    "back\\slash",
    "new\nline",
    "tab\t",
    "ümlaut 漢字 🙂",
    "#no comment",
    "\x7f\x01",
    "a = [b]",
)
KEYS = ("window", "two words", "dotted.key", "ümlaut", 'quo"te', "")


def random_value(annotation: Any, draw: random.Random, depth: int = 0) -> Any:
    """Any value the type admits, legal for the codec and not necessarily sensible."""
    if variants(annotation):
        table = draw.choice(variants(annotation))
        return table(**{name: random_value(s.annotation, draw) for name, s in settings(table).items()})
    if get_origin(annotation) is Literal:
        return draw.choice(get_args(annotation))
    if get_origin(annotation) is tuple:
        return tuple(random_value(element(annotation), draw) for _ in range(draw.randrange(4)))
    if get_origin(annotation) is dict:
        return {key: random_free(draw, depth + 1) for key in draw.sample(KEYS, draw.randrange(4))}
    if annotation is float:
        return draw.choice([draw.uniform(-1, 1) * 10.0 ** draw.randrange(-300, 300), 0.0, 1e16, 1e-8, 5e-324, 3.0])
    return {
        bool: lambda: draw.random() < 0.5,
        int: lambda: draw.randrange(-(2**63), 2**63),
        str: lambda: draw.choice(TEXTS),
    }[annotation]()


def random_free(draw: random.Random, depth: int) -> Any:
    if depth < 4 and draw.random() < 0.5:
        if draw.random() < 0.5:
            return [random_free(draw, depth + 1) for _ in range(draw.randrange(3))]
        return random_value(dict[str, Any], draw, depth)
    return random_value(draw.choice([bool, int, float, str]), draw)


def problems_of(*flags: str, files: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny(), files, flags)
    return list(caught.value.problems)


@pytest.mark.parametrize("table", [ModelConfig, DataConfig, OptimConfig, CheckpointConfig, EvalConfig, LogConfig])
def test_a_random_config_survives_toml_and_plain_values(table: type, tmp_path: Path) -> None:
    for seed in range(60):
        config = random_value(table, random.Random(seed))
        assert from_dict(table, to_dict(config)) == config
        file = tmp_path / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        assert from_toml(table, file) == config, seed
        assert to_toml(from_toml(table, file)) == to_toml(config)


def test_a_recipe_survives_toml_and_resolving_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(tiny()))
    assert from_toml(RunConfig, file) == tiny()
    assert resolve(tiny(), [], []) == tiny()
    assert resolve(tiny(), [file], []) == tiny()


def test_files_apply_from_left_to_right_and_flags_last(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("steps = 700\nseed = 5\n[optim]\nlr = 1e-3\nwarmup_steps = 7\n")
    second.write_text("steps = 800\noptim.lr = 2e-3\n")
    config = resolve(tiny(), [first, second], ["--steps", "900"])
    assert (config.steps, config.seed, config.optim.lr, config.optim.warmup_steps) == (900, 5, 2e-3, 7)


def test_a_whole_number_is_accepted_for_a_number_and_nothing_else_is_coerced() -> None:
    assert from_dict(OptimConfig, {"lr": 1}).lr == 1.0
    assert isinstance(from_dict(OptimConfig, {"lr": 1}).lr, float)
    for key, value, name in [
        ("warmup_steps", True, "a whole number"),
        ("warmup_steps", 1.0, "a whole number"),
        ("warmup_steps", "1", "a whole number"),
        ("lr", "1e-3", "a number"),
        ("lr", False, "a number"),
        ("gated", 1, "true or false"),
        ("gated", "true", "true or false"),
    ]:
        with pytest.raises(ConfigError, match=f"^{key} = .* is not {name}$"):
            from_dict(OptimConfig, {key: value})
    with pytest.raises(ConfigError, match="lr = nan is not finite"):
        from_dict(OptimConfig, {"lr": float("nan")})


def test_an_unknown_key_is_answered_with_the_nearest_its_type_and_default() -> None:
    assert problems_of("--optim.lrr", "1") == [
        "--optim.lrr: optim.lrr is not a setting; nearest: optim.lr (a number, default 0.003)"
    ]
    assert problems_of("--lr", "1") == ["--lr: lr is not a setting; nearest: optim.lr (a number, default 0.003)"]
    assert problems_of("--model.atention.num_heads", "1") == [
        "--model.atention.num_heads: model.atention is not a setting; "
        "nearest: model.attention (a table of kind gqa | custom, required)"
    ]
    assert problems_of("--eval.qqqq", "1") == [
        "--eval.qqqq: eval.qqqq is not a setting; here are: every, rows, final_rows, batch_size"
    ]


def test_a_setting_of_another_variant_is_called_that() -> None:
    assert problems_of("--optim.schedule.kind", "cosine", "--optim.schedule.decay_fraction", "0.1") == [
        "--optim.schedule.decay_fraction: optim.schedule.decay_fraction belongs to kind 'wsd'; here the kind is 'cosine'"
    ]


def test_a_bad_choice_is_answered_with_the_choices_and_the_nearest() -> None:
    assert problems_of("--parallel.precision", "bf61") == [
        "--parallel.precision: parallel.precision = 'bf61' is not one of auto, fp32, bf16, bf16_pure, fp16, fp8, fp64; nearest: 'bf16'"
    ]
    assert problems_of("--optim.schedule.kind", "cosin") == [
        "--optim.schedule.kind: optim.schedule.kind = 'cosin' is not one of constant, cosine, linear, one_minus_sqrt, inverse_sqrt, power, wsd; nearest: 'cosine'"
    ]


def test_a_union_without_kind_and_a_missing_setting_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(ModelConfig, {"vocab_size": 300, "attention": {"num_heads": 2}, "feed_forward": {"kind": "swiglu"}})
    assert caught.value.problems == (
        "d_model is missing: a whole number",
        "num_layers is missing: a whole number",
        "attention.kind is missing: one of gqa, custom",
        "feed_forward.d_ff is missing: a whole number",
    )


def test_switching_the_kind_of_a_union_keeps_only_what_is_given() -> None:
    config = resolve(tiny(), [], ["--optim.schedule.min_ratio=0.3", "--optim.schedule.kind", "cosine"])
    assert config.optim.schedule == Cosine(min_ratio=0.3)
    assert resolve(tiny(), [], ["--optim.schedule.kind", "cosine"]).optim.schedule == Cosine()
    assert resolve(tiny(), [], ["--optim.schedule.min_ratio", "0.3"]).optim.schedule == WSD(min_ratio=0.3)
    assert problems_of("--model.attention.kind", "custom") == [
        "--model.attention.kind: model.attention.build is missing: a text"
    ]


def test_a_file_may_switch_a_kind_and_flags_refine_it(tmp_path: Path) -> None:
    file = tmp_path / "custom.toml"
    file.write_text('[model.attention]\nkind = "custom"\nbuild = "a.b:c"\nkwargs = { window = 4, kind = "x" }\n')
    config = resolve(tiny(), [file], ["--model.attention.kwargs.window", "8", "--model.attention.kwargs.kind", "local"])
    assert config.model.attention == Custom(build="a.b:c", kwargs={"window": 8, "kind": "local"})


def test_flags_are_read_by_the_type_of_their_setting() -> None:
    config = resolve(
        tiny(),
        [],
        [
            *("--optim.lr", "3e-4", "--optim.gated=false", "--steps", "1_000", "--data.cache_dir", "5"),
            *("--optim.optimizer.weight_decay", "0", "--log.trackers", "wandb, tensorboard"),
            *("--data.sources.0.weight", "3", "--data.batch_stages", '[{"start_batch": 5, "batch_size": 64}]'),
            *("--data.mixture_stages", "[{start_row = 5000, weights = [1, 2.5]}]"),
            *("--optim.optimizer", '{"kind": "adamw", "beta1": 0.8}'),
        ],
    )
    assert (config.optim.lr, config.optim.gated, config.steps, config.data.cache_dir) == (3e-4, False, 1000, "5")
    assert config.optim.optimizer == AdamW(beta1=0.8, weight_decay=0.0)
    assert config.log.trackers == ("wandb", "tensorboard")
    assert [source.weight for source in config.data.sources] == [3.0, 1.0]
    assert config.data.batch_stages[0].batch_size == 64
    assert config.data.mixture_stages[0].weights == (1.0, 2.5)
    assert resolve(tiny(), [], ["--log.trackers="]).log.trackers == ()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--steps", "1e4"), "--steps: steps: '1e4' is not a whole number; write 10000"),
        (("--steps", "ten"), "--steps: steps: 'ten' is not a whole number"),
        (("--optim.lr", "fast"), "--optim.lr: optim.lr: 'fast' is not a number"),
        (("--optim.gated", "yes"), "--optim.gated: optim.gated: 'yes' is not true or false"),
        (("--optim.lr",), "command line: --optim.lr needs a value: --optim.lr VALUE"),
        (("--optim.lr", "--steps", "9000"), "command line: --optim.lr needs a value: --optim.lr VALUE"),
        (("500",), "command line: '500' is not a flag; settings are given as --key value"),
        (("--optim..lr", "1"), "command line: --optim..lr is not a setting: a part of the dotted key is empty"),
        (
            ("--data.sources.2.weight", "1"),
            "--data.sources.2.weight: data.sources.2: data.sources has items 0 to 1; give the whole list to add one",
        ),
        (
            ("--data.sources.code.weight", "1"),
            "--data.sources.code.weight: data.sources.code: data.sources is a list, each item a table; "
            "name an item by its number, from 0",
        ),
        (
            ("--optim.schedule", "cosine"),
            "--optim.schedule: optim.schedule: 'cosine' is not a table of kind constant | cosine | linear | one_minus_sqrt | inverse_sqrt | power | wsd: "
            "give its kind as .kind cosine",
        ),
        (("--log.trackers", "[wandb"), "--log.trackers: log.trackers: '[wandb' is neither a JSON nor a TOML list"),
        (
            ("--log.trackers", "wandb,tensorbord"),
            "--log.trackers: log.trackers.1 = 'tensorbord' is not one of wandb, tensorboard; nearest: 'tensorboard'",
        ),
    ],
)
def test_a_mistaken_flag_is_told(flags: tuple[str, ...], problem: str) -> None:
    assert problems_of(*flags) == [problem]


def test_every_mistake_is_told_at_once_with_its_file_and_line_or_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "# a comment\n"
        "steps = '5'\n"
        "[optim]\n"
        "lrr = 1\n"
        "schedule = { kind = 'cosine', decay_fraction = 0.2 }\n"
        "[[data.sources]]\n"
        "name = 'a'\n"
        "documents = { kind = 'text', glob = 'x' }\n"
        "[[data.sources]]\n"
        "name = 'b'\n"
        "[data.sources.documents]\n"
        "kind = 'text'\n"
        "glub = 'x'\n"
        "[model]\n"
        "attention.d_head = 33\n"
    )
    assert problems_of("--seed", "x", "--data.sources.1.weight", "true", files=(file,)) == [
        f"{file}:2: steps = '5' is not a whole number",
        "--seed: seed: 'x' is not a whole number",
        f"{file}:13: data.sources.1.documents.glub is not a setting; nearest: data.sources.1.documents.glob (a text, required)",
        f"{file}:11: data.sources.1.documents.glob is missing: a text",
        "--data.sources.1.weight: data.sources.1.weight: 'true' is not a number",
        f"{file}:4: optim.lrr is not a setting; nearest: optim.lr (a number, default 0.003)",
        f"{file}:5: optim.schedule.decay_fraction belongs to kind 'wsd'; here the kind is 'cosine'",
        f"{file}:15: model.attention.d_head=33 must be even, for RoPE; nearest: 32, 34",
    ]


def test_a_later_file_takes_the_blame_for_what_it_overrides(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("\n\noptim.lr = 'x'\nseed = 'x'\n")
    second.write_text("optim.lr = 'y'\n")
    assert problems_of(files=(first, second)) == [
        f"{first}:4: seed = 'x' is not a whole number",
        f"{second}:1: optim.lr = 'y' is not a number",
    ]


def test_a_setting_that_a_change_of_kind_dropped_takes_no_blame(tmp_path: Path) -> None:
    for name, text in (("a", "vocab_size = 5000"), ("b", "kind = 'bytes'"), ("c", "kind = 'bpe'")):
        (tmp_path / name).write_text(f"[data.tokenizer]\n{text}\n")
    files = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert problems_of("--model.vocab_size", "300", files=files) == [
        "--model.vocab_size: model.vocab_size=300 has no row for data.tokenizer.vocab_size=4096; at least 4096"
    ]


def test_a_file_that_is_no_toml_is_told_with_its_line(tmp_path: Path) -> None:
    file, missing, binary = tmp_path / "a.toml", tmp_path / "none.toml", tmp_path / "b.toml"
    file.write_text("steps = 5\nseed 3\n")
    binary.write_bytes(b"a = '\xff'")
    found = problems_of("--sed", "3", files=(file, missing, binary))
    assert found[0] == f"{file}:2: is not TOML: Expected '=' after a key in a key/value pair: seed 3"
    assert found[1] == f"{missing}: cannot be read: No such file or directory"
    assert found[2] == f"{binary}: is not UTF-8 text: invalid start byte at byte 5"
    assert found[3] == "--sed: sed is not a setting; nearest: seed (a whole number, default 0)"


def test_a_diff_names_keys_and_both_values() -> None:
    other = resolve(
        tiny(),
        [],
        ["--optim.schedule.kind", "linear", "--data.sources.1.name", "words", "--log.trackers", "wandb", "--seed", "1"],
    )
    assert diff(tiny(), other) == [
        ("seed", "0", "1"),
        ("data.sources.1.name", '"prose"', '"words"'),
        ("optim.schedule.kind", '"wsd"', '"linear"'),
        ("optim.schedule.decay_fraction", "0.2", "(absent)"),
        ("optim.schedule.decay_steps", "0", "(absent)"),
        ("optim.schedule.shape", '"linear"', "(absent)"),
        ("log.trackers", "[]", '["wandb"]'),
    ]
    assert diff(tiny(), tiny()) == []
