"""The commands of docs/scale-out.md do what the page says, and the files of deploy/ hold commands that deat accepts."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from deat.cli.main import parse_command
from deat.cli.train import TrainCommand
from deat.utils.distributed import Distributed
from helpers.nets import conv_net, learnable
from helpers.together import together

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale-out.md").read_text(encoding="utf-8")
LINES = re.findall(r"```bash\n(.*?)\n```", PAGE, flags=re.S)


@contextmanager
def started(line: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A line of the page, in a shell of its own, with this Python's torchrun; whatever it leaves running is ended."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            line, shell=True, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        for pid in [*workers(process.pid).values(), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def finished(line: str, folder: Path) -> str:
    with started(line, folder) as process:
        assert process.wait(120) == 0, (folder / "output").read_text()
    return (folder / "output").read_text()


def workers(above: int) -> dict[int, int]:
    """The process of each rank below another process, by /proc."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_below(int(entry.name), above):
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", _read(entry / "environ"))
            if rank:
                found[int(rank[1])] = int(entry.name)
    return found


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        stat = _read(Path(f"/proc/{pid}/stat"))
        pid = int(stat.rsplit(b")", 1)[1].split()[1]) if stat else 0
        if pid == ancestor:
            return True
    return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_page_has_three_commands() -> None:
    assert len(LINES) == 3
    assert all(line.startswith("torchrun --standalone --nproc-per-node=2 ") for line in LINES)


def test_two_processes_train_and_judge_as_the_page_says(tmp_path: Path) -> None:
    assert "in 2 processes that share batches of 64" in finished(LINES[0], tmp_path)
    assert "worst of all" in finished(LINES[1], tmp_path)
    assert json.loads((tmp_path / "runs/two/evaluation.json").read_text())["images"] == 100


@pytest.mark.promise("P26")
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_a_killed_process_is_started_again_and_the_run_resumes(tmp_path: Path) -> None:
    history, said = tmp_path / "runs/safe/history.jsonl", tmp_path / "output"
    with started(LINES[2], tmp_path) as process:
        deadline = monotonic() + 90
        while not (history.exists() and history.read_text().count("\n") >= 2):
            assert monotonic() < deadline, "no epoch was finished"
            assert process.poll() is None, said.read_text()
            sleep(0.05)
        os.kill(workers(process.pid)[1], signal.SIGKILL)
        assert process.wait(90) == 0, said.read_text()
    assert re.search(r"resuming runs/safe at epoch [2-5]", said.read_text())  # not from the beginning
    assert json.loads((history.parent / "run.json").read_text())["processes"] == 2
    assert [json.loads(line)["epoch"] for line in history.read_text().splitlines()] == list(range(5))


def as_told(ranks: Distributed, folder: Path) -> list[object]:
    """The page's Python, with data of ours."""
    (code,) = re.findall(r"```python\n(.*?)\n```", PAGE, flags=re.S)
    os.chdir(folder)
    names: dict[str, Any] = {"model": conv_net(), "data": learnable(24), "test": learnable(12, seed=1)}
    exec(code.replace("data, distributed", "data, epochs=2, batch_size=8, device='cpu', distributed"), names)
    return [names["distributed"].size, names["evaluation"].verdicts, [vars(s) for s in names["result"].history]]


def test_the_page_s_python_works_in_two_processes(tmp_path: Path) -> None:
    first, second = together(as_told, tmp_path)
    assert first == second
    assert first[0] == 2
    assert (tmp_path / "runs/own").is_dir()


def accepted(words: list[str]) -> TrainCommand:
    """What deat makes of a command that torchrun is given."""
    command = parse_command(words[words.index("deat") + 1 :])
    assert isinstance(command, TrainCommand)
    return command


def test_the_slurm_file_is_a_script_that_starts_deat() -> None:
    file = ROOT / "deploy/slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True).stderr == ""
    text = file.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.M))
    assert options["nodes"] == "2"
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options
    words = shlex.split(text[text.index("srun ") :].replace("\\\n", " "))
    assert words[words.index("torchrun") :][:3] == [
        "torchrun",
        "--nnodes=$SLURM_JOB_NUM_NODES",
        "--nproc-per-node=$SLURM_GPUS_ON_NODE",
    ]
    assert accepted(words).resume == "auto"


def test_the_kubernetes_file_is_a_job_that_starts_deat() -> None:
    job = json.loads((ROOT / "deploy/pytorchjob.json").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    worker, policy = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    assert worker["replicas"] == policy["minReplicas"] == policy["maxReplicas"]  # the number of processes must stay
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for it by name
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    command = accepted(container["command"])
    assert command.resume == "auto"
    assert command.out is not None
    assert command.out.startswith("/runs/")


def test_the_skypilot_file_is_a_task_that_starts_deat() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    task = yaml.safe_load((ROOT / "deploy/sky.yaml").read_text())
    assert task["num_nodes"] == 2
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[part], capture_output=True, text=True).stderr == ""
    words = shlex.split(task["run"].replace("\\\n", " "))
    assert {word.partition("=")[0] for word in words[: words.index("-m")]} >= {
        "--nnodes",
        "--nproc-per-node",
        "--node-rank",
    }
    command = accepted(words)
    assert command.resume == "auto"
    assert command.out is not None
    assert any(command.out.startswith(f"{mount}/") for mount in task["file_mounts"])
