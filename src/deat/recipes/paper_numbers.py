"""The paper's own numbers: every table that a recipe repeats, their misprints, and claims on training time.

Accuracies are in percent, as printed. A row's name is its model and the recipe's label, a column's the attack's or
a cost: minutes, hours, or per_batch (backprops a batch over all of training, the paper's M).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper.

    Args:
        printed: The number as printed.
        logged: The number in the authors' own log, where the table is wrong.
    """

    printed: float
    logged: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Args:
        number: Such as "Table 3".
        label: Label in the LaTeX source.
        title: Title of the table.
        columns: Names of the columns: attacks and costs.
        rows: Numbers by the name of the row; None where the paper has none.
    """

    number: str
    label: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]

    def value(self, row: str, column: str) -> PaperValue | None:
        """Return the number in a row and column.

        Args:
            row: Name of a row.
            column: Name of a column.

        Returns:
            The number, or None where the paper has none.
        """
        cells = dict(zip(self.columns, self.rows.get(row, ()), strict=False))
        printed = cells.get(column)
        return None if printed is None else PaperValue(printed, MISPRINTS.get((self.label, row, column)))


@dataclass(frozen=True)
class PaperClaim:
    """A sentence of the paper on training time.

    Args:
        text: The sentence.
        percent: By how many percent less time the faster row takes; below 0, more time.
        table_label: Label of the table with the times.
        faster_row: Name of the row that the paper calls faster.
        slower_row: Name of the row that it is compared with.
    """

    text: str
    percent: float
    table_label: str
    faster_row: str
    slower_row: str

    @property
    def percent_from_table(self) -> float:
        """The same percentage by the times in the table, with which the sentence does not always agree."""
        table = PAPER_TABLES[self.table_label]
        unit = "hours" if "hours" in table.columns else "minutes"
        fast, slow = (value.printed for row in (self.faster_row, self.slower_row) if (value := table.value(row, unit)))
        return 100 * (1 - fast / slow)


_STANDARD_COLUMNS = ("natural", "pgd-100", "cw-20", "aa", "minutes")
_FAST_COLUMNS = ("natural", "fgsm", "pgd-100", "cw-20", "aa", "minutes")

PAPER_TABLES = {
    table.label: table
    for table in (
        PaperTable(
            "Table 2",
            "tab:computational_cost",
            "Backprops in ten epochs, in batches of the training set",
            ("per_batch",),
            {
                "preact_resnet18 fgsm": (20,),
                "preact_resnet18 pgd-7": (80,),
                "preact_resnet18 free-4": (40,),
                "preact_resnet18 free-8": (80,),
                "preact_resnet18 deat-3": (22,),
                "preact_resnet18 deat-40%": (25,),
            },
        ),
        PaperTable(
            "Table 3",
            "cifar10_result_std",
            "CIFAR-10 under the standard training setup",
            _STANDARD_COLUMNS,
            {
                "preact_resnet18 free-4": (85.10, 47.17, 47.11, 43.98, 83.1),
                "preact_resnet18 free-6": (82.30, 48.27, 47.12, 44.78, 124.0),
                "preact_resnet18 free-8": (80.77, 48.54, 47.11, 44.79, 162.4),
                "preact_resnet18 m+deat": (83.93, 48.87, 48.12, 45.56, 102.1),
                "preact_resnet18 pgd-7": (82.33, 49.48, 48.64, 45.95, 157.2),
                "preact_resnet18 fat-5": (81.77, 48.65, 47.97, 44.87, 92.2),
                "preact_resnet18 yopo-5-3": (82.09, 43.02, 43.23, 40.69, 77.8),
                "preact_resnet18 amata-2-10": (79.63, 50.28, 48.24, 46.20, 135.4),
                "preact_resnet18 m+pgd": (83.43, 45.94, 45.66, 42.57, 94.8),
                "preact_resnet18 trades": (79.29, 51.06, 48.46, 47.64, 456.4),
                "preact_resnet18 f+trades": (81.91, 51.12, 48.72, 47.54, 236.0),
                "preact_resnet18 m+trades": (79.89, 51.43, 48.61, 47.52, 317.7),
                "preact_resnet18 mart": (78.04, 54.88, 48.42, 46.67, 148.7),
                "preact_resnet18 f+mart": (84.05, 49.46, 47.02, 45.46, 240.5),
                "preact_resnet18 m+mart": (78.04, 55.83, 49.19, 47.20, 87.6),
                "densenet121_12 free-4": (82.81, 44.83, 44.41, 41.06, 122.4),
                "densenet121_12 free-6": (80.68, 46.71, 45.90, 43.49, 184.5),
                "densenet121_12 free-8": (79.04, 46.67, 45.76, 43.22, 244.4),
                "densenet121_12 m+deat": (82.18, 45.16, 45.22, 42.53, 152.6),
                "densenet121_12 pgd-7": (71.19, 43.40, 41.50, 39.54, 220.9),
                "densenet121_12 fat-5": (75.43, 41.90, 39.61, 38.57, 168.5),
                "densenet121_12 amata-2-10": (72.10, 43.43, 41.90, 39.77, 177.6),
                "densenet121_12 m+pgd": (73.06, 44.28, 43.16, 40.99, 192.3),
                "densenet121_12 trades": (70.47, 42.50, 39.30, 38.67, 689.1),
                "densenet121_12 f+trades": (74.33, 42.75, 39.65, 39.05, 499.1),
                "densenet121_12 m+trades": (72.32, 43.34, 39.77, 39.15, 451.8),
                "densenet121_12 mart": (63.19, 44.62, 39.61, 38.05, 330.9),
                "densenet121_12 f+mart": (77.39, 43.35, 40.09, 39.01, 434.6),
                "densenet121_12 m+mart": (68.33, 47.46, 42.08, 40.26, 132.7),
            },
        ),
        PaperTable(
            "Table 4",
            "imagenet",
            "ResNet 50 on ImageNet, eps 4/255",
            ("natural", "pgd-10-last", "pgd-50-last", "hours"),
            {
                "resnet50 free-4": (61.02, 31.90, 30.93, 52.43),
                "resnet50 amata-2-4": (59.7, 31.8, 31.2, None),
                "resnet50 m+deat gamma 1.1": (62.04, 31.40, 30.18, 34.34),
                "resnet50 m+deat gamma 1.01": (60.10, 32.34, 31.41, 44.67),
            },
        ),
        PaperTable(
            "Table 6",
            "cifar10_result_pre",
            "CIFAR-10 with PreAct-ResNet 18 under the FAST training setup",
            _FAST_COLUMNS,
            {
                "preact_resnet18 deat-3": (80.09, 49.75, 42.94, 42.26, 40.17, 5.8),
                "preact_resnet18 deat-40%": (79.52, 48.64, 42.81, 42.08, 40.06, 5.6),
                "preact_resnet18 m+deat": (79.88, 49.84, 43.38, 43.36, 41.18, 6.0),
                "preact_resnet18 free-4": (78.46, 49.52, 43.97, 43.16, 40.65, 7.8),
                "preact_resnet18 free-8": (74.56, 48.60, 44.11, 42.49, 40.72, 15.7),
                "preact_resnet18 pgd-7": (70.90, 46.37, 43.17, 41.01, 40.29, 15.1),
            },
        ),
        PaperTable(
            "Table 7",
            "cifar10_result_wide",
            "CIFAR-10 with Wide-ResNet 34 under the FAST training setup",
            _FAST_COLUMNS,
            {
                "wide_resnet34_10 deat-3": (81.58, 50.53, 44.39, 44.43, 43.50, 41.6),
                "wide_resnet34_10 deat-40%": (81.49, 51.08, 45.03, 44.49, 42.50, 38.9),
                "wide_resnet34_10 m+deat": (81.59, 51.29, 45.27, 45.09, 44.45, 43.1),
                "wide_resnet34_10 free-4": (80.34, 51.72, 46.17, 45.62, 43.30, 55.4),
                "wide_resnet34_10 free-8": (77.69, 51.45, 46.99, 46.11, 44.90, 110.8),
                "wide_resnet34_10 pgd-7": (72.12, 47.39, 44.80, 42.18, 41.95, 109.1),
            },
        ),
        PaperTable(
            "Table 8",
            "deat_vs_ufgsm",
            "M+DEAT against U-FGSM under three setups on CIFAR-10",
            _STANDARD_COLUMNS,
            {
                "preact_resnet18 m+deat fast": (79.88, 43.38, 43.36, 41.18, 6.0),
                "preact_resnet18 fgsm fast": (78.45, 43.86, 43.04, 39.80, 5.6),
                "wide_resnet34_10 m+deat fast": (81.59, 45.27, 45.09, 44.45, 43.1),
                "wide_resnet34_10 fgsm fast": (80.89, 45.45, 44.91, 42.45, 41.3),
                "preact_resnet18 m+deat standard": (83.93, 48.87, 48.12, 45.56, 102.1),
                "preact_resnet18 fgsm standard": (81.99, 45.77, 45.74, 42.25, 40.3),
            },
        ),
        PaperTable(
            "Table 9",
            "tab:ablation",
            "Learning rate, start and step size of M+DEAT with PreAct-ResNet 18 on CIFAR-10",
            ("natural", "pgd-100", "cw-20", "minutes"),
            {
                "preact_resnet18 m+deat alpha 8": (83.72, 47.97, 47.66, 92.8),
                "preact_resnet18 m+deat alpha 12": (83.67, 48.59, 47.98, 108.9),
                "preact_resnet18 m+deat zero start": (81.95, 49.27, 47.65, 105.1),
                "preact_resnet18 m+deat normal start": (85.73, 45.87, 46.37, 81.6),
                "preact_resnet18 m+deat cyclic lr": (83.97, 49.24, 48.65, 116.4),
                "preact_resnet18 m+deat flat lr": (66.20, 35.41, 34.95, 100.3),
                "preact_resnet18 m+deat": (83.93, 48.87, 48.12, 102.1),
            },
        ),
    )
}

MISPRINTS = {
    ("cifar10_result_std", "preact_resnet18 mart", "natural"): 75.86,
    ("cifar10_result_std", "preact_resnet18 m+trades", "natural"): 79.98,
    ("cifar10_result_std", "densenet121_12 fat-5", "cw-20"): 41.16,
    ("cifar10_result_std", "densenet121_12 f+trades", "cw-20"): 39.95,
    ("cifar10_result_std", "densenet121_12 m+trades", "aa"): 39.05,
    ("tab:ablation", "preact_resnet18 m+deat zero start", "cw-20"): 48.65,
    ("tab:ablation", "preact_resnet18 m+deat cyclic lr", "cw-20"): 48.88,
}
"""Cells that the authors' own logs contradict, with what the logs say."""

PAPER_CLAIMS = (
    PaperClaim(
        "M+DEAT is about 35 % faster than PGD-AT-7",
        35,
        "cifar10_result_std",
        "preact_resnet18 m+deat",
        "preact_resnet18 pgd-7",
    ),
    PaperClaim(
        "M+DEAT is about 17 % faster than FREE-6",
        17,
        "cifar10_result_std",
        "preact_resnet18 m+deat",
        "preact_resnet18 free-6",
    ),
    PaperClaim(
        "M+TRADES is 26 % faster than TRADES",
        26,
        "cifar10_result_std",
        "preact_resnet18 m+trades",
        "preact_resnet18 trades",
    ),
    PaperClaim(
        "M+MART is 40 % faster than MART",
        40,
        "cifar10_result_std",
        "preact_resnet18 m+mart",
        "preact_resnet18 mart",
    ),
    PaperClaim(
        "M+DEAT is 20 % faster than FREE-4 under the FAST setup, PreAct-ResNet 18",
        20,
        "cifar10_result_pre",
        "preact_resnet18 m+deat",
        "preact_resnet18 free-4",
    ),
    PaperClaim(
        "M+DEAT is 22 % faster than FREE-4 under the FAST setup, Wide-ResNet 34",
        22,
        "cifar10_result_wide",
        "wide_resnet34_10 m+deat",
        "wide_resnet34_10 free-4",
    ),
    PaperClaim(
        "M+DEAT takes 40 % of FREE-8's time under the FAST setup, Wide-ResNet 34, for 97 % of its training effect, "
        "which the paper does not define",
        60,
        "cifar10_result_wide",
        "wide_resnet34_10 m+deat",
        "wide_resnet34_10 free-8",
    ),
    PaperClaim(
        "M+DEAT is about 34 % faster than FREE-4 on ImageNet with gamma 1.1",
        34,
        "imagenet",
        "resnet50 m+deat gamma 1.1",
        "resnet50 free-4",
    ),
    PaperClaim(
        "M+DEAT is 16 % faster than FREE-4 on ImageNet with gamma 1.01",
        16,
        "imagenet",
        "resnet50 m+deat gamma 1.01",
        "resnet50 free-4",
    ),
    PaperClaim(
        "M+DEAT with a cyclic learning rate takes 10 % longer than with a multi-step one",
        -10,
        "tab:ablation",
        "preact_resnet18 m+deat cyclic lr",
        "preact_resnet18 m+deat",
    ),
)


def find_paper_value(table: str | None, row: str | None, column: str) -> PaperValue | None:
    """Return the paper's number in a table's row and column.

    Args:
        table: Label of the table, or None.
        row: Name of the row, or None.
        column: Name of the column.

    Returns:
        The number, or None where the paper has none.
    """
    paper_table = find_paper_table(table, row)
    return paper_table.value(row, column) if paper_table and row else None


def find_paper_table(table: str | None, row: str | None) -> PaperTable | None:
    """Return the paper's table of a label, if it has a row of this name.

    Args:
        table: Label of the table, or None.
        row: Name of the row, or None.

    Returns:
        The table, or None.
    """
    paper_table = PAPER_TABLES.get(table) if table else None
    return paper_table if paper_table and row in paper_table.rows else None
