"""deat: robust image classifiers, trained fast.

Adversarial training whose number of attack steps tunes itself while it trains.
"""

from deat import schedules
from deat.core.inner_attack import InnerAttack
from deat.core.moves import Game, MagnitudeProbe
from deat.core.objectives import CrossEntropy, LossOutput, Mart, Objective, Trades
from deat.core.plays import Craft, Relay, Replay
from deat.data import Augment, DataSplits, ImageSet, as_source, load_data
from deat.engine.precision import Engine
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.results import Evaluation, load_evaluation
from deat.methods import Method, friendly, get_method, mplus, register_method
from deat.methods.configure import configure_method
from deat.models import add_normalization, build_model, load_weights, register_model, save_weights
from deat.runs.fit import fit, make_trainer
from deat.threat import L1, L2, Linf, ThreatModel
from deat.training.best_epoch import TrainResult
from deat.training.checkpoints import Checkpoints
from deat.training.config import TrainConfig
from deat.training.overfit_watch import OverfitWatch
from deat.training.records import EpochStats, EpochTiming
from deat.training.trainer import Trainer
from deat.utils.distributed import Distributed
from deat.version import VERSION

__version__ = VERSION

__all__ = [
    "L1",
    "L2",
    "Attack",
    "Augment",
    "Checkpoints",
    "Craft",
    "CrossEntropy",
    "DataSplits",
    "Distributed",
    "Engine",
    "EpochStats",
    "EpochTiming",
    "Evaluation",
    "Game",
    "ImageSet",
    "InnerAttack",
    "Linf",
    "LossOutput",
    "MagnitudeProbe",
    "Mart",
    "Method",
    "Objective",
    "OverfitWatch",
    "Relay",
    "Replay",
    "ThreatModel",
    "Trades",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "add_normalization",
    "as_source",
    "build_model",
    "configure_method",
    "evaluate",
    "fit",
    "friendly",
    "get_method",
    "load_data",
    "load_evaluation",
    "load_weights",
    "make_trainer",
    "mplus",
    "register_method",
    "register_model",
    "save_weights",
    "schedules",
]
