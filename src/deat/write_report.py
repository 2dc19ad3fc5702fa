"""deat.report: the report of `deat report`, from Python."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deat.report  # noqa: F401  the package comes first: the function then takes its place as an attribute of deat
from deat.errors import UsageError


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        folder: Its folder; `figures/` in it has the figures as PDF, SVG, PNG and CSV, whole and by panel.
        page: The page, one HTML file that needs no network.
        tables: The table's files by their format: "md", "tex" and "csv".
        numbers: Every number of the report, as `deat report --json` prints it.
        missing: What the report lacks, and why.
    """

    folder: Path
    page: Path
    tables: dict[str, Path]
    numbers: dict[str, Any] = field(repr=False)
    missing: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """The table in Markdown."""
        return self.tables["md"].read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        from html import escape

        page = escape(self.page.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def report(
    *runs: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    title: str | None = None,
    against: str | None = None,
    sweep: int | None = None,
    gallery: int = 6,
    figures: bool = True,
    model: str | Sequence[str] | None = None,
    device: str = "auto",
    data_root: str | os.PathLike[str] | None = None,
) -> WrittenReport:
    """Compare runs: write tables, figures and one page, as `deat report` does.

    Args:
        *runs: Folders of `deat train`, `deat bench`, `TrainResult.save` or `fit(checkpoints=)`. Runs that differ in
            their seed alone make one row.
        out: The report's folder; by default report/ in the only folder named, or beside the first of several.
        title: The report's title; by default the recipe if its setup is the paper's, or else the methods and data.
        against: The row that others are tested against, image by image; by default m+deat, or else the most robust.
        sweep: Also attack the first so many test images at radii from 0 to 3 eps, and draw the curves.
        gallery: Adversarial examples to show, against the most robust row that kept its weights; 0 for none.
        figures: Whether to draw the figures as files; without matplotlib they are left out.
        model: Networks that are code among the runs, whose code sweep and gallery run: "net.py:Net", or several.
        device: Where networks run for sweep and gallery.
        data_root: The folder of data sets.

    Returns:
        The paths of what was written, and the numbers.

    Raises:
        UsageError: If an argument is not accepted.
        DataError: If a folder is no run and no bench, or is damaged.
        CheckpointError: If the report cannot be written.

    Example:
        >>> deat.report("runs/digits-m+deat", "runs/digits-pgd-7", out="comparison").page
        PosixPath('comparison/index.html')
    """
    from deat.cli.report import ReportCommand, report_to_json, write_report  # rich and tyro take long to import

    specs = [model] if isinstance(model, str) else model or ()
    _check_arguments(runs, specs)
    story, folder = write_report(
        ReportCommand(
            runs=tuple(os.fspath(run) for run in runs),
            out=None if out is None else os.fspath(out),
            title=title,
            against=against,
            sweep=sweep,
            gallery=gallery,
            no_figures=not figures,
            model=",".join(specs) or None,
            device=device,
            data_root=None if data_root is None else os.fspath(data_root),
        )
    )
    tables = {kind: folder / f"table.{kind}" for kind in ("md", "tex", "csv")}
    return WrittenReport(folder, folder / "index.html", tables, report_to_json(story), tuple(story.missing))


def _check_arguments(runs: Sequence[Any], specs: Any) -> None:
    """Refuse what the report cannot be made of, with what to write instead."""
    for run in runs:
        if isinstance(run, list | tuple):
            raise UsageError("give the folders one by one: deat.report('runs/a', 'runs/b'), or deat.report(*runs).")
        if not isinstance(run, str | os.PathLike):
            hint = "save it first: result.save('runs/mine')." if hasattr(run, "save") else "give its path."
            raise UsageError(f"{run!r:.80} is no run's folder: {hint}")
    if not runs:
        raise UsageError("give the folder of at least one run.")
    if not isinstance(specs, Sequence) or not all(isinstance(spec, str) for spec in specs):
        raise UsageError(
            f"model is {specs!r:.80}: name the file of the network, such as 'my_net.py:Net', so that the report can build "
            "it for each run."
        )
