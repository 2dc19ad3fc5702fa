"""`deat report` on runs that were really trained: what it writes, what it says, what it refuses."""

import builtins
import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from deat.cli.main import main
from deat.evaluation.results import load_evaluation
from deat.utils import safetensors_files
from helpers.runs import make_bench, make_run, one_run

QUICK = ["--epochs", "2", "--held-out", "40", "--val-attack", "fgsm", "--watch", "none", "--baseline", "no"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two epochs, evaluated."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", "--out", str(folder), "--test-images", "0", *QUICK]) == 0
    assert main(["evaluate", str(folder), "--attacks", "natural,pgd-2", "--n", "40"]) in (0, 6)
    return folder


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    assert main(["report", str(run), "--out", str(out), "--sweep", "20", "--gallery", "2"]) == 0
    return out


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_report_writes_tables_page_and_every_figure_with_its_data(report):
    assert {p.name for p in report.iterdir()} == {"index.html", "table.md", "table.tex", "table.csv", "figures"}
    drawn = {"training-process", "validation", "backprops", "cost", "sweep", "gallery"}
    files = {p.name for p in (report / "figures").iterdir()}
    assert {p.name for p in (report / "figures").glob("*.pdf")} >= {f"{name}.pdf" for name in drawn}
    assert files == {f"{name.rpartition('.')[0]}.{kind}" for name in files for kind in ("pdf", "svg", "png", "csv")}
    for picture in (report / "figures").glob("*.png"):
        with Image.open(picture) as held:
            assert min(held.size) > 150


def test_training_process_has_the_papers_six_rows_and_both_training_accuracies(report, run):
    rows = rows_of(report / "figures" / "training-process.csv")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    assert [p.split(",")[0] for p in panels] == [
        "train (clean)",
        "train (under attack)",
        "held out (clean)",
        "held out (under FGSM)",
        "robustness gain",
        "gradient magnitude l_X",
        "Lipschitz bound",
    ]
    told = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    mine = [float(row["y"]) for row in rows if row["panel"] == panels[3]]
    assert mine == [h["val_robust"] for h in told]
    (gain,) = [float(row["y"]) for row in rows if row["panel"] == "robustness gain"]
    assert gain == pytest.approx(told[1]["val_robust"] - told[0]["val_robust"])


def test_sweep_starts_at_natural_accuracy_and_never_rises(report, run):
    rows = rows_of(report / "figures" / "sweep.csv")
    shares = [float(row["y"]) for row in rows]
    assert {(row["panel"], row["seed"]) for row in rows} == {("PGD-20 on 20 test examples, seed 0 alone", "0")}
    assert "seed 0 alone</h3>" in (report / "index.html").read_text()
    assert [float(row["x"]) for row in rows] == pytest.approx([0, 0.075, 0.15, 0.225, 0.3, 0.45])
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == sum(load_evaluation(run / "evaluation.json").verdicts["natural"][:20]) / 20


@pytest.mark.parametrize("epoch", ["best", "last"])
def test_sweep_and_gallery_attack_the_weights_that_were_evaluated(run, tmp_path, epoch, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    weights = safetensors_files.read_tensors(folder / "best" / "model.safetensors")
    still = {name: torch.zeros_like(w) for name, w in weights.items()}
    (folder / "last" / "model.safetensors").write_bytes(safetensors_files.encode_tensors(still))
    (folder / "evaluation.json").unlink()  # of the best epoch, which a report would prefer
    assert main(["evaluate", str(folder), "--epoch", epoch, "--attacks", "natural,pgd-2", "--n", "40"]) in (0, 6)
    assert main(["report", str(folder), "--sweep", "20", "--no-figures"]) == 0
    judged = load_evaluation(folder / "evaluation.json").verdicts["natural"]
    assert float(rows_of(folder / "report/figures/sweep.csv")[0]["y"]) == sum(judged[:20]) / 20
    seen = rows_of(folder / "report/figures/gallery.csv")
    assert [row["prediction"] == row["label"] for row in seen] == [judged[int(row["image"])] for row in seen]
    (folder / epoch / "model.safetensors").unlink()
    assert main(["report", str(folder), "--no-figures"]) == 0
    assert "other weights than those that were evaluated" in capsys.readouterr().out


def test_networks_of_your_own_are_attacked_only_where_the_user_names_them(run, tmp_path, capsys):
    marker, folders, specs = tmp_path / "marker", [tmp_path / "a", tmp_path / "b"], []
    for folder in folders:
        shutil.copytree(run, folder)
        code = tmp_path / f"{folder.name}.py"
        code.write_text(f"import deat\nopen({str(marker)!r}, 'a').close()\nNet = deat.build_model('small', 10, 1, 8)\n")
        record = json.loads((folder / "run.json").read_text())
        record["model"]["name"] = f"{code}:Net"
        (folder / "run.json").write_text(json.dumps(record))
        specs.append(f"{code}:Net")
    command = ["report", *map(str, folders), "--out", str(tmp_path / "r"), "--sweep", "4", "--no-figures"]
    for named, lines in (([], 0), (["--model", f"elsewhere.py:Net, {specs[0]}"], 1), (["--model", ",".join(specs)], 2)):
        assert main([*command, *named]) == 0
        assert marker.exists() == bool(lines)
        file = tmp_path / "r/figures/sweep.csv"
        assert len({row["row"] for row in rows_of(file)} if file.exists() else ()) == lines
        assert (f"Say so yourself: --model {specs[0]}" in capsys.readouterr().out) == (not lines)
    assert (tmp_path / "r/figures/gallery.csv").exists()


def test_gallery_shows_test_images_by_their_numbers_and_what_becomes_of_them(report, run):
    rows = rows_of(report / "figures" / "gallery.csv")
    found = load_evaluation(run / "evaluation.json")
    shown = [int(row["image"]) for row in rows]
    assert len(set(shown)) == 2
    assert [row["label"] for row in rows] == [str(found.labels[n]) for n in shown]
    assert [row["prediction"] == row["label"] for row in rows] == [found.verdicts["natural"][n] for n in shown]
    text = (report / "index.html").read_text()
    assert text.count("data:image/png;base64,") == 6
    assert "not in proportion: " in text


def test_images_of_a_run_that_was_evaluated_on_others_are_among_the_first(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    held = load_evaluation(folder / "evaluation.json")
    replace(held, labels=[(label + 1) % 10 for label in held.labels]).save(folder / "evaluation.json")
    assert main(["report", str(folder), "--gallery", "2", "--no-figures"]) == 0
    shown = rows_of(folder / "report/figures/gallery.csv")
    assert [row["label"] for row in shown] == [str(held.labels[int(row["image"])]) for row in shown]
    assert all(int(row["image"]) < 6 for row in shown)


def test_json_says_the_same_as_the_evaluation(run, tmp_path, capsys):
    assert main(["report", str(run), "--out", str(tmp_path / "r"), "--no-figures", "--gallery", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = json.loads((run / "evaluation.json").read_text())
    (row,) = told["rows"]
    assert row["accuracy"]["pgd-2"]["mean"] == found["accuracy"]["pgd-2"]
    assert row["accuracy"]["pgd-2"]["low"] == found["intervals"]["pgd-2"][0]
    assert told["headline"] == "pgd-2"
    assert any("sample" in note for note in told["notes"])
    assert told["left_out"] == []  # one run varies nothing, so no comparison is missed


def test_a_run_that_was_reported_can_be_overwritten_and_other_files_are_safe(tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", "--out", str(out), "--test-images", "0", *QUICK]
    assert main(command) == 0
    assert main(["report", str(out), "--no-figures"]) == 0
    assert "report/index.html" in capsys.readouterr().out
    (out / "report" / "thesis.docx").write_text("mine")
    assert main([*command, "--overwrite"]) == 2
    (out / "report" / "thesis.docx").rename(out / "report" / ".index.html.1f2e.tmp")  # a report that was killed
    assert list(out.glob("ckpt-*"))
    assert main([*command, "--overwrite"]) == 0
    assert not (out / "report").exists()


def test_a_bench_folder_is_reported_and_the_alpha_gamma_panels_are_drawn(tmp_path, capsys):
    rows = []
    for alpha in (1.0, 1.25):
        for gamma in (1.1, 1.01):
            name = f"m+deat {alpha:g} {gamma:g}"
            schedule = {"method": {"name": "m+deat", "schedule": {"alpha": alpha, "gamma": gamma}}}
            make_run(tmp_path / name, shares={"natural": 0.9, "pgd-20": 0.4}, record=schedule)
            rows.append({"name": name, "method": "m+deat", "model": "small", "runs": [one_run(name)]})
    rows[0]["runs"].append(one_run("gone", 1, "failed", "out of memory"))
    bench = make_bench(tmp_path, rows, "alpha-gamma", "Figure <3>", set={"epochs": "4"})
    assert main(["report", str(bench), "--against", "m+deat 1 1.01"]) == 0
    assert "incomplete: m+deat 1 1.1, seed 1: out of memory" in capsys.readouterr().out
    panels = {row["panel"] for row in rows_of(tmp_path / "report" / "figures" / "alpha-gamma.csv")}
    assert panels == {"m+deat, gamma 1.1", "m+deat, gamma 1.01"}
    assert (tmp_path / "report" / "figures" / "alpha-gamma.png").is_file()
    assert "· in the paper: Figure &lt;3&gt; ·" in (tmp_path / "report" / "index.html").read_text()
    table = (tmp_path / "report" / "table.md").read_text()
    assert "# alpha-gamma\n\nIn the paper: Figure &lt;3&gt;.\n" in table
    assert "All rows: with network small, epochs=4 instead" in table
    assert main(["report", str(bench), "--no-figures"]) == 0  # again, into the same folder
    assert {p.suffix for p in (tmp_path / "report" / "figures").iterdir()} == {".csv"}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["{tmp}/nowhere"], 3, "neither run.json nor bench.json"),
        (["{run}", "--against", "pgd-9"], 2, "unknown row 'pgd-9'"),
        (["{run}", "--sweep", "0"], 2, "sweep must be"),
        (["{run}", "--gallery", "-1"], 2, "gallery must be"),
        (["{run}", "--model", "small"], 2, "--model 'small' is no network of your own"),
        (["{run}", "--out", "{run}"], 2, "holds other things than a report"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_words(run, tmp_path, capsys, arguments, status, words):
    filled = [text.format(tmp=tmp_path, run=run) for text in arguments]
    assert main(["report", *filled, "--no-figures"]) == status
    assert words in capsys.readouterr().err


def test_folders_below_the_one_that_a_report_is_to_go_to_are_not_searched(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "home" / "photos").mkdir(parents=True)
    monkeypatch.setattr(Path, "rglob", None)
    assert main(["report", str(run), "--out", str(tmp_path / "home"), "--no-figures"]) == 2
    assert "holds other things than a report" in capsys.readouterr().err


def test_without_matplotlib_the_report_says_that_figures_are_left_out(run, tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["report", str(run), "--out", str(tmp_path / "r"), "--gallery", "0"]) == 0
    assert "pip install matplotlib" in "".join(capsys.readouterr())
    assert "pip install matplotlib" in (tmp_path / "r" / "index.html").read_text()
    assert not list((tmp_path / "r" / "figures").glob("*.svg"))
    assert main(["report", str(run), "--out", str(tmp_path / "r"), "--no-figures", "--gallery", "0"]) == 0
    assert "pip install" not in "".join(capsys.readouterr())


def test_a_run_without_weights_is_reported_and_the_lack_is_reported(tmp_path, capsys):
    run = make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4})
    assert main(["report", str(run), "--no-figures", "--sweep", "5"]) == 0
    said = capsys.readouterr().out
    assert "left out: Accuracy by radius: m+deat: " in said
    assert "left out: Adversarial examples: an evaluated run with its weights" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"settings": {"seed": 0}}'])
@pytest.mark.parametrize("file", ["run.json", "evaluation.json", "history.jsonl"])
def test_a_damaged_record_is_named_and_left_as_it_is(tmp_path, capsys, file, text):
    run = make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4})
    (run / file).write_text(f"{text}\n")
    assert main(["report", str(run), "--no-figures", "--gallery", "0", "--out", str(tmp_path / "r")]) == 3
    assert str(run) in capsys.readouterr().err
    assert (run / file).read_text() == f"{text}\n"


@pytest.mark.parametrize("file", ["run.json", "evaluation.json", "history.jsonl", "scores.json", "watch.jsonl"])
def test_a_record_of_anything_at_all_is_named_in_a_short_message(tmp_path, capsys, file):
    run = make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4})
    (run / file).write_bytes(b"\xff" * 1_000_000)
    assert main(["report", str(run), "--no-figures", "--gallery", "0", "--out", str(tmp_path / "r")]) in (0, 3)
    assert len(capsys.readouterr().err) < 1000


@pytest.mark.parametrize("order", [["report", "--no-figures"], ["resume"], ["export"], ["import"], ["evaluate"]])
def test_a_name_too_long_for_any_file_is_no_defect(order, capsys):
    assert main([*order, "x" * 300]) in (2, 4)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "xxx" in said
