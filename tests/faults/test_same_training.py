"""What a training began with is compared when it goes on: what was done to its images, its weights, its code."""

import json
import re
import shutil
from pathlib import Path

import pytest

import deat
from deat.checkpoint.store import find_newest_checkpoint
from deat.cli.main import main
from deat.data import image_folder
from deat.errors import UsageError
from helpers.data_sets import png, tree, write_folder
from helpers.nets import conv_net, learnable, seeded

from .conftest import SHORT
from .test_resume_checks import rewrite_state

COMMAND = """train --data folder:photos --data-root cache --model small --method fgsm --epochs 1 --batch-size 4
--held-out 0 --test-images 0 --baseline no --threads 1 --workers 0 --size 8 --out run"""
PHOTOS = COMMAND.split()


def fit(**more: object) -> deat.TrainResult:
    """A short training whose checkpoints are kept."""
    options = {"method": "fgsm", "epochs": 2, "batch_size": 8, "progress": False, "checkpoints": "kept"}
    return deat.fit(conv_net(), learnable(24), **{**options, **more})


@pytest.mark.parametrize("place", ["photos", Path("photos"), ".", ""], ids=repr)
def test_folder_that_holds_other_things_is_not_used_for_checkpoints(place):
    Path("photos").mkdir()
    Path("photos/cat.png").write_bytes(b"a cat")
    with pytest.raises(UsageError, match=r"holds other things than checkpoints, such as|names no folder"):
        fit(checkpoints=place)
    assert sorted(map(str, Path().rglob("*"))) == ["photos", "photos/cat.png"]


@pytest.mark.parametrize("held", [[], ["lock"], [".gitignore"], [".tmp-0123456789abcdef", ".DS_Store"]], ids=str)
def test_folder_that_holds_nothing_of_anybody_s_is_used_for_checkpoints(held):
    Path("kept").mkdir()
    for name in held:
        Path("kept", name).touch()
    assert len(fit().history) == 2


def test_folder_of_checkpoints_may_hold_what_was_put_beside_them():
    fit()
    Path("kept/notes.txt").write_text("the best one yet")
    assert len(fit().history) == 2


AUGMENTED = {
    "crops no more": (deat.Augment(4), None, r'data\.augment: "Augment\(pad=4, flip=True\)", now "none"'),
    "wider crops": (deat.Augment(4), deat.Augment(8), r'data\.augment: "Augment\(pad=4, .*now "Augment\(pad=8, '),
    "crops at last": (None, deat.Augment(4), r'data\.augment: "none", now "Augment\('),
}


@pytest.mark.parametrize("change", AUGMENTED)
def test_call_of_fit_with_another_augmentation_is_refused(change):
    before, now, words = AUGMENTED[change]
    fit(augment=before)
    with pytest.raises(UsageError, match=words):
        fit(augment=now)


def test_checkpoint_that_does_not_tell_its_augmentation_resumes():
    fit(augment=deat.Augment(4))
    rewrite_state(Path("kept"), lambda state: state["config"]["data"].pop("augment"))
    assert fit().history


@pytest.mark.parametrize("streamed", [False, True], ids=["in memory", "streamed"])
def test_run_without_the_augmentation_that_it_began_with_is_refused(streamed, monkeypatch, capsys):
    if streamed:
        monkeypatch.setattr(image_folder, "decode_splits", lambda *_: None)
    write_folder(Path("photos"), tree(8))
    assert main(PHOTOS) == 0
    record = Path("run/run.json").read_text()
    assert main([*PHOTOS, "--resume", "auto", "--augment", "none"]) == 2
    assert "data.augment: " in (told := capsys.readouterr().err)
    assert 'now "none"' in told
    assert Path("run/run.json").read_text() == record
    assert main([*PHOTOS, "--resume", "auto"]) == 0


@pytest.fixture
def fine_tuned(capsys) -> list[str]:
    """The command of an unfinished run that began with weights of nat.safetensors, beside others."""
    for seed, name in enumerate(("nat", "other")):
        net = seeded(lambda: deat.build_model("small", num_classes=10, in_channels=1, image_size=8), seed)
        deat.save_weights(net, f"{name}.safetensors")
    command = [*SHORT, "--resume", "auto", "--lr", "0.01"]
    assert main([*command, "--init", "nat.safetensors"]) == 0
    assert "starting from nat.safetensors" in capsys.readouterr().out
    shutil.rmtree(find_newest_checkpoint(Path("run")).newest)
    Path("run/report.md").unlink()
    return command


@pytest.mark.parametrize("other", [["--init", "other.safetensors"], []], ids=["others", "none"])
def test_run_that_began_with_other_weights_is_refused_with_both_names(other, fine_tuned, capsys):
    assert main([*fine_tuned, *other]) == 2
    now = '"other.safetensors"' if other else "none"
    told = capsys.readouterr()
    assert f'init: "nat.safetensors", now {now}' in told.err
    assert "starting from" not in told.out
    assert main([*fine_tuned, "--init", str(Path("nat.safetensors").resolve())]) == 0
    told = capsys.readouterr().out
    assert "resuming run at epoch 3" in told
    assert "starting from" not in told


def test_weights_that_a_run_began_with_are_not_needed_to_go_on_and_stay_recorded(fine_tuned):
    rewrite_state(Path("run"), lambda state: state["environment"].update(threads=4))
    Path("nat.safetensors").unlink()
    assert main(["resume", "run", "--inexact"]) == 0
    assert json.loads(Path("run/run.json").read_text())["request"]["init"] == "nat.safetensors"
    assert main([*fine_tuned, "--init", "nat.safetensors", "--inexact"]) == 0


def rewrite_record(**change: object) -> None:
    """Change what the run's record says."""
    file = Path("run/run.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def baseline() -> dict[str, float]:
    """What natural training reached beside the run."""
    return {row["name"]: row for row in json.loads(Path("run/scores.json").read_text())}["natural training"]["accuracy"]


def test_baseline_starts_from_the_same_weights_whichever_command_resumes(fine_tuned):
    rewrite_record(options={"test_images": 100, "baseline": "yes"})
    shutil.copytree("run", "copy")
    auto = [*fine_tuned, "--init", "nat.safetensors", "--baseline", "yes", "--test-images", "100"]
    assert main(auto) == 0
    found = baseline()
    shutil.rmtree("run")
    assert main(auto) == 0, "it begins anew"
    assert baseline() == found
    shutil.rmtree("run")
    shutil.move("copy", "run")
    assert main(["resume", "run"]) == 0
    assert baseline() == found


@pytest.mark.promise("P18")
@pytest.mark.parametrize("way", ["resume", "auto"])
def test_run_does_not_go_on_with_weights_that_changed_since_it_began(way, fine_tuned, capsys):
    command = ["resume", "run"] if way == "resume" else [*fine_tuned, "--init", "nat.safetensors"]
    rewrite_record(options={"test_images": 0, "baseline": "yes" if way == "resume" else "no"})
    shutil.copy("nat.safetensors", "first.safetensors")
    shutil.copy("other.safetensors", "nat.safetensors")
    record = Path("run/run.json").read_bytes()
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "'nat.safetensors' holds other weights than the run in 'run' began with. Put those back" in told
    assert Path("run/run.json").read_bytes() == record
    shutil.copy("first.safetensors", "nat.safetensors")
    assert main(command) == 0


def test_run_without_a_baseline_resumes_by_resume_whatever_became_of_its_first_weights(fine_tuned):
    shutil.copy("other.safetensors", "nat.safetensors")
    assert main(["resume", "run"]) == 0


@pytest.mark.parametrize("way", ["resume", "auto"])
def test_run_resumes_while_the_folder_it_began_with_holds_no_weights(way, fine_tuned):
    Path("nat.safetensors").unlink()
    Path("nat.safetensors").mkdir()
    assert main(["resume", "run"] if way == "resume" else [*fine_tuned, "--init", "nat.safetensors"]) == 0


def test_finished_run_with_a_baseline_is_shown_again_without_the_weights_it_began_with(fine_tuned, capsys):
    rewrite_record(options={"test_images": 20, "baseline": "yes"})
    assert main(["resume", "run"]) == 0
    Path("nat.safetensors").unlink()
    capsys.readouterr()
    assert main(["resume", "run"]) == 0
    assert "natural training" in capsys.readouterr().out


def test_record_without_a_hash_of_its_first_weights_resumes(fine_tuned):
    assert len(json.loads(Path("run/run.json").read_text())["digest_of_init"]) == 64
    rewrite_record(digest_of_init=None)
    shutil.copy("other.safetensors", "nat.safetensors")
    assert main([*fine_tuned, "--init", "nat.safetensors"]) == 0


def test_weights_that_the_baseline_will_start_from_are_missed_before_training_continues(fine_tuned, capsys):
    Path("nat.safetensors").unlink()
    kept = find_newest_checkpoint(Path("run")).newest
    assert main([*fine_tuned, "--init", "nat.safetensors", "--baseline", "yes"]) == 4
    assert "no weights at nat.safetensors" in (told := capsys.readouterr().err)
    assert "--resume auto --baseline no" in told
    assert find_newest_checkpoint(Path("run")).newest == kept
    assert main([*fine_tuned, "--init", "nat.safetensors", "--baseline", "no"]) == 0


def test_more_epochs_are_refused_with_what_trains_further(capsys):
    short = [*SHORT, "--epochs", "1"]
    assert main(short) == 0
    assert main([*short, "--resume", "auto", "--epochs", "2"]) == 2
    assert "--init RUN with another --out" in capsys.readouterr().err
    assert main([*SHORT[:-1], "further", "--init", "run", "--epochs", "2"]) == 0
    model = fit().model
    with pytest.raises(UsageError, match=r"settings\.epochs: 2, now 3\..* fit with the trained model and another"):
        fit(epochs=3)
    with pytest.raises(UsageError, match=r"start a new run\.$"):
        fit(lr=0.01)
    assert deat.fit(model, learnable(24), epochs=1, batch_size=8, progress=False, checkpoints="further-on").history


MINE = """from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
"""


def test_file_that_was_edited_since_is_named_without_its_hash(capsys):
    Path("mine.py").write_text(MINE)
    command = [*SHORT, "--epochs", "1", "--model", "mine.py:Net"]
    assert main(command) == 0
    Path("mine.py").write_text(f"{MINE}# changed\n")
    assert main([*command, "--resume", "auto"]) == 2
    told = capsys.readouterr().err
    assert "code.model: the file of mine.py:Net has changed" in told
    assert not re.search(r"[0-9a-f]{16}", told)


def test_other_data_are_reported_with_their_counts_and_without_their_hashes():
    x, y = learnable(24)
    kept = {"method": "fgsm", "epochs": 1, "batch_size": 8, "progress": False, "checkpoints": "kept"}
    deat.fit(conv_net(), (x, y), **kept)
    for other, now in ((y.flip(0), 24), (y[:16], 16)):
        with pytest.raises(UsageError) as refused:
            deat.fit(conv_net(), (x[: len(other)], other), **kept)
        told = f"data.content: other training images or labels than before (24 then, {now} now)"
        assert told in str(refused.value)
        assert not re.search(r"[0-9a-f]{16}", str(refused.value))


@pytest.mark.parametrize("way", ["resume", "auto"])
def test_run_resumes_with_the_images_it_held_out_where_a_val_folder_came_since(way):
    write_folder(Path("photos"), tree(8) | {"test/cat/0.png": png(seed=77), "test/dog/0.png": png(seed=78)})
    command = [*COMMAND.replace("--held-out 0", "--val-attack pgd-1").split(), "--epochs", "2"]
    assert main(command) == 0
    data, history = json.loads(Path("run/run.json").read_text())["data"], Path("run/history.jsonl").read_bytes()
    assert data["held_out"]
    shutil.rmtree(find_newest_checkpoint(Path("run")).newest)
    Path("run/report.md").unlink()
    write_folder(Path("photos"), {"val/cat/0.png": png(seed=97), "val/dog/0.png": png(seed=98)})
    assert main(["resume", "run"] if way == "resume" else [*command, "--resume", "auto"]) == 0
    assert Path("run/history.jsonl").read_bytes() == history
    assert json.loads(Path("run/run.json").read_text())["data"] == data


def test_images_of_a_folder_that_were_replaced_are_reported_once(capsys):
    write_folder(Path("photos"), tree(8))
    assert main(PHOTOS) == 0
    write_folder(Path("photos"), {"train/cat/0.png": png(seed=99)})
    assert main([*PHOTOS, "--resume", "auto"]) == 2
    told = capsys.readouterr().err
    assert told.count("images or labels") == 1
    assert not re.search(r"[0-9a-f]{16}", told)
