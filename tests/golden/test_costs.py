"""The paper's cost table: backprops a batch in ten epochs, by declaration and by counting."""

import pytest

import deat
from deat.core.epoch_sums import EpochRecord
from helpers.games import trainer_of
from helpers.guards import BackwardCounter
from helpers.nets import conv_net, learnable

TABLE = {
    "fgsm": 20,
    "pgd-7": 80,
    "free-4": 40,
    "free-8": 80,
    "deat-3": 22,
    "n-fgsm": 20,
    "fgsm-pgi": 20,
    "gradalign": 40,
}


def ks(name: str, epochs: int, rules: str = "default", accuracy: float = 0.5, magnitude: float = 1.0) -> list[int]:
    """k in every epoch of a training in which nothing surprising happens."""
    schedule = deat.get_method(name, rules=rules).bind(deat.Linf(8 / 255), epochs)
    state, found = schedule.init(), []
    for epoch in range(epochs):
        found.append(schedule.budget(state, epoch).k)
        state = schedule.observe(state, EpochRecord(epoch, 1.0, accuracy, magnitude, 100))
    return found


@pytest.mark.promise("P39")
@pytest.mark.parametrize(("name", "cost"), TABLE.items(), ids=TABLE.keys())
def test_ten_epochs_cost_what_the_paper_says(name, cost):
    method = deat.get_method(name)
    schedule = method.bind(deat.Linf(8 / 255), 10)
    budgets = [schedule.budget(schedule.init(), epoch) for epoch in range(10)]
    assert sum(method.play.backprops(budget) for budget in budgets) == cost


@pytest.mark.parametrize(("name", "cost"), TABLE.items(), ids=TABLE.keys())
def test_ten_real_epochs_make_that_many_backward_calls_a_batch(name, cost):
    net = conv_net()
    counter = BackwardCounter(net[-1])
    history = trainer_of(name, net, data=learnable(12), batch_size=6, epochs=10).fit().history
    assert counter.count == history[-1].backprops == 2 * cost


def test_deat_3_ends_fifty_epochs_with_17_replays():
    replays = [k + 1 for k in ks("deat-3", 50)]
    assert replays[-1] == 17
    assert replays[:12] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_released_deat_3_stops_at_5_replays_and_costs_30_in_twelve_epochs():
    replays = [k + 1 for k in ks("deat-3", 50, "released")]
    assert max(replays) == replays[-1] == 5
    assert sum(replays[:12]) == 30


def test_released_deat_40_stops_at_4_replays_where_the_paper_continues():
    assert [k + 1 for k in ks("deat-40%", 8, "released")] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert [k + 1 for k in ks("deat-40%", 8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ks("deat-40%", 4, accuracy=0.4) == [0, 0, 0, 0]  # strictly above


def test_released_amata_takes_272_steps_from_2_to_9_in_fifty_epochs():
    steps = ks("amata-2-10", 50, "released")
    assert (steps[0], steps[-1], sum(steps)) == (2, 9, 272)
    assert steps == sorted(steps)


def test_paper_amata_reaches_10():
    steps = ks("amata-2-10", 50)
    assert (steps[0], steps[-1], max(steps)) == (2, 10, 10)
    assert steps == sorted(steps)


def test_fgsm_pgi_executes_two_passes_to_its_step_and_four_in_its_update():
    history = trainer_of("fgsm-pgi", data=learnable(12), batch_size=6, epochs=1).fit().history
    assert history[-1].backprops == 2 * 2
    assert history[-1].passes == 2 * 6


def test_gradalign_executes_four_passes_of_fgsm_and_six_of_its_penalty():
    history = trainer_of("gradalign", data=learnable(12), batch_size=6, epochs=1).fit().history
    assert history[-1].backprops == 2 * 4
    assert history[-1].passes == 2 * 10


def test_trades_executes_24_passes_and_one_for_its_clean_logits():
    history = trainer_of("trades", data=learnable(12), batch_size=6, epochs=1).fit().history
    assert history[-1].backprops == 2 * 11
    assert history[-1].passes == 2 * 25
