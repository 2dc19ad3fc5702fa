"""A save cut short, or a damaged checkpoint, never costs more than what came after the last whole one."""

import errno
import json
import os
import platform
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from deat.checkpoint import store
from deat.checkpoint.store import find_newest_checkpoint, verify_checkpoint
from deat.cli.main import main
from deat.errors import BusyError, CheckpointError, Interrupted
from deat.runs.run_dir import RunFolder
from deat.training.checkpoints import Checkpoints
from deat.utils.file_locks import LOCK_FILE_NAME, lock_run_folder
from helpers.games import trainer_of
from helpers.locks import remove_locks
from helpers.nets import conv_net

from .conftest import SHORT

SAME = ("history.jsonl", "best/model.safetensors", "last/model.safetensors")


def assert_same_run(found: Path, whole: Path) -> None:
    for name in SAME:
        assert (found / name).read_bytes() == (whole / name).read_bytes(), name
    ours, theirs = (find_newest_checkpoint(run).newest for run in (found, whole))
    for name in ("model.safetensors", "optim.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def saved(path: Path, epochs: int = 2, **options: object) -> Checkpoints:
    """Checkpoints of a few epochs of a small training."""
    trainer = trainer_of("fgsm", conv_net(batch_norm=True), epochs=epochs, **options)
    keeper = Checkpoints(path)
    keeper.resume_or_start(trainer)
    trainer.fit()
    return keeper


POINTS = ["before data", "mid file", "before manifest", "before rename", "after rename"]


@pytest.mark.promise("P1")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("nth", [1, 3])
def test_killed_in_any_stage_of_a_save_the_run_resumes_to_the_same_bytes(point, nth, children, whole, tmp_path):
    times = nth * 5 - 4 if point == "mid file" else nth  # five files a checkpoint
    assert children.run(*SHORT, cwd=tmp_path, fault=f"{point}:{times}") == -9
    left = find_newest_checkpoint(Path("run"))
    assert not left.problems  # nothing partial has a checkpoint's name
    again = ["resume", "run"] if left.newest else [*SHORT, "--resume", "auto"]
    assert children.run(*again, cwd=tmp_path) == 0, Path("err").read_text()
    assert not list(Path("run").glob(".tmp-*"))
    assert_same_run(Path("run"), whole)


@pytest.mark.promise("P2")
@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.5, 0.99])
def test_truncated_file_is_named_and_the_checkpoint_before_it_is_used(share, tmp_path):
    saved(tmp_path)
    for file in sorted((tmp_path / "ckpt-000002").iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[: int(share * len(data))])
        found = find_newest_checkpoint(tmp_path)
        assert found.newest == tmp_path / "ckpt-000001"
        assert file.name in found.problems[0]
        file.write_bytes(data)
    assert find_newest_checkpoint(tmp_path).newest == tmp_path / "ckpt-000002"


def test_damaged_checkpoint_is_reported_and_training_continues_from_the_one_before(tmp_path):
    saved(tmp_path, epochs=3)
    (tmp_path / "ckpt-000003/optim.safetensors").write_bytes(b"")
    trainer, said = trainer_of("fgsm", conv_net(batch_norm=True), epochs=3), []
    keeper = Checkpoints(tmp_path, notify=said.append)
    keeper.resume_or_start(trainer)
    assert trainer.epoch == 2
    assert "optim.safetensors" in said[0]
    assert "ckpt-000002" in said[0]
    trainer.fit()
    assert find_newest_checkpoint(tmp_path).newest == tmp_path / "ckpt-000004"


@pytest.mark.promise("P2")
def test_without_any_whole_checkpoint_all_are_listed_and_the_status_is_4(whole, capsys):
    shutil.copytree(whole, "run")
    names = [path.name for path in store.list_checkpoints(Path("run"))]
    for name in names:
        (Path("run") / name / "state.json").write_text("{}")
    assert main(["resume", "run"]) == 4
    message = capsys.readouterr().err
    assert all(name in message for name in names)
    assert "--overwrite or in another folder (--out" in message


def test_damaged_record_is_named_with_what_to_do(whole, capsys):
    shutil.copytree(whole, "run")
    (Path("run") / "run.json").write_text("{")
    for command in ("resume", "evaluate"):
        assert main([command, "run"]) == 4
        message = capsys.readouterr().err
        assert "'run/run.json' is not a run's record" in message
        assert "train again into another --out" in message


@pytest.mark.parametrize("name", ["history.jsonl", "timing.jsonl"])
def test_garbage_among_a_run_s_lines_is_named_and_a_resumed_run_writes_them_anew(whole, name, capsys):
    shutil.copytree(whole, "run")
    file = Path("run") / name
    before = file.read_text()
    file.write_text("garbage\n" + before)
    assert main(["report", "run", "--no-figures", "--gallery", "0"]) == 3
    assert f"line 1 of 'run/{name}' is not valid" in capsys.readouterr().err
    assert main(["resume", "run"]) == 0
    assert f"{name} held lines that deat did not write" in "".join(capsys.readouterr())
    assert file.read_text() == before


def test_resume_on_a_disk_that_is_read_only_offers_no_flag_that_it_lacks(whole, monkeypatch, capsys):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    shutil.copytree(whole, "run")
    monkeypatch.setattr("deat.runs.run_dir.write_records", refused)
    assert main(["resume", "run"]) == 4
    assert "Read-only file system. Make it writable, or give a new run another --out." in capsys.readouterr().err


@pytest.mark.promise("P4")
def test_any_flipped_bit_is_detected(tmp_path):
    saved(tmp_path, epochs=1)
    path, draw = tmp_path / "ckpt-000001", random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(200):
        file = draw.choice(files)
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        if file.name == store.MANIFEST_FILE and same_meaning(data, bytes(flipped)):
            file.write_bytes(data)
            continue
        with pytest.raises(CheckpointError):
            verify_checkpoint(path)
        file.write_bytes(data)
    verify_checkpoint(path)


def same_meaning(data: bytes, other: bytes) -> bool:
    """Whether a flip in the manifest touched nothing that is checked: white space, or the word schema."""
    try:
        return json.loads(data)["files"] == json.loads(other)["files"]
    except (ValueError, KeyError):
        return False


@pytest.mark.promise("P5")
@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_full_disk_keeps_the_previous_checkpoint_and_is_tried_again(failing, tmp_path, monkeypatch):
    trainer, said = trainer_of("fgsm", conv_net(), epochs=3), []
    keeper = Checkpoints(tmp_path, notify=said.append)
    keeper.resume_or_start(trainer)
    broken = [2]

    def full(*_: object) -> None:
        if trainer.epoch == 2 and broken[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    for name, owner in {"write": (store, "_write_file"), "fsync": (os, "fsync"), "rename": (Path, "rename")}.items():
        if name == failing:
            real = getattr(*owner)
            monkeypatch.setattr(*owner, lambda *a, real=real: (full(), real(*a))[1])
    trainer.fit()
    assert len(said) == 1
    assert "No space left" in said[0]
    assert [path.name for path in store.list_checkpoints(tmp_path)] == ["ckpt-000001", "ckpt-000002"]
    assert not list(tmp_path.glob(".tmp-*"))
    assert trainer_at(tmp_path, 3).epoch == 3


def trainer_at(path: Path, epochs: int):
    trainer = trainer_of("fgsm", conv_net(), epochs=epochs)
    Checkpoints(path).resume_or_start(trainer)
    return trainer


@pytest.mark.promise("P5")
def test_third_failure_in_a_row_ends_training_with_the_last_whole_checkpoint_named(tmp_path, monkeypatch):
    trainer, said = trainer_of("fgsm", conv_net(), epochs=9), []
    Checkpoints(tmp_path, notify=said.append).resume_or_start(trainer)
    real = store._write_file

    def full(path: Path, data: bytes) -> None:
        if trainer.epoch >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(store, "_write_file", full)
    with pytest.raises(CheckpointError, match="ckpt-000001"):
        trainer.fit()
    assert (trainer.epoch, len(said)) == (4, 2)
    assert CheckpointError.exit_code == 4


def test_success_between_failures_starts_their_count_anew(tmp_path, monkeypatch):
    trainer, said = trainer_of("fgsm", conv_net(), epochs=6), []
    Checkpoints(tmp_path, notify=said.append).resume_or_start(trainer)
    real = store._write_file

    def full(path: Path, data: bytes) -> None:
        if trainer.epoch in (1, 2, 4, 5):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(store, "_write_file", full)
    trainer.fit()
    assert (trainer.epoch, len(said)) == (6, 4)
    assert trainer_at(tmp_path, 6).epoch == 6


@pytest.mark.promise("P5")
def test_final_save_that_fails_is_an_error(tmp_path, monkeypatch):
    trainer = trainer_of("fgsm", conv_net(), epochs=1)
    Checkpoints(tmp_path, notify=lambda text: None).resume_or_start(trainer)
    real = store._write_file

    def full(path: Path, data: bytes) -> None:
        if trainer.epoch:
            raise RuntimeError("unexpected pos 64 vs 0")  # how a library shows a file-size limit
        real(path, data)

    monkeypatch.setattr(store, "_write_file", full)
    with pytest.raises(CheckpointError):
        trainer.fit()
    assert find_newest_checkpoint(tmp_path).newest == tmp_path / "ckpt-000000"


@pytest.mark.promise("P5")
def test_file_size_limit_ends_before_the_first_epoch_with_status_4(children, tmp_path):
    assert children.run(*SHORT, cwd=tmp_path, file_size=50_000) == 4
    assert "ckpt-000000" in Path("err").read_text()
    assert not Path("run/history.jsonl").exists()


@pytest.mark.promise("P6")
def test_folder_that_vanishes_ends_with_status_4_and_not_in_a_traceback(children, tmp_path, monkeypatch, capsys):
    real = RunFolder.on_epoch

    def vanish(self, trainer, stats, timing):
        shutil.rmtree(self.path, ignore_errors=True)
        real(self, trainer, stats, timing)

    monkeypatch.setattr(RunFolder, "on_epoch", vanish)
    assert main(SHORT) == 4
    message = capsys.readouterr().err
    assert "cannot write" in message
    assert not Path("run").exists()


@pytest.mark.promise("P6")
@pytest.mark.parametrize(("what", "after"), [("run", 1), ("run", 3), ("run.json", 1)])
def test_folder_that_vanishes_once_is_not_made_again_without_its_record(what, after, monkeypatch, capsys):
    """Three saves fail, or the scores cannot be written, and nothing is left that looks like a run and is none."""
    real = Checkpoints.save_if_due

    def vanish(self, trainer, *, force=False):
        real(self, trainer, force=force)
        if trainer.epoch == after and Path("run/run.json").exists():
            shutil.rmtree("run") if what == "run" else Path("run/run.json").unlink()

    monkeypatch.setattr(Checkpoints, "save_if_due", vanish)
    assert main([*SHORT, "--epochs", "5" if after == 1 else "3"]) == 4
    message = capsys.readouterr().err
    assert "Traceback" not in message
    if what == "run":
        assert "The last valid checkpoint is" not in message
        assert not Path("run").exists()


@pytest.mark.promise("P6")
@pytest.mark.parametrize("what", [(Path, "mkdir"), (store, "_write_file")], ids=["folder", "file"])
def test_folder_that_cannot_be_written_is_refused_before_the_first_epoch(what, monkeypatch, capsys):
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")  # the superuser, as tests may be, is never refused

    with monkeypatch.context() as patch:
        patch.setattr(*what, refused)
        assert main(SHORT) == 4
    assert "Permission denied" in capsys.readouterr().err
    assert not Path("run/history.jsonl").exists()


@pytest.mark.promise("P7")
def test_pruning_that_fails_does_not_end_training(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(store, "try_remove", lambda path: False)
    trainer = trainer_of("fgsm", conv_net(), epochs=4)
    Checkpoints(tmp_path, notify=said.append).resume_or_start(trainer)
    trainer.fit()
    assert trainer.epoch == 4
    assert "cannot delete ckpt-000000" in said[0]


@pytest.mark.promise("P7")
def test_last_two_and_the_best_are_kept(tmp_path, monkeypatch):
    from deat.training.validation import Validator, ValScores

    scores = iter([0.1, 0.9, 0.3, 0.2, 0.5, 0.4])
    monkeypatch.setattr(Validator, "__call__", lambda self, net: ValScores(0.5, next(scores), 1.0, []))
    saved(tmp_path, epochs=6, val=0.25)
    assert [path.name for path in store.list_checkpoints(tmp_path)] == ["ckpt-000002", "ckpt-000005", "ckpt-000006"]


def test_checkpoints_are_written_every_so_many_epochs_and_at_the_end(tmp_path):
    trainer, kept = trainer_of("fgsm", conv_net(batch_norm=True), epochs=5), list[int]()
    Checkpoints(tmp_path, every=2, on_saved=lambda path, trainer: kept.append(trainer.epoch)).resume_or_start(trainer)
    trainer.fit()
    assert kept == [0, 2, 4, 5]


@pytest.mark.promise("P7")
def test_checkpoint_resumed_from_stays_until_there_are_two_newer_ones(tmp_path):
    saved(tmp_path, epochs=2)
    shutil.rmtree(tmp_path / "ckpt-000002")
    trainer = trainer_of("fgsm", conv_net(batch_norm=True), epochs=2)
    Checkpoints(tmp_path).resume_or_start(trainer)
    trainer.fit()
    assert [path.name for path in store.list_checkpoints(tmp_path)] == ["ckpt-000001", "ckpt-000002"]


@pytest.mark.promise("P8")
def test_second_process_leaves_with_status_7_and_names_the_first(children, tmp_path, capsys):
    Path("run").mkdir()
    with lock_run_folder(Path("run")):
        assert children.run("train", "--resume", "auto", *SHORT[1:], cwd=tmp_path) == 7
        RunFolder(Path("run")).write_record({"request": {}, "method": {}})
        assert children.run("train", "--resume", "auto", *SHORT[1:], cwd=tmp_path) == 7
        assert children.run(*SHORT, "--overwrite", cwd=tmp_path) == 7
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(json.loads(Path("run/lock").read_text())["since"]))
        assert f"process {os.getpid()} on this machine, since {since}, is working on 'run'" in Path("err").read_text()
    assert not Path("run/lock").exists()


@pytest.mark.promise("P8")
def test_lock_says_which_machine_s_process_holds_it_but_not_its_name(tmp_path, monkeypatch):
    began = int(time.time())
    with lock_run_folder(tmp_path):
        held = json.loads((tmp_path / LOCK_FILE_NAME).read_text())
        assert held.keys() == {"pid", "host", "since"}
        assert held["pid"] == os.getpid()
        assert began <= held["since"] <= time.time()
        assert platform.node() not in (tmp_path / LOCK_FILE_NAME).read_text()
        monkeypatch.setattr(platform, "node", lambda: "a-machine-elsewhere")
        with (
            pytest.raises(BusyError, match=f"process {os.getpid()} on another machine, since 2"),
            lock_run_folder(tmp_path),
        ):
            pass


def test_a_system_without_locks_can_train_all_the_same(tmp_path, monkeypatch):
    remove_locks(monkeypatch)
    with lock_run_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE_NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("P8")
def test_lock_of_a_dead_process_is_taken_over_with_a_notice(tmp_path):
    said: list[str] = []
    (tmp_path / LOCK_FILE_NAME).write_text('{"pid": 999999, "host": "", "since": 0}')
    with lock_run_folder(tmp_path, said.append):
        (notice,) = said
        assert re.fullmatch("process 999999 on another machine, since .*", notice)
        with pytest.raises(BusyError), lock_run_folder(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("P8")
@pytest.mark.parametrize("text", ["", "[]", "5", '{"pid": "x"}', '{"pid": 1, "host": 1, "since": 1e300}', "[" * 200])
def test_lock_that_nothing_can_read_is_taken_all_the_same(text, tmp_path):
    (tmp_path / LOCK_FILE_NAME).write_text(text)
    with lock_run_folder(tmp_path), pytest.raises(BusyError), lock_run_folder(tmp_path):
        pass


@pytest.mark.promise("P9")
@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "a/b.json", "..", "state.json\0", "ｍodel.json"])
def test_manifest_that_names_something_outside_is_rejected_and_nothing_is_read(name, tmp_path):
    saved(tmp_path / "run", epochs=1)
    (tmp_path / "outside.json").write_text("{}")
    path = tmp_path / "run/ckpt-000001"
    manifest = json.loads((path / store.MANIFEST_FILE).read_text())
    manifest["files"][name] = {"size": 2, "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}
    (path / store.MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a file of a checkpoint"):
        verify_checkpoint(path)


@pytest.mark.promise("P9")
def test_links_in_a_checkpoint_are_not_followed(tmp_path):
    saved(tmp_path / "run", epochs=1)
    path = tmp_path / "run/ckpt-000001"
    (path / "model.safetensors").rename(tmp_path / "elsewhere")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="plain file"):
        verify_checkpoint(path)
    (tmp_path / "run/ckpt-000002").symlink_to(path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        verify_checkpoint(tmp_path / "run/ckpt-000002")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": []}', '{"files": {"state.json": 5}}', "[" * 100_000, '{"files": null}']
)
def test_manifest_that_is_none_is_one_clean_error(text, tmp_path):
    saved(tmp_path, epochs=1)
    (tmp_path / "ckpt-000001" / store.MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError):
        verify_checkpoint(tmp_path / "ckpt-000001")


@pytest.mark.promise("P11")
def test_data_is_on_the_disk_before_its_manifest_and_both_before_the_name(tmp_path, monkeypatch):
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        calls.append(f"rename to {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    store.write_checkpoint(tmp_path, "ckpt-000000", {"model.safetensors": b"1", "state.json": b"2"})
    shown = ["fsync TEMP" if call.startswith("fsync .tmp-") else call for call in calls]
    assert shown == [
        "fsync model.safetensors",
        "fsync state.json",
        "fsync MANIFEST.json",
        "fsync TEMP",
        "rename to ckpt-000000",
        f"fsync {tmp_path.name}",
    ]


@pytest.mark.promise("P59")
def test_link_planted_at_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / f"{store.TEMPORARY_PREFIX}00").symlink_to(tmp_path / "target")
    monkeypatch.setattr(store.secrets, "token_hex", lambda n: "00")
    with pytest.raises(CheckpointError):
        store.write_checkpoint(tmp_path, "ckpt-000000", {"state.json": b"2"})
    assert list((tmp_path / "target").iterdir()) == []
    assert not (tmp_path / "ckpt-000000").exists()


@pytest.mark.promise("P12")
def test_torn_last_line_of_the_history_is_dropped_with_a_notice_and_the_run_is_the_same(whole, capsys):
    shutil.copytree(whole, "run")
    shutil.rmtree(find_newest_checkpoint(Path("run")).newest)  # killed before the last checkpoint
    text = Path("run/history.jsonl").read_text()
    Path("run/history.jsonl").write_text(text[:-40])
    assert main(["resume", "run"]) == 0
    assert "torn" in capsys.readouterr().err
    assert_same_run(Path("run"), whole)


def test_checkpoints_have_the_permissions_of_their_folder(tmp_path):
    tmp_path.chmod(0o750)
    saved(tmp_path, epochs=1)
    assert (tmp_path / "ckpt-000001").stat().st_mode & 0o777 == 0o750


def test_optimiser_state_that_cannot_be_written_down_is_refused_by_name(tmp_path):
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "closure": print}

    trainer = trainer_of("fgsm", conv_net(), optimizer=lambda p: Odd(p, lr=0.1))
    Checkpoints(tmp_path).resume_or_start(trainer)
    with pytest.raises(CheckpointError, match=r"closure is a builtin_function_or_method"):
        trainer.fit()


@pytest.mark.parametrize("factory", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_any_optimiser_of_torch_resumes_exactly(factory, tmp_path):
    def build(seed: int, epochs: int = 3):
        return trainer_of("fgsm", conv_net(seed=seed), epochs=epochs, lr=None, optimizer=lambda p: factory(p, lr=0.01))

    def weights(trainer) -> list[bytes]:
        return [value.numpy().tobytes() for value in trainer.model.state_dict().values()]

    straight, first, second = build(0), build(0), build(7)
    straight.fit()
    Checkpoints(tmp_path).resume_or_start(first)
    first.callbacks.append(Ask(first, 1))
    with pytest.raises(Interrupted):
        first.fit()
    Checkpoints(tmp_path).resume_or_start(second)
    second.fit()
    assert weights(second) == weights(straight)


class Ask:
    """Asks training to stop after an epoch."""

    def __init__(self, trainer, epoch: int) -> None:
        self.trainer, self.epoch = trainer, epoch

    def on_epoch(self, trainer, stats, timing) -> None:
        if stats.epoch == self.epoch - 1:
            trainer.interruption.request()
