"""The Python blocks of the pages on other people's tools run as they stand, from the first to the last."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"loggers.md": (), "other-loops.md": ("lightning", "accelerate", "transformers")}
"""The pages, and the packages that their blocks import."""


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore")  # of libraries that other people keep
def test_the_blocks_of_the_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [package for package in PAGES[page] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
