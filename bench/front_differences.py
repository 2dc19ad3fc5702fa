"""The table of docs/results/front and the differences between its rows, from the records of `deat bench front`.

    python bench/front_differences.py docs/results/front/runs

It prints the accuracies of each row over its seeds, what averaging the weights changes under PGD-20, and the difference of
each pair of rows at one budget: the mean over seeds with the 95 % interval of Student's t.
"""

import json
import math
import sys
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev

T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t by the number of seeds."""
COLUMNS = (("evaluation.json", "natural"), ("evaluation.json", "pgd-20"), ("evaluation-aa.json", "aa"))
LAST = ("evaluation-last.json", "pgd-20")


def main(runs: Path) -> None:
    """Print the table and the differences."""
    rows = json.loads((runs / "bench.json").read_text(encoding="utf-8"))["rows"]
    folders = {row["name"]: [runs / run["folder"] for run in row["runs"] if run["status"] == "done"] for row in rows}
    print("| row | natural | PGD-20 | AutoAttack | averaged - last, PGD-20 |\n|---|---|---|---|---|")
    for name, seeds in folders.items():
        values = [read(seeds, *column) for column in COLUMNS]
        values.append(subtract(values[1], read(seeds, *LAST)))
        print(f"| {name} | {' | '.join(f'{mean(v):.1f} ± {stdev(v):.1f}' for v in values)} |")
    for one, other in combinations(folders, 2):
        if one.split()[-1] == other.split()[-1]:
            pairs = (subtract(*(read(folders[name], *column) for name in (one, other))) for column in COLUMNS)
            print(f"{one} - {other}: natural, PGD-20, AutoAttack {', '.join(map(format_interval, pairs))}")


def read(folders: list[Path], file: str, attack: str) -> list[float]:
    """The accuracy in percent in each folder."""
    return [100 * json.loads((folder / file).read_text(encoding="utf-8"))["accuracy"][attack] for folder in folders]


def subtract(one: list[float], other: list[float]) -> list[float]:
    """The differences, seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]


def format_interval(values: list[float]) -> str:
    """The mean and the half width of its 95 % interval."""
    return f"{mean(values):+.1f} ± {T_QUANTILE[len(values)] * stdev(values) / math.sqrt(len(values)):.1f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
