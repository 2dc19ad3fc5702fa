"""The task whose losses the learner minimises: smoothed labels, and weights of classes."""

from torch import Tensor

from deat.core.training_losses import TrainingLoss
from deat.data.batch_source import BatchSource
from deat.errors import DataError, UsageError
from deat.tasks import Task
from deat.tasks.task import ClassWeights
from deat.training.config import TrainConfig
from deat.training.validation import read_labels
from deat.utils.user_code import accepts_argument


def make_learner_task(task: Task, config: TrainConfig, loss: TrainingLoss, train: BatchSource) -> Task:
    """Return the task whose losses the learner minimises; attacks keep those of `task`.

    Args:
        task: The task.
        config: The settings of training.
        loss: The training loss.
        train: The training data, whose labels "balanced" weights count.

    Returns:
        The task itself without label smoothing and class weights.

    Raises:
        UsageError: The task or the loss cannot be changed, or the number of weights is not that of the classes.
        DataError: A class has no training example, so that it has no balanced weight.
    """
    if not config.label_smoothing and config.class_weights is None:
        return task
    if not accepts_argument(loss, "task"):
        raise UsageError(
            f"label_smoothing and class_weights change the task's loss, which {type(loss).__name__} does not use: give it "
            "a parameter task and use task.loss, or leave them out."
        )
    weights = config.class_weights
    if isinstance(weights, str):  # "balanced"
        weights = balance_classes(task, read_labels(train), train.num_classes)
    elif weights is not None and len(weights) != train.num_classes:
        raise UsageError(
            f"class_weights has {len(weights)} weights, and the data {train.num_classes} classes. Give one for each class, "
            'in their order, or "balanced".'
        )
    return task.for_learner(config.label_smoothing, weights)


def balance_classes(task: Task, labels: Tensor, num_classes: int) -> ClassWeights:
    """Return weights with which all classes count equally: N / (classes * n_c), whose mean over the data is 1.

    Args:
        task: The task.
        labels: All training labels, on the CPU.
        num_classes: The number of classes.

    Raises:
        DataError: A class has no example.
    """
    ignored = getattr(task, "ignore_index", None)
    counted = labels[labels != ignored] if ignored is not None else labels
    counts = counted.flatten().bincount(minlength=num_classes).tolist()
    if 0 in counts:
        raise DataError(
            f"class {counts.index(0)} has no training example, so it has no balanced weight. Give class_weights as numbers, "
            "or leave the class out."
        )
    return tuple(sum(counts) / (num_classes * count) for count in counts)
