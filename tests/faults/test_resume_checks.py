"""A run goes on as itself or not at all: another configuration, place, schema or code is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deat
from deat.checkpoint import store
from deat.checkpoint.store import find_newest_checkpoint
from deat.cli.main import main
from deat.errors import CheckpointError, UsageError
from deat.runs.record_files import read_record
from deat.training.checkpoints import Checkpoints, load_checkpoint
from deat.training.overfit_watch import OverfitWatch
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable

from .conftest import SHORT
from .test_saving import assert_same_run, saved

FIXTURES = Path(__file__).parent / "fixtures"


def rewrite_state(run: Path, change) -> None:
    """Change state.json of every checkpoint, with manifests that agree."""
    for path in store.list_checkpoints(run):
        files = {file.name: file.read_bytes() for file in path.iterdir() if file.name != store.MANIFEST_FILE}
        state = json.loads(files["state.json"])
        change(state)
        shutil.rmtree(path)
        store.write_checkpoint(run, path.name, {**files, "state.json": json.dumps(state).encode()})


CHANGED = {
    "eps": (["--eps", "0.2"], ["threat.eps: 0.15, now 0.2"]),
    "batch size": (["--batch-size", "128"], ["settings.batch_size: 256, now 128"]),
    "epochs": (["--epochs", "4"], ["settings.epochs: 3, now 4"]),
    "lr and seed": (["--lr", "0.1", "--seed", "1"], ["settings.lr: 0.05, now 0.1", "settings.seed: 0, now 1"]),
    "method": (["--method", "pgd-3"], ['method.name: "fgsm", now "pgd-3"']),
    "model": (["--model", "resnet18"], ['network: "small", now "resnet18"']),
    "watch": (["--watch", "warn"], ['watch: "none", now "warn"']),
}


@pytest.mark.promise("P18")
@pytest.mark.parametrize("change", CHANGED)
def test_changed_configuration_is_refused_with_a_readable_difference(change, unfinished, capsys):
    flags, words = CHANGED[change]
    before = {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}
    assert main([*SHORT, "--resume", "auto", *flags]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert before == {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}


@pytest.mark.promise("P18")
@pytest.mark.parametrize("flags", [["--workers", "1"], ["--test-images", "10"], ["--json"]])
def test_harmless_change_is_allowed_and_the_run_ends_in_the_same_bytes(flags, unfinished, whole):
    assert main([*SHORT, "--resume", "auto", *flags]) == 0
    assert_same_run(unfinished, whole)


SCORED = [*SHORT, "--epochs", "2", "--test-images", "60"]


@pytest.mark.promise("P14")
@pytest.mark.parametrize("command", [["resume", "run"], [*SCORED, "--resume", "auto"]])
def test_finished_run_says_so_shows_what_it_found_and_is_left_as_it_is(command, capsys):
    assert main(SCORED) == 0
    table = capsys.readouterr().out.split("accuracy on 60 test images")[1]
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "run is finished" in shown
    assert "epoch 2/2" in shown
    assert shown.endswith(table)
    assert "going on" not in shown
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_finished_run_is_one_json_document_with_its_scores(capsys):
    assert main(SCORED) == 0
    capsys.readouterr()
    assert main(["resume", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == json.loads(Path("run/scores.json").read_text())
    assert len(found["history"]) == 2


@pytest.mark.promise("P14")
@pytest.mark.parametrize("text", ["", "[]", "[1]", "{}", '[{"name": "x", "accuracy": 1, "images": 1, "backprops": 1}]'])
def test_scores_of_a_finished_run_that_cannot_be_read_are_made_again(text, capsys):
    assert main(SCORED) == 0
    whole = json.loads(Path("run/scores.json").read_text())
    Path("run/scores.json").write_text(text)
    assert main(["resume", "run"]) == 0
    assert "it is scored now" in capsys.readouterr().out
    again = json.loads(Path("run/scores.json").read_text())
    assert [score["accuracy"] for score in again] == [score["accuracy"] for score in whole]


def test_run_that_was_stopped_early_is_finished_too(monkeypatch, capsys):
    monkeypatch.setattr(OverfitWatch, "on_epoch", lambda self, trainer, *_: trainer.stop())
    assert main([*SHORT, "--watch", "stop"]) == 0
    assert len(Path("run/history.jsonl").read_text().splitlines()) == 1
    assert main(["resume", "run"]) == 0
    assert "run is finished" in capsys.readouterr().out


def test_gamma_of_an_m_plus_run_is_part_of_its_configuration(capsys):
    command = [*SHORT, "--method", "m+deat", "--epochs", "1"]
    assert main(command) == 0
    assert main([*command, "--resume", "auto", "--gamma", "1.5"]) == 2
    assert "method.schedule.gamma: 1.01, now 1.5" in capsys.readouterr().err


def test_edited_record_is_refused_by_what_the_checkpoint_says(unfinished, capsys):
    record = json.loads((unfinished / "run.json").read_text())
    record["request"]["eps"] = 0.3
    (unfinished / "run.json").write_text(json.dumps(record))
    assert main(["resume", "run"]) == 2
    assert "threat.eps: 0.15, now 0.3" in capsys.readouterr().err


class Labelled(torch.utils.data.Dataset):
    """A data set of one's own, read item by item."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], int(self.y[index])


def one_pixel_less(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone()
    x[7, 0, 3, 3] *= 0.5
    return x, y


SETS = {
    "pixels": (learnable(24), one_pixel_less(*learnable(24)), "data.content"),
    "labels": (learnable(24), (learnable(24)[0], learnable(24)[1].flip(0)), "data.content"),
    "a data set's labels": (Labelled(*learnable(24)), Labelled(learnable(24)[0], learnable(24)[1].flip(0)), "content"),
}


@pytest.mark.promise("P18")
@pytest.mark.parametrize("kind", SETS)
def test_python_training_does_not_go_on_with_other_data_of_the_same_size(kind):
    data, other, word = SETS[kind]
    keep_epoch(data)
    assert Checkpoints("kept").resume(trainer_of("fgsm", conv_net(), data=data, epochs=2))
    with pytest.raises(UsageError, match=word):
        Checkpoints("kept").resume(trainer_of("fgsm", conv_net(), data=other, epochs=2))


def test_python_training_does_not_go_on_with_other_held_out_data():
    val = learnable(8, seed=2)
    keep_epoch(learnable(24), val=val)
    with pytest.raises(UsageError, match="held_out_content"):
        Checkpoints("kept").resume(trainer_of("fgsm", conv_net(), val=one_pixel_less(*val), epochs=2))


def test_checkpoint_that_does_not_tell_its_data_resumes():
    keep_epoch(learnable(24))
    rewrite_state(Path("kept"), lambda state: state["config"]["data"].pop("content"))
    assert Checkpoints("kept").resume(trainer_of("fgsm", conv_net(), epochs=2))


def test_loader_in_another_order_resumes():
    def loader(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
        x, y = learnable(24)
        return [(x[part], y[part]) for part in order.split(8)]

    keep_epoch(loader(0))
    assert Checkpoints("kept").resume(trainer_of("fgsm", conv_net(), data=loader(1), epochs=2))


def keep_epoch(data: object, **options: object) -> None:
    """Train for an epoch of two, kept in kept/."""
    trainer = trainer_of("fgsm", conv_net(), data=data, epochs=2, **options)
    Checkpoints("kept").resume_or_start(trainer)
    trainer.checkpointer.on_train_begin(trainer)
    with trainer.session():
        trainer.run_epoch()
    trainer.checkpointer.save_if_due(trainer)


ELSEWHERE = {"threads": 4, "device": "cuda", "torch": "2.0.0", "processes": 8, "precision": "fp16", "cpu": "AVX3"}


@pytest.mark.promise("P19")
@pytest.mark.parametrize(("name", "value"), ELSEWHERE.items())
def test_other_device_version_or_number_of_processes_needs_consent_and_is_marked(name, value, unfinished, capsys):
    rewrite_state(unfinished, lambda state: state["environment"].update({name: value}))
    assert json.loads((unfinished / "run.json").read_text())["exact"] is True
    assert main(["resume", "run"]) == 2
    message = capsys.readouterr().err
    assert f"{name}: " in message
    assert "--inexact" in message
    assert main(["resume", "run", "--inexact"]) == 0
    record = json.loads((unfinished / "run.json").read_text())
    assert record["exact"] is False
    assert record["not_exact_because"]


def test_a_call_of_fit_resumes_elsewhere_with_the_consent_that_its_refusal_asks_for():
    def fit(**more: object) -> deat.TrainResult:
        options = {"method": "fgsm", "epochs": 2, "batch_size": 8, "progress": False}
        return deat.fit(conv_net(), learnable(24), checkpoints="kept", **options, **more)

    fit()
    shutil.rmtree(find_newest_checkpoint(Path("kept")).newest)
    rewrite_state(Path("kept"), lambda state: state["environment"].update(threads=4))
    with pytest.raises(UsageError, match=r"threads: .*\(inexact=True\)"):
        fit()
    assert len(fit(inexact=True).history) == 2


@pytest.mark.promise("P19")
def test_another_engine_that_gives_other_bits_needs_consent_and_is_marked(unfinished, capsys):
    assert main([*SHORT, "--resume", "auto", "--engine", "compile"]) == 2
    message = capsys.readouterr().err
    assert "compiled: false, now true" in message
    assert "--inexact" in message
    rewrite_state(unfinished, lambda state: state["environment"].update(compiled=True))
    assert main(["resume", "run"]) == 2
    assert main(["resume", "run", "--inexact"]) == 0
    assert json.loads((unfinished / "run.json").read_text())["exact"] is False


def test_eager_instead_of_the_usual_engine_is_harmless(unfinished, whole):
    assert main([*SHORT, "--resume", "auto", "--engine", "eager"]) == 0
    assert_same_run(unfinished, whole)


@pytest.mark.promise("P19")
def test_checkpoint_that_does_not_tell_its_processor_resumes(unfinished, whole):
    rewrite_state(unfinished, lambda state: [state["environment"].pop(name) for name in ("cpu", "compiled")])
    assert main(["resume", "run"]) == 0
    assert_same_run(unfinished, whole)


class Gpu:
    """Looks like one to whoever asks."""

    type, index = "cuda", 0


@pytest.mark.promise("P19")
@pytest.mark.parametrize(
    ("settings", "doubts"),
    [
        ({"deterministic": True}, []),
        ({"deterministic": True, "engine": "graph"}, []),
        ({"deterministic": True, "engine": "compile"}, ["--engine compile"]),
        ({"engine": "eager"}, ["without --deterministic"]),
        ({}, ["without --deterministic", "--engine auto, which may start to compile"]),
    ],
    ids=str,
)
def test_record_of_a_run_on_a_gpu_says_what_stands_against_exactness(settings, doubts, monkeypatch):
    from deat.training.resume_checks import collect_environment, list_inexactness_reasons

    trainer = trainer_of("fgsm", conv_net())
    trainer.config, trainer.engine.device = replace(trainer.config, **settings), Gpu()
    trainer.may_compile = not settings
    found = list_inexactness_reasons(trainer)
    assert len(found) == len(doubts)
    assert all(word in reason for word, reason in zip(doubts, found, strict=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert collect_environment(trainer)["gpu"] == "Some GPU"


@pytest.mark.promise("P20")
def test_newer_schema_is_refused_with_a_hint_to_upgrade(unfinished, capsys):
    rewrite_state(unfinished, lambda state: state.update(schema=99, versions={"deat": "9.0"}))
    assert main(["resume", "run"]) == 4
    message = capsys.readouterr().err
    assert "deat 9.0" in message
    assert "Upgrade" in message


BROKEN = {
    "no schema": lambda state: state.pop("schema"),
    "old schema": lambda state: state.update(schema=0),
    "text for a schema": lambda state: state.update(schema="1"),
    "no state": lambda state: state.pop("state"),
    "list for a state": lambda state: state.update(state=[]),
    "missing part": lambda state: state["state"].pop("cost"),
    "unknown kind": lambda state: state["state"].update(
        history=[{"$kind": "Popen", "fields": {"args": "touch marker"}}]
    ),
    "no tensor": lambda state: state["state"].update(model={"weight": {"$tensor": "nowhere"}}),
    "bad float": lambda state: state["state"].update(seconds={"$float": "__import__('os').mkdir('marker')"}),
    "float beyond all": lambda state: state["state"].update(seconds={"$float": "0x1p+2000"}),
    "number for a history": lambda state: state["state"].update(history=5),
    "number for a time": lambda state: state["state"]["callbacks"]["RunFolder-0"].update(timings=[5]),
    "number for the best": lambda state: state["state"].update(best=5),
    "path for the best": lambda state: state.update(best_checkpoint="../victim"),
    "list for the best": lambda state: state.update(best_checkpoint=[1]),
}


@pytest.mark.promise("P21", "P49")
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_state_that_is_none_is_one_clean_error(change, unfinished, capsys):
    rewrite_state(unfinished, change)
    assert main(["resume", "run"]) == 4, capsys.readouterr().err
    assert not Path("marker").exists()


@pytest.mark.parametrize("wrong", [{"test_images": "x"}, {"baseline": 5}, {"test_images": True}])
def test_options_of_a_record_that_no_command_gives_are_one_clean_error(wrong, unfinished, capsys):
    record = json.loads((unfinished / "run.json").read_text())
    record["options"].update(wrong)
    (unfinished / "run.json").write_text(json.dumps(record))
    assert main(["resume", "run"]) == 4
    assert f"options.{next(iter(wrong))} is" in capsys.readouterr().err


def part(**parts):
    return lambda state: state["state"].update(parts)


def first_epoch(**fields):
    return lambda state: [stats["fields"].update(fields) for stats in state["state"]["history"][:1]]


def optimizer(change):
    """A change of the optimiser's groups and of each weight's entries."""

    def changed(state):
        held = state["state"]["optimizer"]
        change(held["param_groups"][0], [entry for _, entry in held["state"]["$dict"]])

    return "optimizer", changed


NOT_GIVEN = {
    "a weight without its momentum": optimizer(lambda group, entries: entries[0].clear()),
    "momenta that are numbers": optimizer(lambda group, entries: [e.update(momentum_buffer=5) for e in entries]),
    "momenta of other weights": optimizer(lambda group, entries: entries[0].update(entries[1])),
    "momentum of text": optimizer(lambda group, entries: group.update(momentum="x")),
    "decay of nothing": optimizer(lambda group, entries: group.update(weight_decay=None)),
    "another optimiser": optimizer(lambda group, entries: group.update(betas=[0.9, 0.99])),
    "epoch": part(epoch=1.5),
    "step": part(step=-5),
    "step of text": ("step", part(step="x")),
    "step past the epoch": ("step", part(step=1000)),
    "stopping": part(stopping="no"),
    "seconds": part(seconds="x"),
    "seconds that are not finite": ("seconds", part(seconds={"$float": "nan"})),
    "schedule": part(schedule={}),
    "schedule of text": ("schedule", part(schedule={"k": 1, "threshold": "x"})),
    "schedule below zero": ("schedule", part(schedule={"k": -5, "threshold": None})),
    "lengths": part(lengths={"alpha": 0.1, "stretch": 0.1, "gamma": 2}),
    "cost": part(cost={"backprops": "x", "passes": 0}),
    "active": part(active=True),
    "val_passes": part(val_passes=None),
    "history": part(history=[]),
    "history of numbers": ("history", part(history=[5, 5])),
    "history of a text": ("k of a EpochStats", first_epoch(k="x")),
    "history of a truth": ("loss of a EpochStats", first_epoch(loss=True)),
    "best": part(best=5),
    "no best": ("best", part(best=None)),
    "rng": part(rng={"torch": 5, "starts": {"$tensor": "starts"}}),
    "callbacks": part(callbacks=5),
}


@pytest.mark.promise("P21")
@pytest.mark.parametrize("kind", NOT_GIVEN)
def test_part_of_a_state_that_no_training_gives_is_refused_by_name(kind, tmp_path):
    found = NOT_GIVEN[kind]
    word, change = found if isinstance(found, tuple) else (kind, found)
    trainer = trainer_of("m+deat", conv_net(), epochs=3)
    Checkpoints(tmp_path).resume_or_start(trainer)
    trainer.fit()
    rewrite_state(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"{word} (is|of)"):
        Checkpoints(tmp_path).resume(trainer_of("m+deat", conv_net(), epochs=3))


@pytest.mark.promise("P9")
@pytest.mark.parametrize("name", ["delta", "callbacks"])
def test_files_that_a_manifest_does_not_name_are_not_looked_at(name, tmp_path):
    trainer = trainer_of("m+deat", conv_net(), epochs=3)
    Checkpoints(tmp_path / "kept").resume_or_start(trainer)
    trainer.fit()
    stray = find_newest_checkpoint(tmp_path / "kept").newest / f"{name}.safetensors"
    assert not stray.exists()
    (tmp_path / "secret").write_text("not to be read")
    stray.symlink_to(tmp_path / "secret")
    again = trainer_of("m+deat", conv_net(), epochs=3)
    assert Checkpoints(tmp_path / "kept").resume(again)
    assert again.history == trainer.history


@pytest.mark.promise("P21")
@pytest.mark.parametrize("wrong", [{"events": [5]}, {"standing": "x"}, {"healthy": 5}, {"seconds": "x"}])
def test_watch_restores_its_own_state_alone(wrong):
    watch = OverfitWatch(trainer_of("fgsm", val=learnable()).val, deat.Linf(0.1))
    with pytest.raises((TypeError, ValueError)):
        watch.load_state_dict({**watch.state_dict(), **wrong})


@pytest.mark.promise("P20")
@pytest.mark.parametrize("schema", sorted(path.name for path in FIXTURES.iterdir()))
def test_checkpoints_of_every_release_still_load(schema, tmp_path):
    shutil.copytree(FIXTURES / schema, tmp_path / "kept")
    trainer = trainer_of("m+deat", conv_net(), epochs=3)
    keeper = Checkpoints(tmp_path / "kept")
    state = load_checkpoint(find_newest_checkpoint(tmp_path / "kept").newest)["state"]
    rewrite_state(tmp_path / "kept", lambda found: found["environment"].update(keeper_environment(trainer)))
    assert keeper.resume(trainer)
    assert (trainer.epoch, trainer.schedule_state["k"]) == (state["epoch"], state["schedule"]["k"]) == (2, 1)
    trainer.fit()
    assert len(trainer.history) == 3


def keeper_environment(trainer) -> dict[str, object]:
    from deat.training.resume_checks import collect_environment

    return collect_environment(trainer)


@pytest.mark.promise("P22")
def test_missing_random_states_are_refused(unfinished, capsys):
    for path in store.list_checkpoints(unfinished):
        (path / "rng.safetensors").unlink()
    assert main(["resume", "run"]) == 4
    assert "rng.safetensors" in capsys.readouterr().err


@pytest.mark.promise("P23")
def test_weights_that_are_not_finite_are_refused(tmp_path):
    from deat.utils.safetensors_files import encode_tensors, read_tensors

    saved(tmp_path, epochs=1)
    path = tmp_path / "ckpt-000001"
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name != store.MANIFEST_FILE}
    weights = read_tensors(path / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    shutil.rmtree(path)
    store.write_checkpoint(tmp_path, path.name, {**files, "model.safetensors": encode_tensors(weights)})
    with pytest.raises(CheckpointError, match="not finite"):
        Checkpoints(tmp_path).resume(trainer_of("fgsm", conv_net(batch_norm=True), epochs=1))


MINE = """import deat
from pathlib import Path
from torch import nn
from deat.attack_schedules import Fixed
Path("ran").touch()
TWO = deat.Method("two", deat.Craft(), Fixed(k=2, alpha_eps=0.5))
class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.mark.promise("P55")
@pytest.mark.parametrize("what", ["method", "model"])
def test_code_is_run_on_the_user_s_word_alone_and_must_be_the_same(what, monkeypatch, capsys):
    Path("mine.py").write_text(MINE)
    spec = "mine.py:TWO" if what == "method" else "mine.py:Net"
    command = [*SHORT, f"--{what}", spec]
    assert main(command) == 0
    shutil.rmtree(find_newest_checkpoint(Path("run")).newest)
    Path("run/report.md").unlink()
    Path("ran").unlink()
    assert main(["resume", "run"]) == 2
    assert f"--{what} {spec}" in capsys.readouterr().err
    assert not Path("ran").exists()
    Path("mine.py").write_text(MINE + "# changed\n")
    assert main(["resume", "run", f"--{what}", spec]) == 2
    assert f"code.{what}" in capsys.readouterr().err
    Path("mine.py").write_text(MINE)
    assert main(["resume", "run", f"--{what}", spec]) == 0


@pytest.mark.promise("P55")
def test_checkpoint_that_names_a_module_imports_nothing(unfinished):
    Path("evil.py").write_text("from pathlib import Path\nPath('marker').touch()\nX = None\n")
    record = json.loads((unfinished / "run.json").read_text())
    record["request"]["method"] = record["model"]["name"] = record["request"]["model"] = "evil.py:X"
    (unfinished / "run.json").write_text(json.dumps(record))
    assert main(["resume", "run"]) == 2
    assert main(["evaluate", "run"]) == 2
    assert not Path("marker").exists()


def test_auto_starts_a_run_where_there_is_none_and_resumes_where_there_is(whole, capsys):
    assert main([*SHORT, "--resume", "auto"]) == 0
    assert_same_run(Path("run"), whole)
    assert main([*SHORT, "--resume", "auto"]) == 0
    assert_same_run(Path("run"), whole)
    assert main([*SHORT[:-2], "--resume", "auto"]) == 2
    assert "--out" in capsys.readouterr().err


def test_folder_that_is_no_run_is_refused(capsys):
    Path("run").mkdir()
    assert main(["resume", "run"]) == 4
    assert main(["resume", "nowhere"]) == 4
    Path("run/thesis.txt").write_text("years of work")
    assert main([*SHORT, "--resume", "auto"]) == 2


def test_records_without_checkpoints_are_left_alone(unfinished, capsys):
    for path in store.list_checkpoints(unfinished):
        shutil.rmtree(path)
    before = (unfinished / "history.jsonl").read_bytes()
    assert main(["resume", "run"]) == 4
    assert main([*SHORT, "--resume", "auto"]) == 4
    assert "no checkpoint" in capsys.readouterr().err
    assert (unfinished / "history.jsonl").read_bytes() == before


def test_folder_of_a_run_killed_before_it_was_written_down_is_used(whole):
    Path("run").mkdir()
    Path("run/.run.json.0a1b2c3d.tmp").write_text("{")
    assert main([*SHORT, "--resume", "auto"]) == 0
    assert_same_run(Path("run"), whole)
    assert not list(Path("run").glob(".*"))


def test_finished_run_that_is_resumed_trains_no_more(unfinished, whole, monkeypatch):
    from deat.training.trainer import Trainer

    assert main(["resume", "run"]) == 0
    monkeypatch.setattr(Trainer, "run_epoch", None)
    assert main(["resume", "run"]) == 0
    assert_same_run(unfinished, whole)


HOSTILE = {
    "not JSON": "{",
    "a list": "[]",
    "nothing": "{}",
    "request a list": '{"request": [], "threat": {"norm": "linf", "eps": 0.1}, "model": {"name": "small"}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("command", ["resume", "evaluate"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_record_is_one_clean_error(text, command, unfinished, capsys):
    (unfinished / "run.json").write_text(text)
    assert main([command, "run"]) == 4
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_record_is_no_run_to_go_on_with_by_train(text, unfinished, capsys):
    (unfinished / "run.json").write_text(text)
    assert main([*SHORT, "--resume", "auto"]) == 2
    assert "Traceback" not in capsys.readouterr().err


TYPES = [
    ("request", "data", 5),
    ("request", "method", ["m+deat"]),
    ("request", "eps", "0.1"),
    ("request", "persistent", "yes"),
    ("settings", "epochs", "3"),
    ("settings", "milestones", [1, None]),
    pytest.param("settings", "lr", 10**400, id="settings-lr-huge"),
    ("settings", "val_attack", 5),
    ("threat", None, None),
    ("threat", "eps", "__import__('os')"),
    ("model", "name", None),
    ("model", None, "small"),
    ("options", None, 7),
]


@pytest.mark.parametrize("command", ["resume", "evaluate"])
@pytest.mark.parametrize(("part", "name", "value"), TYPES)
def test_record_with_a_value_of_another_kind_is_one_clean_error(part, name, value, command, unfinished, capsys):
    record = json.loads((unfinished / "run.json").read_text())
    if name is None:
        record[part] = value
    else:
        record[part][name] = value
    (unfinished / "run.json").write_text(json.dumps(record))
    assert main([command, "run"]) == 4, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


def test_record_gives_its_lists_back_as_they_were_and_what_a_later_deat_added_is_left(unfinished):
    record = json.loads((unfinished / "run.json").read_text())
    record["settings"] |= {"milestones": [2, 3], "novelty": 1}
    record["request"]["novelty"] = 1
    (unfinished / "run.json").write_text(json.dumps(record))
    found = read_record(unfinished)
    assert found.config.milestones == (2, 3)
    assert (found.request.data, found.config.epochs) == ("digits", 3)


def test_unfinished_run_is_evaluated_with_a_remark(unfinished, capsys):
    assert main(["evaluate", "run", "--attacks", "natural", "--n", "20"]) == 0
    assert "not finished" in capsys.readouterr().err
