"""Model cards, shared folders, the Hub's stand-in, and RobustBench's file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deat
from deat.cli.main import main
from deat.errors import CheckpointError, DataError, UsageError
from deat.evaluation.attack_registry import describe_attack, get_attack
from deat.evaluation.results import AttackResult, Evaluation
from deat.evaluation.sanity import Flag
from deat.report.model_card import render_model_card
from deat.report.robustbench_claim import Publication, make_robustbench_claim
from helpers.hub_server import TOKEN, serve_hub

LAST = ["--epoch", "last"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    command = ["train", "--epochs", "2", "--method", "fgsm", "--normalize", "data"]
    command += ["--out", str(folder), "--baseline", "no", "--val-attack", "none", "--test-images", "0"]
    assert main([*command, "--watch", "none"]) == 0
    main(["evaluate", str(folder), "--attacks", "natural,pgd-5", "--n", "100", *LAST])
    return folder


def images() -> torch.Tensor:
    return deat.load_data("digits").test.images[:20].float() / 255


def test_a_card_has_the_numbers_of_the_run_and_a_header_that_the_hub_reads(run):
    cards = pytest.importorskip("huggingface_hub")
    text = render_model_card(run, repo="you/digits", license="mit", epoch="last")
    evaluation = deat.load_evaluation(run / "evaluation.json")
    card = cards.ModelCard(text)
    assert card.data.license == "mit"
    assert card.data.library_name == "deat"
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert len(found) == 3
    for name, share in evaluation.accuracy.items():
        low, high = evaluation.intervals[name]
        row = f"| {'worst of all' if name == 'worst' else name} | {share:.2%} | {low:.2%} to {high:.2%} |"
        assert row in text
        assert pytest.approx(100 * share, abs=0.005) in found.values()
    history = deat.load_run(run, epoch="last").history
    for told in (f"{history[-1].backprops:,} backprops", "eps 0.15", "a sample of 400", "No AutoAttack", "last epoch"):
        assert told in text


def test_a_card_tells_flags_and_does_not_call_a_network_robust_that_nothing_attacked(run, tmp_path):
    deat.save_pretrained(run, "shared", epoch="last")
    evaluation = deat.load_evaluation("shared/evaluation.json")
    replace(evaluation, flags=[Flag("weak-attack", "seen [this]", "do | that")]).save("shared/evaluation.json")
    text = render_model_card(Path("shared"))
    assert r"Flag weak-attack: seen \[this\]. do \| that" in text
    natural = replace(evaluation, results=evaluation.results[:1])
    natural.save("shared/evaluation.json")
    text = render_model_card(Path("shared"))
    assert "worst" not in text
    assert "Its robustness was not evaluated" in text
    Path("shared/evaluation.json").unlink()
    assert "Not evaluated" in render_model_card(Path("shared"))


def test_the_card_command_writes_a_new_file_and_replaces_none(run, capsys):
    assert main(["card", str(run), *LAST]) == 0
    text = capsys.readouterr().out
    assert main(["card", str(run), *LAST, "--out", "README.md"]) == 0
    assert Path("README.md").read_text() == text
    assert main(["card", str(run), "--out", "README.md"]) == 2
    assert main(["card", str(run), "--license", "my own!"]) == 2
    assert main(["card", "nothing"]) == 4


def test_a_shared_folder_is_a_run_of_every_command_and_answers_as_the_run(run, capsys):
    assert main(["push", str(run), "./shared", *LAST]) == 0
    assert main(["pull", "./shared", "--out", "pulled"]) == 0
    expected = deat.load_run(run, epoch="last", device="cpu").model(images())
    for folder in ("shared", "pulled"):
        assert torch.equal(deat.from_pretrained(f"./{folder}", device="cpu").model(images()), expected)
    assert {file.name for file in Path("shared").iterdir()} == {file.name for file in Path("pulled").iterdir()}
    assert not [file for file in Path("shared").iterdir() if file.name.startswith(("best", "last", "ckpt"))]
    main(["evaluate", "pulled", "--attacks", "natural,pgd-5", "--n", "100", *LAST])
    assert (
        deat.load_evaluation("pulled/evaluation.json").accuracy
        == deat.load_evaluation(run / "evaluation.json").accuracy
    )
    assert main(["export", "pulled", "--out", "a.safetensors", *LAST]) == 0
    capsys.readouterr()
    assert main(["export", "pulled", "--out", "b.safetensors"]) == 4  # the best epoch's are not in it
    assert "no best weights" in capsys.readouterr().err


def test_a_shared_folder_appears_whole_or_not_at_all(run):
    Path("full").mkdir()
    Path("full/file").touch()
    for folder in ("full", "full/file"):
        with pytest.raises(UsageError, match="exists already"):
            deat.save_pretrained(run, folder, epoch="last")
    deat.save_pretrained(run, "shared", epoch="last")
    with pytest.raises(CheckpointError, match="no best weights"):
        deat.save_pretrained("shared", "again")
    weights = bytearray(Path("shared/model.safetensors").read_bytes())
    weights[-1] ^= 1
    Path("shared/model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError):
        deat.pull_from_hub("./shared", "pulled")
    Path("shared/run.json").unlink()
    with pytest.raises(CheckpointError, match=r"no run\.json"):
        deat.pull_from_hub("./shared", "pulled")
    assert sorted(path.name for path in Path().iterdir()) == ["full", "shared"]


@pytest.mark.parametrize("repo", ["name", "a/b/c", "a b/c", "-a/b", "../up", "a/b?x=1"])
def test_a_name_that_is_no_repository_is_refused(repo, run):
    with pytest.raises((UsageError, CheckpointError)):
        deat.from_pretrained(repo)
    with pytest.raises(UsageError):
        deat.push_to_hub(run, repo)


SCRIPT = """
import json, os, sys
os.environ.update(json.loads(sys.argv[1]))
import deat
from deat.cli.main import main

run = sys.argv[2]
statuses = [main(["push", run, "me/digits", "--epoch", "last", "--license", "mit"]), main(["pull", "me/digits"])]
statuses += [main(["pull", "me/digits", "--out", "other", "--revision", "v9"]), main(["pull", "me/nothing"])]
same = deat.from_pretrained("me/digits", device="cpu").history == deat.load_run(run, epoch="last").history
statuses += [main(["push", run, "me/written", "--epoch", "last"]), main(["push", run, "me/old", "--replace-card"])]
os.environ["HF_TOKEN"] = "wrong"
statuses.append(main(["push", run, "me/digits", "--epoch", "last"]))
json.dump([statuses, same], open("found.json", "w"))
"""


def test_a_run_is_pushed_to_and_pulled_from_a_hub(run, children, tmp_path):
    pytest.importorskip("huggingface_hub")
    Path("script.py").write_text(SCRIPT)
    with serve_hub() as hub:
        hub.repos["me/written"], hub.repos["me/old"] = {"README.md": b"by hand"}, {"README.md": b"by hand"}
        settings = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        assert children.run_script(Path("script.py"), json.dumps(settings), str(run), cwd=tmp_path) == 0
        assert json.loads(Path("found.json").read_text()) == [[0, 0, 4, 4, 0, 0, 4], True]
        assert hub.private["me/digits"] is True
        assert hub.repos["me/written"]["README.md"] == b"by hand"
        assert b"library_name: deat" in hub.repos["me/old"]["README.md"]
        assert "model.safetensors" in hub.repos["me/written"]
        hub.repos["me/digits"]["code.py"] = b"raise SystemExit"
        files = hub.repos["me/digits"]
    assert {file.name for file in Path("digits").iterdir()} == files.keys() - {"code.py"}
    assert all(Path("digits", name).read_bytes() == data for name, data in files.items() if name != "code.py")
    errors = Path("err").read_text()
    assert "no such revision" in errors
    assert "no such repository" in errors
    assert "hf auth login" in errors
    assert TOKEN not in errors


def test_without_a_network_the_error_says_so(run, children, tmp_path):
    pytest.importorskip("huggingface_hub")
    Path("script.py").write_text(SCRIPT)
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    assert children.run_script(Path("script.py"), json.dumps(settings), str(run), cwd=tmp_path) == 1
    assert "Is the network reachable?" in Path("err").read_text()


PAPER = Publication("Steps-that adapt", "Fu Wang, Ann Lee and Bo Chu", 2026, "https://example.org/paper")


def robust_evaluation(data: str = "cifar10", count: int = 10_000, eps: float = 8 / 255, **settings: Any) -> Evaluation:
    """What `deat evaluate --attacks natural,aa` writes on CIFAR-10's test images."""
    threat = deat.Linf(eps)
    results = [
        AttackResult(name, [i < share for i in range(count)], 0, 1.0, 1, 1)
        for name, share in (("natural", 8251), ("aa", 4870))
    ]
    about = {"data": data, "epoch": "best", "weights": "w", "model": "preact_resnet18"}
    told = {
        "threat": threat.describe(),
        "attacks": {name: describe_attack(get_attack(name), threat, 10) for name in ("natural", "aa")},
        "about": about,
        "seed": 0,
        "block": 500,
        "cascade": False,
        "sample": count < 10_000,
        "available": 10_000,
    }
    return Evaluation(results, [0] * count, [str(i) for i in range(10)], {**told, **settings})


def test_a_robustbench_claim_has_the_leaderboards_keys_and_place(run, capsys):
    deat.save_pretrained(run, "shared", epoch="last")
    robust_evaluation().save("shared/evaluation.json")
    record = json.loads(Path("shared/run.json").read_text())
    record["model"]["name"] = "preact_resnet18"
    Path("shared/run.json").write_text(json.dumps(record))
    command = ["claim", "shared", "--title", PAPER.title, "--authors", PAPER.authors, "--link", PAPER.link]
    assert main([*command, "--year", "2026", "--venue", "ICML 2026", "--footnote", "A note."]) == 0
    claim = json.loads(Path("model_info/cifar10/Linf/Wang2026Steps.json").read_text())
    assert claim == {
        "link": PAPER.link,
        "name": PAPER.title,
        "authors": PAPER.authors,
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": "cifar10",
        "venue": "ICML 2026",
        "architecture": "PreActResNet-18",
        "eps": "8/255",
        "clean_acc": "82.51",
        "reported": "48.70",
        "autoattack_acc": "48.70",
        "footnote": "A note.",
    }
    assert main([*command, "--year", "2026"]) == 2  # it exists
    assert main(command) == 2
    assert "--year missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("evaluation", "reason"),
    [
        (robust_evaluation(count=1000), "1,000 images"),
        (robust_evaluation(eps=4 / 255), "eps is 4/255"),
        (robust_evaluation(data="digits"), "no leaderboard"),
        (robust_evaluation(attacks={"natural": {}}), "AutoAttack"),
        (robust_evaluation(attacks={"natural": {}, "aa": {"standard": False}}), "not the standard"),
    ],
    ids=["sample", "radius", "data", "no AutoAttack", "other AutoAttack"],
)
def test_a_claim_without_what_the_leaderboard_asks_for_is_refused_and_says_why(evaluation, reason, run):
    deat.save_pretrained(run, "shared", epoch="last")
    evaluation.save("shared/evaluation.json")
    with pytest.raises(DataError, match=reason):
        make_robustbench_claim(Path("shared"), PAPER)
