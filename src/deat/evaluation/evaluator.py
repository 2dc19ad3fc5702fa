"""deat.evaluate: any model, any data, any attacks, in blocks that survive interruption."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import Data, Source, as_source
from deat.evaluation.arguments import Question, check_about, check_files, check_model, check_question, count_outputs
from deat.evaluation.attack_registry import attackers, describe, passes
from deat.evaluation.blocks import Images, Rulings, blocks, look_ahead, spread_out
from deat.evaluation.fast_model import choose_engine
from deat.evaluation.judge import Attacker, Judge, stages_of
from deat.evaluation.progress import Pace, PaceLines, Progress
from deat.evaluation.results import Evaluation
from deat.evaluation.resume_log import ASKED, Ledger, answers, fingerprint, fingerprint_code, fingerprint_model
from deat.evaluation.sanity import SLICE, Flag, after, before, compare, passes_after
from deat.threat import ThreatModel, check_room, tiny_radius
from deat.threat import threat as find_threat
from deat.utils.distributed import ALONE, Ranks
from deat.utils.paths import tidy
from deat.utils.torch_utils import choose_threads, device_of, threaded
from deat.version import versions

BLOCK = 500
DEFAULT = ("natural", "fgsm", "pgd-20", "cw-20")
Tell = Callable[[Flag], None]
"""Called with a flag on the model itself, before the first attack."""
Save = Callable[[Evaluation], None]
"""Called with the Evaluation, to put it where it is safe."""


def evaluate(
    model: nn.Module,
    data: Data | None,
    *,
    threat: str | ThreatModel,
    attacks: str | Sequence[str | Attacker] = DEFAULT,
    n: int | None = None,
    seed: int = 0,
    block: int = BLOCK,
    cascade: bool = False,
    sanity: bool = True,
    precision: str = "auto",
    engine: str = "auto",
    threads: int | None = None,
    ledger: str | Path | None = None,
    save: str | Path | Save | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | bool = True,
    tell: Tell | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Accuracy of a model on data, natural and under each attack, and under the worst of them, image by image.

    data is a loader, a Dataset, a pair of tensors or an ImageSet; `n` takes its first images only. threat is Linf(8 /
    255), L2, L1 or text such as "l2:0.5". attacks are names that `deat list attacks` shows, such as "pgd-20" or "aa",
    or an Attack of one's own. The Evaluation has the accuracy under each, and flags where it should not be believed,
    most of which sanity=False does not look for. Verdicts depend on model, seed and block size. `cascade` sends only
    survivors on.

    With `ledger`, a file, an interrupted call goes on where it was; `save` names the evaluation.json that then takes
    its place, or is called to write it, and `about` holds what it shall say of model and data. precision is what
    attacks compute in: "auto" is half on a GPU and fp32 elsewhere; whom they fool is always settled in float32. engine
    is how they ask there: "graph" records passes, "compile" compiles them first, which pays for long work, "eager"
    does neither; "auto" compiles where it pays. threads are a CPU's, one for a small network unless they are given. The
    model is checked before the first attack, and `tell` hears of a flag on it at once. A long evaluation says now and
    then on standard error how far it is, unless progress=False; a function is called with its Pace instead. With
    ranks=Ranks.join() torchrun's processes take blocks in turn, and all return the same; the first one writes.
    """
    chosen = attackers(attacks)
    check_question(chosen, n, block, seed, threads)
    n, block, seed = None if n is None else int(n), int(block), int(seed)  # numpy's become ours
    check_model(model)
    told = {"model": type(model).__name__, "data": type(data).__name__, **check_about(about)}
    ranks.by_main(lambda: check_files(ledger, save))
    radius = find_threat(threat)
    device = device_of(model)
    source = as_source(data, batch_size=block, device=device, shuffle=False)
    source.check()
    check_room(radius, source.shape)
    for line in tiny_radius(radius) if sanity and ranks.main else ():
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    asked = Question(model, radius, chosen, block, seed, n=n, cascade=cascade, sanity=sanity, precision=precision)
    engine = choose_engine(engine, device, asked.images_of(source) * sum(map(passes, chosen)))
    session = Session(replace(asked, engine=engine, ledger=ledger, about=told, ranks=ranks))
    with threaded(threads or choose_threads(model)):
        found, rulings = session.run(source, _told(progress, ranks), tell or (lambda flag: None))
    if save is not None and ranks.main:
        save(found) if callable(save) else found.save(Path(save))
    rulings.close()  # not before what it held is safe elsewhere
    return found


def _told(progress: Progress | bool, ranks: Ranks) -> Progress:
    """Whoever is told how far an evaluation is."""
    if callable(progress):
        return progress
    return PaceLines() if progress and ranks.main else lambda pace: None


class Session:
    """One evaluation: its judge, its ledger, and the order of its work."""

    def __init__(self, asked: Question) -> None:
        self.asked = asked
        self.judge = Judge(asked.model, asked.threat, asked.seed, asked.precision, asked.engine)
        self._model = fingerprint_model(asked.model)
        self.fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        """What rulings of an earlier call must have been asked to count."""
        asked = self.asked
        question = {"threat": repr(asked.threat), "seed": asked.seed, "block": asked.block, "cascade": asked.cascade}
        question["precision"] = self.judge.precision
        # Alone, an attack's ruling owes nothing to the others.
        order = [(a.name, describe(a, asked.threat)) for a in asked.attacks] if asked.cascade else None
        return fingerprint(question, order, self._model, fingerprint_code(asked.model) if asked.ledger else "")

    def run(self, source: Source, progress: Progress, tell: Tell) -> tuple[Evaluation, Ledger]:
        """Rule on every block by every attack, with sanity checks before and after; also the ledger of the rulings."""
        asked, images = self.asked, self.asked.images_of(source)
        (first, _), cut = look_ahead(blocks(source, asked.block, images), ASKED)
        outputs = count_outputs(asked.model, first, source)
        few = spread_out(source, images, SLICE, first.device) if self._checks else None
        early, seconds = timed(lambda: self._check(few, source.num_classes, tell))
        ledger = self._take_up(first)
        pace = self._pace(images, min(SLICE, images) if asked.sanity else 0)
        results, labels = Rulings(asked, self.judge, ledger).on_all(cut, images, progress, pace)
        classes = [str(c) for c in getattr(getattr(source, "images", None), "classes", range(source.num_classes))]
        found = Evaluation(results, labels, classes, self._settings(source, outputs))
        late, more = timed(lambda: self._check_after(found, few, progress, pace))
        flags = [asdict(flag) for flag in (*early, *compare(found), *late)]
        raised, spent = asked.ranks.broadcast([flags, seconds + more if asked.sanity else 0.0])
        return replace(found, flags=[Flag(**flag) for flag in raised], check_seconds=spent), ledger

    def _pace(self, images: int, checked: int) -> Pace:
        """The work ahead: attacks on all images, and checks of a few."""
        attacks = self.asked.attacks
        total = -(-images // self.asked.block) * sum(len(stages_of(how)) for how in attacks)
        checks = checked * passes_after(attacks) if self.asked.threat.eps else 0
        return Pace(attacks, images, total, lambda: self.judge.counted()[0], checks=checks)

    def _check(self, few: Images | None, num_classes: int, tell: Tell) -> list[Flag]:
        """Flags about the model itself, told as they are found; the first process speaks for all."""
        flags = before(self.asked.model, *few, num_classes) if few else []
        for flag in flags:
            tell(flag)
        return flags

    def _check_after(self, found: Evaluation, few: Images | None, progress: Progress, pace: Pace) -> list[Flag]:
        """Flags about what the attacks left, from a few more of them."""
        if few is None:
            return []
        pace.check()
        progress(pace)
        return after(found, self.judge.model, self.asked.threat, *few, lambda: progress(pace))

    @property
    def _checks(self) -> bool:
        """Whether this process makes the sanity checks, of which one makes them for all."""
        return self.asked.sanity and self.asked.ranks.main

    def _take_up(self, x: Tensor) -> Ledger:
        """The ledger, with what it holds on this very question; the first process has its file."""
        asked = self.asked
        path = Path(asked.ledger) if asked.ledger and asked.ranks.main else None
        ledger = Ledger(self.fingerprint, path, answers(asked.model, x) if asked.ledger else None)
        ledger.share(asked.ranks)
        return ledger

    def _settings(self, source: Source, outputs: int) -> dict[str, Any]:
        """All that this evaluation was asked, and of what."""
        asked = self.asked
        return {
            "about": {name: tidy(value) for name, value in asked.about.items()},
            "device": device_name(device_of(asked.model)),
            "image": list(source.shape),
            "sanity": asked.sanity,
            "threat": {"norm": asked.threat.name, "eps": asked.threat.eps},
            "attacks": {a.name: describe(a, asked.threat, outputs) for a in asked.attacks},
            "seed": asked.seed,
            "block": asked.block,
            "cascade": asked.cascade,
            "precision": self.judge.precision,
            "compiled": self.judge.quick is not None and self.judge.quick.compiled,
            "sample": asked.images_of(source) < source.num_examples,
            "available": source.num_examples,
            "model": self._model,
            "versions": versions(),
        }


def timed(work: Callable[[], list[Flag]]) -> tuple[list[Flag], float]:
    """What was found, and the seconds it took."""
    started = perf_counter()
    return work(), perf_counter() - started


def device_name(device: torch.device) -> str:
    """The kind of a device, and a GPU's name."""
    return f"cuda, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
