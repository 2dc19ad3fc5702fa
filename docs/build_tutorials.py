"""Build the tutorials: run each script in docs/tutorials and write it as a notebook and as a page, with its outputs.

Scripts are in the percent format: `# %%` begins a cell of code, `# %% [markdown]` one of text.

    python docs/build_tutorials.py            # all of them
    python docs/build_tutorials.py --check    # only whether the notebooks have the scripts' present cells
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tutorials"
CELL_START = re.compile(r"^# %%( \[markdown\])?$", re.MULTILINE)


@dataclass
class Cell:
    """A cell of a tutorial, with what running it showed."""

    kind: str
    source: str
    outputs: list[dict[str, Any]] = field(default_factory=list)


def read_cells(script: Path) -> list[Cell]:
    """Read the cells of a script; lines of text lose their comment sign."""
    parts = CELL_START.split(script.read_text(encoding="utf-8"))[1:]
    cells = []
    for marker, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.strip("\n")
        if marker:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
        cells.append(Cell("markdown" if marker else "code", text))
    return cells


def run_cells(cells: list[Cell], folder: Path) -> None:
    """Run the cells of code one after the other in a folder, and keep what each shows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for cell in cells:
            if cell.kind == "code":
                cell.outputs = _run_cell(cell.source, names)
    finally:
        os.chdir(before)


def _run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs, value = io.StringIO(), list[dict[str, Any]](), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": repr(value)}
        if (html := getattr(value, "_repr_html_", None)) and (shown := html()):
            data["text/html"] = shown
        outputs.append({"output_type": "execute_result", "metadata": {}, "execution_count": None, "data": data})
    outputs += [
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": image}} for image in _take_figures()
    ]
    return outputs


def _take_figures() -> list[str]:
    """Return the figures that are open in matplotlib, if it was imported, and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    images = []
    for number in pyplot.get_fignums() if pyplot else ():
        data = io.BytesIO()
        pyplot.figure(number).savefig(data, format="png", dpi=100)
        images.append(base64.b64encode(data.getvalue()).decode())
    if pyplot:
        pyplot.close("all")
    return images


def make_notebook(cells: list[Cell]) -> dict[str, Any]:
    """Make the notebook (format 4.5)."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        entry: dict[str, Any] = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}, "source": cell.source}
        if cell.kind == "code":
            entry |= {"execution_count": None, "outputs": cell.outputs}
        made.append(entry)
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def make_page(cells: list[Cell], name: str) -> str:
    """Make the page in Markdown, with a link to the notebook below the title."""
    blocks = []
    for cell in cells:
        if cell.kind == "markdown":
            blocks.append(cell.source)
            continue
        blocks.append(f"```python\n{cell.source}\n```")
        blocks += [_format_output(output) for output in cell.outputs]
    title, rest = "\n\n".join(blocks).split("\n", 1)
    note = f"This page is a notebook, too: [{name}.ipynb]({name}.ipynb).\nOutputs are those of its last build."
    return f"{title}\n\n{note}\n{rest}\n"


def _format_output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return str(data["text/html"]).replace("\n\n", "\n")
    if "image/png" in data:
        return f'<img alt="figure" src="data:image/png;base64,{data["image/png"]}">'
    return f"```text\n{(data.get('text/plain') or output['text']).rstrip()}\n```"


def has_same_cells(script: Path) -> bool:
    """Whether a script's notebook has its present cells."""
    notebook = script.with_suffix(".ipynb")
    if not notebook.is_file():
        return False
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(c["cell_type"], c["source"]) for c in cells] == [(c.kind, c.source) for c in read_cells(script)]


def main() -> int:
    """Build or check the tutorials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for script in sorted(FOLDER.glob("*.py")):
        if check:
            stale += [] if has_same_cells(script) else [script.name]
            continue
        cells = read_cells(script)
        with tempfile.TemporaryDirectory() as folder:
            run_cells(cells, Path(folder))
        text = json.dumps(make_notebook(cells), indent=1, ensure_ascii=False)
        script.with_suffix(".ipynb").write_text(f"{text}\n", encoding="utf-8")
        script.with_suffix(".md").write_text(make_page(cells, script.stem), encoding="utf-8")
        print(f"built {script.stem}")
    if stale:
        print(f"not built from the present script: {', '.join(stale)}. Run python docs/build_tutorials.py.")
    return len(stale)


if __name__ == "__main__":
    raise SystemExit(main())
