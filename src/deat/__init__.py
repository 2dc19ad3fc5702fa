"""deat: robust image classifiers, trained fast.

Adversarial training whose number of attack steps tunes itself while it trains.
"""

from deat import schedules
from deat.data import load as load_data
from deat.game.ascent import Ascent
from deat.game.engine import Engine
from deat.game.moves import Game, Probe
from deat.game.objectives import CrossEntropy, Mart, Objective, Trades
from deat.game.plays import Craft, Relay, Replay
from deat.methods import Method, friendly, method, mplus, register
from deat.models import build as build_model
from deat.models import load_weights, normalized, save_weights
from deat.threat import L1, L2, Linf, ThreatModel
from deat.training.fit import fit, make_trainer
from deat.training.result import Result
from deat.training.settings import Settings
from deat.training.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "L1",
    "L2",
    "Ascent",
    "Craft",
    "CrossEntropy",
    "Engine",
    "Game",
    "Linf",
    "Mart",
    "Method",
    "Objective",
    "Probe",
    "Relay",
    "Replay",
    "Result",
    "Settings",
    "ThreatModel",
    "Trades",
    "Trainer",
    "build_model",
    "fit",
    "friendly",
    "load_data",
    "load_weights",
    "make_trainer",
    "method",
    "mplus",
    "normalized",
    "register",
    "save_weights",
    "schedules",
]
