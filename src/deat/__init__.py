"""deat: robust image classifiers, trained fast.

Adversarial training whose number of attack steps tunes itself while it trains.
"""

from deat import schedules
from deat.core.inner_attack import Ascent
from deat.core.moves import Game, Probe
from deat.core.objectives import CrossEntropy, Mart, Objective, Outcome, Trades
from deat.core.plays import Craft, Relay, Replay
from deat.data import Augment, ImageSet, as_source
from deat.data import load as load_data
from deat.engine.precision import Engine
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.results import Evaluation, load_evaluation
from deat.methods import Method, friendly, method, mplus, register
from deat.methods.tune import tune
from deat.models import build as build_model
from deat.models import load_weights, normalized, register_model, save_weights
from deat.runs.fit import fit, make_trainer
from deat.threat import L1, L2, Linf, ThreatModel
from deat.training.best_epoch import Result
from deat.training.checkpoints import Checkpoints
from deat.training.config import Settings
from deat.training.overfit_watch import OverfitWatch
from deat.training.records import EpochStats, EpochTiming
from deat.training.trainer import Trainer
from deat.utils.distributed import Ranks
from deat.version import VERSION

__version__ = VERSION

__all__ = [
    "L1",
    "L2",
    "Ascent",
    "Attack",
    "Augment",
    "Checkpoints",
    "Craft",
    "CrossEntropy",
    "Engine",
    "EpochStats",
    "EpochTiming",
    "Evaluation",
    "Game",
    "ImageSet",
    "Linf",
    "Mart",
    "Method",
    "Objective",
    "Outcome",
    "OverfitWatch",
    "Probe",
    "Ranks",
    "Relay",
    "Replay",
    "Result",
    "Settings",
    "ThreatModel",
    "Trades",
    "Trainer",
    "as_source",
    "build_model",
    "evaluate",
    "fit",
    "friendly",
    "load_data",
    "load_evaluation",
    "load_weights",
    "make_trainer",
    "method",
    "mplus",
    "normalized",
    "register",
    "register_model",
    "save_weights",
    "schedules",
    "tune",
]
