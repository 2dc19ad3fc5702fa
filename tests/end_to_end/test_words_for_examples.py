"""Rows of a table are never called images: on the terminal, in the run's report, the model card and the page."""

import html
import re

import pytest

from deat.cli.main import main

OTHER_KINDS = re.compile(r"which is for images in|images or waveforms, which can be drawn")
"""Where images are meant: what AutoAttack and the gallery are for."""


def write_table(path, *, is_regression):
    rows = [(n % 7 / 7, n % 5 / 5, n / 60 if is_regression else ("low", "high")[n % 7 > 3]) for n in range(60)]
    path.write_text("\n".join(["a,b,y", *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def find_images(text):
    """The lines that speak of images."""
    text = re.sub(r"<(script|style).*?</\1>|data:[^\"' )]*|<[^>]+>", " ", text, flags=re.DOTALL)
    lines = OTHER_KINDS.sub("", html.unescape(text)).splitlines()
    return [line.strip() for line in lines if re.search(r"\b(images?|pictures?)\b", line, re.IGNORECASE)]


@pytest.mark.parametrize("is_regression", [False, True], ids=["classes", "numbers"])
def test_a_table_is_never_said_to_have_images(is_regression, tmp_path, capsys):
    data = f"csv:{write_table(tmp_path / 'table.csv', is_regression=is_regression)}"
    runs = [str(tmp_path / name) for name in ("scored", "other")]
    quick = f"--epochs 1 --data {data} --target y --val-attack fgsm --held-out 8 --batch-size 16 --watch none".split()
    for run in runs:
        assert main(["train", "--out", run, *quick]) == 0
    assert main(["evaluate", runs[0], "--attacks", "natural,pgd-2", "--n", "6"]) in (0, 6)
    assert main(["report", *runs, "--out", str(tmp_path / "report"), "--no-figures"]) == 0
    assert main(["card", runs[0], "--out", str(tmp_path / "card.md")]) == 0
    shown = capsys.readouterr()
    files = ["scored/report.md", "card.md", "report/index.html", "report/table.md", "report/table.tex"]
    texts = [shown.out, shown.err, *((tmp_path / file).read_text() for file in files)]
    assert [find_images(text) for text in texts] == [[]] * len(texts)
    assert all("examples" in text for text in (texts[0], *texts[2:]))
