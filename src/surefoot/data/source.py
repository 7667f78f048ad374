"""Where documents come from: the Python installation and text files."""

import ast
import glob
import inspect
import io
import pydoc_data.topics
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.config.data import PythonInstallation, TextFiles
from surefoot.data.errors import DataError

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_TOPICS = "pydoc_data/topics.py"
_TOPIC = "topic:"
_MIN_PROSE = 200  # characters; a page of docstrings below it is a fragment

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    name: str
    text: str


def list_names(cfg: PythonInstallation | TextFiles) -> list[str]:
    """Names of what may become documents, sorted, nothing read yet; DataError if there are none."""
    if isinstance(cfg, TextFiles):
        return _text_files(cfg.glob)
    modules = [name for name in _library_modules() if name != _TOPICS]
    topics = [_TOPIC + topic for topic in sorted(pydoc_data.topics.topics)]
    return modules + (topics if cfg.part == "prose" else [])


def read_documents(cfg: PythonInstallation | TextFiles, names: Iterable[str]) -> Iterator[Document]:
    """Read the named documents in order. A library module without code or with hardly any prose is left out.

    DataError for an empty text file and for undecodable bytes, with the byte offset.
    """
    for name in names:
        match cfg:
            case PythonInstallation(part="code"):
                text = _without_docstrings(_read_module(name), name)
            case PythonInstallation(part="prose"):
                text = _prose(name)
            case TextFiles():
                text = _read_text_file(Path(name))
        if text.strip():
            yield Document(name, text)


def describe_origin(cfg: PythonInstallation | TextFiles) -> object:
    """What the documents depend on, cheap to compute and JSON-able: a change of it means building again."""
    match cfg:
        case PythonInstallation():
            return {"part": cfg.part, "python": sys.version}
        case TextFiles():
            stats = [(name, Path(name).stat()) for name in _text_files(cfg.glob)]
            return {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


def _library_modules() -> list[str]:
    root = _library_root()
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    modules = sorted(name.as_posix() for name in names if not _NOT_LIBRARY.intersection(name.parts[:-1]))
    if not modules:
        raise DataError(f"{root}: no .py file of the standard library; use data.sources of kind text instead")
    return modules


def _library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _read_module(name: str) -> str:
    path = _library_root() / name
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (UnicodeDecodeError, SyntaxError) as error:
        raise DataError(
            f"{path}: not in the encoding that it declares ({error}); the Python installation is damaged"
        ) from error


def _documented(tree: ast.Module) -> Iterator[tuple[Documented, ast.Expr]]:
    """Nodes with a docstring, in source order, with the statement that holds it."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, Documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield node, first


def _without_docstrings(code: str, name: str) -> str:
    """The code with each docstring cut out where it stands; ``pass`` where nothing else is left of a body."""
    lines = [line.encode() for line in io.StringIO(code)]  # ast counts columns in UTF-8 bytes
    for node, statement in reversed(list(_documented(_parse(code, name)))):
        first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
        before, after = lines[first][: statement.col_offset], lines[last][statement.end_col_offset or 0 :]
        if len(node.body) == 1 and not isinstance(node, ast.Module):
            kept = before + b"pass" + after
        elif after.lstrip().startswith(b";"):
            kept = before + after.lstrip()[1:].lstrip()
        else:
            kept = before + after
        lines[first : last + 1] = [kept] if kept.strip() else []
    return b"".join(lines).decode()


def _parse(code: str, name: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise DataError(
            f"{_library_root() / name}: line {error.lineno}: {error.msg}; the installation is damaged"
        ) from error


def _prose(name: str) -> str:
    if name.startswith(_TOPIC):
        topic: str = pydoc_data.topics.topics[name.removeprefix(_TOPIC)]
        return topic
    found = _documented(_parse(_read_module(name), name))
    parts = [inspect.cleandoc(statement.value.value).strip() for _, statement in found]  # type: ignore[attr-defined]
    prose = "\n\n".join(part for part in parts if part)
    return prose + "\n" if len(prose) >= _MIN_PROSE else ""


def _text_files(pattern: str) -> list[str]:
    names = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
    if not names:
        raise DataError(
            f"data.sources: no file matches glob={pattern!r} (seen from {Path.cwd()}); give a pattern of UTF-8 text "
            "files, for example 'texts/**/*.txt'"
        )
    return names


def _read_text_file(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {data[error.start]:#04x} at offset {error.start} is not UTF-8 ({error.reason}); convert the "
            "file to UTF-8 or leave it out of the glob"
        ) from None
    if not text.strip():
        raise DataError(f"{path}: an empty document ({len(data)} bytes); remove the file or leave it out of the glob")
    return text
