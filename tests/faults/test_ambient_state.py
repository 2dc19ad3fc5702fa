"""What the caller has set in torch for code of their own does not change a training silently."""

import threading

import pytest
import torch

import deat
from deat.errors import UsageError
from helpers.nets import conv_net, learnable, same, weights


def fit(**options):
    options = {"method": "m+deat", "epochs": 2, "batch_size": 8, "lr": 0.1, "progress": False, **options}
    net = conv_net(batch_norm=True, dropout=0.5)
    return net, deat.fit(
        net, learnable(24), val=learnable(12, seed=1), threat="linf:0.05", val_attack="pgd-2", **options
    )


AMBIENT = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast of half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


@pytest.mark.promise("P164")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_inside_a_context_of_the_caller_has_the_same_bytes(ambient, precision):
    net, result = fit(precision=precision, device="cpu")
    with AMBIENT[ambient]():
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        inside, again = fit(precision=precision)
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before
    assert same(weights(inside), weights(net))
    assert again.history == result.history


class Waiting:
    """Holds a training after its first epoch until it is let go."""

    def __init__(self) -> None:
        self.reached, self.free = threading.Event(), threading.Event()

    def on_epoch(self, trainer, stats, timing) -> None:
        self.reached.set()
        assert self.free.wait(60)


@pytest.mark.promise("P165")
def test_second_training_in_another_thread_is_refused_and_the_first_is_the_same():
    straight, _ = fit()
    holder, nets = Waiting(), []
    thread = threading.Thread(target=lambda: nets.append(fit(callbacks=[holder])[0]))
    thread.start()
    try:
        assert holder.reached.wait(60)
        with pytest.raises(UsageError, match="another thread"):
            fit()
    finally:
        holder.free.set()
        thread.join()
    assert same(weights(nets[0]), weights(straight))
    assert same(weights(fit()[0]), weights(straight))


class Inner:
    """Trains another network after every epoch, as one that searches settings may."""

    def on_epoch(self, trainer, stats, timing) -> None:
        fit(epochs=1, seed=7)


@pytest.mark.promise("P165")
def test_training_in_a_callback_leaves_the_outer_one_the_same():
    straight, _ = fit()
    assert same(weights(fit(callbacks=[Inner()])[0]), weights(straight))
