"""What the documents claim to be tested is tested."""

import re
import tomllib
from pathlib import Path

import pytest

import deat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_test_that_a_promise_rests_on_exists(file, name):
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_every_number_of_the_table_stands_once():
    numbers = re.findall(r"^\| (\d+a?) \| .*::", PAGE, flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers)) >= 51


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_every_file_that_a_page_links_to_exists(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_on_python_has_every_public_name():
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    assert [name for name in deat.__all__ if not re.search(rf"\b{name}\b", page)] == []


def anchors(page: Path) -> set[str]:
    """The places in a page that a link can lead to: its headings, as GitHub names them, and its ids."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings} | set(
        re.findall(r'id="(.+?)"', text)
    )


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_every_place_in_a_page_that_a_page_links_to_exists(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


def test_make_test_asks_for_every_package_that_a_test_is_skipped_without():
    wanted = {n for p in (ROOT / "tests").rglob("*.py") for n in re.findall(r'importorskip\(\s*"(\w+)"', p.read_text())}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r'^\t-.* -e "\.\[(\w+)\]"$', (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    brought = {re.split(r"\W", text)[0] for extra in ("dev", *asked) for text in extras[extra]}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"ray", "triton"} <= wanted <= brought & pinned


def test_the_page_of_gpu_tests_leaves_none_out() -> None:
    shares = (ROOT / "bench" / "gpu_tests.py").read_text(encoding="utf-8")
    files = {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files
    assert {file for file in files if file not in shares} == set()
