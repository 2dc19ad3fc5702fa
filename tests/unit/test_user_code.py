"""Objects out of a user's Python file, and what is said when there is none."""

import sys

import pytest

from deat.errors import UsageError
from deat.utils.user_code import describe_error_with_line, is_file_spec, load_object


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\nfrom dataclasses import dataclass\nanswer = 42\n@dataclass\nclass Point:\n  x: int = 1\n"
    )
    return path


def test_the_named_object_comes_back(file):
    assert load_object(f"{file}:answer") == 42
    assert load_object(f"{file}:Point")().x == 1


def test_a_path_with_colons_is_split_at_the_last(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "m.py").write_text("value = 7")
    assert load_object(f"{folder / 'm.py'}:value") == 7


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.py").write_text("value = 7")
    assert load_object("~/m.py:value") == 7


def test_a_relative_path_is_taken_from_the_working_folder(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load_object("mine.py:answer") == 42


def test_the_file_cannot_hide_a_package(tmp_path):
    (tmp_path / "json.py").write_text("value = 7")
    before = sys.modules.get("json")
    assert load_object(f"{tmp_path / 'json.py'}:value") == 7
    assert sys.modules.get("json") is before


def test_an_edited_file_is_read_anew_and_leaves_no_byte_code(file):
    load_object(f"{file}:answer")
    file.write_text(file.read_text().replace("42", "43"))
    assert load_object(f"{file}:answer") == 43
    assert [p.name for p in file.parent.iterdir()] == ["mine.py"]


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match=r"no such file 'nowhere/m\.py'"):
        load_object("nowhere/m.py:x")


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "m.py").mkdir()
    with pytest.raises(UsageError, match="no such file"):
        load_object(f"{tmp_path / 'm.py'}:x")


def test_a_missing_name_suggests_those_near(file):
    with pytest.raises(UsageError, match=r"unknown name in .*'anwser'.*'answer'") as caught:
        load_object(f"{file}:anwser")
    assert "os" not in str(caught.value).partition("Known:")[2]


def test_a_missing_name_in_an_empty_file_says_so(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UsageError, match=r"no 'x' in .*defines no names"):
        load_object(f"{tmp_path / 'empty.py'}:x")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = 1\nraise RuntimeError('boom')", r"\(line 2\): RuntimeError: boom"),
        ("a = 1\n\ndef f(:\n", r"\(line 3\): SyntaxError"),
        ("import no_such_package", r"\(line 1\): ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.exit(3)", r"\(line 2\): SystemExit: 3"),
    ],
)
def test_an_exception_inside_the_file_is_shown_with_its_line(tmp_path, text, told):
    path = tmp_path / "bad.py"
    path.write_text(text)
    before = set(sys.modules)
    with pytest.raises(UsageError, match=told):
        load_object(f"{path}:x")
    assert not {name for name in set(sys.modules) - before if name.startswith("_deat_file")}


@pytest.mark.parametrize("spec", ["m.py", "plain", "m.txt:x", "timm:resnet18", "m.py:", "m.py:a.b", "m.py:1", ""])
def test_a_malformed_spec_says_the_form(spec):
    with pytest.raises(UsageError, match=r"write it as path/to/file\.py:NAME"):
        load_object(spec)


@pytest.mark.parametrize(
    ("spec", "is_file"),
    [("a/b.py:NAME", True), ("b.py", True), ("b.py:", True), ("timm:resnet18", False), ("small", False)],
)
def test_file_specs_are_distinguished_from_names(spec, is_file):
    assert is_file_spec(spec) is is_file


def test_what_lies_beside_the_file_hides_nothing_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    (tmp_path / "sched.py").write_text("scheduler = None")
    (tmp_path / "m.py").write_text("from sched import scheduler")
    assert load_object(f"{tmp_path / 'm.py'}:scheduler") is not None


def raise_from(function, *args):
    try:
        function(*args)
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this file
        return describe_error_with_line(error)


def test_an_error_is_described_by_the_last_line_of_the_users_own_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("import json\ndef parse(text):\n    return json.loads(text)\n")
    (tmp_path / "mine.py").write_text("from helper import parse\ndef run(text):\n    return parse(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = load_object("mine.py:run")
    assert raise_from(run, "{").startswith("JSONDecodeError: Expecting property name")
    assert raise_from(run, "{").endswith("(helper.py, line 3)")
    monkeypatch.chdir(tmp_path.parent)
    assert raise_from(run, "{").endswith(f"({tmp_path.name}/helper.py, line 3)")


def test_without_code_of_the_user_an_error_is_described_by_deats_line():
    described = raise_from(is_file_spec, 3)
    assert described.startswith("AttributeError: 'int' object has no attribute 'endswith' (")
    assert "deat/utils/user_code.py, line " in described
