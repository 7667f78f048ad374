"""The line of every key, in every way TOML can write one."""

import random
import tomllib
from typing import Any

from surefoot.config.toml_lines import key_lines
from surefoot.config.toml_write import toml_text

ALL_FORMS = """\
# heading
plain = 1 # [not.a.table]
dotted.key.deep = "a # no comment"
"quoted key".'x.y' = 'lit \\'

[table]  # trailing
a = [1, 2,
  3, # three
  { in_array = true },
]
b = \"\"\"
not = "a key"
[nor.a.table]
\\\"\"\" still inside \"\"\"\"
c = '''
neither = 1'''
d = { x = 1, y = { z = "}" } }
[table.sub."dotted.name"]
date = 1979-05-27 07:32:00
e.f = -1e-3
[[items]]
name = "first"
[[items.inner]]
v = 1
[[items.inner]]
v = 2
[[items]]
name = "second"
[items.only]
w = 1
[[items.inner]]
v = 3
"""


def test_every_form_of_key_is_found_at_its_line() -> None:
    assert key_lines(ALL_FORMS) == {
        ("plain",): 2,
        ("dotted",): 3,
        ("dotted", "key"): 3,
        ("dotted", "key", "deep"): 3,
        ("quoted key",): 4,
        ("quoted key", "x.y"): 4,
        ("table",): 6,
        ("table", "a"): 7,
        ("table", "a", "0"): 7,
        ("table", "a", "1"): 7,
        ("table", "a", "2"): 8,
        ("table", "a", "3"): 9,
        ("table", "a", "3", "in_array"): 9,
        ("table", "b"): 11,
        ("table", "c"): 15,
        ("table", "d"): 17,
        ("table", "d", "x"): 17,
        ("table", "d", "y"): 17,
        ("table", "d", "y", "z"): 17,
        ("table", "sub"): 18,
        ("table", "sub", "dotted.name"): 18,
        ("table", "sub", "dotted.name", "date"): 19,
        ("table", "sub", "dotted.name", "e"): 20,
        ("table", "sub", "dotted.name", "e", "f"): 20,
        ("items",): 21,
        ("items", "0"): 21,
        ("items", "0", "name"): 22,
        ("items", "0", "inner"): 23,
        ("items", "0", "inner", "0"): 23,
        ("items", "0", "inner", "0", "v"): 24,
        ("items", "0", "inner", "1"): 25,
        ("items", "0", "inner", "1", "v"): 26,
        ("items", "1"): 27,
        ("items", "1", "name"): 28,
        ("items", "1", "only"): 29,
        ("items", "1", "only", "w"): 30,
        ("items", "1", "inner"): 31,
        ("items", "1", "inner", "0"): 31,
        ("items", "1", "inner", "0", "v"): 32,
    }


def paths(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {path} if path else set()
    for key, item in pairs:
        found |= paths(item, (*path, str(key)))
    return found


def random_table(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = ("a", "b c", "d.e", "f", 'g"h', "ü")
    return {key: random_item(draw, depth + 1) for key in draw.sample(keys, draw.randrange(1, 4))}


def random_item(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(4 if depth < 4 else 2)
    if kind == 0:
        return draw.choice([1, -2.5, True, "x # [y] = {z}", 'q"[', "it's"])
    if kind == 1:
        return ["}", "]", 3][: draw.randrange(4)]
    if kind == 2:
        return random_table(draw, depth)
    return [random_table(draw, depth) for _ in range(draw.randrange(1, 3))]


def test_the_keys_found_are_exactly_those_of_the_parser() -> None:
    for seed in range(200):
        text = toml_text(random_table(random.Random(seed)))
        assert set(key_lines(text)) == paths(tomllib.loads(text)), text


def test_lines_of_keys_grow_with_blank_lines_above() -> None:
    text = toml_text(random_table(random.Random(3)))
    assert {path: line + 2 for path, line in key_lines(text).items()} == key_lines("\n# more\n" + text)
