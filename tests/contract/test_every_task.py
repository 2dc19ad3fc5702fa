"""What every task keeps to under every method: cost and ball; and under samples of them: resuming, evaluation."""

import copy

import pytest
import torch
from torch import nn

import deat
from deat.core.move_order import find_play
from deat.errors import UsageError
from deat.methods import list_methods
from deat.tasks import MultiLabel, Regression, Segmentation
from helpers.games import busy_budget
from helpers.nets import same, weights

METHODS = [
    *list_methods(),
    "auto",
    "m+f+trades",
    "m+free",
    "m+yopo-5-3",
    "g+natural",
    "m+g+deat",
    "awp+m+trades",
    "g+awp+pgd-2",
]


def problem(name, seed=0, n=40):
    """A small network, its data, its task and its threat model."""
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.rand(n, 2, 6, 6, generator=g)
    if name == "one logit":
        net = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 1))
        return net, (x, (x[:, 0].mean((1, 2)) > 0.5).long()), deat.tasks.Classification(), deat.Linf(0.1)
    if name == "multilabel":
        net = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 2))
        return net, (x, (x.mean((2, 3)) > 0.5).long()), MultiLabel(), deat.L2(0.5)
    if name == "segmentation":
        net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        masks = (x[:, 0] > 0.5).long()
        masks[:, 0] = 255
        return net, (x, masks), Segmentation(ignore_index=255), deat.Linf(0.1)
    if name == "waveforms":
        net = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2))
        waves = 2 * torch.rand(n, 1, 40, generator=g) - 1
        return net, (waves, torch.arange(n) % 2), deat.tasks.Classification(), deat.L1(2.0, box=(-1, 1))
    features = torch.randn(n, 4, generator=g) * torch.tensor([1.0, 10.0, 0.1, 1.0])
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    threat = deat.Linf(0.1, box=None, scale=[1.0, 10.0, 0.1, 1.0], mutable=[True, True, True, False])
    return net, (features, features[:, 0]), Regression(), threat


PROBLEMS = ["one logit", "multilabel", "segmentation", "waveforms", "regression"]
every_problem = pytest.mark.parametrize("name", PROBLEMS)


def game_for(method, net, task, threat, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return deat.Game(net, deat.Objective(net, method.objective, task), threat, method.attack, optimizer, **options)


def threat_of(norm, like):
    """A threat model of another norm with the same box, units and fixed features."""
    options = {"box": like.box, "scale": like.scale, "mutable": like.mutable}
    balls = {"linf": deat.Linf(0.1, **options), "l2": deat.L2(0.3, **options), "l1": deat.L1(0.8, **options)}
    return deat.Union(*balls.values()) if norm == "union" else balls[norm]


def why_refused(method, task, threat):
    """A word of the reason for which a method is not defined for a task or a threat model; None if it is."""
    is_union = len(threat.balls) > 1
    if isinstance(method.objective, deat.Mart) and isinstance(task, Regression):
        return "classes"
    if is_union and find_play(method.play, deat.Relay):
        return "first layer alone"
    return "does not project" if is_union and method.attack.leaves_ball else None


every_norm = pytest.mark.parametrize("norm", ["linf", "l2", "l1", "union"])


@every_problem
@every_norm
@pytest.mark.parametrize("method_name", METHODS)
def test_a_method_trains_inside_ball_and_box_at_its_declared_cost_or_says_why_not(name, norm, method_name):
    net, (x, y), task, threat = problem(name, n=12)
    threat, method = threat_of(norm, threat), deat.get_method(method_name)
    if (reason := why_refused(method, task, threat)) is not None:
        with pytest.raises(UsageError, match=reason):
            deat.make_trainer(net, (x, y), method=method, task=task, threat=threat)
        return
    game, budget, seen = game_for(method, net, task, threat, probe=method.probe), busy_budget(method, threat), []
    if method.attack.remember is not None:
        game.remember_starts(len(x), x.shape[1:])
        game.batch_index = torch.arange(len(x))
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    before = weights(net)
    method.play_batch(game, x, y, budget)
    assert game.cost.backprops == method.play.backprops(budget)
    assert not same(before, weights(net))
    is_outside = method.attack.leaves_ball or "g+" in method_name  # g+ looks one step beyond the perturbation
    if not is_outside:
        assert all(bool(threat.contains(x, adv).all()) for adv in seen if len(adv) == len(x))
    assert any(not torch.equal(x, adv) for adv in seen if len(adv) == len(x)) or not budget.k
    record = game.meter.read(0)
    assert record.examples == len(x)
    assert 0 <= record.accuracy <= 1
    assert record.magnitude > 0


@every_problem
@every_norm
def test_an_evaluation_attacks_every_ball_inside_it(name, norm):
    net, data, task, threat = problem(name)
    threat = threat_of(norm, threat)
    evaluation = deat.evaluate(net, data, task=task, threat=threat, attacks="natural,pgd-2", sanity=False)
    assert evaluation.results[1].invalid == 0
    assert len(evaluation.balls) == (3 if norm == "union" else 0)


@every_problem
@pytest.mark.parametrize("method_name", ["auto", "auto+pgd-3", "auto+f+pgd-3"])
def test_auto_reads_a_gap_between_0_and_1_on_every_task(name, method_name):
    net, data, task, threat = problem(name)
    config = deat.TrainConfig(epochs=5, batch_size=20, lr=0.01, device="cpu", val_attack="none")
    result = deat.make_trainer(net, data, method=method_name, task=task, threat=threat, config=config).fit()
    assert max(stats.k for stats in result.history) >= 1
    for stats in result.history:
        reached, largest = stats.measured["reached_rise"], stats.measured["largest_rise"]
        assert largest >= 0
        assert stats.k or reached == 0
        assert -1e-6 <= reached <= largest * 1.002


@every_problem
@pytest.mark.parametrize("form", ["gradient", "curvature"])
def test_a_gradient_penalty_has_an_effect_at_its_declared_cost(name, form):
    after = []
    for method_name in ("deat-3", "g+deat-3"):
        net, (x, y), task, threat = problem(name)
        method = deat.get_method(method_name)
        if method_name == "g+deat-3":
            method = deat.configure_method(method, g_form=form, g_weight=10.0)
        game, budget = game_for(method, net, task, threat, probe=method.probe), busy_budget(method, threat)
        method.play_batch(game, x, y, budget)
        assert game.cost.backprops == method.play.backprops(budget)
        assert all(bool(w.isfinite().all()) for w in weights(net))
        after.append(weights(net))
    assert not same(*after)


@every_problem
@pytest.mark.parametrize("method_name", ["m+deat", "f+trades"])
def test_training_resumes_to_the_bits_of_an_uninterrupted_one(name, method_name):
    net, data, task, threat = problem(name)
    config = deat.TrainConfig(epochs=2, batch_size=10, lr=0.01, val_attack="pgd-2")
    options = {"method": method_name, "task": task, "threat": threat, "val": 0.25, "config": config}
    whole = deat.make_trainer(net, data, **options)
    whole.run_epoch()
    state = copy.deepcopy(whole.state_dict())
    expected = whole.run_epoch()
    again = deat.make_trainer(problem(name)[0], data, **options)
    again.load_state_dict(state)
    assert again.run_epoch() == expected


@every_problem
def test_an_evaluation_is_saved_and_read_again_and_more_attacks_are_never_better(name, tmp_path):
    net, data, task, threat = problem(name)
    options = {"task": task, "threat": threat, "sanity": False, "block": 15}
    evaluation = deat.evaluate(net, data, attacks="natural,pgd-3,cw-3x2", save=tmp_path / "e.json", **options)
    assert deat.load_evaluation(tmp_path / "e.json") == evaluation
    assert deat.load_evaluation(tmp_path / "e.json").metrics == evaluation.metrics
    scores = evaluation.scores
    assert all(w <= n for w, n in zip(scores["worst"], scores["natural"], strict=True))
    assert evaluation.results[1].invalid == 0
    low, high = evaluation.intervals["worst"]
    assert low <= evaluation.worst <= high


@every_problem
def test_an_interrupted_evaluation_resumes_to_the_same_result(name, tmp_path):
    net, data, task, threat = problem(name)
    options = {"task": task, "threat": threat, "sanity": False, "block": 15, "attacks": "natural,pgd-3"}
    log = tmp_path / "log.jsonl"

    def stop(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deat.evaluate(net, data, resume_log=log, progress=stop, **options)
    resumed = deat.evaluate(net, data, resume_log=log, **options)
    assert resumed.scores == deat.evaluate(net, data, **options).scores
    assert not log.exists()
