"""Every example runs as it stands."""

from pathlib import Path

import pytest

from helpers.children import Children

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_runs_and_prints_its_epochs(path: Path, children: Children, tmp_path: Path) -> None:
    assert children.run_script(path, cwd=tmp_path) == 0, (tmp_path / "err").read_text()
    assert len((tmp_path / "out").read_text().splitlines()) >= 4
    assert {path.name for path in tmp_path.iterdir()} == {"out", "err"}


def test_the_readme_example_runs(children: Children, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 12
    (tmp_path / "example.py").write_text(code)
    assert children.run_script(tmp_path / "example.py", cwd=tmp_path) == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text()
