"""Loggers: what they record, also over an interruption, and that they never stop or change a training."""

import copy
import csv
import importlib.util
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import deat
from deat.cli.main import main
from deat.errors import Interrupted, UsageError
from deat.integrations.loggers import Logger, RunLog, get_loggers, list_loggers
from deat.integrations.loggers.logger import _LOGGERS
from deat.integrations.loggers.logging_callback import read_log_options
from helpers.nets import conv_net, learnable
from helpers.together import together

EPOCHS = 3
QUICK: dict[str, Any] = {
    "epochs": EPOCHS,
    "batch_size": 40,
    "threat": "linf:0.1",
    "method": "deat-1",
    "progress": False,
}


class Recorder(Logger):
    """Keeps what it is told, and fails where it is asked to."""

    name = "recorder"

    def __init__(self, fails_at: str = "", error: type[BaseException] = OSError) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at, self.error = fails_at, error
        self.state = {"id": 7}

    def _note(self, *call: Any) -> None:
        if call[0] == self.fails_at:
            raise self.error("the server is gone")
        self.calls.append(call)

    def start(self, run):
        self.run = run
        self._note("start", run.epochs_done, dict(run.state))

    def log_metrics(self, metrics, step, axis="epoch"):
        self._note("metrics" if axis == "epoch" else "batch", step, dict(metrics))

    def log_image(self, name, image, step):
        self._note("image", step, image)

    def log_summary(self, summary):
        self._note("summary", dict(summary))

    def log_file(self, path, name):
        if path.is_dir():
            return self._note("checkpoint", name, path.name, (path / "MANIFEST.json").is_file())
        self._note("file", deat.models.weights.read_weights(path).tensors)

    def finish(self, status):
        self._note("finish", status)

    def named(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


def interrupt_after(epoch: int) -> Callable[..., None]:
    def callback(trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        if stats.epoch == epoch:
            trainer.interruption.request("the machine is needed")

    return callback


def train(folder: Path | None, loggers: Any, **options: Any) -> deat.TrainResult:
    torch.manual_seed(0)
    images = learnable(80)
    return deat.fit(conv_net(), images, val=images, loggers=loggers, checkpoints=folder, **QUICK | options)


def train_in_two_parts(folder: Path, loggers: Any, **options: Any) -> deat.TrainResult:
    with pytest.raises(Interrupted):
        train(folder, loggers, callbacks=[interrupt_after(1)], **options)
    return train(folder, loggers, **options)


def test_a_logger_receives_the_settings_every_epoch_and_the_results(tmp_path: Path) -> None:
    logger = Recorder()
    result = train(tmp_path / "kept", [logger], log_every=2)
    assert logger.run.flat_config["settings.epochs"] == EPOCHS
    assert logger.run.flat_config["threat.eps"] == 0.1
    epochs = [(step, values) for step, values in logger.named("metrics") if len(values) > 1]
    assert [step for step, _ in epochs] == [1, 2, 3]
    for stats, (_, values) in zip(result.history, epochs, strict=True):
        expected = (stats.k, stats.magnitude, stats.loss, stats.val_robust, stats.lr, stats.backprops)
        assert tuple(values[name] for name in ("k", "l_X", "loss", "val_robust", "lr", "backprops")) == expected
        assert values["train_seconds"] > 0
        assert set(values) <= set(logger.run.metric_names)
    assert [step for step, _ in logger.named("batch")] == [2, 4, 6]
    (summary,) = logger.named("summary")[0]
    assert summary["best_epoch"] == result.best.epoch + 1
    assert summary["best_robust"] == result.best.robust
    (weights,) = logger.named("file")[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in result.best.weights.items())
    assert logger.calls[-1] == ("finish", "finished")


def test_every_checkpoint_is_stored_where_that_is_wanted(tmp_path: Path) -> None:
    logger, other = Recorder(), Recorder()
    with pytest.raises(Interrupted):
        train(tmp_path / "kept", [logger], log_checkpoints=True, callbacks=[interrupt_after(1)])
    assert {name for name, _, _ in logger.named("checkpoint")} == {"checkpoint"}
    assert [name for _, name, _ in logger.named("checkpoint")][-1] == "ckpt-000002"
    assert all(is_whole for _, _, is_whole in logger.named("checkpoint"))
    train(tmp_path / "kept", [other])
    assert not other.named("checkpoint")
    with pytest.raises(UsageError, match="add checkpoints=FOLDER"):
        train(None, [other], log_checkpoints=True)


def test_k_is_a_step_plot_and_adversarial_examples_differ_from_clean_ones_by_eps() -> None:
    logger = Recorder()
    torch.manual_seed(0)
    log = RunLog([logger], Path("unused"), notify=lambda text: None)
    trainer = deat.make_trainer(
        conv_net(), learnable(80), method="deat-1", threat="linf:0.1", callbacks=[log],
        config=deat.TrainConfig(epochs=3, batch_size=40),
    )  # fmt: skip
    with log:
        trainer.fit()
    points = [(step, values["k"]) for step, values in logger.named("metrics")]
    assert points == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)], "of which plots draw steps"
    (_, image), *_ = logger.named("image")
    assert [step for step, _ in logger.named("image")] == [2, 3], "none in an epoch without an adversary"
    side = learnable(8)[0].shape[-1]
    assert image.shape == (1, 3 * side, 8 * side)
    clean, adversarial, difference = image.float().split(side, 1)
    assert 0 < (adversarial - clean).abs().max() <= 0.1 * 255 + 1
    assert difference.min() == 0 or difference.max() == 255


def test_training_with_loggers_has_the_bits_of_training_without(tmp_path: Path) -> None:
    with_loggers = train(tmp_path / "a", [Recorder(), "csv"], log_every=1)
    plain = train(tmp_path / "b", ())
    assert with_loggers.history == plain.history
    for p, q in zip(with_loggers.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("error", [OSError, SystemExit])
@pytest.mark.parametrize("fails_at", ["start", "metrics", "batch", "image", "summary", "file", "finish"])
def test_a_logger_that_fails_is_reported_and_neither_stops_training_nor_other_loggers(
    fails_at: str, error: type[BaseException]
) -> None:
    said: list[str] = []
    bad, good = Recorder(fails_at, error), Recorder()
    log = RunLog([bad, good], Path("logs-of-a-test"), every=1, notify=said.append)
    torch.manual_seed(0)
    trainer = deat.make_trainer(
        conv_net(), learnable(80), method="deat-1", threat="linf:0.1", callbacks=[log],
        config=deat.TrainConfig(epochs=3, batch_size=40),
    )  # fmt: skip
    with log:
        assert len(trainer.fit().history) == 3
    assert good.calls[-1] == ("finish", "finished")
    assert len(good.named("batch")) == 6
    assert [text for text in said if "recorder" in text and "the server is gone" in text and "continues" in text]
    assert len(said) == 1, "it is told once"
    assert (fails_at, "") not in bad.calls


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_failing_logger_warns_where_fit_prints_nothing() -> None:
    with pytest.warns(RuntimeWarning, match="logger 'recorder' failed"):
        train(None, [Recorder("start")])


def test_a_resumed_run_continues_its_record(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    with pytest.raises(Interrupted):
        train(tmp_path / "kept", [first], callbacks=[interrupt_after(0)])
    assert first.calls[-1] == ("finish", "interrupted")
    train(tmp_path / "kept", [second])
    assert second.named("start") == [(1, {"id": 7})]
    assert [step for step, values in second.named("metrics") if len(values) > 1] == [2, 3]
    third = Recorder()
    train(tmp_path / "kept", [third])
    assert not third.calls, "a finished training has nothing to log"


def test_a_logger_that_comes_late_gets_the_epochs_before_it(tmp_path: Path) -> None:
    logger = Recorder()
    with pytest.raises(Interrupted):
        train(tmp_path / "kept", (), callbacks=[interrupt_after(1)])
    result = train(tmp_path / "kept", [logger])
    losses = [values["loss"] for _, values in logger.named("metrics") if len(values) > 1]
    assert losses == [stats.loss for stats in result.history]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def test_csv_has_a_row_for_each_epoch_also_after_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path / "kept", "csv", callbacks=[interrupt_after(1)], log_every=1)
    with (tmp_path / "kept/logs/metrics.csv").open("a") as file:
        file.write("3,half a row")  # as a kill leaves it
    result = train(tmp_path / "kept", "csv", log_every=1)
    rows = rows_of(tmp_path / "kept/logs/metrics.csv")
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == [stats.loss for stats in result.history]
    assert [int(row["k"]) for row in rows] == [stats.k for stats in result.history]
    assert [row["threshold"] for row in rows] == ["", "", ""]
    assert [int(row["batch"]) for row in rows_of(tmp_path / "kept/logs/batches.csv")] == [1, 2, 3, 4, 5, 6]


def test_a_rollback_replaces_the_rows_of_the_epochs_that_were_taken_back(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def take_back_once(trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        if stats.epoch == 0:
            kept.setdefault("state", copy.deepcopy(trainer.state_dict()))
        elif stats.epoch == 2 and "done" not in kept:
            kept["done"] = True
            trainer.rewind(kept["state"])

    result = train(tmp_path / "kept", "csv", callbacks=[take_back_once], log_every=1)
    rows = rows_of(tmp_path / "kept/logs/metrics.csv")
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert int(rows[-1]["backprops"]) == result.history[-1].backprops > sum((1, 2, 3)) * 2
    assert [int(row["batch"]) for row in rows_of(tmp_path / "kept/logs/batches.csv")] == [1, 2, 3, 4, 5, 6]


def test_a_partial_result_ends_the_record_as_interrupted() -> None:
    logger = Recorder()

    def ctrl_c(trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        if stats.epoch == 1:
            raise KeyboardInterrupt

    assert train(None, [logger], callbacks=[ctrl_c]).is_partial
    assert logger.calls[-1] == ("finish", "interrupted")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_package_adds_a_logger_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Logger):
        pass

    class Entry:
        name, group, value, dist = "of-a-package", "deat.loggers", "package:Other", None

        def load(self) -> type[Logger]:
            return Other

    monkeypatch.setattr("deat.utils.plugins.entry_points", lambda group: [Entry()] if group == "deat.loggers" else [])
    monkeypatch.setattr("deat.utils.plugins._LOADED", {})
    monkeypatch.setattr("deat.integrations.loggers.logger._LOGGERS", dict(_LOGGERS))
    assert isinstance(get_loggers("of-a-package")[0], Other)


def installed(*packages: str) -> Any:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@installed("tensorboard")
def test_tensorboard_shows_scalars_images_and_settings_of_both_parts_of_a_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train_in_two_parts(tmp_path / "kept", "tensorboard", log_every=2)
    record = EventAccumulator(str(tmp_path / "kept/logs/tensorboard")).Reload()
    losses = record.Scalars("loss")
    assert [(event.step, event.value) for event in losses] == [
        (stats.epoch + 1, pytest.approx(stats.loss)) for stats in result.history
    ]
    assert [(event.step, event.value) for event in record.Scalars("k")] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 2),
    ]
    assert [event.step for event in record.Images("adversarial_examples")] == [2, 3]
    assert "config/text_summary" in record.Tags()["tensors"]
    assert record.Scalars("result/best_epoch")[-1].value == result.best.epoch + 1
    batches = EventAccumulator(str(tmp_path / "kept/logs/tensorboard/batches")).Reload()
    assert [event.step for event in batches.Scalars("batch_loss")] == [2, 4, 6]


def read_wandb_file(file: Path) -> list[Any]:
    """The records of an offline run: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, records, part = file.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            records.append(Record.FromString(part))
            part = b""
    return records


def wandb_rows(folder: Path) -> tuple[set[str], list[dict[str, Any]]]:
    records = [
        record for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")) for record in read_wandb_file(file)
    ]
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return {record.run.run_id for record in records if record.HasField("run")}, rows


@installed("wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_continues_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    result = train_in_two_parts(tmp_path / "kept", "wandb")
    until = time.monotonic() + 20
    ids, rows = wandb_rows(tmp_path / "kept/logs")
    while not any("adversarial_examples._type" in row and row["epoch"] == EPOCHS for row in rows):
        assert time.monotonic() < until, "wandb's process has written nothing of the last epoch"
        time.sleep(0.05)  # it writes after finish() has returned
        ids, rows = wandb_rows(tmp_path / "kept/logs")
    assert len(ids) == 1
    losses = {row["epoch"]: row["loss"] for row in rows if "loss" in row}
    assert losses == {stats.epoch + 1: stats.loss for stats in result.history}
    assert [(row["epoch"], row["k"]) for row in rows if "k" in row] == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]
    assert [row["epoch"] for row in rows if "adversarial_examples._type" in row] == [2, 3]
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps)), "or wandb would drop rows of the second part"


@installed("mlflow", "sqlalchemy")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_one_run_in_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    result = train_in_two_parts(tmp_path / "kept", "mlflow", log_checkpoints=True)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("deat").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["settings.epochs"] == str(EPOCHS)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(s.epoch + 1, s.loss) for s in result.history]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "adversarial_examples")] == [
        f"adversarial_examples/epoch-000{n}.png" for n in (2, 3)
    ]
    assert client.list_artifacts(run.info.run_id, "best-weights")
    assert client.list_artifacts(run.info.run_id, "checkpoint")
    config = run.data.params
    assert config["threat.eps"] == "0.1"


@installed("mlflow", "sqlalchemy")
@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_is_gone_delays_training_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    before, started = dict(os.environ), time.monotonic()
    assert len(train(None, "mlflow").history) == EPOCHS
    assert time.monotonic() - started < 60, "its own patience is minutes"
    assert dict(os.environ) == before


@installed("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_continues_one_run_in_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    result = train_in_two_parts(tmp_path / "kept", "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("deat")
    losses = {row["epoch"]: row["loss"] for row in SQLiteStorage.get_logs("deat", run) if "loss" in row}
    assert losses == {stats.epoch + 1: stats.loss for stats in result.history}


def test_loggers_are_listed_with_what_installs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "loggers", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"csv", "tensorboard", "wandb", "mlflow", "trackio"} <= rows.keys()
    assert rows["csv"]["install"] == ""
    assert {info.name: info.missing for info in list_loggers()}["csv"] == []


def test_an_unknown_logger_and_one_whose_package_is_missing_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"unknown logger 'tensorbord'.*'tensorboard'"):
        get_loggers("csv,tensorbord")
    with pytest.raises(UsageError, match="7 is no logger"):
        get_loggers([7])  # type: ignore[list-item]
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "deat.integrations.loggers.logger.find_spec", lambda name: None if name == "wandb" else real(name)
    )
    with pytest.raises(UsageError, match=r"needs wandb, not installed here: pip install 'deat\[wandb\]'"):
        train(tmp_path / "kept", "wandb")
    assert not (tmp_path / "kept").exists()


def test_a_logger_in_a_file_is_taken_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from deat.integrations.loggers import Logger\n"
        "class Mine(Logger):\n"
        "    def log_metrics(self, metrics, step, axis='epoch'):\n"
        "        print('mine', axis, step, metrics['k'])\n"
    )
    train(None, "mine.py:Mine")
    out = capsys.readouterr()
    assert [line for line in out.err.splitlines() if line.startswith("mine epoch")] == [
        f"mine epoch {step} {k:.1f}" for step, k in [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]
    ]
    assert "mine" not in out.out, "standard output may be JSON"


COMMAND = ["train", "--epochs", "2", "--val-attack", "pgd-1", "--test-images", "20", "--baseline", "no", "--json"]


def test_a_run_of_the_command_line_has_its_scores_in_the_log_and_can_be_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tools = "csv,tensorboard" if importlib.util.find_spec("tensorboard") else "csv"
    Path("mine.py").write_text(
        "from deat.integrations.loggers import Logger\n"
        "class Mine(Logger):\n"
        "    def start(self, run):\n"
        "        print(run.name, *(run.flat_config[k] for k in ('model.name', 'data.name', 'request.model')))\n"
        "    def log_metrics(self, metrics, step, axis='epoch'):\n"
        "        pass\n"
    )
    assert main([*COMMAND, "--log", f"{tools},mine.py:Mine", "--log-every", "9", "--out", "run"]) == 0
    out, err = capsys.readouterr()
    assert "run small digits auto" in err.splitlines(), "the names of the record, not of classes in Python"
    scores = json.loads(out)["scores"]
    (row,) = rows_of(Path("run/logs/scores.csv"))
    assert float(row["pgd-20"]) == scores[0]["accuracy"]["pgd-20"]
    assert len(rows_of(Path("run/logs/metrics.csv"))) == 2
    assert [int(row["batch"]) for row in rows_of(Path("run/logs/batches.csv"))] == [9, 18, 27, 36]
    assert main([*COMMAND, "--out", "run", "--overwrite"]) == 0
    assert not Path("run/logs").exists()


def test_a_resumed_run_is_logged_where_it_was_begun(capsys: pytest.CaptureFixture[str]) -> None:
    real = deat.Trainer.run_epoch

    def run_epoch(trainer: deat.Trainer) -> deat.EpochStats:
        stats = real(trainer)
        if stats.epoch == 0:
            trainer.interruption.request("the machine is needed")
        return stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deat.Trainer, "run_epoch", run_epoch)
        assert main([*COMMAND, "--log", "csv", "--log-every", "7", "--log-checkpoints", "--out", "run"]) == 75
    assert read_log_options(Path("run/logs")) == (7, True)
    assert main(["resume", "run"]) == 0
    assert read_log_options(Path("run/logs")) == (7, True)
    assert [int(row["epoch"]) for row in rows_of(Path("run/logs/metrics.csv"))] == [1, 2]
    assert [int(row["batch"]) for row in rows_of(Path("run/logs/batches.csv"))] == [7, 14, 21, 28, 35]
    assert rows_of(Path("run/logs/scores.csv"))


def log_together(distributed: deat.Distributed, folder: str) -> Mapping[str, Any]:
    logger = Recorder()
    torch.manual_seed(0)
    deat.fit(
        conv_net(), learnable(80), loggers=[logger, "csv"], checkpoints=f"{folder}/kept", distributed=distributed, **QUICK
    )  # fmt: skip
    return {"calls": len(logger.calls), "loaded": "wandb" in sys.modules}


def test_several_processes_log_once(tmp_path: Path) -> None:
    found = together(log_together, str(tmp_path))
    assert [process["calls"] > 0 for process in found] == [True, False]
    assert len(rows_of(tmp_path / "kept/logs/metrics.csv")) == EPOCHS
