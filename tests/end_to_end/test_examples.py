"""Every example runs as it stands."""

import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest

import deat.cli.main
from helpers.children import Children

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.py"
"""Takes as long as the three commands that it runs, which have tests of their own."""


@pytest.mark.parametrize("path", sorted({*(ROOT / "examples").glob("*.py")} - {DEMO}), ids=lambda p: p.stem)
def test_example_runs_and_prints_its_epochs(path: Path, children: Children, tmp_path: Path) -> None:
    assert children.run_script(path, cwd=tmp_path) == 0, (tmp_path / "err").read_text()
    assert len((tmp_path / "out").read_text().splitlines()) >= 4
    assert {path.name for path in tmp_path.iterdir()} == {"out", "err"}


@pytest.mark.parametrize("failing", ["evaluate", None])
def test_the_demo_runs_its_commands_up_to_the_first_that_fails(
    failing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> int:
        commands.append(argv)
        return 6 if argv[0] == failing else 0

    monkeypatch.setattr(deat.cli.main, "main", run)
    status = runpy.run_path(str(DEMO))["run_demo"]("runs/demo")
    names = [argv[0] for argv in commands]
    assert (status, names) == ((6, ["train", "evaluate"]) if failing else (0, ["train", "evaluate", "report"]))
    assert all("runs/demo" in argv for argv in commands)
    for argv in commands:
        deat.cli.main.parse_command(argv)


def test_the_readme_example_learns_and_says_nothing_of_anything_amiss(children: Children, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 12
    (tmp_path / "example.py").write_text(code)
    assert children.run_script(tmp_path / "example.py", cwd=tmp_path) == 0, (tmp_path / "err").read_text()
    result, found = (tmp_path / "out").read_text().splitlines()
    assert "best.epoch" in result
    assert "flags: none" in found
    said = (tmp_path / "err").read_text().splitlines()
    assert [line for line in said if not line.startswith(("m+deat  epoch ", "best epoch: ", "deat: evaluating"))] == []


@pytest.mark.parametrize(
    "page",
    [
        "index",
        "get-started",
        "choose-a-method",
        "python",
        "extend",
        "tasks",
        "several-threats",
        "own-plays-and-schedules",
    ],
)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: str, children: Children, tmp_path: Path) -> None:
    blocks = (ROOT / f"docs/{page}.md").read_text().split("```python\n")[1:]
    assert blocks
    (tmp_path / "page.py").write_text("\n".join(block.split("```")[0] for block in blocks))
    assert children.run_script(tmp_path / "page.py", cwd=tmp_path) == 0, (tmp_path / "err").read_text()
