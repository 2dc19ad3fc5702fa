"""`deat` commands, and scripts, in processes of their own, forked from one that has imported everything already."""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Children:
    """Starts commands, waits for them, and says how they ended: an exit status, or minus the signal."""

    def __init__(self) -> None:
        here = Path(__file__).parents[1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{here}"}
        command = [sys.executable, "-W", "ignore", "-m", "helpers.children"]
        self.parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )

    def start(self, *command: str, cwd: Path, fault: str = "", file_size: int = 0) -> int:
        return int(self._ask({"start": command, "cwd": str(cwd), "fault": fault, "file_size": file_size}))

    def start_script(self, path: Path, *arguments: str, cwd: Path) -> int:
        """A file, as `python path arguments` runs it."""
        return int(self._ask({"start": [str(path), *arguments], "cwd": str(cwd), "script": True}))

    def wait(self, pid: int) -> int:
        return int(self._ask({"wait": pid}))

    def run(self, *command: str, cwd: Path, **options: Any) -> int:
        return self.wait(self.start(*command, cwd=cwd, **options))

    def run_script(self, path: Path, *arguments: str, cwd: Path) -> int:
        return self.wait(self.start_script(path, *arguments, cwd=cwd))

    def close(self) -> None:
        """End it by a word: its input has no end as long as any process that was forked meanwhile holds it open."""
        assert self.parent.stdin
        assert self.parent.stdout
        self.parent.stdin.write("{}\n")
        self.parent.stdin.close()
        self.parent.stdout.close()
        self.parent.wait(30)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self.parent.stdin
        assert self.parent.stdout
        self.parent.stdin.write(json.dumps(question) + "\n")
        self.parent.stdin.flush()
        return json.loads(self.parent.stdout.readline())


def _serve() -> None:
    """Answer questions on standard input, one a line."""
    _warm_up()
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            return
        print(json.dumps(_fork(question) if "start" in question else _wait(question["wait"])), flush=True)


def _warm_up() -> None:
    """Have torch load all that it loads when it first trains, so that no child does."""
    import torch

    import deat
    from deat.cli.main import COMMANDS, load_command

    for command in COMMANDS:
        load_command(command)
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    digits = deat.load_data("digits")
    net = deat.build_model("small", in_channels=1, image_size=8)
    images = digits.train.subset(range(64))
    deat.fit(net, images, method="fgsm", epochs=1, batch_size=64, val=digits.test.subset([0, 1]), progress=False)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(question: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    with contextlib.suppress(BaseException):
        status = _child(question)
    os._exit(status)


def _child(question: dict[str, Any]) -> int:
    from deat.cli.main import main

    os.chdir(question["cwd"])
    if question.get("fault"):
        _die_at(question["fault"])
    with _output(), _limited(question.get("file_size", 0)):
        return _script(question["start"]) if question.get("script") else main(question["start"])


def _die_at(fault: str) -> None:
    """Have this process killed where a save passes a point, `NAME`, or does so for the n-th time, `NAME:n`."""
    from deat.checkpoint import store

    point, _, times = fault.partition(":")
    passed: list[str] = []

    def reach(name: str) -> None:
        passed.append(name)
        if name == point and passed.count(name) == int(times or 1):
            os.kill(os.getpid(), signal.SIGKILL)

    store.fault_point = reach


def _script(words: list[str]) -> int:
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Everything printed goes to the files out and err."""
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
    yield
    sys.stdout.flush()
    sys.stderr.flush()


@contextlib.contextmanager
def _limited(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    if size:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    yield


if __name__ == "__main__":
    _serve()
