"""deat.evaluate: any model, any data, any attacks, in blocks that survive interruption."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import DataLike, DataSplits, Source, as_source
from deat.errors import DataError, UsageError
from deat.evaluation.arguments import (
    EvaluationRequest,
    check_about,
    check_evaluation_arguments,
    check_model,
    check_output_files,
    count_outputs,
)
from deat.evaluation.attack_registry import describe_attack, estimate_passes, get_attacks
from deat.evaluation.blocks import BlockEvaluator, LabeledImages, iter_blocks, peek_images, sample_images
from deat.evaluation.fast_model import choose_engine
from deat.evaluation.judge import AttackLike, Judge, get_stages
from deat.evaluation.progress import EvaluationProgress, ProgressCallback, ProgressPrinter
from deat.evaluation.results import Evaluation
from deat.evaluation.resume_log import (
    FINGERPRINT_IMAGES,
    ResumeLog,
    fingerprint,
    fingerprint_code,
    fingerprint_logits,
    fingerprint_model,
)
from deat.evaluation.sanity import (
    SANITY_IMAGES,
    Flag,
    check_after_attacks,
    check_before_attacks,
    check_consistency,
    estimate_check_passes,
)
from deat.threat import ThreatModel, check_radius, get_tiny_radius_warnings, parse_threat
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.paths import anonymize_paths
from deat.utils.torch_utils import choose_threads, device_of, use_threads
from deat.version import get_versions

DEFAULT_BLOCK_SIZE = 500
DEFAULT_ATTACKS = ("natural", "fgsm", "pgd-20", "cw-20")
FlagCallback = Callable[[Flag], None]
"""Called with a flag on the model itself, before the first attack."""
SaveCallback = Callable[[Evaluation], None]
"""Called with the Evaluation, to put it where it is safe."""


def evaluate(
    model: nn.Module,
    data: DataLike | DataSplits | None,
    *,
    threat: str | ThreatModel | None = None,
    attacks: str | Sequence[str | AttackLike] = DEFAULT_ATTACKS,
    n: int | None = None,
    seed: int = 0,
    block: int = DEFAULT_BLOCK_SIZE,
    cascade: bool = False,
    sanity: bool = True,
    precision: str = "auto",
    engine: str = "auto",
    threads: int | None = None,
    resume_log: str | Path | None = None,
    save: str | Path | SaveCallback | None = None,
    about: Mapping[str, Any] | None = None,
    progress: ProgressCallback | bool = True,
    on_flag: FlagCallback | None = None,
    distributed: Distributed = SINGLE_PROCESS,
) -> Evaluation:
    """Accuracy of a model on data, natural and under each attack, and under the worst of them, image by image.

    data is what load_data returns (its test part, or its val part where it has no test part), a loader, a Dataset, a
    pair of tensors or an ImageSet; `n` takes its first images only. threat is Linf(8 / 255), L2, L1 or text such as
    "l2:0.5"; what load_data returns has a default of its own, and with other data it is needed. attacks are names that `deat list attacks` shows, such as "pgd-20" or "aa",
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
    chosen = get_attacks(attacks)
    check_evaluation_arguments(chosen, n, block, seed, threads)
    n, block, seed = None if n is None else int(n), int(block), int(seed)  # numpy's become ours
    check_model(model)
    told = {"model": type(model).__name__, "data": _describe_data(data), **check_about(about)}
    distributed.run_on_main(lambda: check_output_files(resume_log, save))
    radius = parse_threat(_default_threat(data) if threat is None else threat)
    device = device_of(model)
    source = as_source(_get_evaluation_part(data), batch_size=block, device=device, shuffle=False)
    source.check()
    check_radius(radius, source.shape)
    for line in get_tiny_radius_warnings(radius) if sanity and distributed.main else ():
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    asked = EvaluationRequest(
        model, radius, chosen, block, seed, n=n, cascade=cascade, sanity=sanity, precision=precision
    )
    engine = choose_engine(engine, device, asked.count_images(source) * sum(map(estimate_passes, chosen)))
    session = EvaluationRun(replace(asked, engine=engine, resume_log=resume_log, about=told, distributed=distributed))
    with use_threads(threads or choose_threads(model)):
        found, rulings = session.run(
            source, _make_progress_callback(progress, distributed), on_flag or (lambda flag: None)
        )
    if save is not None and distributed.main:
        save(found) if callable(save) else found.save(Path(save))
    rulings.close()  # not before what it held is safe elsewhere
    return found


def _make_progress_callback(progress: ProgressCallback | bool, distributed: Distributed) -> ProgressCallback:
    """Whoever is told how far an evaluation is."""
    if callable(progress):
        return progress
    return ProgressPrinter() if progress and distributed.main else lambda pace: None


def _get_evaluation_part(data: DataLike | DataSplits | None) -> DataLike | None:
    """The test part of a data set, or its val part where it has no test part; other data as it is."""
    if not isinstance(data, DataSplits):
        return data
    part = data.val if data.test is None else data.test
    if part is None:
        raise DataError(
            f"{data.name!r} has neither a test part nor a val part to evaluate on. Put class folders into test/ or val/ "
            "beside train/, or pass the images themselves."
        )
    return part


def _default_threat(data: object) -> str:
    if not isinstance(data, DataSplits):
        raise UsageError(
            "evaluate needs a threat model, such as threat=deat.Linf(8 / 255) or threat='l2:0.5'. Only what load_data "
            "returns has a default one."
        )
    return data.threat


def _describe_data(data: object) -> str:
    return data.name if isinstance(data, DataSplits) else type(data).__name__


class EvaluationRun:
    """One evaluation: its judge, its ledger, and the order of its work."""

    def __init__(self, request: EvaluationRequest) -> None:
        self.asked = request
        self.judge = Judge(request.model, request.threat, request.seed, request.precision, request.engine)
        self._model_fingerprint = fingerprint_model(request.model)
        self.fingerprint = self._compute_fingerprint()

    def _compute_fingerprint(self) -> str:
        """What rulings of an earlier call must have been asked to count."""
        asked = self.asked
        question = {"threat": repr(asked.threat), "seed": asked.seed, "block": asked.block, "cascade": asked.cascade}
        question["precision"] = self.judge.precision
        # Alone, an attack's ruling owes nothing to the others.
        order = [(a.name, describe_attack(a, asked.threat)) for a in asked.attacks] if asked.cascade else None
        return fingerprint(
            question, order, self._model_fingerprint, fingerprint_code(asked.model) if asked.resume_log else ""
        )

    def run(self, source: Source, on_progress: ProgressCallback, on_flag: FlagCallback) -> tuple[Evaluation, ResumeLog]:
        """Rule on every block by every attack, with sanity checks before and after; also the ledger of the rulings."""
        asked, images = self.asked, self.asked.count_images(source)
        (first, _), cut = peek_images(iter_blocks(source, asked.block, images), FINGERPRINT_IMAGES)
        outputs = count_outputs(asked.model, first, source)
        few = sample_images(source, images, SANITY_IMAGES, first.device) if self._checks else None
        early, seconds = time_call(lambda: self._check(few, source.num_classes, on_flag))
        ledger = self._open_resume_log(first)
        pace = self._make_progress(images, min(SANITY_IMAGES, images) if asked.sanity else 0)
        results, labels = BlockEvaluator(asked, self.judge, ledger).evaluate_all(cut, images, on_progress, pace)
        classes = [str(c) for c in getattr(getattr(source, "images", None), "classes", range(source.num_classes))]
        found = Evaluation(results, labels, classes, self._describe_settings(source, outputs))
        late, more = time_call(lambda: self._check_results(found, few, on_progress, pace))
        flags = [asdict(flag) for flag in (*early, *check_consistency(found), *late)]
        raised, spent = asked.distributed.broadcast([flags, seconds + more if asked.sanity else 0.0])
        return replace(found, flags=[Flag(**flag) for flag in raised], check_seconds=spent), ledger

    def _make_progress(self, num_images: int, num_checked: int) -> EvaluationProgress:
        """The work ahead: attacks on all images, and checks of a few."""
        attacks = self.asked.attacks
        total = -(-num_images // self.asked.block) * sum(len(get_stages(how)) for how in attacks)
        checks = num_checked * estimate_check_passes(attacks) if self.asked.threat.eps else 0
        return EvaluationProgress(attacks, num_images, total, lambda: self.judge.count_passes()[0], check_passes=checks)

    def _check(self, sample: LabeledImages | None, num_classes: int, on_flag: FlagCallback) -> list[Flag]:
        """Flags about the model itself, told as they are found; the first process speaks for all."""
        flags = check_before_attacks(self.asked.model, *sample, num_classes) if sample else []
        for flag in flags:
            on_flag(flag)
        return flags

    def _check_results(
        self,
        evaluation: Evaluation,
        sample: LabeledImages | None,
        on_progress: ProgressCallback,
        progress: EvaluationProgress,
    ) -> list[Flag]:
        """Flags about what the attacks left, from a few more of them."""
        if sample is None:
            return []
        progress.check()
        on_progress(progress)
        return check_after_attacks(
            evaluation, self.judge.model, self.asked.threat, *sample, lambda: on_progress(progress)
        )

    @property
    def _checks(self) -> bool:
        """Whether this process makes the sanity checks, of which one makes them for all."""
        return self.asked.sanity and self.asked.distributed.main

    def _open_resume_log(self, x: Tensor) -> ResumeLog:
        """The ledger, with what it holds on this very question; the first process has its file."""
        asked = self.asked
        path = Path(asked.resume_log) if asked.resume_log and asked.distributed.main else None
        ledger = ResumeLog(self.fingerprint, path, fingerprint_logits(asked.model, x) if asked.resume_log else None)
        ledger.share(asked.distributed)
        return ledger

    def _describe_settings(self, source: Source, num_outputs: int) -> dict[str, Any]:
        """All that this evaluation was asked, and of what."""
        asked = self.asked
        return {
            "about": {name: anonymize_paths(value) for name, value in asked.about.items()},
            "device": device_name(device_of(asked.model)),
            "image": list(source.shape),
            "sanity": asked.sanity,
            "threat": {"norm": asked.threat.name, "eps": asked.threat.eps},
            "attacks": {a.name: describe_attack(a, asked.threat, num_outputs) for a in asked.attacks},
            "seed": asked.seed,
            "block": asked.block,
            "cascade": asked.cascade,
            "precision": self.judge.precision,
            "compiled": self.judge.quick is not None and self.judge.quick.compiled,
            "sample": asked.count_images(source) < source.num_examples,
            "available": source.num_examples,
            "model": self._model_fingerprint,
            "versions": get_versions(),
        }


def time_call(work: Callable[[], list[Flag]]) -> tuple[list[Flag], float]:
    """What was found, and the seconds it took."""
    started = perf_counter()
    return work(), perf_counter() - started


def device_name(device: torch.device) -> str:
    """The kind of a device, and a GPU's name."""
    return f"cuda, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
