"""Work in blocks: verdicts survive any batch size and any interruption, and nothing is done twice."""

import json
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.errors import CheckpointError
from deat.evaluation import judge, results
from deat.evaluation.arguments import EvaluationRequest
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluator import EvaluationRun, evaluate
from deat.evaluation.judge import Judge
from deat.evaluation.results import load_evaluation
from deat.evaluation.resume_log import are_close, fingerprint_logits
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


def judged(ledger=None, *, attacks=None, **options):
    """A small evaluation: three attacks on five blocks, the last one short."""
    options = {"threat": THREATS[0], "block": BLOCK, "sanity": False, "cascade": False, **options}
    data = options.pop("data", None) or images(IMAGES, seed=3)
    return evaluate(options.pop("model", None) or net(), data, attacks=attacks or NAMES, resume_log=ledger, **options)


def fragile(left=10**9):
    """The attacks, the second of which is interrupted after some calls."""
    return [Fragile("fgsm"), Fragile("pgd-3", left), Fragile("cw-3")]


def calls(attacks):
    return [a.calls for a in attacks]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def rulings(monkeypatch):
    """(attack, block) of every ruling that is made."""
    made, real = [], Judge.rule

    def rule(self, attacker, x, y, block, *rest):
        ruling = real(self, attacker, x, y, block, *rest)
        made.append((attacker.name, block))
        return ruling

    monkeypatch.setattr(Judge, "rule", rule)
    return made


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("block", [1, 7, 30, 500])
def test_verdicts_do_not_depend_on_the_loader_s_batch_size(batch, block):
    x, y = images(IMAGES, seed=3)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    assert judged(data=loader, block=block).verdicts == judged(block=block).verdicts


@pytest.mark.parametrize("n", [1, 6, 7, 8, 29, 30, 31])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_first_n_images_are_judged_whatever_the_batches_and_marked_as_a_sample(n, batch):
    x, y = images(IMAGES, seed=3)
    found = judged(data=DataLoader(TensorDataset(x, y), batch_size=batch), n=n)
    count = min(n, IMAGES)
    assert found.labels == y[:count].tolist()
    assert found.settings["sample"] is (n < IMAGES)
    assert found.verdicts == judged(data=(x[:count], y[:count])).verdicts


def test_whole_blocks_keep_their_verdicts_when_more_images_follow():
    some, all_ = judged(n=2 * BLOCK), judged()
    for name in NAMES:
        assert some.verdicts[name] == all_.verdicts[name][: 2 * BLOCK]


def test_verdicts_depend_on_the_seed_and_the_seed_alone():
    noise, threat = [Attack("noise", steps=0, start="uniform")], deat.Linf(0.9)
    same, again, *others = (judged(attacks=noise, threat=threat, seed=seed) for seed in (0, 0, 1, 2, 3))
    assert same.verdicts == again.verdicts
    assert any(other.verdicts != same.verdicts for other in others)


@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("left", range(BLOCKS))
def test_an_interrupted_evaluation_goes_on_where_it_was(left, cascade, tmp_path, rulings):
    ledger, whole = tmp_path / "rulings.jsonl", judged(attacks=fragile(), cascade=cascade)
    del rulings[:]
    first, second = fragile(left), fragile()
    with pytest.raises(Interrupted):
        judged(ledger, attacks=first, cascade=cascade)
    assert len(rows(ledger)) == len(rulings) == 3 * left + 1
    found = judged(ledger, attacks=second, cascade=cascade)
    assert found.verdicts == whole.verdicts
    assert [(r.forwards, r.backwards) for r in found.results] == [(r.forwards, r.backwards) for r in whole.results]
    assert len(rulings) == len(set(rulings)) == 3 * BLOCKS
    assert calls(first)[1] == left
    assert calls(second)[1] == BLOCKS - left
    assert not ledger.exists()


def test_many_interruptions_end_with_the_same_verdicts_and_no_ruling_made_twice(tmp_path, rulings):
    ledger, whole = tmp_path / "rulings.jsonl", judged(attacks=fragile())
    del rulings[:]
    for _ in range(BLOCKS - 1):
        with pytest.raises(Interrupted):
            judged(ledger, attacks=[Fragile("fgsm", 1), *fragile()[1:]])
    assert judged(ledger, attacks=fragile()).verdicts == whole.verdicts
    assert len(rulings) == len(set(rulings)) == 3 * BLOCKS


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_torn_last_line_is_made_again_and_spoils_nothing_that_follows(cut, tmp_path, rulings):
    ledger, whole = tmp_path / "rulings.jsonl", judged(attacks=fragile())
    with pytest.raises(Interrupted):
        judged(ledger, attacks=fragile(2))
    kept = ledger.read_bytes()
    ledger.write_bytes(kept[:-cut])
    del rulings[:]
    with pytest.raises(Interrupted):
        judged(ledger, attacks=fragile(1))
    assert rulings == [("fgsm", 2), ("pgd-3", 2), ("cw-3", 2), ("fgsm", 3)]
    assert judged(ledger, attacks=fragile()).verdicts == whole.verdicts
    assert len(rulings) == 3 * BLOCKS - 6
    assert len(set(rulings)) == len(rulings)


@pytest.mark.parametrize(
    "rubbish",
    [b"", b"\n\n", b"\x00\xff\xfe", b"{}\n[]\n3\nnull\n", b'{"question": 1}\n', b"{\n", b"[" * 100_000 + b"\n"],
    ids=lambda rubbish: str(rubbish[:20]),
)
def test_rubbish_in_the_file_is_passed_over(rubbish, tmp_path):
    ledger = tmp_path / "rulings.jsonl"
    ledger.write_bytes(rubbish)
    assert judged(ledger).verdicts == judged().verdicts


CHILD = """
import os, signal, sys
from unit.test_eval_blocks import fragile, judged
def told(pace):
    if pace.done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
judged(sys.argv[1], attacks=fragile(), progress=told)
"""


@pytest.mark.parametrize("after", [1, 8])
def test_a_killed_process_s_evaluation_goes_on_where_it_was(after, children, tmp_path, rulings):
    ledger, script = tmp_path / "rulings.jsonl", tmp_path / "judge.py"
    script.write_text(CHILD)
    ended = children.run_script(script, str(ledger), str(after), cwd=tmp_path)
    assert ended == -signal.SIGKILL, (tmp_path / "err").read_text()
    assert len(rows(ledger)) == after
    assert judged(ledger, attacks=fragile()).verdicts == judged(attacks=fragile()).verdicts
    assert len(rulings) == 2 * 3 * BLOCKS - after
    assert not ledger.exists()


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
        {"attacks": [Attack(name, steps=1, alpha=0.5) for name in NAMES]},
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
def test_a_ledger_of_another_question_is_not_used(change, tmp_path, rulings):
    ledger = tmp_path / "rulings.jsonl"
    with pytest.raises(Interrupted):
        judged(ledger, progress=interrupt_after(3 * BLOCKS))
    whole = judged(**change)
    del rulings[:]
    assert judged(ledger, **change).verdicts == whole.verdicts
    assert len(rulings) == 3 * -(-IMAGES // change.get("block", BLOCK))


@pytest.mark.parametrize(("factor", "kept"), [(1.0, True), (0.5, False)])
def test_a_ledger_of_a_network_that_answers_otherwise_is_not_used_though_weights_and_code_are_the_same(
    factor, kept, tmp_path, rulings
):
    def model(share):
        return Around(net(), lambda x: share * x, same)

    ledger = tmp_path / "rulings.jsonl"
    with pytest.raises(Interrupted):
        judged(ledger, model=model(1.0), progress=interrupt_after(10))
    del rulings[:]
    judged(ledger, model=model(factor))
    assert len(rulings) == 3 * BLOCKS - 10 * kept


def test_a_ledger_of_another_precision_is_another_question_s(monkeypatch):
    monkeypatch.setattr(judge, "choose_attack_precision", lambda wanted, device: wanted)
    monkeypatch.setattr(judge, "FastModel", lambda *_: None)
    asked = [EvaluationRequest(net(), THREATS[0], [], BLOCK, precision=how) for how in ("fp32", "fp16")]
    assert len({EvaluationRun(question).fingerprint for question in asked}) == 2


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
    ("old", "new", "kept"),
    [
        ("", "", True),
        ("self.net(x)", "1e4 * self.net(x)", False),
        ("self.net(x)", "self.net(x + (x - x.detach()))", False),  # the same logits, other gradients
    ],
    ids=["same", "logits", "gradients"],
)
def test_a_ledger_of_a_network_whose_file_was_changed_is_not_used(old, new, kept, tmp_path, rulings):
    ledger, file = tmp_path / "rulings.jsonl", tmp_path / "net.py"
    file.write_text(NET)
    with pytest.raises(Interrupted):
        judged(ledger, model=load_object(f"{file}:Net")(net()), progress=interrupt_after(10))
    file.write_text(NET.replace(old, new))
    model = load_object(f"{file}:Net")(net())
    del rulings[:]
    found = judged(ledger, model=model)
    assert len(rulings) == 3 * BLOCKS - 10 * kept
    assert found.verdicts == judged(model=model).verdicts


@pytest.mark.parametrize(
    ("held", "known"),
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
def test_a_model_is_known_again_by_its_logits_but_for_rounding(held, known):
    assert are_close(held, [1.0, -200.0]) is known


def test_a_model_that_answers_with_nan_or_draws_is_known_again():
    assert are_close([float("nan"), float("inf")], [float("nan"), float("inf")])
    x = images(IMAGES, seed=3)[0]
    noisy = Around(net(), lambda x: x + torch.rand_like(x), lambda logits: logits)
    state = torch.get_rng_state()
    assert fingerprint_logits(noisy, x) == fingerprint_logits(noisy, x[:20])
    assert torch.equal(torch.get_rng_state(), state)


def interrupt_after(count):
    def told(pace):
        if pace.done == count:
            raise Interrupted

    return told


def test_an_attack_added_to_the_list_keeps_the_rulings_of_the_others(tmp_path, rulings):
    ledger = tmp_path / "rulings.jsonl"
    with pytest.raises(Interrupted):
        judged(ledger, progress=interrupt_after(3 * BLOCKS))
    del rulings[:]
    found = judged(ledger, attacks=["natural", "cw-3", *NAMES[:2]])
    assert {name for name, _ in rulings} == {"natural"}
    assert found.verdicts == judged(attacks=["natural", "cw-3", *NAMES[:2]]).verdicts


def test_in_a_cascade_an_earlier_attack_s_other_setting_makes_the_ledger_another_s(tmp_path, rulings):
    ledger = tmp_path / "rulings.jsonl"
    with pytest.raises(Interrupted):
        judged(ledger, cascade=True, progress=interrupt_after(3 * BLOCKS))
    changed = [Attack("fgsm", steps=0, start="zero"), *NAMES[1:]]
    del rulings[:]
    assert judged(ledger, attacks=changed, cascade=True).verdicts == judged(attacks=changed, cascade=True).verdicts
    assert len(rulings) == 2 * 3 * BLOCKS


def test_a_finished_evaluation_leaves_no_ledger_and_no_other_file(tmp_path):
    judged(tmp_path / "deep" / "rulings.jsonl")
    assert list((tmp_path / "deep").iterdir()) == []


def test_rulings_are_kept_until_the_evaluation_s_own_file_is_written(tmp_path, rulings, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    ledger = tmp_path / "rulings.jsonl"
    said = r"cannot write '.*evaluation\.json': No space left"
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=said):
        patch.setattr(results, "write_json", full)
        judged(ledger, save=tmp_path / "evaluation.json")
    assert len(rows(ledger)) == len(rulings) == 3 * BLOCKS
    found = judged(ledger, save=tmp_path / "evaluation.json")
    assert len(rulings) == 3 * BLOCKS
    assert load_evaluation(tmp_path / "evaluation.json") == found
    assert not ledger.exists()


def test_without_a_ledger_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    judged()
    assert list(tmp_path.iterdir()) == []
