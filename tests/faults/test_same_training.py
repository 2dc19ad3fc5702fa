"""What a training began with is compared when it goes on: what was done to its images, its weights, its code."""

from pathlib import Path

import pytest

import deat
from deat.cli import main
from deat.data import decoded
from deat.errors import UsageError
from helpers.data_sets import tree, write_folder
from helpers.nets import conv_net, learnable

from .test_going_on import rewrite_state

COMMAND = """train --data folder:photos --data-root cache --model small --method fgsm --epochs 1 --batch-size 4
--held-out 0 --test-images 0 --baseline no --threads 1 --workers 0 --size 8 --out run"""
PHOTOS = COMMAND.split()


def fit(**more: object) -> deat.Result:
    """A short training whose checkpoints are kept."""
    options = {"method": "fgsm", "epochs": 2, "batch_size": 8, "progress": False, "checkpoints": "kept"}
    return deat.fit(conv_net(), learnable(24), **{**options, **more})


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


def test_checkpoint_that_does_not_tell_its_augmentation_goes_on():
    fit(augment=deat.Augment(4))
    rewrite_state(Path("kept"), lambda state: state["config"]["data"].pop("augment"))
    assert fit().history


@pytest.mark.parametrize("streamed", [False, True], ids=["in memory", "streamed"])
def test_run_without_the_augmentation_that_it_began_with_is_refused(streamed, monkeypatch, capsys):
    if streamed:
        monkeypatch.setattr(decoded, "decode", lambda *_: None)
    write_folder(Path("photos"), tree(8))
    assert main(PHOTOS) == 0
    record = Path("run/run.json").read_text()
    assert main([*PHOTOS, "--resume", "auto", "--augment", "none"]) == 2
    assert "data.augment: " in (told := capsys.readouterr().err)
    assert 'now "none"' in told
    assert Path("run/run.json").read_text() == record
    assert main([*PHOTOS, "--resume", "auto"]) == 0
