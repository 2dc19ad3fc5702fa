"""The sides that train, for bench/peers.py: deat, good loops, a paper's script, and packages in a user's loop.

Every side trains the same network with the same number of attack steps on the same images, without augmentation. A package
without a trainer crafts the images in a loop of torch, as its documentation shows.
"""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from plain import EPOCHS, Images, Script, trades_epoch
from shared import Record
from side_process import Work
from torch import Tensor, nn
from torch.nn import functional as F

import deat

BATCH, EPS, STEP = 64, 8 / 255, 2 / 255
TRADES_STEPS, BETA = 10, 6.0
METHODS = ("pgd-7", "free-8", "trades")
BATCHES = {"PreAct-ResNet 18": 1, "PreAct-ResNet 8": 4, "small ViT": 1, "depthwise": 2}
"""Batches in a round."""


class SmallViT(nn.Module):
    """A vision transformer of torch's own layers: patches of 4 x 4, 192 wide, 6 blocks of 3 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 64, 192))
        block = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).mT + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def depthwise_net() -> nn.Module:
    """A small network of depthwise and pointwise convolutions, as MobileNets have them."""

    def block(width_in: int, width: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(width_in, width_in, 3, stride, 1, groups=width_in, bias=False)
        pointwise = nn.Conv2d(width_in, width, 1, bias=False)
        return [depthwise, nn.BatchNorm2d(width_in), nn.ReLU(), pointwise, nn.BatchNorm2d(width), nn.ReLU()]

    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [*block(32, 64, 1), *block(64, 128, 2), *block(128, 128, 1), *block(128, 256, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "PreAct-ResNet 18": lambda: deat.build_model("preact_resnet18"),
    "PreAct-ResNet 8": lambda: deat.build_model("preact_resnet8"),
    "small ViT": SmallViT,
    "depthwise": depthwise_net,
}


def step_size(method: str) -> float:
    """The size of an attack step."""
    return EPS if method == "free-8" else STEP


def sgd(net: nn.Module, **more: Any) -> torch.optim.SGD:
    """The optimizer that all have."""
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, **more)


class GoodLoop:
    """The loop of somebody who knows PyTorch.

    It computes the gradient of the perturbation alone in attack steps, with channels last and fused SGD, and has no
    loader: its batches are slices of a tensor. TRADES asks for the clean answer once a batch.
    """

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, method: str, bf16: bool) -> None:
        last: Any = torch.channels_last
        self.net = net.to(memory_format=last).train()  # type: ignore[call-overload]
        self.x, self.y, self.alpha, self.bf16 = x.contiguous(memory_format=last), y, step_size(method), bf16
        self.train = {"pgd-7": self.pgd, "free-8": self.free, "trades": self.trades}[method]
        self.optimizer = sgd(net, fused=True)

    def epoch(self) -> None:
        """Train on every batch."""
        for x, y in zip(torch.split(self.x, BATCH), torch.split(self.y, BATCH), strict=True):
            self.train(x, y)

    def logits(self, x: Tensor) -> Tensor:
        """The logits, computed in bf16 where that is wanted."""
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            out: Tensor = self.net(x)
        return out.float()

    def moved(self, x: Tensor, delta: Tensor, grad: Tensor) -> Tensor:
        """The next perturbation, in ball and box."""
        stepped = (delta.detach() + self.alpha * grad.sign()).clamp_(-EPS, EPS)
        return (x + stepped).clamp_(0, 1).sub_(x)

    def learn(self, loss: Tensor) -> None:
        """An update."""
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()

    def pgd(self, x: Tensor, y: Tensor) -> None:
        """Seven attack steps, and an update."""
        delta = (x + torch.empty_like(x).uniform_(-EPS, EPS)).clamp_(0, 1).sub_(x)
        for _ in range(7):
            delta.requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(self.logits(x + delta), y), delta)
            delta = self.moved(x, delta, grad)
        self.learn(F.cross_entropy(self.logits(x + delta), y))

    def free(self, x: Tensor, y: Tensor) -> None:
        """Eight updates, each with a step of the perturbation."""
        delta = torch.zeros_like(x)
        for _ in range(8):
            delta.requires_grad_()
            self.learn(F.cross_entropy(self.logits(x + delta), y))
            assert delta.grad is not None
            delta = self.moved(x, delta, delta.grad)

    def trades(self, x: Tensor, y: Tensor) -> None:
        """Ten steps away from the clean answer in eval mode, and an update towards it."""
        self.net.eval()
        delta = 0.001 * torch.randn_like(x)
        with torch.no_grad():
            clean = self.logits(x).softmax(1)
        for _ in range(TRADES_STEPS):
            delta.requires_grad_()
            loss = F.kl_div(self.logits(x + delta).log_softmax(1), clean, reduction="sum")
            (grad,) = torch.autograd.grad(loss, delta)
            delta = self.moved(x, delta, grad)
        self.net.train()
        self.learn(trades_loss(self.logits(x), self.logits(x + delta), y))


def trades_loss(clean: Tensor, adversarial: Tensor, y: Tensor) -> Tensor:
    """The loss of TRADES."""
    apart = F.kl_div(adversarial.log_softmax(1), clean.softmax(1), reduction="batchmean")
    return F.cross_entropy(clean, y) + BETA * apart


def deat_side(net: nn.Module, x: Tensor, y: Tensor, method: str) -> Callable[[], str]:
    """A whole epoch of the trainer, with its records, in its default precision."""
    threads = torch.get_num_threads()
    config = deat.TrainConfig(epochs=10_000, batch_size=BATCH, lr=0.01, lr_schedule="flat", threads=threads)
    trainer = deat.make_trainer(net, (x, y), method=method, threat=deat.Linf(EPS), config=config)
    session = trainer.session()  # as `fit` has it; the side ends with its process

    def epoch() -> str:
        if trainer.epoch == 0:
            session.__enter__()
        trainer.run_epoch()
        return str(trainer.engine.precision)

    return epoch


def script_side(net: nn.Module, x: Tensor, y: Tensor, method: str) -> Callable[[], None]:
    """The loop of paper repositories."""
    images = Images((x * 255).round().to(torch.uint8), y)
    script = Script(net, images, BATCH, 1, 0.01, EPS, step_size(method))
    play = {**EPOCHS, "trades": trades_epoch}[method]
    return lambda: play(script)


def art_side(net: nn.Module, x: Tensor, y: Tensor, method: str) -> Callable[[], None]:
    """The trainers of ART."""
    import numpy as np

    evasion: Any = importlib.import_module("art.attacks.evasion")
    trainer: Any = importlib.import_module("art.defences.trainer")
    classification: Any = importlib.import_module("art.estimators.classification")

    classifier = classification.PyTorchClassifier(
        Whole(net),
        nn.CrossEntropyLoss(),
        (3, 32, 32),
        10,
        optimizer=sgd(net),
        clip_values=(0.0, 1.0),
        device_type="cpu",
    )
    images, labels = x.numpy(), np.eye(10, dtype=np.float32)[y.numpy()]
    if method == "pgd-7":
        madry = trainer.AdversarialTrainerMadryPGD(
            classifier, nb_epochs=1, batch_size=BATCH, eps=EPS, eps_step=STEP, max_iter=7, num_random_init=1
        )
        return lambda: madry.fit(images, labels, nb_epochs=1)
    attack = evasion.ProjectedGradientDescent(
        classifier,
        eps=EPS,
        eps_step=STEP,
        max_iter=TRADES_STEPS,
        num_random_init=1,
        batch_size=BATCH,
        verbose=False,
    )
    trades = trainer.AdversarialTrainerTRADESPyTorch(classifier, attack, BETA)
    return lambda: trades.fit(images, labels, batch_size=BATCH, nb_epochs=1)


class Whole(nn.Module):
    """A network as one module: ART takes an nn.Sequential apart, and its TRADES then fails."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(x)
        return logits


def torchattacks_side(net: nn.Module, x: Tensor, y: Tensor, method: str) -> Callable[[], None]:
    """A loop around an attack of torchattacks."""
    torchattacks: Any = importlib.import_module("torchattacks")

    if method == "pgd-7":
        attack = torchattacks.PGD(net, EPS, STEP, 7, random_start=True)
    else:
        attack = torchattacks.TPGD(net, EPS, STEP, TRADES_STEPS)
    return user_loop(net, x, y, method, lambda images, labels: attack(images, labels))


def foolbox_side(net: nn.Module, x: Tensor, y: Tensor, method: str) -> Callable[[], None]:
    """A loop around an attack of foolbox."""
    foolbox: Any = importlib.import_module("foolbox")

    attack = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=7, random_start=True)
    net.eval()
    wrapped = foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu")

    def craft(images: Tensor, labels: Tensor) -> Tensor:
        net.eval()
        adversarial: Tensor = attack(wrapped, images, labels, epsilons=EPS)[1]
        net.train()
        return adversarial

    return user_loop(net, x, y, method, craft)


def user_loop(
    net: nn.Module, x: Tensor, y: Tensor, method: str, craft: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], None]:
    """A loop of torch in which a package crafts the images."""
    optimizer = sgd(net)
    net.train()

    def epoch() -> None:
        for images, labels in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True):
            adversarial = craft(images, labels)
            if method == "trades":
                loss = trades_loss(net(images), net(adversarial), labels)
            else:
                loss = F.cross_entropy(net(adversarial), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()

    return epoch


SIDES: dict[str, Callable[[nn.Module, Tensor, Tensor, str], Callable[[], str | None]]] = {
    "deat": deat_side,
    "good bf16 loop": lambda net, x, y, method: GoodLoop(net, x, y, method, bf16=True).epoch,
    "good fp32 loop": lambda net, x, y, method: GoodLoop(net, x, y, method, bf16=False).epoch,
    "paper's script": script_side,
    "ART": art_side,
    "torchattacks": torchattacks_side,
    "foolbox": foolbox_side,
}
MODULES = {"ART": "art", "torchattacks": "torchattacks", "foolbox": "foolbox"}
"""The module that a side needs."""
MISSING_METHODS = {"ART": ("free-8",), "torchattacks": ("free-8",), "foolbox": ("free-8", "trades")}
"""Methods that a package does not have."""


def list_sides(method: str) -> list[str]:
    """The sides that have a method and are installed."""
    return [
        name
        for name in SIDES
        if method not in MISSING_METHODS.get(name, ())
        and (name not in MODULES or importlib.util.find_spec(MODULES[name]))
    ]


def make(side: str, network: str, method: str, batches: int) -> Work:
    """Return the work of a side, warm.

    Args:
        side: One of `SIDES`.
        network: One of `NETWORKS`.
        method: One of `METHODS`.
        batches: Batches in a round.
    """
    torch.manual_seed(0)
    net = NETWORKS[network]()
    x = torch.rand(BATCH * batches, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 10
    epoch = SIDES[side](net, x, y, method)

    def work() -> Record:
        return {"precision": epoch() or ("bf16" if "bf16" in side else "fp32")}

    work()
    return work
