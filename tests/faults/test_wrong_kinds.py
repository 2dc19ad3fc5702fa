"""Records whose values are of the wrong kind are damaged records: an error of the data, never one of deat."""

import json
import shutil
from pathlib import Path

import pytest

from deat.cli.main import main

WRONG = ["\ud800", 10**400, True, [[[]]], {"a": 1}, float("inf"), -1]
PLACES = [
    ("run.json", ("processes",)),
    ("run.json", ("method", "schedule")),
    ("run.json", ("method", "ascent")),
    ("run.json", ("data", "name")),
    ("run.json", ("settings", "batch_size")),
    ("history.jsonl", ("epoch",)),
    ("history.jsonl", ("backprops",)),
    ("history.jsonl", ("examples",)),
    ("history.jsonl", ("train_accuracy",)),
    ("history.jsonl", ("magnitude",)),
    ("timing.jsonl", ("train_seconds",)),
    ("timing.jsonl", ("warm_up_seconds",)),
]


@pytest.mark.promise("P175")
@pytest.mark.parametrize(("name", "path"), PLACES, ids=str)
def test_value_of_the_wrong_kind_in_a_record_is_no_defect_of_deat(name, path, whole, capsys):
    shutil.copytree(whole, "run")
    file = Path("run", name)
    lines = file.read_text().splitlines() if name.endswith("l") else [file.read_text()]
    for wrong in WRONG:
        record = json.loads(lines[0])
        part = record
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = wrong
        file.write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
        assert main(["report", "run", "--no-figures"]) in (0, 3), wrong
        assert "Traceback" not in capsys.readouterr().err
