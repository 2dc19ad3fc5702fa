"""deat.attack: an attack by name in loops of one's own. Wrong inputs are refused with what to write instead."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import deat
from deat.errors import DataError, UsageError
from helpers.nets import conv_net

ATTACKS = ("natural", "fgsm", "pgd-3", "cw-3", "pgd-2x2", "pgd-3-last")
THREATS = ("linf:0.1", "l2:0.5", "l1:4")


def batch(count: int = 16) -> tuple[Tensor, Tensor]:
    """Images of digits with their labels."""
    data = deat.load_data("digits").test
    assert data is not None
    return data.images[:count].float() / 255, data.labels[:count]


def trained() -> nn.Module:
    """A network that classifies most digits, so that there is something to attack."""
    torch.manual_seed(0)
    net = deat.build_model("small", num_classes=10, in_channels=1, image_size=8)
    x, y = batch(300)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return trained()


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_stays_in_the_ball_and_leaves_the_model_as_it_was(name: str, threat: str, net: nn.Module) -> None:
    x, y = batch()
    net.train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    attack = deat.attack(name, threat=threat)
    with torch.no_grad():
        adv = attack(net, x, y)
    assert attack.threat.contains(x, adv).all()
    assert net.training
    assert not adv.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert (adv - x).abs().sum() > 0 or name == "natural"


@pytest.mark.parametrize("name", ["aa", "square", "apgd-ce"])
def test_autoattack_is_for_judging(name: str, net: nn.Module) -> None:
    with pytest.raises(UsageError, match="stop_early=True"):
        deat.attack(name, eps=0.1)
    if name == "apgd-ce":
        x, y = batch(4)
        attack = deat.attack(name, eps=0.1, stop_early=True)
        assert attack.threat.contains(x, attack(net, x, y)).all()


@pytest.mark.parametrize("eps", [8 / 255, "8/255", np.float32(8 / 255), torch.tensor(8 / 255)])
def test_a_radius_is_a_number_or_text(eps: Any) -> None:
    assert deat.attack("pgd-7", eps=eps).threat == deat.Linf(8 / 255) or isinstance(eps, np.floating | Tensor)
    assert deat.attack("pgd-7", eps=eps).threat.eps == pytest.approx(8 / 255)


def test_for_training_every_step_moves_every_image_and_for_judging_fooled_ones_stay(net: nn.Module) -> None:
    x, y = batch(64)
    net.eval()
    fooled_before = net(x).argmax(1) != (y + 1) % 10  # every image, by a label that is wrong
    losses = {}
    for stop_early in (False, True):
        attack = deat.attack("pgd-7", eps=0.1, stop_early=stop_early)
        adv = attack(net, x, (y + 1) % 10, torch.Generator().manual_seed(0))
        moved = (adv - x).flatten(1).abs().amax(1)
        losses[stop_early] = float(cross_entropy(net(adv), (y + 1) % 10).detach())
        assert bool((moved[fooled_before] > 0.099).all()) is not stop_early
    assert fooled_before.all()
    assert losses[False] > losses[True] + 0.1


def test_adversarial_training_in_a_plain_loop_makes_a_robust_network() -> None:
    x, y = batch(150)
    judge = deat.attack("pgd-10", eps=0.1, stop_early=True)
    shares = {}
    for trains_robust in (False, True):
        net = trained()
        attack = deat.attack("pgd-3", eps=0.1)
        optimizer = torch.optim.Adam(net.parameters(), 0.005)
        for _ in range(25):
            optimizer.zero_grad()
            cross_entropy(net(attack(net, x, y) if trains_robust else x), y).backward()
            optimizer.step()
        net.eval()
        shares[trains_robust] = float((net(judge(net, x, y)).argmax(1) == y).float().mean())
    assert shares[True] > shares[False] + 0.1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"eps": 8}, "did you mean 8/255"),
        ({"eps": "eight"}, "eight"),
        ({"eps": -0.1}, "negative"),
        ({}, "eps=8/255"),
        ({"eps": 0.1, "threat": "l2:0.5"}, "not both"),
        ({"threat": 0.1}, "A radius is eps="),
        ({"eps": deat.Linf(0.1)}, "threat="),
        ({"eps": 0.1, "norm": "l3"}, "unknown threat model 'l3'"),
        ({"eps": 0.1, "stop_early": "no"}, "True or False"),
        ({"name": "pgd", "eps": 0.1}, "unknown attack 'pgd'"),
        ({"name": 7, "eps": 0.1}, "no attack"),
        ({"name": "segpgd-5", "eps": 0.1}, "segmentation"),
        ({"name": "pgd-3-last", "eps": 0.1, "stop_early": True}, "last step"),
    ],
)
def test_settings_are_refused_with_what_to_write(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        deat.attack(**{"name": "pgd-7", **settings})


class Pair(nn.Module):
    """Returns logits and something else."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair."""
        return x.flatten(1)[:, :10], x


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda net, x, y: (net, (x * 255).byte(), y), r"x\.float\(\) / 255"),
        (lambda net, x, y: (net, x.numpy(), y), r"torch\.as_tensor\(x\)"),
        (lambda net, x, y: (net, x * 255, y), "outside"),
        (lambda net, x, y: (net, x - 0.5, y), r"outside.*add_normalization\(model, mean, std\)"),
        (lambda net, x, y: (net, torch.full_like(x, torch.nan), y), "nan"),
        (lambda net, x, y: (net, x.double(), y), r"x\.to\(torch\.float32\)"),
        (lambda net, x, y: (net, x, y.tolist()), r"torch\.as_tensor\(y\)"),
        (lambda net, x, y: (net, x, y[:-1]), "one for each"),
        (lambda net, x, y: (net, x, y.float() + 0.5), "labels"),
        (lambda net, x, y: (net, x, torch.eye(10)[y]), "argmax"),
        (lambda net, x, y: (net, x, y + 5), "label"),
        (lambda net, x, y: (Pair(), x, y), r"self\.net\(x\)|let it return"),
        (lambda net, x, y: (nn.Linear, x, y), "class"),
        (lambda net, x, y: (lambda images: images, x, y), "torch.nn.Module"),
        (lambda net, x, y: (net, x.to("meta"), y), r"give x\.to\('cpu'\)"),
        (lambda net, x, y: (net, x, y.to("meta")), r"give y\.to\('cpu'\)"),
    ],
)
def test_wrong_inputs_are_refused_with_what_to_write(change: Any, told: str, net: nn.Module) -> None:
    x, y = batch()
    with pytest.raises((UsageError, DataError), match=told):
        deat.attack("pgd-2", eps=0.1)(*change(net, x, y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_labels_of_any_whole_number_type_are_taken(dtype: torch.dtype, net: nn.Module) -> None:
    x, y = batch()
    same = [
        deat.attack("pgd-2", eps=0.1)(net, x, labels, torch.Generator().manual_seed(0)) for labels in (y, y.to(dtype))
    ]
    assert torch.equal(*same)


def test_an_empty_batch_stays_empty(net: nn.Module) -> None:
    x, y = batch()
    assert deat.attack("pgd-2", eps=0.1)(net, x[:0], y[:0]).shape == x[:0].shape


@pytest.mark.parametrize("task", ["multilabel", "segmentation", "regression"])
def test_other_tasks_and_boxes(task: str) -> None:
    torch.manual_seed(0)
    if task == "segmentation":
        net: nn.Module = nn.Conv2d(1, 3, 1)
        x, y = torch.rand(4, 1, 6, 6), torch.randint(0, 3, (4, 6, 6))
    else:
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        x = 2 * torch.rand(4, 1, 36) - 1
        y = torch.randn(4, 3) if task == "regression" else torch.randint(0, 2, (4, 3))
    threat = deat.Linf(0.05, box=(0, 1) if task == "segmentation" else (-1, 1))
    adv = deat.attack("pgd-5", threat=threat, task=task)(net, x, y)
    kind = deat.tasks.get_task(task)
    assert threat.contains(x, adv).all()
    with torch.no_grad():
        labels = kind.prepare_labels(y)
        assert kind.loss(net(adv), labels).mean() > kind.loss(net(x), labels).mean()


class Leaves:
    """Leaves the ball."""

    name = "leaves"

    def __call__(self, model: Any, x: Tensor, y: Tensor, threat: Any, generator: Any = None) -> Tensor:
        return x + 1


def test_attacks_of_your_own_are_called_and_verified(net: nn.Module) -> None:
    x, y = batch()
    mine = deat.attack(deat.Attack("mine", steps=3, alpha=0.5), eps=0.1)
    assert deat.Linf(0.1).contains(x, mine(net, x, y)).all()
    with pytest.raises(UsageError, match="outside the ball"):
        deat.attack(Leaves(), eps=0.1)(net, x, y)


@pytest.mark.parametrize(
    ("threat", "scale", "told"),
    [(0.1, 1.0, r"deat\.Linf\(8 / 255\)"), ("linf:0.1", 255.0, "outside"), (deat.Linf(0.1), -1.0, "outside")],
)
def test_a_bare_attack_refuses_a_bare_radius_and_images_outside_the_box(threat: Any, scale: float, told: str) -> None:
    x, y = batch()
    with pytest.raises((UsageError, DataError), match=told):
        deat.Attack("pgd-2", steps=2)(conv_net(), x * scale, y, threat)


def test_a_bare_attack_takes_a_threat_as_text_and_refuses_bytes(net: nn.Module) -> None:
    x, y = batch()
    adv = deat.Attack("pgd-2", steps=2)(net, x, y, "linf:0.1")
    assert deat.Linf(0.1).contains(x, adv).all()
    with pytest.raises(UsageError, match=r"x\.float\(\) / 255"):
        deat.Attack("pgd-2", steps=2)(net, (x * 255).byte(), y, "linf:0.1")


def test_a_bare_attack_called_in_a_loop_runs_all_its_steps_and_stops_early_in_an_evaluation(net: nn.Module) -> None:
    x, y = batch(64)
    threat = deat.Linf(0.15)
    mine = deat.Attack("mine", steps=7, start="zero")
    called = mine(net, x, y, threat)
    assert torch.equal(called, replace(mine, freeze=False)(net, x, y, threat))
    stopped = replace(mine, freeze=True)(net, x, y, threat)
    losses = [cross_entropy(net(adv), y).item() for adv in (x, stopped, called)]
    assert losses[0] < losses[1] < 0.8 * losses[2]  # what stops early stays almost clean
    evaluation = deat.evaluate(net, (x, y), threat=threat, attacks=[mine], progress=False, sanity=False)
    assert evaluation.settings["attacks"]["mine"]["freeze"] is True
    assert evaluation.verdicts["mine"] == (net(stopped).argmax(1) == y).tolist()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda y: y.tolist(), r"torch\.as_tensor\(y\)"),
        (lambda y: y[:-1], "one for each"),
        (lambda y: y.float() + 0.5, "class numbers"),
        (lambda y: torch.eye(10)[y], "argmax"),
    ],
)
def test_a_bare_attack_refuses_labels_that_are_no_class_numbers(change: Any, told: str, net: nn.Module) -> None:
    x, y = batch()
    with pytest.raises((UsageError, DataError), match=told):
        deat.Attack("mine", steps=2)(net, x, change(y), "linf:0.1")
    taken = [deat.Attack("mine", steps=2, start="zero")(net, x, labels, "linf:0.1") for labels in (y, y.int())]
    assert torch.equal(*taken)


def test_the_threat_model_may_follow_the_name_and_a_bare_radius_there_is_refused() -> None:
    assert deat.attack("pgd-7", "l2:0.5").threat == deat.L2(0.5)
    with pytest.raises(UsageError, match="A radius is eps="):
        deat.attack("pgd-7", 8 / 255)  # type: ignore[arg-type]


class Brighter(deat.Linf):
    """Pixels may only become brighter."""

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Project, and drop what is darker."""
        return super().project(x, delta).clamp(min=0)


def test_a_threat_model_of_your_own_holds_in_every_attack_or_is_refused(net: nn.Module) -> None:
    x, y = batch()
    for name in ("aa", "square"):
        with pytest.raises(UsageError, match=r"of your own.*Use pgd-N"):
            deat.attack(name, Brighter(0.1), stop_early=True)(net, x, y)
        with pytest.raises(UsageError, match=r"of your own.*Use pgd-N"):
            deat.evaluate(net, (x, y), threat=Brighter(0.1), attacks=[name], progress=False)
    adv = deat.attack("pgd-5", Brighter(0.1))(net, x, y)
    assert (adv >= x).all()
    with pytest.raises(UsageError, match="outside the ball"):
        deat.attack(Darker(), Brighter(0.1))(net, x, y)
    wide = deat.evaluate(net, (x, y), threat=deat.Linf(0.5), attacks=["natural", Darker()], sanity=False)
    evaluation = deat.evaluate(net, (x, y), threat=Brighter(0.5), attacks=["natural", Darker()], sanity=False)
    assert wide.accuracy["darker"] < evaluation.accuracy["darker"] == evaluation.accuracy["natural"]
    assert "invalid_examples" in {flag.name for flag in evaluation.flags}


class Darker:
    """An attack in Linf that may only darken."""

    name = "darker"

    def __call__(self, model: Any, x: Tensor, y: Tensor, threat: Any, generator: Any = None) -> Tensor:
        return (x - 0.95 * threat.eps).clamp(min=0)
