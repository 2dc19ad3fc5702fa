"""The parts of one minibatch, for training loops of your own.

A Game has the moves of the adversary (delta) and of the learner (the weights), and a play such as Craft or Replay says
in which order they are made. docs/python.md and examples/own_loop.py show a loop of these parts.
"""

from deat.core.batch_buffers import Budget, Buffers, Cost
from deat.core.epoch_sums import EpochRecord, Meter
from deat.core.example_stopping import StopRule, StopWhenConverged, StopWhenFooled
from deat.core.game import Game
from deat.core.gradient_penalty import GradientAlignment, GradientPenalty
from deat.core.inner_attack import InnerAttack
from deat.core.magnitude_probe import MagnitudeProbe
from deat.core.measurements import Measurement
from deat.core.move_order import Craft, PenaliseGradient, PerturbWeights, Play, Relay, Replay
from deat.core.remembered_starts import RememberStarts
from deat.core.training_losses import CrossEntropy, LossOutput, Mart, Objective, StartConsistency, Trades, TrainingLoss
from deat.core.weight_perturbation import WeightPerturbation
from deat.tasks.per_example_losses import (
    boosted_cross_entropy,
    cross_entropy,
    kl_divergence,
    margin_loss,
    mart_regulariser,
)

__all__ = [
    "Budget",
    "Buffers",
    "Cost",
    "Craft",
    "CrossEntropy",
    "EpochRecord",
    "Game",
    "GradientAlignment",
    "GradientPenalty",
    "InnerAttack",
    "LossOutput",
    "MagnitudeProbe",
    "Mart",
    "Measurement",
    "Meter",
    "Objective",
    "PenaliseGradient",
    "PerturbWeights",
    "Play",
    "Relay",
    "RememberStarts",
    "Replay",
    "StartConsistency",
    "StopRule",
    "StopWhenConverged",
    "StopWhenFooled",
    "Trades",
    "TrainingLoss",
    "WeightPerturbation",
    "boosted_cross_entropy",
    "cross_entropy",
    "kl_divergence",
    "margin_loss",
    "mart_regulariser",
]
