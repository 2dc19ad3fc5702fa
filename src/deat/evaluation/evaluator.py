"""`deat.evaluate`: the accuracy of any model under any attacks, with sanity checks, block by block and resumable."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Never

import torch
from torch import Tensor, nn

from deat.data import BatchSource, DataLike, DataSplits, as_source
from deat.data.datasets import adapt_data
from deat.engine.cpu_memory import reused_memory
from deat.errors import DataError, UsageError, unknown_name_error
from deat.evaluation.attack_registry import describe_attack, estimate_passes, get_attacks
from deat.evaluation.attack_verifier import AttackLike, AttackVerifier, get_stages
from deat.evaluation.block_evaluation import (
    BlockEvaluator,
    LabeledImages,
    iter_blocks,
    peek_images,
    sample_images,
    sample_indices,
)
from deat.evaluation.evaluation_request import (
    EvaluationRequest,
    call_on_one_image,
    check_about,
    check_evaluation_arguments,
    check_output_files,
    check_task,
    choose_task,
    count_outputs,
)
from deat.evaluation.fast_model import choose_attack_engine, choose_attack_threads
from deat.evaluation.kept_examples import AdversarialExamples, check_examples
from deat.evaluation.progress import EvaluationProgress, ProgressCallback, showing_progress
from deat.evaluation.results import Evaluation
from deat.evaluation.resume_log import ResumeLog
from deat.evaluation.sanity import (
    SANITY_IMAGES,
    AttackedSubset,
    Flag,
    FreshCopies,
    check_before_attacks,
    check_consistency,
    check_statefulness,
    copy_before_queries,
    estimate_check_passes,
    run_extra_attacks,
)
from deat.evaluation.union import combine_balls
from deat.models.interface_checks import check_model
from deat.models.logits_wrapper import LogitsModel, has_logits, take_logits
from deat.radius_checks import check_radius, get_tiny_radius_warnings
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel, Union, parse_threat
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.fingerprints import (
    FINGERPRINT_IMAGES,
    fingerprint,
    fingerprint_code,
    fingerprint_logits,
    fingerprint_model,
)
from deat.utils.torch_contexts import device_of, use_threads
from deat.version import get_versions

DEFAULT_BLOCK_SIZE = 500
DEFAULT_ATTACKS = ("natural", "fgsm", "pgd-20", "cw-20")
FlagCallback = Callable[[Flag], None]
"""Called with a flag about the model itself, before the first attack."""
SaveCallback = Callable[[Evaluation], None]
"""Called with the `Evaluation`, to save it."""


RADIUS_HINT = "Radius and norm are the threat, such as threat=deat.Linf(8 / 255) or threat='l2:0.5'."
KEYWORD_HINTS = {
    **dict.fromkeys(("eps", "epsilon", "norm", "radius"), RADIUS_HINT),
    **dict.fromkeys(
        ("normalize", "mean", "std"),
        "Put the normalisation into the model: model = deat.add_normalization(model, mean, std).",
    ),
    "device": "The images go where the model is: model.to('cuda').",
    "batch_size": "How many images are attacked at once is block.",
    "num_images": "The first so many images are n.",
    "steps": "The steps are part of the attack's name, such as attacks=['pgd-50'].",
}
"""What to use in place of a keyword that evaluate does not have, where did_you_mean cannot suggest it."""


def evaluate(
    model: nn.Module,
    data: DataLike | DataSplits | None,
    *,
    threat: str | ThreatModel | None = None,
    task: str | Task | None = None,
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
    examples: AdversarialExamples | None = None,
    on_flag: FlagCallback | None = None,
    distributed: Distributed = SINGLE_PROCESS,
    **unknown: Never,
) -> Evaluation:
    """Measure a model's accuracy without attack, under each attack, and under the worst attack for each image.

    The model is checked before the first attack, and every adversarial example is verified. What speaks against the
    result is in its `flags`.

    Args:
        model: A `torch.nn.Module` that maps float32 images in [0, 1] to logits, or to an object with `logits`. Its mode
            and weights are left as they are.
        data: What `deat.load_data` returns (its test part, or its val part where it has no test part), a
            `DataLoader`, a `Dataset`, a pair of tensors or arrays `(images, labels)`, or a `deat.ImageSet`.
        threat: Norm and radius, such as `deat.Linf(8 / 255)` or the text "l2:0.5". What `deat.load_data` returns has a
            default; with other data it is required. Of a union, such as "linf:8/255+l2:0.5+l1:12", every ball is
            attacked; an image then counts as correct if it is so in every ball, and `balls` has each ball's evaluation.
        task: What outputs and labels mean: "classification", "multilabel", "segmentation", "regression", or a task such
            as `deat.tasks.Segmentation(ignore_index=255)`. Default: that of the data, or classification.
        attacks: Names that `deat list attacks` shows, such as "pgd-20" or "aa", in a list or in one text with commas;
            or attacks of your own, which are `deat.Attack` objects or callables as `AttackLike` describes.
        n: Use the first `n` images only.
        seed: The seed of all random draws.
        block: How many images are attacked at once. Random starts are drawn for a block, so verdicts depend on it.
        cascade: Give each attack only the images that the ones before it did not fool. It is faster, but single attacks
            then have no accuracy.
        sanity: Run the sanity checks. Without them only a few flags can be raised.
        precision: What attacks compute in: "fp32", "tf32", "bf16", "fp16", or "auto" for fp16 on a GPU, bf16 on a CPU
            that multiplies it natively (classifiers with 200,000 weights or more), and fp32 elsewhere. Images are
            always classified in float32 in the end.
        engine: How attacks run the model on a GPU: "graph" (CUDA graphs), "compile" (compiled, and CUDA graphs),
            "eager", or "auto", which compiles for long evaluations and otherwise uses graphs.
        threads: The number of CPU threads. Default: one for a small network, and what torch uses for others.
        resume_log: A file to which each result is written at once, so that the same call after an interruption resumes.
            It is removed at the end.
        save: The evaluation.json to write, or a function that is called with the `Evaluation` to save it.
        about: JSON values that describe model and data, for evaluation.json.
        progress: True to show a bar with the time left on standard error, or in a notebook's cell, and in a pipe a line
            every ten seconds. False shows nothing. Or a function that is called with an `EvaluationProgress`.
        examples: An empty `deat.AdversarialExamples`, which then has every adversarial image and the model's answer to
            it. By default they are not kept.
        on_flag: Called with each flag about the model itself, before the first attack.
        distributed: From `deat.Distributed.initialize()` in processes that torchrun started. They share the blocks,
            and all return the same result; the first one writes files and prints.

    Returns:
        Accuracies with intervals, each image's verdict under each attack, flags, and all settings.

    Raises:
        UsageError: An argument is not accepted, or the model does not return logits for the data's classes.
        DataError: The data holds no images, images outside [0, 1], or labels that are no class numbers.
        CheckpointError: `save` or `resume_log` cannot be read or written.

    Example:
        >>> evaluation = deat.evaluate(model, test, threat=deat.Linf(8 / 255), attacks=["natural", "pgd-20", "aa"])
        >>> evaluation.accuracy
        {'natural': 0.83, 'pgd-20': 0.52, 'aa': 0.48, 'worst': 0.48}
        >>> evaluation.flags
        []
    """
    for name in unknown:
        accepted = inspect.signature(evaluate).parameters.keys() - {"unknown"}
        hint = KEYWORD_HINTS.get(name, "")
        raise unknown_name_error("keyword of evaluate", name, accepted, hint, suggests=not hint)
    chosen = get_attacks(attacks)
    check_evaluation_arguments(chosen, n, block, seed, threads)
    data = adapt_data(data)
    task = choose_task(task, data)
    check_task(task, chosen, cascade)
    n, block, seed = None if n is None else int(n), int(block), int(seed)  # NumPy numbers cannot be written as JSON
    check_model(model)
    about = {"model": type(model).__name__, "data": _describe_data(data), **check_about(about)}
    threat = parse_threat(
        _default_threat(data) if threat is None else threat, **(data.features if isinstance(data, DataSplits) else {})
    )
    check_examples(
        examples,
        has_resume_log=resume_log is not None,
        num_processes=distributed.size,
        num_balls=len(threat.balls),
    )
    distributed.run_on_main(lambda: check_output_files(resume_log, save))
    device = device_of(model)
    part = _get_evaluation_part(data)
    source = as_source(part, batch_size=block, device=device, shuffle=False, task=task, box=threat.box)
    source.check()
    check_radius(threat, source.shape)
    for attack in chosen:
        if callable(check := getattr(attack, "check_threat", None)):
            for ball in threat.balls:
                check(ball, source.shape)
    for warning in get_tiny_radius_warnings(threat) if sanity and distributed.is_main else ():
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    request = EvaluationRequest(
        model, threat, chosen, block, seed, n=n, cascade=cascade, sanity=sanity, precision=precision, task=task
    )
    passes = request.count_images(source) * sum(map(estimate_passes, chosen)) * len(threat.balls)
    engine = choose_attack_engine(engine, device, passes)
    request = replace(
        request, examples=examples, engine=engine, resume_log=resume_log, about=about, distributed=distributed
    )
    runs = [EvaluationRun(replace(request, threat=ball, ball=name)) for name, ball in _name_balls(threat).items()]
    show_flag = _once(on_flag)
    showing = nullcontext(progress) if callable(progress) else showing_progress(progress and distributed.is_main)
    memory = reused_memory() if device.type == "cpu" else nullcontext()
    with showing as on_progress, use_threads(threads or choose_attack_threads(model)), memory:
        evaluations, logs = zip(*(run.run(source, on_progress, show_flag) for run in runs), strict=True)
    evaluation = combine_balls(evaluations, Union(*threat.balls), chosen) if len(evaluations) > 1 else evaluations[0]
    if save is not None and distributed.is_main:
        save(evaluation) if callable(save) else evaluation.save(save)
    for log in logs:
        log.delete()  # only now that its results are saved elsewhere
    return evaluation


def _name_balls(threat: ThreatModel) -> dict[str, ThreatModel]:
    """The balls of a union by their place in it, such as "l2, ball 2 of 3"; any other threat model without a name."""
    count = len(threat.balls)
    if count == 1:
        return {"": threat.balls[0]}
    return {f"{ball.name}, ball {number} of {count}": ball for number, ball in enumerate(threat.balls, 1)}


def _once(on_flag: FlagCallback | None) -> FlagCallback:
    """A function that shows each flag once, also where every ball of a union raises it."""
    shown: set[Flag] = set()

    def show(flag: Flag) -> None:
        """Show a flag that was not shown before."""
        if on_flag and flag not in shown:
            on_flag(flag)
        shown.add(flag)

    return show


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
    """One evaluation from the first image to the result: sanity checks, attacks on every block, sanity checks again.

    `deat.evaluate` makes and runs it.

    Args:
        request: The checked arguments.
    """

    def __init__(self, request: EvaluationRequest) -> None:
        self._set_request(request)

    def _set_request(self, request: EvaluationRequest) -> None:
        self.request = request
        self.verifier = AttackVerifier(
            request.model,
            request.threat,
            request.seed,
            request.precision,
            request.engine,
            request.task,
            request.examples,
        )
        self._model_fingerprint = fingerprint_model(request.model)
        self.fingerprint = self._compute_fingerprint()

    def _compute_fingerprint(self) -> str:
        """A hash of all that a block's result depends on, by which results in the resume log are found."""
        request = self.request
        settings = {
            "threat": repr(request.threat),
            "seed": request.seed,
            "block": request.block,
            "cascade": request.cascade,
            "precision": self.verifier.precision,
            **({} if request.threat.is_plain else {"features": request.threat.describe()}),
            **self._task_entry(),
        }
        # Without a cascade an attack's result does not depend on the other attacks.
        attacks = [(a.name, describe_attack(a, request.threat)) for a in request.attacks] if request.cascade else None
        code = fingerprint_code(request.model) if request.resume_log else ""
        return fingerprint(settings, attacks, self._model_fingerprint, code)

    def run(
        self, source: BatchSource, on_progress: ProgressCallback, on_flag: FlagCallback
    ) -> tuple[Evaluation, ResumeLog]:
        """Evaluate a source.

        Args:
            source: The data, in the order of its blocks.
            on_progress: Called at the start, after each result and during the checks at the end.
            on_flag: Called with each flag about the model itself, before the first attack.

        Returns:
            The evaluation, and the resume log, to be deleted once the evaluation is saved.
        """
        num_images = self.request.count_images(source)
        checks_here = self.request.sanity and self.request.distributed.is_main  # which makes the checks for all
        copies = copy_before_queries(self.request.model) if checks_here else None
        (first_images, first_labels), blocks = peek_images(
            iter_blocks(source, self.request.block, num_images), FINGERPRINT_IMAGES
        )
        output = call_on_one_image(self.request.model, first_images)
        if has_logits(output):
            self._set_request(replace(self.request, model=LogitsModel(self.request.model)))
        request = self.request
        num_outputs = count_outputs(take_logits(output), source, request.task, first_labels.shape[1:])
        sample = sample_images(source, num_images, SANITY_IMAGES, first_images.device) if checks_here else None

        started = perf_counter()
        early_flags = self._check_model(sample, source.num_classes, min(request.block, num_images), on_flag)
        check_seconds = perf_counter() - started

        log = self._open_resume_log(first_images)
        progress = self._make_progress(num_images)
        results, labels = BlockEvaluator(request, self.verifier, log).evaluate_all(
            blocks, num_images, on_progress, progress
        )
        classes = [str(c) for c in getattr(getattr(source, "images", None), "classes", range(source.num_classes))]
        evaluation = Evaluation(
            results, labels, classes, self._describe_settings(source, num_outputs), own_task=request.task
        )

        started = perf_counter()
        late_flags: list[Flag] = []
        if sample is not None:
            progress.start_checks()
            on_progress(progress)
            subset = self._attacked_subset(evaluation, sample, lambda: on_progress(progress))
            late_flags = run_extra_attacks(subset) + self._check_statefulness(copies, subset, early_flags)
        check_seconds += perf_counter() - started

        flags = [asdict(flag) for flag in (*early_flags, *check_consistency(evaluation), *late_flags)]
        flags, check_seconds = request.distributed.broadcast_json([flags, check_seconds if request.sanity else 0.0])
        return replace(evaluation, flags=[Flag(**flag) for flag in flags], check_seconds=check_seconds), log

    def _make_progress(self, num_images: int) -> EvaluationProgress:
        attacks, threat = self.request.attacks, self.request.threat
        num_blocks = -(-num_images // self.request.block)
        total = num_blocks * sum(len(get_stages(attack)) for attack in attacks)
        num_checked = min(SANITY_IMAGES, num_images) if self.request.sanity and threat.eps else 0
        check_passes = num_checked * estimate_check_passes(attacks)
        return EvaluationProgress(
            attacks,
            num_images,
            total,
            lambda: self.verifier.count_passes()[0],
            check_passes=check_passes,
            ball=self.request.ball,
        )

    def _check_model(
        self, sample: LabeledImages | None, num_classes: int, batch_size: int, on_flag: FlagCallback
    ) -> list[Flag]:
        """Flags about the model itself, reported as soon as they are raised."""
        request = self.request
        flags = check_before_attacks(request.model, *sample, num_classes, request.task, batch_size) if sample else []
        for flag in flags:
            on_flag(flag)
        return flags

    def _attacked_subset(
        self, evaluation: Evaluation, sample: LabeledImages, on_attack_done: Callable[[], None]
    ) -> AttackedSubset:
        """What attacks the sample in more ways."""
        verifier, (x, y) = self.verifier, sample
        rows = sample_indices(evaluation.num_images, SANITY_IMAGES)
        model = verifier.choose_attack_model(x)
        threat, task = self.request.threat, self.request.task
        return AttackedSubset(model, verifier.model, threat, x, y, rows, evaluation, on_attack_done, task)

    def _check_statefulness(
        self, copies: FreshCopies | None, subset: AttackedSubset, early_flags: list[Flag]
    ) -> list[Flag]:
        """Flags about answers that depend on earlier questions; random ones always differ."""
        names = {flag.name for flag in early_flags}
        if copies is None or names & {"randomised", "training_mode", "not_finite"}:
            return []
        flag = check_statefulness(subset, copies)
        return [flag] if flag else []

    def _open_resume_log(self, x: Tensor) -> ResumeLog:
        """Read the resume log; only the main process has the file."""
        request = self.request
        path = Path(request.resume_log) if request.resume_log and request.distributed.is_main else None
        log = ResumeLog(self.fingerprint, path, fingerprint_logits(request.model, x) if request.resume_log else None)
        log.sync(request.distributed)
        return log

    def _task_entry(self) -> dict[str, Any]:
        """The task, for records; older ones do not name classification."""
        task = self.request.task
        return {} if task == CLASSIFICATION else {"task": task.describe()}

    def _describe_settings(self, source: BatchSource, num_outputs: int) -> dict[str, Any]:
        """The settings of evaluation.json."""
        request, fast_model = self.request, self.verifier.fast_model
        return {
            "about": {name: anonymize_paths(value) for name, value in request.about.items()},
            "device": device_name(device_of(request.model)),
            "image": list(source.shape),
            "sanity": request.sanity,
            "threat": request.threat.describe(),
            **self._task_entry(),
            "attacks": {a.name: describe_attack(a, request.threat, num_outputs) for a in request.attacks},
            "seed": request.seed,
            "block": request.block,
            "cascade": request.cascade,
            "precision": self.verifier.precision,
            "compiled": fast_model is not None and fast_model.compiled,
            "sample": request.count_images(source) < source.num_examples,
            "available": source.num_examples,
            "model": self._model_fingerprint,
            "versions": get_versions(),
        }


def device_name(device: torch.device) -> str:
    """Return a device's type, and a GPU's name."""
    return f"cuda, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
