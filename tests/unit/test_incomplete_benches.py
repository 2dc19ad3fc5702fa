"""Reports of incomplete benches: seeds with fewer images, pieces that ran separately; sweeps and galleries."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
import torch

from deat.cli import report
from deat.cli.report import LoadOptions, _describe_seeds, _make_sweep_line, make_sweep_figure
from deat.data.image_set import ImageSet
from deat.evaluation.sanity import Flag
from deat.report.draw_figures import ROW_COLORS, _draw_legend, draw_figure, draw_gallery
from deat.report.figure_data import (
    FigureLayout,
    PlotLine,
    build_figures,
    build_trade_off_figure,
    build_training_process_figure,
)
from deat.report.gallery import Gallery, Tile, select_candidates, select_tiles
from deat.report.latex import render_latex_table
from deat.report.page_data import build_settings
from deat.report.problems import collect_flags
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table, render_csv_table, render_markdown_table
from deat.report.setting_names import NAMES, name_setting
from deat.runs.run_dir import FIGURE_NAMES
from deat.threat import L2, Linf
from deat.training.best_epoch import BestChoice
from helpers import nets
from helpers.page_sections import render_section
from helpers.runs import make_bench, make_run, one_run


def test_each_accuracy_says_on_how_many_images_and_seeds_it_stands_where_they_are_fewer(tmp_path):
    for seed, images in enumerate((200, 50, 50, 0)):
        folder = make_run(tmp_path / f"s{seed}", seed=seed, shares={"natural": 0.9, "pgd-20": 0.5})
        if images:
            make_run(tmp_path / "aside" / str(seed), shares={"natural": 0.9, "aa": 0.4}, images=images)
            found = json.loads((tmp_path / "aside" / str(seed) / "evaluation.json").read_text())
            found["settings"]["sample"] = images < 200
            found.pop("checksum", None)
            (folder / "evaluation-aa.json").write_text(json.dumps(found))
    of = build_results_table(load_report_data([str(tmp_path / f"s{seed}") for seed in range(4)]), None)
    (record,) = csv.DictReader(io.StringIO(render_csv_table(of)))
    assert (record["aa images"], record["aa images_each"]) == ("50", "200 50 50")
    assert record["pgd-20 images_each"] == "200 200 200 200"
    text = render_markdown_table(of)
    assert "40.00 ± 0.00 (27.6 to 53.8; seeds 0, 1, 2 only, 200 + 2 × 50 examples) |" in text
    assert "the first 50 test examples: AA of seeds 1, 2 of m+deat. Where another seed" in text
    assert "examples) |" not in text.replace("2 × 50 examples) |", "")
    assert r"From seeds 0, 1, 2 only, 200 + 2 $\times$ 50 examples." in render_latex_table(of)


def test_pieces_of_a_bench_run_apart_make_one_table_and_repetitions_do_not(tmp_path):
    pieces = {"p0": (0, "done"), "p1": (1, "done"), "p2": (2, "waiting"), "p3": (2, "done"), "p4": (1, "done")}
    for piece, (seed, status) in pieces.items():
        make_run(tmp_path / piece / "a", "a", seed=seed, shares={"natural": 0.9, "pgd-20": 0.5})
        rows = [{"name": "a", "method": "a", "model": "m", "runs": [one_run("a", seed, status)]}]
        aa = {"aa_n": "1000"} if piece == "p1" else {}  # tells of images, not of another row
        make_bench(tmp_path / piece, rows, set={"epochs": "4", **aa})
    folders = [str(tmp_path / piece) for piece in pieces]
    assert [[run.seed for run in row.finished_runs] for row in load_report_data(folders[:4]).rows] == [[0, 1, 2]]
    assert [[run.seed for run in row.finished_runs] for row in load_report_data(folders).rows] == [[0, 1, 2], [1]]
    make_bench(tmp_path / "p1", json.loads((tmp_path / "p1" / "bench.json").read_text())["rows"], set={"epochs": "5"})
    assert [row.name for row in load_report_data(folders[:2]).rows] == ["a", "a (2)"]


def test_a_flag_that_both_epochs_raised_is_reported_once_and_one_of_the_last_alone_as_such(tmp_path):
    both, late = Flag("one_step_wins", "x", "y"), Flag("invalid", "z", "y")
    folder = make_run(tmp_path / "a", shares={"natural": 0.9}, flags=(both,))
    make_run(tmp_path / "b", shares={"natural": 0.9}, flags=(both, late))
    (tmp_path / "b" / "evaluation.json").rename(folder / "evaluation-last.json")
    found = [flag.seen for _, flag in collect_flags(load_report_data([str(folder)]).rows[0])]
    assert found == ["x", "in the last epoch z"]


def test_the_page_tells_how_autoattack_apart_was_asked_where_it_differs_from_the_rest(tmp_path):
    folder = make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.5})
    make_run(tmp_path / "b", shares={"natural": 0.9, "aa": 0.4}, images=50)
    found = json.loads((tmp_path / "b" / "evaluation.json").read_text())
    found["settings"]["sample"] = True
    found.pop("checksum", None)
    (folder / "evaluation-aa.json").write_text(json.dumps(found))
    text = render_section("settings", build_settings(load_report_data([str(folder)]).rows))
    assert re.search(r'title="evaluation\.sample">[^<]*</dt><dd>no</dd>', text)
    assert re.search(r'title="evaluation of aa\.sample">[^<]*</dt><dd>yes</dd>', text)
    assert "evaluation of aa.seed" not in text  # it is the same


def test_what_is_recorded_of_the_best_epoch_has_names_that_say_from_where_epochs_count():
    keys = [f"best_epoch.{name}" for name in BestChoice(0, None, None, "last").as_json()]
    assert {key for key in keys if key not in NAMES} == set()
    for key in ("epoch", "most_robust", "indistinguishable"):
        assert name_setting(f"best_epoch.{key}").endswith("counted from 0")
    assert name_setting("evaluation.attacks.aa.targets.apgd-t") == "AA: targets of apgd-t"


def test_a_run_s_folder_knows_every_figure_that_a_report_may_write():
    drawn = {figure.name for figure in (*build_figures([], None), make_sweep_figure([], 1, LoadOptions()))}
    assert drawn | {"gallery"} == set(FIGURE_NAMES)


def test_a_figure_is_laid_out_by_what_it_says_of_itself_whatever_its_name(tmp_path):
    for n, method in enumerate(("m+deat", "free-4")):
        make_run(tmp_path / method, method=method, cost=3 + n, shares={"natural": 0.9, "pgd-20": 0.5 + 0.1 * n})
    rows = load_report_data([str(tmp_path / method) for method in ("m+deat", "free-4")]).rows
    for figure in (build_training_process_figure(rows), build_trade_off_figure(rows, "pgd-20")):
        for name, one in (("mine", figure), ("other", replace(figure, layout=FigureLayout()))):
            draw_figure(replace(one, name=name), [], tmp_path)
        draw_figure(figure, [], tmp_path)
        mine, other, usual = ((tmp_path / f"{name}.svg").read_bytes() for name in ("mine", "other", figure.name))
        assert mine == usual != other


def test_a_gallery_is_of_the_best_row_without_a_flag(tmp_path, monkeypatch):
    flag = Flag("masked", "x", "y")
    make_run(tmp_path / "a", "free-4", shares={"natural": 0.6, "pgd-20": 0.6}, flags=(flag,), kept=3)
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.9, "pgd-20": 0.4}, kept=3)
    asked = []
    monkeypatch.setattr(report, "make_gallery", lambda row, count, lab: asked.append(row.name) or Gallery())
    for folders in (["a", "b"], ["a"]):
        wish = report.ReportCommand(tuple(str(tmp_path / name) for name in folders), no_figures=True)
        report.build_report(load_report_data(wish.runs), wish)
    assert asked == ["pgd-7", "free-4"]


def tile(number, before="3", after="3"):
    return Tile(number, "3", before, after, (None, None, None))


def test_examples_show_what_fools_a_network_and_what_does_not():
    right, stands = [True, True, False, True, True, True, True], [True, False, False, True, True, False, True]
    assert select_candidates(right, stands, 3) == [0, 1, 3, 4, 5]
    assert select_candidates([False] * 4, [False] * 4, 3) == [0, 1, 2]
    fooled, stand = [tile(n, after="8") for n in range(9)], [tile(n) for n in range(10, 19)]
    wrong = [tile(n, "8", "8") for n in range(20, 29)]
    for held, expected in (
        (stand + fooled + wrong, [0, 1, 2, 3, 10, 11]),
        (stand + fooled[:1] + wrong, [0, 10, 11, 12, 13, 14]),
        (stand[:1] + fooled, [0, 1, 2, 3, 4, 10]),
        (fooled[:2] + wrong, [0, 1, 20, 21, 22, 23]),
    ):
        assert [t.image_index for t in select_tiles(held, 6)] == expected
    told = Gallery(tiles=select_tiles(stand + fooled[:1] + wrong, 6)).selection_note
    assert told.endswith("1 that the attack fools and 5 that withstand it")
    assert "2 that are misclassified" in Gallery(tiles=tuple(wrong[:2])).selection_note


@pytest.mark.parametrize("threat", [Linf(0.4), L2(0.4 * nets.SIDE)], ids=lambda t: t.name)
def test_a_sweep_ends_where_any_image_reaches_any_other(threat):
    held = ImageSet(*nets.images(), classes=tuple(map(str, range(nets.CLASSES))))
    line = _make_sweep_line("m+deat", 0, (nets.conv_net(), held, threat), 6)
    assert line.x == [factor * threat.eps for factor in (0.0, 0.5, 1.0, 1.5, 2.0)]
    assert len(line.y) == len(line.x)


def test_a_sweep_names_the_seed_of_each_row():
    lines = [PlotLine(name, seed, [], []) for name, seed in (("a", 0), ("b", 1), ("c", 0))]
    assert _describe_seeds(lines[::2]) == "seed 0 alone"
    assert _describe_seeds(lines) == "seed 0 alone, but seed 1 of b"


def test_a_sweep_says_on_how_many_images_it_really_is(monkeypatch, tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9})
    part = ImageSet(torch.zeros(30, 1, 4, 4), torch.zeros(30, dtype=torch.int64), ("0", "1"))
    monkeypatch.setattr(report, "load_evaluated_run", lambda *_: (None, part, Linf(0.1)))
    monkeypatch.setattr(report, "_make_sweep_line", lambda name, seed, *_: PlotLine(name, seed, [0.0], [0.9]))
    rows = load_report_data([str(tmp_path / "a")]).rows
    titles = {n: make_sweep_figure(rows, n, LoadOptions()).panels[0].title for n in (20, 5000)}
    assert titles == {n: f"PGD-20 on {least} test examples, seed 0 alone" for n, least in ((20, 20), (5000, 30))}


def test_a_row_that_is_a_point_in_one_panel_and_a_line_in_another_is_in_the_legend_once():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    canvas, axes = pyplot.subplots(2)
    axes[0].plot([1], [1], label="a", color="blue", marker="o")
    axes[1].plot([1, 2], [1, 2], label="a", color="blue")
    axes[1].plot([1], [1], label="b", color="red", marker="o")
    _draw_legend(canvas, axes)
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["a", "b"]
    assert canvas.legends[0].legend_handles[0].get_marker() == "None"
    pyplot.close(canvas)


def test_rows_whose_names_are_cut_to_the_same_are_both_in_a_legend(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    canvas, ax = pyplot.subplots()
    for n in range(2):
        ax.plot([0], [n], color=ROW_COLORS[n], label="the same")
    _draw_legend(canvas, [ax])
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["the same", "the same"]
    pyplot.close(canvas)


def test_a_network_that_all_rows_share_is_reported_once_and_not_behind_each_name(tmp_path):
    def rows(*models):
        return [
            {"name": f"{method} {model}", "method": method, "model": model, "runs": [one_run(f"{method}-{model}")]}
            for model in models
            for method in ("free-4", "m+deat")
        ]

    for row in rows("one", "two"):
        make_run(tmp_path / row["runs"][0]["folder"], row["method"], shares={"natural": 0.9, "pgd-20": 0.5})
    make_bench(tmp_path, rows("one"))
    subject = load_report_data([str(tmp_path)])
    assert [row.name for row in subject.rows] == ["free-4", "m+deat"]
    assert any(note.startswith("All rows: with network one instead") for note in subject.notes)
    assert subject.get_row("m+deat one") is subject.get_row("m+deat")
    make_bench(tmp_path, rows("one", "two"))
    assert [row.name for row in load_report_data([str(tmp_path)]).rows] == [row["name"] for row in rows("one", "two")]


def test_a_long_class_name_above_a_picture_of_the_gallery_takes_two_lines(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda ax, text, **how: titles.append(text))
    image = torch.zeros(4, 4, 3).numpy()
    draw_gallery(Gallery("a", "PGD-20", [Tile(0, "automobile", "automobile", "truck", (image,) * 3)]), tmp_path)
    assert titles == ["automobile, seen as\nautomobile", "perturbation", "seen as truck"]
