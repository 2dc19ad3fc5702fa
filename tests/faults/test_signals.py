"""SIGTERM and SIGINT save and leave with 75; a second one leaves at once; nothing that was saved is damaged."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import deat
from deat.checkpoint import store
from deat.checkpoint.store import find_newest_checkpoint
from deat.cli.main import main
from deat.core.game import Game
from deat.errors import Interrupted, UsageError
from deat.evaluation.attacks import Attack
from deat.training import overfit_watch
from deat.training.validation import Validator
from deat.utils.signals import Interruption

from .conftest import BATCHES, SHORT
from .test_saving import assert_same_run

SIGNALS = [signal.SIGTERM, signal.SIGINT]
USUAL = [signal.SIG_DFL, signal.default_int_handler]


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """Python's own handlers: who starts the tests in the background has SIGINT ignored."""
    before = [signal.signal(number, usual) for number, usual in zip(SIGNALS, USUAL, strict=True)]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send_after(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, times: int, number: int) -> None:
    """Send this process a signal when a function has been called so many times."""
    real, calls = getattr(owner, name), []

    def counted(*args: object, **options: object) -> object:
        result = real(*args, **options)
        calls.append(1)
        if len(calls) == times:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(owner, name, counted)


MOMENTS = {
    "in the first batch": (Game, "end_batch", 1),
    "in a batch": (Game, "end_batch", BATCHES + 2),
    "in the last batch of an epoch": (Game, "end_batch", 2 * BATCHES),
    "in a save": (store, "_write_files", 2),
    "after validation": (Validator, "__call__", 2),
}


@pytest.mark.promise("P16", "P24")
@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_saves_once_leaves_with_75_and_the_run_resumes_to_the_same_bytes(
    moment, number, whole, monkeypatch, capsys
):
    before = [signal.getsignal(n) for n in SIGNALS]
    with monkeypatch.context() as patch:
        send_after(patch, *MOMENTS[moment], number)
        assert main(SHORT) == 75
    assert [signal.getsignal(n) for n in SIGNALS] == before
    message = capsys.readouterr().err
    assert f"interrupted by {number.name}" in message
    assert "deat resume run" in message
    assert not list(Path("run").glob(".tmp-*"))
    assert not Path("run/lock").exists()
    assert main(["resume", "run"]) == 0
    assert_same_run(Path("run"), whole)


@pytest.mark.promise("P24")
def test_signal_in_validation_is_obeyed_before_its_next_batch(monkeypatch):
    from deat.evaluation import quick_scores

    command = [*SHORT[:-1], "run", "--held-out", "300"]  # two batches, each under two attacks
    assert main([*command, "--out", "straight"]) == 0
    with monkeypatch.context() as patch:
        send_after(patch, quick_scores, "logits_under_attack", 5, signal.SIGTERM)
        assert main(command) == 75
    state = json.loads((find_newest_checkpoint(Path("run")).newest / "state.json").read_text())["state"]
    assert (state["epoch"], state["step"], len(state["history"])) == (1, BATCHES, 1)  # played, and not validated yet
    assert main(["resume", "run"]) == 0
    assert_same_run(Path("run"), Path("straight"))


@pytest.mark.promise("P24")
def test_interrupted_baseline_or_scoring_is_resumed(monkeypatch, capsys):
    command = [*SHORT, "--test-images", "60", "--baseline", "yes"]
    with monkeypatch.context() as patch:
        send_after(patch, Game, "end_batch", 3 * BATCHES + 2, signal.SIGTERM)  # the run itself is over by then
        assert main(command) == 75
    assert not Path("run/scores.json").exists()
    assert main(["resume", "run"]) == 0
    names = [score["name"] for score in json.loads(Path("run/scores.json").read_text())]
    assert "natural training" in names


SLOW = """import sys, time
from pathlib import Path
from deat.cli.main import main
from deat.utils.signals import Interruption

def check(self):
    for _ in range(600 if self.reason else 0):  # a batch that lasts a minute
        Path("heard").touch()
        time.sleep(0.1)
    real(self)

real, Interruption.check = Interruption.check, check
main(sys.argv[1:])
"""


@pytest.mark.promise("P25")
def test_second_signal_leaves_at_once_with_a_whole_checkpoint(children, tmp_path):
    Path("slow.py").write_text(SLOW)
    pid = children.start_script(Path("slow.py"), *SHORT, "--epochs", "5000", cwd=tmp_path)
    wait_for(Path("run/ckpt-000002"))
    os.kill(pid, signal.SIGTERM)
    wait_for(Path("heard"))  # two that come together may arrive as one
    os.kill(pid, signal.SIGTERM)
    assert children.wait(pid) == 75
    assert "stopped at once" in Path("err").read_text()
    newest = find_newest_checkpoint(Path("run")).newest
    assert json.loads((newest / "state.json").read_text())["state"]["step"] == 0  # the first was not obeyed yet


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.promise("P25")
def test_second_signal_in_a_save_leaves_the_old_checkpoint_or_the_new_one(monkeypatch, tmp_path):
    left: list[int] = []

    class Left(BaseException):
        pass

    def leave(status: int) -> None:
        left.append(status)
        raise Left

    real = store._commit

    def twice(temporary: Path, target: Path) -> None:
        if target.name == "ckpt-000002":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        real(temporary, target)

    monkeypatch.setattr(store, "_commit", twice)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Left):
        main(SHORT)
    assert left == [75]
    assert find_newest_checkpoint(Path("run")).newest.name in ("ckpt-000001", "ckpt-000002")


@pytest.mark.promise("P160")
def test_signals_while_an_interrupted_run_is_saved_do_not_cut_its_save_off(monkeypatch, whole, capsys):
    real = store._commit

    def struck(temporary: Path, target: Path) -> None:
        if target.name == "ckpt-000002":  # the one of the interruption
            for number in (*SIGNALS, *SIGNALS):
                os.kill(os.getpid(), number)
        real(temporary, target)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_commit", struck)
        send_after(patch, Game, "end_batch", BATCHES + 2, signal.SIGTERM)
        assert main(SHORT) == 75
    assert "deat resume run" in capsys.readouterr().err
    newest = find_newest_checkpoint(Path("run")).newest
    assert json.loads((newest / "state.json").read_text())["state"]["step"] == 2
    assert main(["resume", "run"]) == 0
    assert_same_run(Path("run"), whole)


@pytest.mark.promise("P160")
@pytest.mark.parametrize("moment", ["_report_error", "exit_if_distributed"])
def test_signals_while_an_interrupted_command_leaves_keep_its_status(moment, monkeypatch, capsys):
    from deat.cli import exit_handling

    real = getattr(exit_handling, moment)

    def struck(*args: object, **options: object) -> object:
        for number in (*SIGNALS, *SIGNALS):
            os.kill(os.getpid(), number)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exit_handling, moment, struck)
        send_after(patch, Game, "end_batch", BATCHES + 2, signal.SIGTERM)
        assert main(SHORT) == 75
    assert "deat resume run" in capsys.readouterr().err


@pytest.mark.promise("P160")
@pytest.mark.parametrize("world_size", ["1", "2"])
def test_signals_to_the_end_of_an_interrupted_process_keep_its_status(world_size):
    """Without a handler a signal in the interpreter's own end would make it 143, in a report of an error 1."""
    script = (
        "import atexit, os, signal, sys, threading, time\n"
        "from deat.cli.exit_handling import run_to_exit_status\n"
        "from deat.errors import Interrupted\n"
        "from deat.utils.signals import Interruption\n"
        "def strike():\n"
        "    while True:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.001)\n"
        "class Work:\n"
        "    is_resumable = False\n"
        "    def run(self):\n"
        "        stop = Interruption()\n"
        "        with stop.catch_signals():\n"
        "            threading.Thread(target=strike, daemon=True).start()\n"
        "            with stop.saving(): raise Interrupted('saved')\n"
        "atexit.register(time.sleep, 0.3)\n"
        "sys.exit(run_to_exit_status(Work, ends_process=True))\n"
    )
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "WORLD_SIZE": world_size}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (process.returncode, process.stderr) == (75, "deat: saved\n")


@pytest.mark.promise("P24")
def test_handler_of_the_user_s_own_is_called_too():
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        interruption = Interruption()
        with interruption.catch_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Interrupted, match="SIGTERM"):
                interruption.check()
        assert called == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(called) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interruption = Interruption()
        with interruption.catch_signals():
            os.kill(os.getpid(), signal.SIGINT)
        assert interruption.reason is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_without_a_run_says_so(monkeypatch, capsys):
    import deat.cli.train as command

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "resolve_request", interrupted)
    assert main(SHORT) == 130
    assert "no run to resume" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.promise("P24")
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_before_a_run_is_resumed_says_that_it_resumes(number, whole, monkeypatch, capsys):
    import deat.cli.train as command

    shutil.copytree(whole, "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        send_after(patch, command, "resolve_request", 1, number)
        assert main([*SHORT, "--resume", "auto"]) == 75
    assert "the same command" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


@pytest.mark.promise("P24")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("module", "step"), [("deat.cli.flag_types", "check_flag_names"), ("tyro.extras", "subcommand_cli_from_dict")]
)
def test_signal_while_the_command_line_is_parsed_has_the_command_s_own_status(
    module, step, number, whole, monkeypatch, capsys
):
    shutil.copytree(whole, "run")
    messages = {75: "the same command", 130: "no run to resume"}
    for argv, status in (
        (["resume", "run"], 75),
        ([*SHORT, "--resume=auto"], 75),
        (["train", "--out", "run", "--resume", "no"], 130),
        (["report", "run"], 130),
        (["list", "data"], 130),
    ):
        with monkeypatch.context() as patch:
            send_after(patch, importlib.import_module(module), step, 1, number)
            assert main(argv) == status, argv
        assert messages[status] in capsys.readouterr().err
    assert [signal.getsignal(n) for n in SIGNALS] == USUAL


def test_signal_while_a_mistaken_command_line_is_parsed_says_that_there_is_no_run(monkeypatch, capsys):
    import deat.cli.flag_types as flag_types

    def reject(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        raise UsageError("unknown option")

    monkeypatch.setattr(flag_types, "check_flag_names", reject)
    assert main(["resume", "run"]) == 130
    assert "no run to resume" in capsys.readouterr().err
    assert [signal.getsignal(n) for n in SIGNALS] == USUAL


@pytest.mark.promise("P24")
def test_signal_that_an_import_puts_into_other_words_is_still_one(whole, monkeypatch, capsys):
    import deat.runs.trained_run as loading

    def cut_short(*args, **options):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise RuntimeError("Error calling __set_name__") from None

    shutil.copytree(whole, "run")
    monkeypatch.setattr(loading, "resolve_request", cut_short)
    assert main(["resume", "run"]) == 75
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.promise("P24")
def test_signal_inside_code_that_is_executed_does_not_end_a_process_by_a_signal_of_its_own():
    """CPython ends by SIGINT where `exec` saw a KeyboardInterrupt, whatever was made of it afterwards."""
    script = (
        "import os, signal, sys\nfrom deat.cli.exit_handling import run_to_exit_status\n"
        "class Work:\n"
        "    is_resumable = True\n"
        "    def run(self): exec('os.kill(os.getpid(), signal.SIGTERM)', {'os': os, 'signal': signal})\n"
        "sys.exit(run_to_exit_status(Work))\n"
    )
    Path("script.py").write_text(script)
    found = subprocess.run([sys.executable, "-m", "script"], capture_output=True, text=True, check=False)
    assert (found.returncode, "the same command" in found.stderr) == (75, True), found.stderr


def test_signal_to_one_of_several_processes_while_its_command_line_is_parsed_waits_for_the_command():
    """In a distributed run a thread answers the signal, at once: it must not answer before the command is known."""
    script = (
        "import os, signal, sys, time\nfrom deat.cli.exit_handling import run_to_exit_status\n"
        "class Work:\n"
        "    is_resumable = True\n"
        "    def run(self): time.sleep(60)\n"
        "def parse():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.5)\n"
        "    return Work()\n"
        "sys.exit(run_to_exit_status(parse))\n"
    )
    Path("script.py").write_text(script)
    process = subprocess.run(
        [sys.executable, "-m", "script"],
        env={**os.environ, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (process.returncode, process.stderr.count("the same command")) == (75, 1), process.stderr


def test_signal_before_a_run_has_a_checkpoint_says_that_there_is_none(monkeypatch, capsys):
    import deat.cli.train as command

    Path("run").mkdir()
    send_after(monkeypatch, command, "resolve_request", 1, signal.SIGTERM)
    assert main([*SHORT, "--resume", "auto"]) == 130
    assert "no run to resume" in capsys.readouterr().err


@pytest.mark.promise("P24")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_signal_to_a_command_that_can_be_given_again_is_status_75(command, number, whole, monkeypatch, capsys):
    import deat.cli.evaluate as evaluating
    import deat.runs.trained_run as resuming

    shutil.copytree(whole, "run")
    order = {"evaluate": ["evaluate", "run", "--attacks", "natural", "--n", "20"], "resume": ["resume", "run"]}[command]
    with monkeypatch.context() as patch:
        send_after(
            patch,
            *{"evaluate": (evaluating, "load_run_model"), "resume": (resuming, "resolve_request")}[command],
            1,
            number,
        )
        assert main(order) == 75
    assert "the same command" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert main(order) in (0, 6)


@pytest.mark.promise("P24")
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_in_an_attack_keeps_what_was_evaluated_and_says_where(number, whole, monkeypatch, capsys):
    shutil.copytree(whole, "run")
    order = ["evaluate", "run", "--attacks", "natural,fgsm,pgd-2", "--n", "20"]
    with monkeypatch.context() as patch:
        send_after(patch, Attack, "__call__", 2, number)
        assert main(order) == 75
    said = capsys.readouterr().err
    assert "interrupted; finished images are saved next to run/evaluation.json; the same command resumes" in said
    assert Path("run/.evaluation-rulings.jsonl").read_text().count("\n") == 2
    assert not Path("run/.evaluation-lock").exists()
    assert main(order) in (0, 6)


@pytest.mark.promise("P24")
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_to_a_bench_saves_the_run_and_the_same_command_resumes_to_the_same_bytes(number, monkeypatch):
    small = ["--set", "epochs=2", "--set", "batch_size=256", "--set", "attacks=natural", "--set", "n=20"]
    order = ["bench", "quick", "--methods", "fgsm", "--seeds", "0", *small]
    assert main([*order, "--out", "straight"]) == 0
    with monkeypatch.context() as patch:
        send_after(patch, Game, "end_batch", BATCHES + 2, number)
        assert main([*order, "--out", "bench"]) == 75
    newest = find_newest_checkpoint(Path("bench/fgsm/seed-0")).newest
    assert newest
    assert json.loads((newest / "state.json").read_text())["state"]["step"] == 2
    assert main([*order, "--out", "bench"]) == 0
    for name in ("history.jsonl", "best/model.safetensors", "last/model.safetensors"):
        assert Path("bench/fgsm/seed-0", name).read_bytes() == Path("straight/fgsm/seed-0", name).read_bytes()


def test_signal_in_the_last_save_of_a_bench_s_run_ends_it_before_the_evaluation(monkeypatch):
    order = ["bench", "quick", "--methods", "fgsm", "--seeds", "0", "--set", "epochs=1", "--set", "attacks=natural"]
    with monkeypatch.context() as patch:
        send_after(patch, store, "_commit", 2, signal.SIGTERM)
        assert main([*order, "--out", "bench"]) == 75
    assert not list(Path("bench/fgsm/seed-0").glob("evaluation*"))
    assert main([*order, "--out", "bench"]) in (0, 6)


@pytest.mark.promise("P15")
def test_rolled_back_run_resumes_to_the_same_bytes(monkeypatch):
    """A collapse after the interruption goes back to the healthy epoch from before it."""
    command = [*SHORT, "--epochs", "5", "--watch", "rollback"]
    readings = {0: 0.6, 1: 0.6, 2: 0.6, 3: 0.0, 4: 0.6}

    def score(self: overfit_watch.OverfitWatch, trainer: deat.Trainer) -> tuple[float, float]:
        fired = any(event.action == "rollback" for event in self.events)
        return 0.9, 0.6 if fired else readings[trainer.epoch - 1]

    monkeypatch.setattr(overfit_watch.OverfitWatch, "_accuracies", score)
    assert main([*command[:-1], "rollback", "--out", "straight"]) == 0
    for batch in (3 * BATCHES + 2, 4 * BATCHES + 2):
        with monkeypatch.context() as patch:
            send_after(patch, Game, "end_batch", batch, signal.SIGTERM)
            assert main([*command, "--out", f"run-{batch}"]) == 75
        assert main(["resume", f"run-{batch}"]) == 0
        assert_same_run(Path(f"run-{batch}"), Path("straight"))
        assert Path(f"run-{batch}/watch.jsonl").read_bytes() == Path("straight/watch.jsonl").read_bytes()


def test_fit_with_checkpoints_saves_on_a_signal_and_the_same_call_resumes(monkeypatch, tmp_path):
    def fit(where: str | None) -> deat.TrainResult:
        images = deat.load_data("digits").train.subset(range(128))
        net = deat.build_model("small", in_channels=1, image_size=8)
        for parameter in net.parameters():
            deat_fill(parameter)
        options = {"epochs": 3, "batch_size": 32, "lr": 0.05, "threat": "linf:0.1", "val": 0.25, "val_attack": "pgd-1"}
        return deat.fit(net, images, method="m+deat", checkpoints=where, **options)

    straight = fit(None)
    with monkeypatch.context() as patch:
        send_after(patch, Game, "end_batch", 5, signal.SIGINT)
        with pytest.raises(Interrupted):
            fit("kept")
    again = fit("kept")
    assert again.history == straight.history
    for one, other in zip(again.model.parameters(), straight.model.parameters(), strict=True):
        assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


def deat_fill(parameter) -> None:
    """Weights that are the same in every call."""
    import torch

    generator = torch.Generator().manual_seed(parameter.numel())
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


class Struck(torch.utils.data.Dataset):
    """A data set whose worker is struck by Ctrl-C in the middle of its work."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGINT)
        return torch.zeros(1, 4, 4), index % 2


def test_ctrl_c_that_reaches_the_data_s_workers_does_not_end_them():
    from deat.data import as_source

    source = as_source(Struck(), batch_size=4, workers=1)
    assert sum(len(y) for _, y in source.epoch(0)) == 8
