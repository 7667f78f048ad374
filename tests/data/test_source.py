import ast
from pathlib import Path

import pytest

from surefoot.config.data import PythonInstallation, TextFiles
from surefoot.data import source
from surefoot.data.errors import DataError
from surefoot.data.source import list_names, read_documents

MODULE = '''"""Module text."""
import os
def one(): "says one"
class Two:
    """Two's text,
    over lines."""

    def three(self):
        \'\'\'été\'\'\'; return "kept"

    async def four(self):
        """four"""
        # a comment
x = """not a docstring"""
'''


def library(monkeypatch, folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(source, "_library_root", lambda: folder)


def docstrings(code: str) -> list[str]:
    nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, source.Documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def test_code_has_its_docstrings_removed_and_still_parses_to_the_same_program(monkeypatch, tmp_path):
    library(monkeypatch, tmp_path, a=MODULE)
    (document,) = read_documents(PythonInstallation(part="code"), ["a.py"])
    assert docstrings(MODULE)
    assert docstrings(document.text) == []
    for kept in ("import os", "# a comment", '"""not a docstring"""', 'return "kept"'):
        assert kept in document.text
    for lost in ("Module text", "says one", "Two's", "over lines", "été"):
        assert lost not in document.text
    bodies = [len(n.body) for n in ast.walk(ast.parse(document.text)) if isinstance(n, ast.FunctionDef)]
    assert bodies == [1, 1]


def test_prose_is_the_docstrings_of_a_module_and_short_ones_are_left_out(monkeypatch, tmp_path):
    long = f'"""{"Long text. " * 30}"""\ndef f():\n    """Two\n    lines."""\n'
    library(monkeypatch, tmp_path, long=long, short='"""Short."""\n')
    (document,) = read_documents(PythonInstallation(part="prose"), ["long.py", "short.py"])
    assert document.text == ("Long text. " * 30).strip() + "\n\nTwo\nlines.\n"


def test_test_folders_site_packages_and_the_topics_file_are_not_library_code(monkeypatch, tmp_path):
    library(
        monkeypatch,
        tmp_path,
        a="x = 1",
        **{"site-packages__b": "x", "json__tests__c": "x", "idlelib__idle_test__d": "x", "test__e": "x"},
        pydoc_data__topics="x",
        test__test_f="x",
        json__g="x = 2",
    )
    assert list_names(PythonInstallation(part="code")) == ["a.py", "json/g.py"]


def test_pydocs_topics_are_prose(monkeypatch, tmp_path):
    library(monkeypatch, tmp_path, a="x = 1")
    names = list_names(PythonInstallation(part="prose"))
    assert "topic:assert" in names
    (document,) = read_documents(PythonInstallation(part="prose"), ["topic:assert"])
    assert "assert" in document.text


def test_every_module_of_this_installation_survives_the_removal_of_a_few_docstrings():
    cfg = PythonInstallation(part="code")
    names = [name for name in list_names(cfg) if name.startswith(("json/", "collections/", "re/"))]
    documents = list(read_documents(cfg, names))
    assert len(documents) >= 6
    assert all(docstrings(document.text) == [] for document in documents)


def test_text_files_come_sorted_and_in_full(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("été\n", encoding="utf-8")
    (tmp_path / "sub" / "a.txt").write_bytes(b"one\r\ntwo")
    cfg = TextFiles(glob=str(tmp_path / "**/*.txt"))
    assert [document.text for document in read_documents(cfg, list_names(cfg))] == ["été\n", "one\r\ntwo"]


def test_undecodable_bytes_are_refused_with_file_offset_and_remedy(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError) as caught:
        list(read_documents(TextFiles(glob=str(path)), [str(path)]))
    assert str(caught.value) == (
        f"{path}: byte 0xe9 at offset 3 is not UTF-8 (invalid continuation byte); convert the file to UTF-8 or leave it "
        "out of the glob"
    )


def test_an_empty_document_is_refused_by_name(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text(" \n")
    with pytest.raises(DataError, match=r"empty.txt: an empty document \(2 bytes\); remove the file"):
        list(read_documents(TextFiles(glob=str(path)), [str(path)]))


def test_a_glob_without_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no file matches glob='.*\*\.txt' .* give a pattern of UTF-8 text files"):
        list_names(TextFiles(glob=str(tmp_path / "*.txt")))
