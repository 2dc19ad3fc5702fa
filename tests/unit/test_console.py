"""What a terminal shows: text as it is, and lines that fit it."""

import io

from rich.table import Table

from deat.training.epoch_records import EpochStats
from deat.training.progress_lines import format_epoch_short
from deat.utils.console import PlainConsole


def test_no_text_becomes_an_emoji_or_markup() -> None:
    screen = PlainConsole(file=io.StringIO(), width=120)
    table = Table("a :car: head", title="the :train: title")
    table.add_row("folder:dog: [red]cell[/]")
    screen.print("m+deat on folder:dog: [bold]line[/]")
    screen.print(table)
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    for text in (":car:", ":train:", "folder:dog: [red]cell[/]", "folder:dog: [bold]line[/]"):
        assert text in said


def test_an_epoch_s_line_fits_eighty_columns_with_every_score_in_it() -> None:
    numbers = {"epoch": 109, "k": 10, "alpha": 0.1, "level": 1.0, "magnitude": 1e6, "threshold": 1e6, "loss": 12.3456}
    shares = {"train_accuracy": 0.999, "val_natural": 0.999, "val_robust": 0.999, "log10_lipschitz": 1.0, "lr": 0.1}
    counts = dict.fromkeys(("examples", "skipped", "active", "backprops", "passes", "val_passes"), 10**9)
    line = format_epoch_short(EpochStats(**numbers, **shares, **counts), 200, 12345.6)  # type: ignore[arg-type]
    assert line == "epoch 110/200  k 10  train (under attack) 99.9%  val 99.9% robust 99.9%  12346s"
    assert len(line) <= 80
