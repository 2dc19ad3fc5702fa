"""The example of Ray Train runs on this machine, and two workers decide as one process does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deat

ROOT = Path(__file__).parents[2]


def test_two_workers_of_ray_train_have_the_steps_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    pytest.importorskip("ray.train.torch", reason="ray train is not installed: pip install 'ray[train]'")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(ROOT / "examples/ray/ray_train.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    net = deat.build_model("small", in_channels=1, image_size=8)
    options: Any = {"epochs": 3, "val": 0.1, "device": "cpu", "progress": False}
    alone = deat.fit(net, deat.load_data("digits"), method="m+deat", **options).history
    assert [line.split(", l_X")[0] for line in lines] == [f"epoch {e.epoch + 1}: k {e.k}" for e in alone]
    assert [line.rpartition(" ")[2] for line in lines] == [str(e.backprops) for e in alone]
