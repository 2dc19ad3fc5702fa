"""deat: robust models, trained fast.

Adversarial training whose number of attack steps adapts during training.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deat.version import VERSION
from deat.write_report import WrittenReport, report

if TYPE_CHECKING:
    from deat import attack_schedules, core, errors, tasks
    from deat.attack_schedules import Schedule, ScheduleState
    from deat.core import (
        Budget,
        Buffers,
        Craft,
        CrossEntropy,
        EpochRecord,
        Game,
        GradientAlignment,
        GradientPenalty,
        InnerAttack,
        LossOutput,
        MagnitudeProbe,
        Mart,
        Measurement,
        Objective,
        Play,
        Relay,
        RememberStarts,
        Replay,
        StartConsistency,
        StopRule,
        Trades,
        TrainingLoss,
        WeightPerturbation,
    )
    from deat.data import Augment, BatchSource, DataLike, DataSplits, ImageSet, LazyImages, as_source, load_data
    from deat.engine.engine import Engine
    from deat.evaluation.attack_verifier import AttackLike
    from deat.evaluation.attacks import Attack
    from deat.evaluation.evaluator import evaluate
    from deat.evaluation.kept_examples import AdversarialExamples
    from deat.evaluation.results import Evaluation, load_evaluation
    from deat.evaluation.standalone_attack import BoundAttack, attack
    from deat.integrations.hub import from_pretrained, pull_from_hub, push_to_hub, save_pretrained
    from deat.methods import Method, RuleSet, auto_steps, awp, friendly, get_method, gplus, mplus, register_method
    from deat.methods.change_settings import configure_method
    from deat.models import Normalize, add_normalization, build_model, load_weights, register_model, save_weights
    from deat.models.export_network import ExportedFile
    from deat.runs.attack_images import AttackedImage, AttackedImages, attack_images
    from deat.runs.export import export
    from deat.runs.fit import fit
    from deat.runs.predict import Prediction, predict
    from deat.runs.saved_run import SavedRun, load_run
    from deat.threat import L1, L2, Linf, ThreatModel, Union
    from deat.training.adversarial_step import AdversarialStep, StepResult
    from deat.training.best_epoch import BestChoice
    from deat.training.callbacks import Callback, LambdaCallback
    from deat.training.checkpoints import Checkpoints
    from deat.training.config import TrainConfig
    from deat.training.epoch_records import EpochStats, EpochTiming
    from deat.training.make_trainer import make_trainer
    from deat.training.optimizers import OptimizerFactory
    from deat.training.overfit_watch import OverfitWatch
    from deat.training.train_result import TrainResult
    from deat.training.trainer import Trainer
    from deat.utils.distributed import Distributed

_NAMES_BY_MODULE = {
    "attack_schedules": "Schedule ScheduleState",
    "core": (
        "Budget Buffers Craft CrossEntropy EpochRecord StopRule Game GradientAlignment GradientPenalty "
        "InnerAttack LossOutput MagnitudeProbe Mart Measurement Objective Play Relay RememberStarts Replay "
        "StartConsistency Trades TrainingLoss WeightPerturbation"
    ),
    "data": "Augment DataLike DataSplits ImageSet LazyImages BatchSource as_source load_data",
    "engine.engine": "Engine",
    "evaluation.kept_examples": "AdversarialExamples",
    "evaluation.attacks": "Attack",
    "evaluation.evaluator": "evaluate",
    "evaluation.results": "Evaluation load_evaluation",
    "evaluation.standalone_attack": "BoundAttack attack",
    "evaluation.attack_verifier": "AttackLike",
    "integrations.hub": "from_pretrained pull_from_hub push_to_hub save_pretrained",
    "methods": "Method RuleSet auto_steps awp friendly get_method gplus mplus register_method",
    "methods.change_settings": "configure_method",
    "models": "Normalize add_normalization build_model load_weights register_model save_weights",
    "models.export_network": "ExportedFile",
    "runs.attack_images": "AttackedImage AttackedImages attack_images",
    "runs.export": "export",
    "runs.fit": "fit",
    "runs.predict": "Prediction predict",
    "runs.saved_run": "SavedRun load_run",
    "threat": "L1 L2 Linf ThreatModel Union",
    "training.adversarial_step": "AdversarialStep StepResult",
    "training.best_epoch": "BestChoice",
    "training.callbacks": "Callback LambdaCallback",
    "training.checkpoints": "Checkpoints",
    "training.config": "TrainConfig",
    "training.epoch_records": "EpochStats EpochTiming",
    "training.make_trainer": "make_trainer",
    "training.optimizers": "OptimizerFactory",
    "training.overfit_watch": "OverfitWatch",
    "training.train_result": "TrainResult",
    "training.trainer": "Trainer",
    "utils.distributed": "Distributed",
}
"""The public names of each module, which is imported when one of them is first used: a program uses few of them."""
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__version__ = VERSION

__all__ = [
    "L1",
    "L2",
    "AdversarialExamples",
    "AdversarialStep",
    "Attack",
    "AttackLike",
    "AttackedImage",
    "AttackedImages",
    "Augment",
    "BatchSource",
    "BestChoice",
    "BoundAttack",
    "Budget",
    "Buffers",
    "Callback",
    "Checkpoints",
    "Craft",
    "CrossEntropy",
    "DataLike",
    "DataSplits",
    "Distributed",
    "Engine",
    "EpochRecord",
    "EpochStats",
    "EpochTiming",
    "Evaluation",
    "ExportedFile",
    "Game",
    "GradientAlignment",
    "GradientPenalty",
    "ImageSet",
    "InnerAttack",
    "LambdaCallback",
    "LazyImages",
    "Linf",
    "LossOutput",
    "MagnitudeProbe",
    "Mart",
    "Measurement",
    "Method",
    "Normalize",
    "Objective",
    "OptimizerFactory",
    "OverfitWatch",
    "Play",
    "Prediction",
    "Relay",
    "RememberStarts",
    "Replay",
    "RuleSet",
    "SavedRun",
    "Schedule",
    "ScheduleState",
    "StartConsistency",
    "StepResult",
    "StopRule",
    "ThreatModel",
    "Trades",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingLoss",
    "Union",
    "WeightPerturbation",
    "WrittenReport",
    "add_normalization",
    "as_source",
    "attack",
    "attack_images",
    "attack_schedules",
    "auto_steps",
    "awp",
    "build_model",
    "configure_method",
    "core",
    "errors",
    "evaluate",
    "export",
    "fit",
    "friendly",
    "from_pretrained",
    "get_method",
    "gplus",
    "load_data",
    "load_evaluation",
    "load_run",
    "load_weights",
    "make_trainer",
    "mplus",
    "predict",
    "pull_from_hub",
    "push_to_hub",
    "register_method",
    "register_model",
    "report",
    "save_pretrained",
    "save_weights",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of deat, when it is first used."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"deat.{_MODULE_OF[name]}"), name)
    elif not name.startswith("_") and find_spec(f"deat.{name}"):
        value = import_module(f"deat.{name}")
    else:
        raise AttributeError(f"module 'deat' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
