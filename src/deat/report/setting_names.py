"""Names of settings for readers of a report, in place of the keys in run.json and evaluation.json."""

from collections.abc import Iterable

from deat.report.row_statistics import format_attack_name

SETTINGS_IN_EPS = tuple(
    f"method.schedule.{name}" for name in ("alpha", "stretch", "ramp", "alpha_eps", "stretch_eps", "ramp_eps")
)
"""Lengths that a method declares in units of eps."""
NAMES = {
    "method.name": "method",
    "method.summary": "summary",
    "method.kind": "class of the method",
    "method.play.kind": "moves on a batch",
    "method.play.play.kind": "moves on a batch",
    "method.play.penalty.form": "form of the gradient penalty",
    "method.play.penalty.weight": "weight of the gradient penalty",
    "method.play.penalty.step": "step of the gradient penalty",
    "method.play.perturbation.gamma": "size of the weight perturbation",
    "method.play.perturbation.warmup": "epochs without weight perturbation",
    "method.schedule.kind": "schedule of the steps k",
    "method.schedule.k": "steps k",
    "method.schedule.alpha": "step size alpha",
    "method.schedule.alpha_eps": "step size alpha",
    "method.schedule.gamma": "growth factor gamma",
    "method.schedule.max_steps": "largest k",
    "method.schedule.level": "threshold of the stop rule",
    "method.schedule.stretch": "least reach of k steps",
    "method.schedule.stretch_eps": "least reach of k steps",
    "method.schedule.ramp": "ramp of the step size",
    "method.schedule.ramp_eps": "ramp of the step size",
    "method.ascent.kind": "class of the inner attack",
    "method.ascent.loss": "loss of the inner attack",
    "method.ascent.start": "start of the inner attack",
    "method.ascent.batch_norm": "batch norm during the inner attack",
    "method.ascent.freeze": "stop rule",
    "method.ascent.noisy": "random start without steps",
    "method.ascent.persistent": "perturbation carried between batches",
    "method.ascent.carries_unclipped": "carried perturbation unclipped",
    "method.ascent.compact": "attack active examples only",
    "method.ascent.leaves_ball": "perturbation may leave the ball",
    "method.ascent.remember": "starts remembered for each example",
    "method.ascent.start_radius": "radius of the start in eps",
    "method.objective.kind": "training objective",
    "method.probe.kind": "class of the probe of l_X",
    "method.probe.move": "move that measures l_X",
    "method.probe.over": "l_X is summed over",
    "method.probe.space": "l_X is measured in the space of",
    "settings.epochs": "epochs",
    "settings.batch_size": "batch size",
    "settings.lr": "learning rate",
    "settings.rate": "learning-rate schedule",
    "settings.lr_schedule": "learning-rate schedule",
    "settings.milestones": "epochs of learning-rate decay",
    "settings.peak": "peak of the learning rate, share of epochs",
    "settings.cycle_momentum": "cyclic momentum",
    "settings.optimizer": "optimizer",
    "settings.momentum": "momentum",
    "settings.betas": "betas of the optimizer",
    "settings.weight_decay": "weight decay",
    "settings.precision": "precision requested",
    "settings.engine": "engine requested",
    "settings.device": "device requested",
    "settings.seed": "seed",
    "settings.threads": "CPU threads requested",
    "settings.workers": "data workers",
    "settings.val_attack": "validation attack",
    "settings.deterministic": "deterministic on a GPU",
    "settings.ema": "decay of averaged weights",
    "settings.clip_grad_norm": "largest norm of the gradient",
    "settings.label_smoothing": "label smoothing",
    "settings.class_weights": "class weights",
    "settings.mixup": "mixup",
    "settings.cutmix": "CutMix",
    "settings.random_erasing": "random erasing",
    "settings.sync_bn": "batch norm over all processes",
    "model.name": "network",
    "model.parameters": "parameters",
    "data.name": "data set",
    "data.digest": "hash of the data",
    "data.train": "training examples",
    "data.n_train": "training examples chosen of a larger set",
    "data.held_out": "held-out examples",
    "data.classes": "classes",
    "data.image": "example shape",
    "data.normalized_by": "normalisation: mean, standard deviation",
    "data.measured_on": "examples that the normalisation was measured on",
    "data.augmented_by": "augmentation",
    "threat.norm": "norm",
    "threat.eps": "radius eps",
    "device": "device",
    "precision": "precision",
    "engine": "engine",
    "threads": "CPU threads",
    "processes": "processes",
    "watch": "overfit watch",
    "exact": "exact when resumed",
    "not_exact_because": "why it would not be exact",
    "best_epoch.epoch": "best epoch, counted from 0",
    "best_epoch.natural": "natural accuracy of the best epoch, held-out examples",
    "best_epoch.robust": "accuracy under attack of the best epoch, held-out examples",
    "best_epoch.rule": "comparison of epochs",
    "best_epoch.images": "held-out examples that epochs are compared on",
    "best_epoch.most_robust": "most robust epoch, counted from 0",
    "best_epoch.most_robust_accuracy": "accuracy under attack of the most robust epoch",
    "best_epoch.most_robust_natural": "natural accuracy of the most robust epoch",
    "best_epoch.p_value": "p-value of best and most robust epoch",
    "best_epoch.indistinguishable": "epochs that are indistinguishable, counted from 0",
    "best_epoch.averaged": "best weights are averaged",
    "best_epoch.most_robust_averaged": "most robust weights are averaged",
    "best_epoch.metric": "metric in place of accuracy",
    "best_epoch.reason": "choice of the epoch",
    "best_weights": "hash of the best weights",
    "checksum": "checksum of run.json",
    "digest": "hash of the settings",
    "digest_of_init": "hash of the initial weights",
    "schedule": "schedule with absolute lengths",
    "request.rules": "rule set",
    "request.init": "initial weights",
    "options.test_images": "test examples scored after training",
    "request.size": "size",
    "request.data_root": "folder of data sets",
    "request.max_steps": "largest k requested",
    "request.n_train": "training examples requested",
    "request.held_out": "held-out examples requested",
    "request.space": "space of l_X requested",
    "request.download": "download of data",
    "evaluation.about.model": "evaluated network",
    "evaluation.about.data": "evaluated data set",
    "evaluation.about.data_root": "folder of data sets in the evaluation",
    "evaluation.about.size": "size in the evaluation",
    "evaluation.about.weights": "evaluated weights",
    "evaluation.about.epoch": "evaluated epoch",
    "evaluation.about.normalize": "normalisation in the evaluation",
    "evaluation.available": "test examples available",
    "evaluation.block": "examples attacked at once",
    "evaluation.cascade": "cascade of attacks",
    "evaluation.compiled": "compiled attacks",
    "evaluation.image": "example shape in the evaluation",
    "evaluation.model": "hash of the evaluated weights",
    "evaluation.sample": "part of the test examples only",
    "evaluation.sanity": "sanity checks",
    "evaluation.threat.norm": "norm of the attacks",
    "evaluation.threat.eps": "radius eps of the attacks",
}
"""Readable names by key; `name_setting` makes the others from the key's words."""
SECTIONS = {
    "method": "Method",
    "settings": "Training",
    "model": "Network",
    "data": "Data",
    "threat": "Threat model",
    "evaluation": "Evaluation",
    "versions": "Versions",
    "code": "Code files, by their hashes",
    "request": "Requested by flags or arguments",
}
"""Headings by the first word of a key, in the order of the page; other keys are in the section `RUN_SECTION`."""
RUN_SECTION = "Run"
VALUE_NAMES = {"True": "yes", "False": "no", "": "—"}


def name_setting(key: str) -> str:
    """Return the readable name of a setting.

    Args:
        key: Its key in a flattened record, such as "settings.val_attack".

    Returns:
        Its name, with its unit if that is eps.

    Example:
        >>> name_setting("settings.val_attack")
        'validation attack'
        >>> name_setting("evaluation.attacks.pgd-20.restarts")
        'PGD-20: restarts'
    """
    name = NAMES.get(key) or _name_by_words(key)
    return f"{name}, in eps" if key in SETTINGS_IN_EPS else name


def format_setting_value(text: str) -> str:
    """Return a setting's value as a reader expects it: yes and no, and a dash for an empty one."""
    return VALUE_NAMES.get(text, text)


def group_settings(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Group settings under headings.

    Args:
        pairs: Keys and values. Requested settings without a value are left out.

    Returns:
        Headings with the (key, name, value) of each setting, in the order of the page.
    """
    groups: dict[str, list[tuple[str, str, str]]] = {title: [] for title in (*SECTIONS.values(), RUN_SECTION)}
    for key, value in pairs:
        section = _find_section(key)
        if value != "—" or not key.startswith("request."):
            groups.setdefault(section, []).append((key, name_setting(key), format_setting_value(value)))
    return [(title, settings) for title, settings in groups.items() if settings]


def _find_section(key: str) -> str:
    first = key.partition(".")[0]
    if first.startswith("evaluation of "):  # another evaluation than the main one: of the last epoch, of AutoAttack
        return f"{first.capitalize()}, where it differs"
    return SECTIONS.get(first, RUN_SECTION)


def _name_by_words(key: str) -> str:
    """A name from a key's words: after the section, and for attacks after the attack's name."""
    first, _, rest = key.partition(".")
    if not rest:
        return first.replace("_", " ")
    if first.startswith("evaluation"):
        if rest.startswith("attacks."):
            setting = rest.removeprefix("attacks.").replace(".targets.", ".targets of ")
            attack, _, setting = setting.rpartition(".")
            return f"{format_attack_name(attack)}: {setting.replace('_', ' ')}"
        rest = NAMES.get(f"evaluation.{rest}", rest)
    words = rest.replace("_", " ").replace(".", ": ")
    if first == "versions":
        return f"version of {words}"
    return f"{words} requested" if first == "request" else words
