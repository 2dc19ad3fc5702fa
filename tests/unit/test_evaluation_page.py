"""The page on evaluation speed is what its file says, row by row."""

import importlib
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from helpers.bench_scripts import importable_bench


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with importable_bench(monkeypatch):
        yield importlib.import_module("evaluation_page")


def pack(hits: str) -> str:
    return f"{len(hits)}:{int('1' + hits, 2):x}"


def cell(seconds: float, hits: str, first: float = 5.0) -> dict[str, object]:
    verdicts = dict.fromkeys(("fgsm", "pgd-20", "pgd-100", "cw-20"), pack(hits))
    each = dict.fromkeys(verdicts, seconds / 4)
    return {"seconds": seconds, "each": each, "verdicts": verdicts, "first_before": first, "first_images": len(hits)}


def rows(text: str) -> dict[str, list[str]]:
    return {r[0]: r[1:] for line in re.findall(r"^\| (.*) \|$", text, re.M) if (r := line.split(" | "))}


def made(page: ModuleType) -> str:
    machine = {"device": "a GPU", "torch": "2", "python": "3"}
    cells = {
        "fp32": cell(8, "1111100000"),
        "fp16": cell(4, "0111110000"),
        "default": cell(2, "1111000000"),
        "plain": cell(16, "1111111000"),
    }
    return str(page.render({"machine": machine, "cells": cells}))


def test_every_row_says_how_far_it_is_from_the_reference(page: ModuleType) -> None:
    found = {name: (row[6], row[7].strip()) for name, row in rows(made(page)).items() if len(row) > 7}
    assert found["fp32"] == ("0.00", "0.00%")
    assert found["fp16"] == ("0.00", "20.00%")
    assert found["default"] == ("10.00", ""), "another block has other starts"
    assert found["plain"] == ("20.00", "")


def test_the_fastest_row_is_reported_with_its_options_and_what_went_before(page: ModuleType) -> None:
    shown = " ".join(made(page).split())
    assert "`default`, is `--precision auto --block 500 --engine auto`" in shown
    assert "PGD-20 took 5.0 s; within the row it took 0.5 s." in shown
    assert "may use TF32" in shown
