"""Help: what is used most first, everything on demand."""

import shutil

import pytest

from surefoot.cli.train_help import COMMON, help_for
from surefoot.config.run import RunConfig
from surefoot.config.schema import every_setting, kind_of, settings, variants
from surefoot.config.texts import field_text
from surefoot.recipes.index import RECIPES


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def help_of(*argv: str) -> str:
    text = help_for(argv)
    assert text is not None
    return text


def test_no_help_is_given_unasked() -> None:
    assert help_for(["tiny", "--optim.lr", "3"]) is None


def test_the_short_help_begins_with_the_commands_own_flags_and_the_settings_used_most() -> None:
    text = help_of("--help")
    wanted = [
        "recipes: tiny",
        "--fresh",
        "--dry-run",
        "--json",
        "--run DIR",
        "--config FILE",
        "--allow-change KEY",
        "--help-all",
    ]
    wanted += [f"  --{key}  (" for key in COMMON]
    positions = [text.index(word) for word in wanted]
    assert positions == sorted(positions)
    assert "--data.cache_dir" not in text


def test_the_default_shown_is_the_recipes_when_one_is_named() -> None:
    assert "--optim.warmup_steps  (a whole number; default 100)" in help_of("-h")
    warmup, steps = RECIPES["tiny"]().optim.warmup_steps, RECIPES["tiny"]().steps
    assert warmup != 100
    assert f"--optim.warmup_steps  (a whole number; default {warmup})" in help_of("tiny", "-h")
    assert "--steps  (a whole number; required)" in help_of("-h")
    assert f"--steps  (a whole number; default {steps})" in help_of("tiny", "-h")
    assert (
        "--optim.schedule.kind  (one of constant, cosine, linear, one_minus_sqrt, inverse_sqrt, power, wsd; default wsd)"
        in help_of("tiny", "-h")
    )
    assert "--data.sources.0.name  (a text; default code)" in help_of("tiny", "--help-all")


def test_the_long_help_has_every_setting_of_every_variant() -> None:
    for text in (help_of("--help-all"), help_of("tiny", "--help-all")):
        for key, setting in every_setting(RunConfig):
            if not variants(setting.annotation) and not key.endswith("kind") and key != "recipe":
                assert f"  --{key}  (" in text, key
        assert text.count("--optim.schedule.min_ratio  (") == 4


def test_the_long_help_shows_the_recipes_variant_first() -> None:
    text = help_of("tiny", "--help-all")
    kinds = [f"--data.tokenizer.kind {kind}" for kind in ("bpe, the one of this recipe:", "bytes:", "file:")]
    positions = [text.index(kind) for kind in kinds]
    assert positions == sorted(positions)


def test_help_explains_each_setting_with_the_text_under_its_field() -> None:
    assert "--optim.lr  (a number; default 0.003)\n      Peak learning rate.\n" in help_of("tiny", "--help-all")
    assert "``" not in help_of("--help-all")


def test_no_line_of_help_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert shutil.get_terminal_size().columns == 80
    texts = [line for line in help_of("tiny", "--help-all").splitlines() if not line.lstrip().startswith("--")]
    assert max(map(len, texts)) <= 80


def test_the_text_of_a_field_is_the_string_under_it_and_else_what_its_table_is() -> None:
    run = settings(RunConfig)
    assert (
        field_text(RunConfig, run["steps"]) == "Applied updates at which the run ends, unless ``bound`` says otherwise."
    )
    assert field_text(RunConfig, run["guard"]).startswith("The ladder: note")
    model = variants(run["model"].annotation)[0]
    custom = next(table for table in variants(settings(model)["norm"].annotation) if kind_of(table) == "custom")
    assert field_text(custom, settings(custom)["kwargs"]) == "Keyword arguments for the builder; TOML values only."
    assert field_text(model, settings(model)["norm"]).startswith("Before each part")
