"""The line of every key of a TOML text, which the standard library's parser does not tell.

Reads text that ``tomllib`` has already accepted, so it looks only for structure and checks nothing.
"""

import re
import tomllib

from surefoot.config.places import Path

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|'
    r"'''(?:.|\n)*?'{3,5}|"
    r'"(?:[^"\\]|\\.)*"|'
    r"'[^']*'",
    re.DOTALL,
)
_BARE = re.compile(r"[A-Za-z0-9_\-]+")
_SCALAR = re.compile(r"[^,\]}#\n]*")


def key_lines(text: str) -> dict[Path, int]:
    """Line, from 1, of every key of the text: tables, dotted keys and the keys of inline tables; list items by index.

    The parts of a dotted key count as keys at the line where they first appear.
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.last_item: dict[Path, int] = {}

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        self.space()
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self.array_header()
            elif self.text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table)
            self.space()
        return self.lines

    def space(self) -> None:
        """Skips blanks, line ends and comments."""
        self.at = _match(_SPACE, self.text, self.at)

    def header(self) -> Path:
        line = self.line()
        self.at += 1
        path = self.inside_items(self.key())
        self.at = self.text.index("]", self.at) + 1
        self.record(path, line)
        return path

    def array_header(self) -> Path:
        line = self.line()
        self.at += 2
        *outer, name = self.key()
        path = (*self.inside_items(tuple(outer)), name)
        self.at = self.text.index("]]", self.at) + 2
        index = self.last_item.get(path, -1) + 1
        self.last_item[path] = index
        self.record((*path, str(index)), line)
        return (*path, str(index))

    def inside_items(self, path: Path) -> Path:
        """A header's key with the index of the newest item after every array of tables it names."""
        found: Path = ()
        for part in path:
            found = (*found, part)
            if found in self.last_item:
                found = (*found, str(self.last_item[found]))
        return found

    def key(self) -> Path:
        """A dotted key of bare and quoted parts."""
        parts = []
        while True:
            self.space()
            if self.text[self.at] in "\"'":
                start, self.at = self.at, _match(_STRINGS, self.text, self.at)
                parts.append(_unquoted(self.text[start : self.at]))
            else:
                start, self.at = self.at, _match(_BARE, self.text, self.at)
                parts.append(self.text[start : self.at])
            self.space()
            if self.text[self.at] != ".":
                return tuple(parts)
            self.at += 1

    def pair(self, table: Path) -> None:
        line = self.line()
        path = (*table, *self.key())
        self.record(path, line)
        self.at = self.text.index("=", self.at) + 1
        self.value(path)

    def value(self, path: Path) -> None:
        self.space()
        opening = self.text[self.at]
        if opening == "{":
            self.members(path, "}")
        elif opening == "[":
            self.members(path, "]")
        elif opening in "\"'":
            self.at = _match(_STRINGS, self.text, self.at)
        else:
            self.at = _match(_SCALAR, self.text, self.at)

    def members(self, path: Path, closing: str) -> None:
        """The pairs of an inline table or the items of an array."""
        self.at += 1
        index = 0
        self.space()
        while self.text[self.at] != closing:
            if closing == "}":
                self.pair(path)
            else:
                item = (*path, str(index))
                self.record(item, self.line())
                self.value(item)
                index += 1
            self.space()
            if self.text[self.at] == ",":
                self.at += 1
                self.space()
        self.at += 1

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def record(self, path: Path, line: int) -> None:
        for end in range(1, len(path) + 1):
            self.lines.setdefault(path[:end], line)


def _match(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found and found.end() > at else (at if pattern is _SPACE else at + 1)


def _unquoted(text: str) -> str:
    return str(tomllib.loads(f"key = {text}")["key"])
