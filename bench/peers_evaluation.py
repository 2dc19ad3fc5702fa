"""The sides that evaluate, for bench/peers.py: the same images and network under the same attacks.

All sides have the same steps of a quarter of eps from a uniform start. deat counts an image as fooled if any step fooled
it; the others look at the last step. CW-20 is PGD on the margin: foolbox and ART take another loss, torchattacks has none.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from peers_training import Whole
from shared import Record, net_of
from side_process import Work
from torch import Tensor, nn
from torch.nn import functional as F

import deat
from deat.models import load_weights

EPS = 8 / 255
BATCH = 128
NETWORK = "preact_resnet8"
ATTACKS = ("natural", "fgsm", "pgd-20", "pgd-100", "cw-20")
Attacked = Callable[[Tensor, Tensor], Tensor]
"""Images and labels to adversarial images."""


def train_network(data: str, path: Path, num_train: int, epochs: int) -> None:
    """Train the network that is evaluated, and write its weights.

    Args:
        data: The data set, as `deat.load_data` takes it.
        path: The file of weights to write.
        num_train: Training images.
        epochs: Passes over them.
    """
    model = net_of(NETWORK)
    splits = deat.load_data(data, n_train=num_train)
    deat.fit(model, splits, method="deat-3", epochs=epochs, batch_size=64, lr=0.1, progress=False)
    deat.save_weights(model, path)


def load(data: str, weights: str, num_images: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The network in eval mode, and the first test images."""
    model = net_of(NETWORK)
    load_weights(model, weights)
    test: Any = deat.load_data(data).test
    return model.eval(), test.images[:num_images].float() / 255, test.labels[:num_images]


def count_steps(attack: str) -> int:
    """The steps of an attack."""
    return int(attack.partition("-")[2] or 1)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """The mean of the best wrong logit less the true one, which CW raises."""
    true = logits.gather(1, y[:, None]).squeeze(1)
    return (logits.scatter(1, y[:, None], -1e4).amax(1) - true).mean()


def deat_side(model: nn.Module, x: Tensor, y: Tensor, attacks: list[str], sanity: bool) -> Work:
    """deat.evaluate, with its checks or without."""

    def work() -> Record:
        threads = torch.get_num_threads()
        options: Any = {"threat": deat.Linf(EPS), "sanity": sanity, "threads": threads, "progress": False}
        started = process_time()
        found = deat.evaluate(model, (x, y), attacks=attacks, **options)
        cpu, wall = process_time() - started, sum(r.seconds for r in found.results) + found.check_seconds
        return {
            "accuracy": {r.name: sum(r.correct) / len(x) for r in found.results},
            "each": {r.name: r.seconds for r in found.results},
            "each_cpu": {r.name: r.seconds * cpu / wall for r in found.results},
            "flags": [flag.name for flag in found.flags],
        }

    return work


def by_attack(model: nn.Module, x: Tensor, y: Tensor, attacks: dict[str, Attacked]) -> Work:
    """The accuracy under each attack, in batches; the final answer is the network's own."""

    def work() -> Record:
        found: Record = {"accuracy": {}, "each": {}, "each_cpu": {}}
        for name, attack in attacks.items():
            cpu, started, right = process_time(), perf_counter(), 0
            for images, labels in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True):
                moved = attack(images, labels)
                with torch.no_grad():
                    right += int((model(moved).argmax(1) == labels).sum())
            found["accuracy"][name] = right / len(x)
            found["each"][name], found["each_cpu"][name] = perf_counter() - started, process_time() - cpu
        return found

    return work


def script_attacks(model: nn.Module, attacks: list[str], bf16: bool) -> dict[str, Attacked]:
    """A plain loop: the gradient of the images alone, for all images until the last step."""

    def attack(name: str) -> Attacked:
        alpha = EPS if name == "fgsm" else EPS / 4
        loss = margin if name.startswith("cw") else F.cross_entropy

        def run(x: Tensor, y: Tensor) -> Tensor:
            delta = torch.zeros_like(x) if name == "fgsm" else torch.empty_like(x).uniform_(-EPS, EPS)
            delta = (x + delta).clamp(0, 1) - x
            for _ in range(count_steps(name)):
                delta.requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits = model(x + delta)
                (grad,) = torch.autograd.grad(loss(logits.float(), y), delta)
                delta = (delta.detach() + alpha * grad.sign()).clamp_(-EPS, EPS)
                delta = (x + delta).clamp_(0, 1).sub_(x)
            return x + delta

        return run

    return {name: (lambda x, y: x) if name == "natural" else attack(name) for name in attacks}


def torchattacks_attacks(model: nn.Module, attacks: list[str]) -> dict[str, Attacked]:
    """FGSM and PGD of torchattacks, as they are."""
    torchattacks: Any = importlib.import_module("torchattacks")

    found: dict[str, Attacked] = {"natural": lambda x, y: x}
    for name in attacks:
        if name == "fgsm":
            found[name] = torchattacks.FGSM(model, EPS)
        elif name.startswith("pgd"):
            found[name] = torchattacks.PGD(model, EPS, EPS / 4, count_steps(name), random_start=True)
    return found


def foolbox_attacks(model: nn.Module, attacks: list[str]) -> dict[str, Attacked]:
    """FGSM and PGD of foolbox, and PGD on the margin."""
    foolbox: Any = importlib.import_module("foolbox")

    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")

    class MarginPGD(foolbox.attacks.LinfPGD):  # type: ignore[misc]
        def get_loss_fn(self, model: Any, labels: Any) -> Callable[[Any], Any]:
            return lambda inputs: _eager_margin(model(inputs), labels)

    def _eager_margin(logits: Any, labels: Any) -> Any:
        return importlib.import_module("eagerpy").astensor(margin(logits.raw, labels.raw) * len(labels.raw))

    def bound(attack: Any) -> Attacked:
        def run(x: Tensor, y: Tensor) -> Tensor:
            adversarial: Tensor = attack(wrapped, x, y, epsilons=EPS)[1]
            return adversarial

        return run

    found: dict[str, Attacked] = {"natural": lambda x, y: x}
    for name in attacks:
        if name == "fgsm":
            found[name] = bound(foolbox.attacks.LinfFastGradientAttack())
        elif name != "natural":
            kind = MarginPGD if name.startswith("cw") else foolbox.attacks.LinfPGD
            found[name] = bound(kind(abs_stepsize=EPS / 4, steps=count_steps(name), random_start=True))
    return found


def art_attacks(model: nn.Module, attacks: list[str]) -> dict[str, Attacked]:
    """FGSM and PGD of ART, and PGD on the margin."""
    import numpy as np

    evasion: Any = importlib.import_module("art.attacks.evasion")
    classification: Any = importlib.import_module("art.estimators.classification")

    class Margin(nn.Module):
        reduction = "mean"

        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            return margin(logits, y if y.ndim == 1 else y.argmax(1))

    def bound(attack: Any) -> Attacked:
        return lambda x, y: torch.from_numpy(attack.generate(x.numpy(), np.eye(10, dtype=np.float32)[y.numpy()]))

    shape: Any = (3, 32, 32)
    found: dict[str, Attacked] = {"natural": lambda x, y: x}
    for name in attacks:
        loss = Margin() if name.startswith("cw") else nn.CrossEntropyLoss()
        classifier = classification.PyTorchClassifier(
            Whole(model), loss, shape, 10, clip_values=(0.0, 1.0), device_type="cpu"
        )
        if name == "fgsm":
            found[name] = bound(evasion.FastGradientMethod(classifier, eps=EPS, batch_size=BATCH))
        elif name != "natural":
            pgd: Any = evasion.ProjectedGradientDescent(
                classifier,
                eps=EPS,
                eps_step=EPS / 4,
                max_iter=count_steps(name),
                num_random_init=1,
                batch_size=BATCH,
                verbose=False,
            )
            found[name] = bound(pgd)
    return found


def pyautoattack_attacks(model: nn.Module, attacks: list[str]) -> dict[str, Attacked]:
    """Standard AutoAttack of pyautoattack."""
    from pyautoattack import AutoAttack

    def run(x: Tensor, y: Tensor) -> Tensor:
        adversary = AutoAttack(model, eps=EPS, norm="Linf", seed=0, device="cpu")
        adversarial: Tensor = adversary.run_standard_evaluation(x, y, batch_size=BATCH)[0]
        return adversarial

    return {"aa": run}


def torchattacks_autoattack(model: nn.Module, attacks: list[str]) -> dict[str, Attacked]:
    """Standard AutoAttack of torchattacks."""
    torchattacks: Any = importlib.import_module("torchattacks")

    return {"aa": torchattacks.AutoAttack(model, norm="Linf", eps=EPS, version="standard", n_classes=10, seed=0)}


PEERS: dict[str, Callable[[nn.Module, list[str]], dict[str, Attacked]]] = {
    "bf16 loop": lambda model, attacks: script_attacks(model, attacks, True),
    "fp32 loop": lambda model, attacks: script_attacks(model, attacks, False),
    "torchattacks": torchattacks_attacks,
    "foolbox": foolbox_attacks,
    "ART": art_attacks,
}
AUTOATTACKS = {"pyautoattack": pyautoattack_attacks, "torchattacks": torchattacks_autoattack}
MODULES = {name: name for name in ("torchattacks", "foolbox", "pyautoattack")} | {"ART": "art"}
"""The module that a side needs."""


def list_sides(is_autoattack: bool) -> list[str]:
    """The sides that are installed."""
    peers = AUTOATTACKS if is_autoattack else PEERS
    installed = [name for name in peers if name not in MODULES or importlib.util.find_spec(MODULES[name])]
    return ["deat", "deat with its checks", *installed]


def make(side: str, data: str, weights: str, num_images: int, attacks: list[str]) -> Work:
    """Return the work of a side, after a short one that warms it.

    Args:
        side: A name of `list_sides`.
        data: The data set.
        weights: The file of the network's weights.
        num_images: Test images.
        attacks: Names of attacks; ["aa"] is AutoAttack.
    """
    model, x, y = load(data, weights, num_images)
    peers = AUTOATTACKS if attacks == ["aa"] else PEERS

    def side_of(attacks: list[str], x: Tensor, y: Tensor) -> Work:
        if side.startswith("deat"):
            return deat_side(model, x, y, attacks, side != "deat")
        return by_attack(model, x, y, peers[side](model, attacks))

    if attacks != ["aa"]:
        side_of(["natural", "fgsm"], x[:BATCH], y[:BATCH])()
    return side_of(attacks, x, y)
