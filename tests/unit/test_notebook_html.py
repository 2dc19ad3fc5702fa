"""What objects show in a notebook, and their tables of pandas."""

import math
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

import deat
from deat.data import ImageSet
from deat.errors import UsageError
from helpers.nets import conv_net, images, learnable

HOSTILE = "<script>alert(1)</script>"
VOID = {"img", "rect", "polyline", "br"}


class Balanced(HTMLParser):
    """Fails on tags that do not close in order; collects their names and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(html: str) -> Balanced:
    page = Balanced()
    page.feed(html)
    assert not page.open
    return page


@pytest.fixture(scope="module")
def result() -> deat.TrainResult:
    return deat.fit(
        conv_net(),
        learnable(24),
        val=learnable(8),
        method="pgd-1",
        epochs=10,
        batch_size=8,
        val_attack="pgd-1",
        progress=False,
    )


@pytest.fixture(scope="module")
def evaluation(result) -> deat.Evaluation:
    data = ImageSet(*learnable(12), (HOSTILE, "b", "c"))
    return deat.evaluate(result.model, data, threat="linf:0.1", attacks=["natural", "pgd-2"], progress=False)


def test_a_result_shows_its_last_epochs_and_a_curve(result):
    page = read(result._repr_html_())
    assert page.tags.count("tr") == 1 + 8
    assert page.tags.count("polyline") == 3
    assert str(result.history[-1].backprops) in page.text.replace(",", "")
    assert "8 of 10 epochs" in page.text
    assert "best.epoch" not in page.text, "it counts from 0, and the line below from 1"


def test_curves_are_drawn_to_scale_and_leave_missing_values_out():
    from deat.utils.notebook_html import render_html

    html = render_html("t", curves={"a": [0.0, None, 1.0], "one value": [0.5, None, None]}, curves_title="score")
    points = re.findall(r'points="([^"]*)"', html)
    assert len(points) == 1
    (x0, y0), (x2, y2) = (map(float, point.split(",")) for point in points[0].split())
    assert (x2 - x0, y0 - y2) == (320, 120)


def test_an_evaluation_shows_each_attack_and_its_flags_and_escapes_names(evaluation):
    page = read(evaluation._repr_html_())
    assert page.tags.count("tr") == 1 + len(evaluation.accuracy)
    for flag in evaluation.flags:
        assert flag.line in page.text
    assert "linf eps 0.1" in page.text
    options = {"threat": "linf:0.1+l2:0.5", "attacks": ["natural", "pgd-2"], "sanity": False, "progress": False}
    union = deat.evaluate(conv_net(), learnable(12), **options)
    page = read(union._repr_html_())
    assert page.tags.count("tr") == 1 + len(union.accuracy) + 2
    assert "worst, l2 eps 0.5" in page.text
    data = ImageSet(images(9)[0], torch.arange(9) % 3, (HOSTILE, "b", "c"))
    shown = data._repr_html_()
    assert "<script" not in shown
    assert read(shown).tags.count("img") == 8


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (4, 8, 8), (12,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_sets_of_any_inputs_show_themselves(shape, dtype):
    x = torch.rand(5, *shape)
    data = ImageSet((255 * x).to(torch.uint8) if dtype == torch.uint8 else x, torch.arange(5) % 2, ("a", "b"))
    assert read(data._repr_html_()).tags.count("img") == (5 if shape[0] in (1, 3) else 0)


def test_methods_data_sets_and_runs_show_themselves(result, tmp_path):
    assert "Replay()" in read(deat.get_method("m+deat")._repr_html_()).text
    page = read(deat.load_data("digits")._repr_html_())
    assert "1,397" in page.text
    assert page.tags.count("img") == 8
    result.save(tmp_path / "run")
    run = deat.load_run(tmp_path / "run", model=conv_net())
    assert read(run._repr_html_()).tags.count("polyline") == 3


def test_pandas_has_every_epoch_attack_and_verdict(result, evaluation):
    pytest.importorskip("pandas", reason="to_pandas() needs pandas")
    frame = result.to_pandas()
    assert list(frame["epoch"]) == list(range(10))
    assert list(frame["val_robust"]) == [stats.val_robust for stats in result.history]
    table = evaluation.to_pandas()
    assert dict(zip(table["attack"], table["accuracy"], strict=True)) == evaluation.accuracy
    assert math.isnan(table["seconds"].iloc[-1])
    verdicts = evaluation.to_pandas(per_image=True)
    assert verdicts["worst"].mean() == evaluation.worst
    assert list(verdicts["label"]) == evaluation.labels


def test_without_pandas_the_error_says_how_to_get_it(result, evaluation, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for table in (result.to_pandas, evaluation.to_pandas):
        with pytest.raises(UsageError, match="pip install pandas"):
            table()
