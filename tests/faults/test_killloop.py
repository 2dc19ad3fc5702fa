"""The loop behind docs/results/killloop.md, with a few kills."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_that_is_killed_a_few_times_ends_with_the_same_bytes(tmp_path: Path) -> None:
    out = tmp_path / "killloop.json"
    command = [sys.executable, ROOT / "bench/killloop.py", "--kills", "6", "--seed", "1", "--epochs", "8", "--out", out]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    told = json.loads(out.read_text())
    assert told["sigkill"] + told["sigterm"] == 6
    assert told["identical"] == told["runs"] > 0
    assert "| runs with the same final bytes" in out.with_suffix(".md").read_text()
