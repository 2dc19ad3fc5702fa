"""Evaluation against a union: every ball attacked as if alone, and an image counted only if it stands in all."""

import json
import warnings

import pytest
import torch

import deat
from deat.evaluation.attacks import call_attack, correct_under_attack, parse_attack
from deat.evaluation.quick_scores import compute_accuracies
from deat.tasks import CLASSIFICATION, Regression
from helpers.games import UNIONS
from helpers.nets import conv_net, learnable

UNION = UNIONS[0]
OPTIONS = {"sanity": False, "progress": False, "block": 10}


@pytest.fixture(scope="module")
def problem():
    """A network that resists some perturbations and not others, with its data."""
    net, data = conv_net(), learnable(36)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deat.fit(net, data, method="pgd-3", threat=UNION, epochs=20, batch_size=12, lr=0.2, progress=False)
    return net, data


def test_each_ball_has_the_results_of_an_evaluation_of_its_own_and_the_union_all_of_them(problem):
    net, data = problem
    evaluation = deat.evaluate(net, data, threat=UNION, attacks="natural,pgd-5,cw-5x2", **OPTIONS)
    assert list(evaluation.balls) == ["linf", "l2", "l1"]
    for ball in UNION.threats:
        alone = deat.evaluate(net, data, threat=ball, attacks="natural,pgd-5,cw-5x2", **OPTIONS)
        assert evaluation.balls[ball.name].verdicts == alone.verdicts
        assert evaluation.balls[ball.name].settings["threat"] == ball.describe()
    for name, verdicts in evaluation.verdicts.items():
        per_ball = zip(*(ball.verdicts[name] for ball in evaluation.balls.values()), strict=True)
        assert verdicts == [all(column) for column in per_ball]
    assert evaluation.worst < min(ball.accuracy["natural"] for ball in evaluation.balls.values())
    for index, result in enumerate(evaluation.results):
        for cost in ("forwards", "backwards"):
            parts = [getattr(ball.results[index], cost) for ball in evaluation.balls.values()]
            assert getattr(result, cost) == sum(parts) > 0 or (result.name, cost) == ("natural", "backwards")
    assert not any(result.invalid for result in evaluation.results)


def test_an_example_outside_its_own_ball_is_no_attack_even_if_it_is_inside_of_another(problem):
    net, data = problem

    class LinfCorner:
        """Random signs at the radius of the Linf ball, whatever the ball."""

        name = "corner"

        def __call__(self, model, x, y, threat, generator=None):
            signs = torch.rand(x.shape, generator=generator).sub(0.5).sign()
            return (x + UNION.threats[0].eps * signs).clamp(0, 1)

    evaluation = deat.evaluate(net, data, threat=UNION, attacks=["natural", LinfCorner()], **OPTIONS)
    invalid = {name: ball.results[1].invalid for name, ball in evaluation.balls.items()}
    attacked = sum(evaluation.verdicts["natural"])
    assert invalid == {"linf": 0, "l2": attacked, "l1": attacked}


def test_file_is_read_again_and_is_without_balls_for_a_single_threat(problem, tmp_path):
    net, data = problem
    options = {**OPTIONS, "attacks": "natural,pgd-2"}
    union = deat.evaluate(net, data, threat=UNION.text, save=tmp_path / "union.json", **options)
    assert deat.load_evaluation(tmp_path / "union.json") == union
    assert deat.load_evaluation(tmp_path / "union.json").balls["l1"].accuracy == union.balls["l1"].accuracy
    single = deat.evaluate(net, data, threat=deat.Union(UNION.threats[1]), save=tmp_path / "one.json", **options)
    assert "balls" not in json.loads((tmp_path / "one.json").read_text())
    assert single.verdicts == deat.evaluate(net, data, threat=UNION.threats[1], **options).verdicts


def test_rule_of_training_is_not_part_of_an_evaluation(problem):
    net, data = problem
    settings = [deat.evaluate(net, data, threat=u, attacks="pgd-2", **OPTIONS).settings for u in UNIONS[:2]]
    assert settings[0]["threat"] == settings[1]["threat"]


def test_interrupted_evaluation_resumes_in_the_ball_where_it_was(problem, tmp_path):
    net, data = problem
    log, seen = tmp_path / "log.jsonl", []

    def stop(progress):
        seen.append((progress.ball, progress.done))
        if progress.ball.startswith("l2") and progress.done == 3:
            raise KeyboardInterrupt

    options = {**OPTIONS, "threat": UNION, "attacks": "natural,pgd-2", "resume_log": log}
    with pytest.raises(KeyboardInterrupt):
        deat.evaluate(net, data, **{**options, "progress": stop})
    lines = log.read_text().count("\n")
    resumed = deat.evaluate(net, data, **options)
    assert lines == 8 + 3
    assert seen[-1][0] == "l2, ball 2 of 3"
    assert resumed.verdicts == deat.evaluate(net, data, **{**options, "resume_log": None}).verdicts
    assert not log.exists()


def test_autoattack_is_each_norms_own_standard_version(problem):
    net, _ = problem
    wide = torch.nn.Sequential(net, torch.nn.Linear(3, 11))
    x, y = learnable(4)
    evaluation = deat.evaluate(wide, (x, y), threat=UNION, attacks="apgd-t", **OPTIONS)
    targets = {name: ball.settings["attacks"]["apgd-t"]["targets"]["apgd-t"] for name, ball in evaluation.balls.items()}
    assert targets == {"linf": 9, "l2": 9, "l1": 5}


def test_a_flag_of_the_model_is_shown_once_and_one_of_a_ball_names_it(problem):
    net, data = problem
    shown = []
    soft = torch.nn.Sequential(net, torch.nn.Softmax(1))
    options = {**OPTIONS, "sanity": True, "attacks": "natural,pgd-2"}
    evaluation = deat.evaluate(soft, data, threat=UNION, on_flag=shown.append, **options)
    assert [flag.name for flag in shown].count("probabilities") == 1
    assert [flag.name for flag in evaluation.flags].count("probabilities") == 1
    of_balls = {flag for ball in evaluation.balls.values() for flag in ball.flags}
    assert {flag.name for flag in evaluation.flags} == {flag.name for flag in of_balls}


def test_graded_tasks_take_the_ball_with_the_lowest_score():
    g = torch.Generator().manual_seed(0)
    x, net = torch.randn(20, 4, generator=g), torch.nn.Linear(4, 1)
    threat = deat.Union(deat.Linf(0.1, box=None), deat.L2(0.3, box=None))
    evaluation = deat.evaluate(net, (x, x[:, 0]), task=Regression(), threat=threat, attacks="natural,pgd-3", **OPTIONS)
    for name in ("pgd-3", "worst"):
        columns = zip(*(ball.scores[name] for ball in evaluation.balls.values()), strict=True)
        assert evaluation.scores[name] == list(map(min, columns))


def test_quick_scores_and_validation_count_an_image_only_if_it_stands_in_every_ball(problem):
    net, (x, y) = problem
    attack = parse_attack("pgd-5")
    adv = call_attack(attack, net, x, y, UNION, torch.Generator().manual_seed(0), CLASSIFICATION)
    assert UNION.contains(x, adv).all()
    generator = torch.Generator().manual_seed(0)
    alone = torch.stack([correct_under_attack(net, x, y, attack, ball, generator) for ball in UNION.threats])
    with torch.no_grad():
        assert torch.equal(net(adv).argmax(1) == y, alone.all(0))
    source = deat.as_source((x, y), batch_size=9, shuffle=False)
    scores = compute_accuracies(net, source, ["natural", attack], UNION, seed=0)
    singles = [compute_accuracies(net, source, [attack], ball, seed=0)["pgd-5"] for ball in UNION.threats]
    assert scores["pgd-5"] <= min(singles)
    assert scores["natural"] > scores["pgd-5"]
