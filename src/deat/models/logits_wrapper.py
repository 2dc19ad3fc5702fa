"""Networks that return an object whose `logits` are the outputs, as those of Hugging Face transformers do."""

from typing import Any

from torch import Tensor, nn


class LogitsModel(nn.Module):
    """A network that returns the `logits` of another network's output object.

    `deat.fit` and `deat.evaluate` put it around a network that needs it. It is no layer of the network: weights are saved
    and loaded under the network's own names.

    Args:
        module: The network. Outputs that are tensors, as some networks return in one mode only, pass as they are.

    Example:
        >>> model = deat.models.LogitsModel(transformers.ViTForImageClassification(config))
        >>> model(images).shape
        torch.Size([8, 10])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # not train(), which would change the network's modules

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits.

        Args:
            x: The inputs.
        """
        output = self.module(x)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits


def has_logits(output: Any) -> bool:
    """Return whether a network's output is an object, not a tensor, whose attribute `logits` is a tensor."""
    return not isinstance(output, Tensor) and isinstance(getattr(output, "logits", None), Tensor)


def take_logits(output: Any) -> Any:
    """Return the logits of an output object that has them, and any other output as it is."""
    return output.logits if has_logits(output) else output


def return_logits(model: nn.Module, output: Any) -> nn.Module:
    """Wrap a model whose output is an object with logits.

    Args:
        model: The network.
        output: What it has returned for some images.

    Returns:
        A `LogitsModel`, or the model itself.
    """
    return LogitsModel(model) if has_logits(output) else model
