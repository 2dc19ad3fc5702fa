"""Evaluation in blocks: verdicts do not depend on batch sizes or interruptions, and no result is computed twice."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.errors import CheckpointError
from deat.evaluation import attack_verifier, results
from deat.evaluation.attack_verifier import AttackVerifier
from deat.evaluation.attacks import Attack, parse_attack
from deat.evaluation.evaluation_request import EvaluationRequest
from deat.evaluation.evaluator import EvaluationRun, evaluate
from deat.evaluation.results import load_evaluation
from deat.utils.fingerprints import are_close, fingerprint_logits
from deat.utils.user_code import load_object
from helpers.eval_attackers import Fragile, Interrupted
from helpers.eval_nets import Around, same
from helpers.games import THREATS
from helpers.nets import conv_net, images

NAMES = ["fgsm", "pgd-3", "cw-3"]
BLOCK = 7
IMAGES = 30
BLOCKS = 5


def net() -> nn.Module:
    return conv_net(seed=1)


def evaluate_small(log=None, *, attacks=None, **options):
    """A small evaluation: three attacks on five blocks, the last one short."""
    options = {"threat": THREATS[0], "block": BLOCK, "sanity": False, "cascade": False, **options}
    data = options.pop("data", None) or images(IMAGES, seed=3)
    return evaluate(options.pop("model", None) or net(), data, attacks=attacks or NAMES, resume_log=log, **options)


def fragile(left=10**9):
    """The attacks, the second of which is interrupted after some calls."""
    return [Fragile("fgsm"), Fragile("pgd-3", left), Fragile("cw-3")]


def calls(attacks):
    return [a.calls for a in attacks]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def computed(monkeypatch):
    """(attack, block) of every result that is computed."""
    names, real = [], AttackVerifier.attack_block

    def attack_block(self, attack, x, y, block, *rest):
        result = real(self, attack, x, y, block, *rest)
        names.append((attack.name, block))
        return result

    monkeypatch.setattr(AttackVerifier, "attack_block", attack_block)
    return names


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("block", [1, 7, 30, 500])
def test_verdicts_do_not_depend_on_the_batch_size_of_the_loader(batch, block):
    x, y = images(IMAGES, seed=3)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    assert evaluate_small(data=loader, block=block).verdicts == evaluate_small(block=block).verdicts


@pytest.mark.parametrize("n", [1, 6, 7, 8, 29, 30, 31])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_first_n_images_are_evaluated_whatever_the_batch_size_and_marked_as_a_sample(n, batch):
    x, y = images(IMAGES, seed=3)
    evaluation = evaluate_small(data=DataLoader(TensorDataset(x, y), batch_size=batch), n=n)
    count = min(n, IMAGES)
    assert evaluation.labels == y[:count].tolist()
    assert evaluation.settings["sample"] is (n < IMAGES)
    assert evaluation.verdicts == evaluate_small(data=(x[:count], y[:count])).verdicts


def test_complete_blocks_keep_their_verdicts_when_more_images_follow():
    some, all_ = evaluate_small(n=2 * BLOCK), evaluate_small()
    for name in NAMES:
        assert some.verdicts[name] == all_.verdicts[name][: 2 * BLOCK]


def test_verdicts_change_with_the_seed_and_with_nothing_else():
    noise, threat = [Attack("noise", steps=0, start="uniform")], deat.Linf(0.9)
    same, again, *others = (evaluate_small(attacks=noise, threat=threat, seed=seed) for seed in (0, 0, 1, 2, 3))
    assert same.verdicts == again.verdicts
    assert any(other.verdicts != same.verdicts for other in others)


@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("left", range(BLOCKS))
def test_an_interrupted_evaluation_resumes_without_computing_a_result_again(left, cascade, tmp_path, computed):
    log, whole = tmp_path / "log.jsonl", evaluate_small(attacks=fragile(), cascade=cascade)
    computed.clear()
    first, second = fragile(left), fragile()
    with pytest.raises(Interrupted):
        evaluate_small(log, attacks=first, cascade=cascade)
    assert len(read_lines(log)) == len(computed) == 3 * left + 1
    resumed = evaluate_small(log, attacks=second, cascade=cascade)
    assert resumed.verdicts == whole.verdicts
    assert [(r.forwards, r.backwards) for r in resumed.results] == [(r.forwards, r.backwards) for r in whole.results]
    assert len(computed) == len(set(computed)) == 3 * BLOCKS
    assert calls(first)[1] == left
    assert calls(second)[1] == BLOCKS - left
    assert not log.exists()


def test_many_interruptions_end_with_the_same_verdicts_and_no_result_computed_twice(tmp_path, computed):
    log, whole = tmp_path / "log.jsonl", evaluate_small(attacks=fragile())
    computed.clear()
    for _ in range(BLOCKS - 1):
        with pytest.raises(Interrupted):
            evaluate_small(log, attacks=[Fragile("fgsm", 1), *fragile()[1:]])
    assert evaluate_small(log, attacks=fragile()).verdicts == whole.verdicts
    assert len(computed) == len(set(computed)) == 3 * BLOCKS


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_an_incomplete_last_line_is_computed_again_and_later_lines_are_readable(cut, tmp_path, computed):
    log, whole = tmp_path / "log.jsonl", evaluate_small(attacks=fragile())
    with pytest.raises(Interrupted):
        evaluate_small(log, attacks=fragile(2))
    log.write_bytes(log.read_bytes()[:-cut])
    computed.clear()
    with pytest.raises(Interrupted):
        evaluate_small(log, attacks=fragile(1))
    assert computed == [("fgsm", 2), ("pgd-3", 2), ("cw-3", 2), ("fgsm", 3)]
    assert evaluate_small(log, attacks=fragile()).verdicts == whole.verdicts
    assert len(computed) == 3 * BLOCKS - 6
    assert len(set(computed)) == len(computed)


@pytest.mark.parametrize(
    "rubbish",
    [b"", b"\n\n", b"\x00\xff\xfe", b"{}\n[]\n3\nnull\n", b'{"question": 1}\n', b"{\n", b"[" * 100_000 + b"\n"],
    ids=lambda rubbish: str(rubbish[:20]),
)
def test_lines_that_are_no_results_are_ignored(rubbish, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(rubbish)
    assert evaluate_small(log).verdicts == evaluate_small().verdicts


CHILD = """
import os, signal, sys
from unit.test_resume_log import evaluate_small, fragile
def kill(progress):
    if progress.done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
evaluate_small(sys.argv[1], attacks=fragile(), progress=kill)
"""


@pytest.mark.parametrize("after", [1, 8])
def test_an_evaluation_resumes_after_its_process_was_killed(after, children, tmp_path, computed):
    log, script = tmp_path / "log.jsonl", tmp_path / "judge.py"
    script.write_text(CHILD)
    ended = children.run_script(script, str(log), str(after), cwd=tmp_path)
    assert ended == -signal.SIGKILL, (tmp_path / "err").read_text()
    assert len(read_lines(log)) == after
    assert evaluate_small(log, attacks=fragile()).verdicts == evaluate_small(attacks=fragile()).verdicts
    assert len(computed) == 2 * 3 * BLOCKS - after
    assert not log.exists()


def scaled_net() -> nn.Module:
    other = net()
    with torch.no_grad():
        other[0].weight.mul_(1.1)
    return other


def loud_net() -> nn.Module:
    """The network's layers and weights, but another forward."""
    other = net()
    other.forward = lambda x: 1e4 * nn.Sequential.forward(other, x)
    return other


@pytest.mark.parametrize(
    "change",
    [
        {"model": scaled_net()},
        {"model": loud_net()},
        {"model": nn.Sequential(*net(), nn.Hardtanh())},
        {"model": nn.Sequential(*list(net())[:-1], nn.Dropout(0.5), net()[-1])},
        {"seed": 1},
        {"block": 10},
        {"threat": deat.Linf(0.05)},
        {"threat": deat.L2(0.1)},
        {"cascade": True},
        {"data": images(IMAGES, seed=4)},
        {"data": (images(IMAGES, seed=3)[0], images(IMAGES, seed=3)[1].flip(0))},
        {"attacks": [replace(parse_attack(name), alpha=0.5) for name in NAMES]},
    ],
    ids=[
        "weights",
        "forward",
        "layers",
        "dropout",
        "seed",
        "block",
        "radius",
        "norm",
        "cascade",
        "images",
        "labels",
        "settings",
    ],
)
def test_a_log_of_another_evaluation_is_not_used(change, tmp_path, computed):
    log = tmp_path / "log.jsonl"
    with pytest.raises(Interrupted):
        evaluate_small(log, progress=interrupt_after(3 * BLOCKS))
    whole = evaluate_small(**change)
    computed.clear()
    assert evaluate_small(log, **change).verdicts == whole.verdicts
    assert len(computed) == 3 * -(-IMAGES // change.get("block", BLOCK))


@pytest.mark.parametrize(("factor", "used"), [(1.0, True), (0.5, False)])
def test_a_log_of_a_network_with_other_logits_is_not_used_though_weights_and_code_are_the_same(
    factor, used, tmp_path, computed
):
    def model(factor):
        return Around(net(), lambda x: factor * x, same)

    log = tmp_path / "log.jsonl"
    with pytest.raises(Interrupted):
        evaluate_small(log, model=model(1.0), progress=interrupt_after(10))
    computed.clear()
    evaluate_small(log, model=model(factor))
    assert len(computed) == 3 * BLOCKS - 10 * used


def test_a_log_of_another_precision_is_not_used(monkeypatch):
    monkeypatch.setattr(attack_verifier, "choose_attack_precision", lambda wanted, *_: wanted)
    monkeypatch.setattr(attack_verifier, "FastModel", lambda *_: None)
    requests = [EvaluationRequest(net(), THREATS[0], [], BLOCK, precision=name) for name in ("fp32", "fp16")]
    assert len({EvaluationRun(request).fingerprint for request in requests}) == 2


NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x):
        return self.net(x)
"""


@pytest.mark.parametrize(
    ("old", "new", "used"),
    [
        ("", "", True),
        ("self.net(x)", "1e4 * self.net(x)", False),
        ("self.net(x)", "self.net(x + (x - x.detach()))", False),  # the same logits, other gradients
    ],
    ids=["same", "logits", "gradients"],
)
def test_a_log_of_a_network_whose_file_was_changed_is_not_used(old, new, used, tmp_path, computed):
    log, file = tmp_path / "log.jsonl", tmp_path / "net.py"
    file.write_text(NET)
    with pytest.raises(Interrupted):
        evaluate_small(log, model=load_object(f"{file}:Net")(net()), progress=interrupt_after(10))
    file.write_text(NET.replace(old, new))
    model = load_object(f"{file}:Net")(net())
    computed.clear()
    evaluation = evaluate_small(log, model=model)
    assert len(computed) == 3 * BLOCKS - 10 * used
    assert evaluation.verdicts == evaluate_small(model=model).verdicts


@pytest.mark.parametrize(
    ("saved", "close"),
    [
        ([1.0, -200.0], True),
        ([1.1, -199.9], True),
        ([1.3, -200.0], False),
        ([1.0], False),
        ([1.0, float("nan")], False),
        (None, False),
        ("no", False),
        ([[1.0], 2], False),
    ],
)
def test_a_model_is_identified_by_its_logits_up_to_rounding(saved, close):
    assert are_close(saved, [1.0, -200.0]) is close


def test_a_model_with_nan_or_random_logits_is_identified():
    assert are_close([float("nan"), float("inf")], [float("nan"), float("inf")])
    x = images(IMAGES, seed=3)[0]
    noisy = Around(net(), lambda x: x + torch.rand_like(x), lambda logits: logits)
    state = torch.get_rng_state()
    assert fingerprint_logits(noisy, x) == fingerprint_logits(noisy, x[:20])
    assert torch.equal(torch.get_rng_state(), state)


def interrupt_after(count):
    def on_progress(progress):
        if progress.done == count:
            raise Interrupted

    return on_progress


def test_an_attack_added_to_the_list_keeps_the_results_of_the_others(tmp_path, computed):
    log = tmp_path / "log.jsonl"
    with pytest.raises(Interrupted):
        evaluate_small(log, progress=interrupt_after(3 * BLOCKS))
    computed.clear()
    evaluation = evaluate_small(log, attacks=["natural", "cw-3", *NAMES[:2]])
    assert {name for name, _ in computed} == {"natural"}
    assert evaluation.verdicts == evaluate_small(attacks=["natural", "cw-3", *NAMES[:2]]).verdicts


def test_in_a_cascade_a_log_with_other_settings_of_an_earlier_attack_is_not_used(tmp_path, computed):
    log = tmp_path / "log.jsonl"
    with pytest.raises(Interrupted):
        evaluate_small(log, cascade=True, progress=interrupt_after(3 * BLOCKS))
    changed = [Attack("fgsm", steps=1, alpha=0.5, start="zero"), *NAMES[1:]]
    computed.clear()
    assert (
        evaluate_small(log, attacks=changed, cascade=True).verdicts
        == evaluate_small(attacks=changed, cascade=True).verdicts
    )
    assert len(computed) == 2 * 3 * BLOCKS


def test_a_finished_evaluation_leaves_no_log_and_no_other_file(tmp_path):
    evaluate_small(tmp_path / "deep" / "log.jsonl")
    assert list((tmp_path / "deep").iterdir()) == []


def test_the_log_is_kept_until_the_evaluation_is_saved(tmp_path, computed, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    log = tmp_path / "log.jsonl"
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"evaluation\.json': No space left"):
        patch.setattr(results, "write_json", full)
        evaluate_small(log, save=tmp_path / "evaluation.json")
    assert len(read_lines(log)) == len(computed) == 3 * BLOCKS
    evaluation = evaluate_small(log, save=tmp_path / "evaluation.json")
    assert len(computed) == 3 * BLOCKS
    assert load_evaluation(tmp_path / "evaluation.json") == evaluation
    assert not log.exists()


def test_without_a_log_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evaluate_small()
    assert list(tmp_path.iterdir()) == []
