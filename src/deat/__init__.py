"""deat: robust models, trained fast.

Adversarial training whose number of attack steps adapts during training.
"""

from deat import core, errors, schedules, tasks
from deat.core import (
    Budget,
    Buffers,
    Craft,
    CrossEntropy,
    EpochRecord,
    FreezeRule,
    Game,
    GradientPenalty,
    InnerAttack,
    LossOutput,
    MagnitudeProbe,
    Mart,
    Measurement,
    Objective,
    Play,
    Relay,
    Replay,
    Trades,
    TrainingLoss,
    WeightPerturbation,
)
from deat.data import Augment, DataLike, DataSplits, ImageSet, LazyImages, Source, as_source, load_data
from deat.engine.engine import Engine
from deat.evaluation.adversarial_examples import AdversarialExamples
from deat.evaluation.attacks import Attack
from deat.evaluation.bound_attack import BoundAttack, attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.results import Evaluation, load_evaluation
from deat.evaluation.verified_attack import AttackLike
from deat.integrations.hub import from_pretrained, pull_from_hub, push_to_hub, save_pretrained
from deat.methods import Method, RuleSet, awp, friendly, get_method, gplus, mplus, register_method
from deat.methods.configure import configure_method
from deat.models import Normalize, add_normalization, build_model, load_weights, register_model, save_weights
from deat.models.export_network import ExportedFile
from deat.runs.attack_images import AttackedImage, AttackedImages, attack_images
from deat.runs.export import export
from deat.runs.fit import fit
from deat.runs.predict import Prediction, predict
from deat.runs.saved_run import SavedRun, load_run
from deat.schedules import Schedule, ScheduleState
from deat.threat import L1, L2, Linf, ThreatModel, Union
from deat.training.adversarial_step import AdversarialStep, StepResult
from deat.training.best_epoch import BestChoice
from deat.training.callbacks import Callback
from deat.training.checkpoints import Checkpoints
from deat.training.config import TrainConfig
from deat.training.epoch_records import EpochStats, EpochTiming
from deat.training.make_trainer import make_trainer
from deat.training.optimizers import OptimizerFactory
from deat.training.overfit_watch import OverfitWatch
from deat.training.train_result import TrainResult
from deat.training.trainer import Trainer
from deat.utils.distributed import Distributed
from deat.version import VERSION
from deat.write_report import WrittenReport, report

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
    "FreezeRule",
    "Game",
    "GradientPenalty",
    "ImageSet",
    "InnerAttack",
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
    "Replay",
    "RuleSet",
    "SavedRun",
    "Schedule",
    "ScheduleState",
    "Source",
    "StepResult",
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
    "schedules",
    "tasks",
]
