"""PGD, FREE, FAT, YOPO, TRADES and MART training, and PGD evaluation, as paper repositories write them.

torch's default precision (float32 whose convolutions may use TF32 on a GPU), a DataLoader, and in every attack step of
PGD, FREE and FAT a full backward whose parameter gradients are thrown away; TRADES asks the clean images again in each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[Tensor, Tensor]]):
    """uint8 images as floats in [0, 1], each cropped out of a zero border and flipped at random."""

    def __init__(self, images: Tensor, labels: Tensor, pad: int = 0) -> None:
        self.images, self.labels, self.pad = images, labels, pad

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.images[index].float() / 255
        return (self._crop_and_flip(x) if self.pad else x), self.labels[index]

    def _crop_and_flip(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:]
        top, left = torch.randint(0, 2 * self.pad + 1, (2,)).tolist()
        x = F.pad(x, [self.pad] * 4)[:, top : top + height, left : left + width]
        return x.flip(2) if torch.rand(()) < 0.5 else x


@dataclass
class Script:
    """What such a script holds at its top level; seed fixes the order of the data and the noise."""

    model: nn.Module
    data: Images
    batch_size: int
    epochs: int
    lr: float
    eps: float
    alpha: float
    lr_schedule: str = "flat"
    workers: int = 0
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.loader = DataLoader(
            self.data, self.batch_size, shuffle=True, num_workers=self.workers, persistent_workers=self.workers > 0
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4)
        total = self.epochs * len(self.loader) if self.lr_schedule == "cosine" else None
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total) if total else None
        self.losses: list[float] = []
        self.backprops = 0

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's batches, on the device."""
        return ((x.to(self.device), y.to(self.device)) for x, y in self.loader)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean cross-entropy, with a backward through every parameter."""
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.backprops += 1
        return loss

    def learn(self, loss: Tensor) -> None:
        """A backward through every parameter, and an update."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.backprops += 1
        self.optimizer.step()
        self.end_of_batch(loss)

    def step(self, delta: Tensor, x: Tensor) -> None:
        """Move delta by alpha along its gradient's sign, into ball and box."""
        assert delta.grad is not None
        moved = torch.clamp(delta.detach() + self.alpha * torch.sign(delta.grad), -self.eps, self.eps)
        delta.data = torch.clamp(x + moved, 0, 1) - x
        delta.grad.zero_()

    def end_of_batch(self, loss: Tensor) -> None:
        """Log the loss and step the learning rate."""
        self.losses.append(loss.item())
        if self.scheduler:
            self.scheduler.step()


def pgd_epoch(script: Script, steps: int = 7) -> None:
    """One epoch of PGD training: `steps` attack steps from a uniform start, then an update."""
    script.model.train()
    for x, y in script.batches():
        delta = torch.zeros_like(x).uniform_(-script.eps, script.eps)
        delta.data = torch.clamp(x + delta, 0, 1) - x
        delta.requires_grad_()
        for _ in range(steps):
            script.loss(x + delta, y)
            script.step(delta, x)
        script.optimizer.zero_grad()
        loss = script.loss(x + delta.detach(), y)
        script.optimizer.step()
        script.end_of_batch(loss)


def free_epoch(script: Script, replays: int = 8) -> None:
    """One epoch of FREE training: every replay of a batch updates both weights and delta."""
    script.model.train()
    for x, y in script.batches():
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(replays):
            script.optimizer.zero_grad()
            loss = script.loss(x + delta, y)
            script.step(delta, x)
            script.optimizer.step()
        script.end_of_batch(loss)


def fat_epoch(script: Script, steps: int = 5, tau: int = 3) -> None:
    """One epoch of FAT: PGD in eval mode in which an image that is fooled makes tau steps more, then an update.

    Images that stay where they are go along, so that a batch costs the same whatever the network answers.
    """
    for x, y in script.batches():
        script.model.eval()
        delta, left = torch.zeros_like(x).uniform_(-script.eps, script.eps), torch.full_like(y, tau)
        delta.data = torch.clamp(x + delta, 0, 1) - x
        delta.requires_grad_()
        for _ in range(steps):
            before, logits = delta.detach().clone(), script.model(x + delta)
            F.cross_entropy(logits, y).backward()  # type: ignore[no-untyped-call]
            script.backprops += 1
            moves = (logits.argmax(1) == y) | (left > 0)
            left = left - (logits.argmax(1) != y).long()
            script.step(delta, x)
            delta.data = torch.where(moves[:, None, None, None], delta.data, before)
        script.model.train()
        script.optimizer.zero_grad()
        script.learn(F.cross_entropy(script.model(x + delta.detach()), y))


def yopo_epoch(script: Script, first: Callable[[nn.Module], nn.Module], passes: int = 5, steps: int = 3) -> None:
    """One epoch of YOPO: full passes, each followed by steps through the first layer alone, then one update.

    `first` is what a network does to images up to its first layer's output, with the layer last.
    """
    script.model.train()
    layer, seen = first(script.model), list[Tensor]()
    for x, y in script.batches():
        delta = torch.zeros_like(x).uniform_(-script.eps, script.eps)
        delta = (torch.clamp(x + delta, 0, 1) - x).requires_grad_()
        script.optimizer.zero_grad()
        for _ in range(passes):
            hook = list(layer.modules())[-1].register_forward_hook(lambda _, __, y: seen.append(y))
            logits = script.model(x + delta)
            hook.remove()
            answer = seen.pop()
            answer.retain_grad()
            loss = F.cross_entropy(logits, y)
            loss.backward()  # type: ignore[no-untyped-call]
            script.backprops += 1
            for _ in range(steps):
                (delta.grad,) = torch.autograd.grad((layer(x + delta) * answer.grad).sum(), delta)
                script.step(delta, x)
        script.optimizer.step()
        script.end_of_batch(loss)


def trades_epoch(script: Script, steps: int = 10, beta: float = 6.0) -> None:
    """One epoch of TRADES: steps away from the clean answer, in eval mode, then an update towards it."""

    def apart(images: Tensor, x: Tensor) -> Tensor:
        clean, adv = script.model(x), script.model(images)
        return F.kl_div(F.log_softmax(adv, 1), F.softmax(clean, 1), reduction="sum")

    for x, y in script.batches():
        images = _crafted(script, x, steps, partial(apart, x=x))
        script.optimizer.zero_grad()
        script.learn(F.cross_entropy(script.model(x), y) + beta / len(x) * apart(images, x))


def mart_epoch(script: Script, steps: int = 10, beta: float = 6.0) -> None:
    """One epoch of MART: PGD in eval mode, then an update that weighs images by how unsure the clean answer is."""

    def wrong(images: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(script.model(images), y)

    for x, y in script.batches():
        images = _crafted(script, x, steps, partial(wrong, y=y))
        script.optimizer.zero_grad()
        clean, adv = script.model(x), script.model(images)
        p, q = F.softmax(clean, 1), F.softmax(adv, 1)
        second, first = torch.argsort(q, 1)[:, -2:].T
        margin = F.nll_loss(torch.log(1.0001 - q + 1e-12), torch.where(first == y, second, first))
        unsure = 1.0000001 - p.gather(1, y[:, None]).squeeze(1)
        apart = F.kl_div(torch.log(q + 1e-12), p, reduction="none").sum(1)
        script.learn(F.cross_entropy(adv, y) + margin + beta * (apart * unsure).mean())


def _crafted(script: Script, x: Tensor, steps: int, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Images moved from beside x along the loss's gradient in eval mode, as both repositories do it."""
    script.model.eval()
    images = x.detach() + 0.001 * torch.randn_like(x)
    for _ in range(steps):
        images.requires_grad_()
        (grad,) = torch.autograd.grad(loss(images), images)
        script.backprops += 1
        images = images.detach() + script.alpha * torch.sign(grad)
        images = torch.clamp(torch.min(torch.max(images, x - script.eps), x + script.eps), 0, 1)
    script.model.train()
    return images


EPOCHS: dict[str, Callable[[Script], None]] = {"pgd-7": pgd_epoch, "free-8": free_epoch}
"""The plain loops, by the name that the library gives the same method."""


def attack_images(model: nn.Module, x: Tensor, y: Tensor, eps: float, name: str, batch_size: int = 200) -> list[bool]:
    """Who is still correct under fgsm, pgd-N or cw-N; every image takes part in every step until the end."""
    model.eval()
    correct: list[bool] = []
    for images, labels in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
        delta = _plain_attack(model, images, labels, eps, name)
        with torch.no_grad():
            correct += (model(images + delta).argmax(1) == labels).tolist()
    return correct


def _plain_attack(model: nn.Module, x: Tensor, y: Tensor, eps: float, name: str) -> Tensor:
    family, _, steps = name.partition("-")
    alpha = eps if family == "fgsm" else eps / 4
    delta = torch.zeros_like(x) if family == "fgsm" else torch.zeros_like(x).uniform_(-eps, eps)
    delta.data = torch.clamp(x + delta, 0, 1) - x
    delta.requires_grad_()
    for _ in range(int(steps or 1)):
        logits = model(x + delta)
        held = torch.where(logits.max(1)[1] == y)[0]
        if len(held) == 0:
            break
        loss = _margin(logits, y) if family == "cw" else F.cross_entropy(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        assert delta.grad is not None
        moved = torch.clamp(delta.detach() + alpha * torch.sign(delta.grad), -eps, eps)
        delta.data[held] = (torch.clamp(x + moved, 0, 1) - x)[held]
        delta.grad.zero_()
    return delta.detach()


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    true = logits.gather(1, y[:, None]).squeeze(1)
    wrong = logits.scatter(1, y[:, None], -1e4).max(1)[0]
    return (wrong - true).mean()
