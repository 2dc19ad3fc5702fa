"""Folders written by deat 0.1.0 are read, resumed, evaluated further and reported by this version.

`whole-NAME` is a finished run and `cut-NAME` the same run after SIGTERM in the middle of its third epoch.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import deat
from deat.cli.bench import BenchCommand, plan_cells
from deat.cli.main import main
from deat.data import cifar, datasets
from deat.recipes import get_recipe
from deat.report.run_results import load_bench, load_run_results
from deat.runs.record_files import read_bench_record, read_record
from deat.runs.resolve_request import resolve_request
from deat.utils.safetensors_files import read_tensors
from deat.utils.torch_contexts import cpu_model
from helpers.data_sets import cifar_files, shrink, write_folder

WRITTEN_BY = "AuthenticAMD"
"""The maker of the processor that wrote the folders. Those of other makers round the last bits in another way."""
FOLDERS = Path(__file__).parents[1] / "fixtures/v1"
OWN = ["--model", "net.py:Net"]
CUT = sorted(path.name.removeprefix("cut-") for path in FOLDERS.glob("cut-*") if path.name != "cut-evaluation")
BENCH = [
    "bench",
    "quick",
    "--methods",
    "m+deat,pgd-2",
    "--seeds",
    "0",
    "--set",
    "epochs=4",
    "--set",
    "batch_size=256",
    "--set",
    "attacks=natural,fgsm,pgd-2",
]


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path, monkeypatch):
    shutil.copytree(FOLDERS, tmp_path / "v1")
    monkeypatch.chdir(tmp_path / "v1")


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def check_same_weights(found: dict, expected: dict, exact: bool) -> None:
    """Bit for bit where the machine is like the one that wrote the folder, and to rounding elsewhere."""
    exact &= cpu_model().startswith(WRITTEN_BY)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if exact:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)


def check_same_history(found: list[dict], expected: list[dict], exact: bool) -> None:
    """The same."""
    exact &= cpu_model().startswith(WRITTEN_BY)
    if exact:  # in what the older version recorded
        recorded = lines("whole-m-deat/history.jsonl")[0].keys()
        assert [{name: e[name] for name in recorded} for e in found] == [
            {name: e[name] for name in recorded} for e in expected
        ]
    assert [(e["k"], e["backprops"]) for e in found] == [(e["k"], e["backprops"]) for e in expected]
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in expected], rel=1e-2)


@pytest.mark.promise("P109")
def test_the_rule_set_that_older_records_call_paper_is_the_default_one():
    assert '"rules": "paper"' in Path("cut-m-trades/run.json").read_text()
    assert read_record(Path("cut-m-trades")).request.rules == "default"
    assert load_run_results("cut-m-trades").record["request"]["rules"] == "default"
    assert '"rules": "paper"' in Path("bench-whole/bench.json").read_text()
    assert load_bench("bench-whole").settings["rules"] == "default"


@pytest.mark.promise("P109")
@pytest.mark.parametrize("name", CUT)
def test_a_run_cut_short_by_the_older_version_ends_as_if_it_had_not_been(name):
    assert main(["resume", f"cut-{name}", *OWN]) == 0
    exact = json.loads(Path(f"cut-{name}/run.json").read_text())["exact"]
    check_same_history(lines(f"cut-{name}/history.jsonl"), lines(f"whole-{name}/history.jsonl"), exact)
    check_same_weights(
        *(read_tensors(Path(f"{run}-{name}/last/model.safetensors")) for run in ("cut", "whole")), exact=exact
    )


def test_a_run_on_cifar100_is_evaluated_by_the_numbers_in_its_record(tmp_path, monkeypatch, capsys):
    shrink(monkeypatch, "cifar100", count=16)
    write_folder(tmp_path / cifar.RELEASES["cifar100"][0].folder, cifar_files("cifar100", True, count=16))
    asked = ["train", "--data", "cifar100", "--data-root", str(tmp_path), "--method", "natural", "--model", "small"]
    with monkeypatch.context() as older:  # 0.1.0 normalised it by CIFAR-10's numbers
        older.setitem(datasets._CIFAR_MEAN_STD, "cifar100", datasets._CIFAR_MEAN_STD["cifar10"])
        options = ["--epochs", "1", "--batch-size", "4", "--held-out", "4", "--test-images", "0", "--out", "older"]
        assert main([*asked, *options]) == 0
    mean, std = json.loads(Path("older/run.json").read_text())["data"]["normalized_by"]
    assert (tuple(mean), tuple(std)) == datasets._CIFAR_MEAN_STD["cifar10"]
    record = read_record(Path("older"))
    assert (record.statistics.mean, record.statistics.std) == datasets._CIFAR_MEAN_STD["cifar10"]
    run = resolve_request(record.request, statistics=record.statistics, **vars(record.config))
    assert run.normalization == datasets._CIFAR_MEAN_STD["cifar10"]
    assert resolve_request(record.request, **vars(record.config)).normalization == datasets._CIFAR_MEAN_STD["cifar100"]
    assert main(["resume", "older"]) == 0
    assert main(["evaluate", "older", "--data-root", str(tmp_path), "--attacks", "natural"]) in (0, 6)
    weights = read_tensors(Path("older/last/model.safetensors"))
    assert weights["normalize.mean"].flatten().tolist() == pytest.approx(datasets._CIFAR_MEAN_STD["cifar10"][0])
    capsys.readouterr()


def test_a_run_of_m_amata_with_another_first_k_is_resumed_with_a_warning(capsys):
    run = ["--epochs", "1", "--baseline", "no", "--test-images", "0", "--held-out", "10", "--watch", "none"]
    with pytest.warns(UserWarning, match="A = 5 is not used"):
        assert main(["train", "--method", "m+amata-5-10", *run, "--out", "older"]) == 0
    assert json.loads(Path("older/run.json").read_text())["method"]["name"] == "m+amata-5-10"
    with pytest.warns(UserWarning, match="A = 5 is not used"):
        assert main(["resume", "older"]) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_bench_of_the_older_version_with_another_learning_rate_schedule_is_continued():
    recorded = read_bench_record(Path("bench-cut"))
    recorded["settings"]["set"] |= {"rate": "flat"}
    cells, settings = plan_cells(get_recipe("quick"), BenchCommand("quick", set=("lr_schedule=flat", *BENCH[7::2])))
    assert {cell.row.settings["lr_schedule"] for cell in cells} == {"flat"}
    assert settings == recorded["settings"]


def test_a_python_training_cut_short_by_the_older_version_ends_as_if_it_had_not_been():
    from fixtures.v1.net import Net

    torch.manual_seed(0)
    asked = {"method": "m+pgd", "threat": deat.Linf(0.1), "epochs": 4, "val": 0.1, "batch_size": 256, "threads": 1}
    data = deat.load_data("digits").train
    ends = [deat.fit(Net(), data, checkpoints=folder, progress=False, **asked) for folder in ("fit-cut", "fit-whole")]
    states = [json.loads(max(Path(f).glob("ckpt-*/state.json")).read_text()) for f in ("fit-cut", "fit-whole")]
    check_same_history(*(list(map(vars, end.history)) for end in ends), exact=states[0]["exact"])
    check_same_weights(ends[0].model.state_dict(), ends[1].model.state_dict(), exact=states[0]["exact"])


def test_a_finished_run_of_the_older_version_is_finished_and_can_be_evaluated_and_reported(capsys):
    assert main(["resume", "whole-m-deat", *OWN]) == 0
    assert "is finished" in capsys.readouterr().out
    older = deat.load_evaluation("whole-m-deat/evaluation.json")
    assert older.accuracy == pytest.approx(json.loads(Path("whole-m-deat/evaluation.json").read_text())["accuracy"])
    assert main(["report", "whole-m-deat", "--no-figures", "--out", "page"]) == 0
    assert f"{100 * older.accuracy['pgd-5']:.2f}" in Path("page/table.md").read_text()


def test_an_evaluation_cut_short_by_the_older_version_keeps_what_was_evaluated(capsys):
    judged = len(lines("cut-evaluation/.evaluation-rulings.jsonl"))
    asked = ["--attacks", "natural,fgsm,pgd-5", "--n", "120", "--block", "40"]
    assert main(["evaluate", "cut-evaluation", *OWN, *asked]) in (0, 6)
    assert judged
    assert not Path("cut-evaluation/.evaluation-rulings.jsonl").exists()
    both = [deat.load_evaluation(f"{run}/evaluation.json") for run in ("cut-evaluation", "whole-m-deat")]
    assert both[0].accuracy == pytest.approx(both[1].accuracy, abs=0.02)


def test_a_bench_cut_short_by_the_older_version_makes_the_same_table():
    assert main([*BENCH, *OWN, "--out", "bench-cut"]) in (0, 6)
    for run in ("m+deat-net.py-Net/seed-0", "pgd-2-net.py-Net/seed-0"):
        exact = json.loads(Path(f"bench-cut/{run}/run.json").read_text())["exact"]
        check_same_history(
            lines(f"bench-cut/{run}/history.jsonl"), lines(f"bench-whole/{run}/history.jsonl"), exact=exact
        )
    assert main(["report", "bench-cut", "bench-whole", "--no-figures", "--out", "page"]) == 0
    assert Path("page/index.html").is_file()
