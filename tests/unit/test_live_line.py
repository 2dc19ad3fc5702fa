"""Progress in Python: a bar on a terminal and in a notebook, lines in a pipe, nothing that can break the work."""

import io
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import deat
from deat.core.game import Game
from deat.runs.fit_progress import MAX_EPOCH_LINES, FitProgress
from deat.training.progress_lines import TrainingLine
from deat.utils import live_line
from deat.utils.live_line import NotebookDisplay, PlainDisplay, TerminalDisplay, make_live_display
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable

QUICK: dict[str, Any] = {"method": "fgsm", "epochs": 3, "batch_size": 10, "threat": "linf:0.05", "val_attack": "fgsm"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Cell:
    """The output of a notebook's cell, as IPython's display makes and updates it."""

    def __init__(self) -> None:
        self.contents: list[dict[str, str]] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        assert raw
        assert display_id
        assert not self.contents, "one output for each training"
        return self.update(content, raw=True)

    def update(self, content: dict[str, str], *, raw: bool) -> "Cell":
        self.contents.append(content)
        return self

    @property
    def text(self) -> str:
        return self.contents[-1]["text/plain"]


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; pytest would undo that between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell, module, shell = Cell(), ModuleType("IPython"), SimpleNamespace(kernel=object())
    display_module = ModuleType("IPython.display")
    display_module.display = cell.display  # type: ignore[attr-defined]
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display_module)
    monkeypatch.setattr(live_line.NotebookDisplay, "interval", 0.01)
    return cell


def fit(**options: Any) -> deat.TrainResult:
    return deat.fit(conv_net(), learnable(20), val=learnable(8), **{**QUICK, **options})


def test_the_line_says_how_far_it_is_within_and_across_epochs() -> None:
    trainer = trainer_of("pgd-2", conv_net(), epochs=4)
    line = TrainingLine(trainer)
    assert "epoch 1/4  batch 1/3  k 2  0 backprops" in line.format()
    assert "-:-- left" in line.format()
    trainer.run_epoch()
    trainer.batches_done = 1
    shown = line.format()
    assert "epoch 2/4  batch 2/3" in shown
    assert shown.count("━") == round(20 * (1 + 1 / 3) / 4)
    line.start_time = time.perf_counter() - 90  # 9 backprops took 90 s, and 8 batches of 3 are left
    assert "4:00 left" in line.format()
    trainer.batches_done = 3
    assert "validation" in line.format()
    trainer.epoch = 4
    assert line.format() == ""


def test_a_terminal_shows_a_bar_and_keeps_a_line_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    assert isinstance(make_live_display(str), TerminalDisplay)
    fit()
    shown = terminal.getvalue()
    assert "━" in shown or "╌" in shown
    assert all(f"epoch {n}/3  k 1  l_X" in shown for n in (1, 2, 3))
    before = terminal.tell()
    fit(progress=False)
    assert terminal.tell() == before


def test_a_notebook_shows_one_output_that_ends_without_the_bar(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_live_display(str), NotebookDisplay)
    result = fit()
    assert capsys.readouterr() == ("", "")
    assert any("╌" in content["text/plain"] for content in cell.contents)
    lines = cell.text.splitlines()
    assert [line.split("  k ")[0] for line in lines[:3]] == [f"fgsm  epoch {n}/3" for n in (1, 2, 3)]
    assert lines[3:] == [result.choice.reason, *result.notes]
    assert cell.contents[-1]["text/html"].startswith("<pre")


def test_an_evaluation_in_a_notebook_moves_a_bar_and_leaves_nothing(cell: Cell) -> None:
    deat.evaluate(conv_net(), learnable(20), threat="linf:0.05", attacks="natural,pgd-200", sanity=False)
    assert any("evaluating" in content["text/plain"] for content in cell.contents)
    assert cell.text == ""


@pytest.mark.parametrize("in_notebook", [True, False])
def test_ctrl_c_gives_back_a_partial_result_and_ends_the_bar(
    in_notebook: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("cell") if in_notebook else use_terminal(monkeypatch)
    real, played = Game.end_batch, []

    def end_batch(self: Game, *args: Any) -> Any:
        played.append(1)
        if len(played) == 5:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Game, "end_batch", end_batch)
    threads = threading.active_count()
    result = fit()
    assert result.is_partial
    assert len(result.history) == 2
    assert not result.model.training
    for _ in range(100):  # a thread that was told to end may take a moment
        if threading.active_count() == threads:
            break
        time.sleep(0.05)
    assert threading.active_count() == threads


@pytest.mark.parametrize("stream", [None, "closed", "broken"])
def test_a_missing_closed_or_broken_standard_error_changes_nothing(
    stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    chosen = Broken() if stream == "broken" else io.StringIO() if stream else None
    if stream == "closed":
        assert chosen is not None
        chosen.close()
    monkeypatch.setattr(sys, "stderr", chosen)
    monkeypatch.setenv("TERM", "xterm")
    assert len(fit().history) == 3
    deat.evaluate(conv_net(), learnable(8), threat="linf:0.05", attacks="natural", sanity=False)


def test_a_pipe_gets_a_line_only_where_nothing_came_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlainDisplay, "interval", 0.05)
    with PlainDisplay(lambda: "half done") as display:
        display.print("an epoch")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "an epoch"
    assert "half done" in lines[1:]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_live_display(str), PlainDisplay)


def test_many_short_epochs_are_no_flood_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress, epochs = FitProgress(), 5 * MAX_EPOCH_LINES + 3
    trainer = trainer_of("fgsm", conv_net(), epochs=epochs)
    stats, timing = trainer.run_epoch(), SimpleNamespace(train_seconds=1.0, seconds=1.0, engine="eager")
    for epoch in range(epochs):
        object.__setattr__(stats, "epoch", epoch)
        progress.on_epoch(trainer, stats, timing)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert 0.8 * MAX_EPOCH_LINES < len(lines) <= MAX_EPOCH_LINES
    assert f"epoch {epochs}/{epochs}" in lines[-1]
