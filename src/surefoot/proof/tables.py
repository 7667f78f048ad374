"""One table of text in two forms."""

from collections.abc import Iterable, Sequence


def text_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Columns aligned with blanks, for a terminal."""
    lines = [tuple(heads), *(tuple(row) for row in body)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    lines.insert(1, tuple("-" * width for width in widths))
    pairs = (zip(line, widths, strict=True) for line in lines)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in pairs)


def markdown_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """The same as Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])
