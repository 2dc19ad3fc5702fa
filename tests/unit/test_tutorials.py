"""The tutorials run as they are written, and their notebooks have the scripts' cells."""

import json
import sys
from pathlib import Path

import pytest

import deat

DOCS = Path(deat.__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import build_tutorials  # noqa: E402

SCRIPTS = sorted(build_tutorials.FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_cell_of_a_tutorial_runs(script, tmp_path):
    if "to_pandas" in script.read_text():
        pytest.importorskip("pandas", reason="the tutorial shows a table of pandas")
    cells = build_tutorials.read_cells(script)
    build_tutorials.run_cells(cells, tmp_path)
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("text/html" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_notebook_and_page_are_built_from_the_present_script(script):
    assert build_tutorials.has_same_cells(script), "run python docs/build_tutorials.py"
    notebook = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(set(cell) >= {"cell_type", "metadata", "source"} for cell in notebook["cells"])
    assert any(cell.get("outputs") for cell in notebook["cells"])
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    assert all(cell.source in page for cell in build_tutorials.read_cells(script)[1:])


def test_a_cell_shows_what_it_prints_and_what_its_last_line_is():
    cells = [build_tutorials.Cell("code", "print('one')\nx = 2\nx + 1"), build_tutorials.Cell("code", "x")]
    build_tutorials.run_cells(cells, Path())
    assert [output.get("text") or output["data"]["text/plain"] for output in cells[0].outputs] == ["one\n", "3"]
    assert cells[1].outputs[0]["data"] == {"text/plain": "2"}
