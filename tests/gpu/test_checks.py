"""Sanity checks, and how a ledger knows a model again, where float32 moves most: on a GPU; skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.evaluation.progress import EvaluationProgress
from deat.evaluation.sanity import check_before_attacks
from deat.utils.fingerprints import are_close, fingerprint_logits
from helpers.eval_attackers import Interrupted
from helpers.eval_nets import THREAT, convolutional, digits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network(name: str = "preact_resnet18") -> nn.Module:
    """An untrained network whose batch norms have seen images."""
    torch.manual_seed(0)
    net = deat.build_model(name).cuda().train()
    with torch.no_grad():
        for _ in range(3):
            net(torch.rand(64, 3, 32, 32, device="cuda"))
    return net.eval()


def seen(net: nn.Module) -> set[str]:
    x, y = torch.rand(128, 3, 32, 32, device="cuda"), torch.arange(128, device="cuda") % 10
    return {flag.name for flag in check_before_attacks(net, x, y, 10)}


@pytest.mark.parametrize("name", ["preact_resnet18", "wide_resnet34_10"])
@pytest.mark.parametrize("tuned", [False, True])
def test_an_honest_network_gives_an_image_the_same_answer_in_any_batch(name: str, tuned: bool) -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=tuned, allow_tf32=True):
        assert seen(network(name)) <= {"at_chance"}


def test_statistics_of_the_batch_are_flagged() -> None:
    assert "batch_dependent" in seen(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), network()).cuda())


def test_a_network_is_known_again_by_its_answers() -> None:
    net, x = network(), torch.rand(40, 3, 32, 32, device="cuda")
    first = fingerprint_logits(net, x)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True), torch.autocast("cuda"):
        again = fingerprint_logits(net, x[:9])
    assert are_close(first, again)
    assert not are_close(first, [1.01 * value for value in again])


def test_an_interrupted_evaluation_is_resumed(tmp_path: Path) -> None:
    net, data, ledger = convolutional().cuda(), digits(120), tmp_path / "rulings.jsonl"
    options: dict[str, Any] = {"threat": THREAT, "attacks": ["natural", "pgd-5"], "block": 40, "sanity": False}

    def interrupt(pace: EvaluationProgress) -> None:
        if pace.done == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        deat.evaluate(net, data, resume_log=ledger, progress=interrupt, **options)
    held, lengths = ledger.read_text().count("\n"), []
    kept = deat.evaluate(
        net, data, resume_log=ledger, progress=lambda *_: lengths.append(ledger.read_text().count("\n")), **options
    )
    assert lengths == [held, held, held, held, 4, 5, 6]  # the first three were found, not made
    assert kept.verdicts == deat.evaluate(net, data, **options).verdicts


def test_aa_says_what_each_part_felled_and_raises_no_flag_on_an_honest_network() -> None:
    found = deat.evaluate(convolutional().cuda(), digits(60), threat=THREAT, attacks=["natural", "pgd-20", "aa"])
    natural, _, whole = found.results
    assert sum(whole.num_fooled_by_stage.values()) == sum(natural.correct) - sum(whole.correct)
    assert found.flags == []
