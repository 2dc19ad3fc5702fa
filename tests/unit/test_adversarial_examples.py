"""Adversarial examples and answers come out of an evaluation on request, and are those that the verdicts are about."""

import pytest
import torch

import deat
from deat.errors import UsageError
from deat.tasks import Segmentation
from deat.utils.distributed import Distributed
from helpers.nets import conv_net, learnable

THREAT = deat.Linf(0.3)


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    net = conv_net()
    deat.fit(net, learnable(48), method="natural", epochs=6, batch_size=8, lr=0.1, progress=False)
    return net.eval()


@pytest.mark.parametrize("options", [{}, {"block": 7}, {"cascade": True}, {"sanity": False}], ids=str)
def test_examples_and_answers_are_those_of_the_verdicts(net, options):
    x, y = learnable(20)
    examples, attacks = deat.AdversarialExamples(), ["natural", "fgsm", "apgd-ce", "aa"]
    evaluation = deat.evaluate(
        net, (x, y), threat=THREAT, attacks=attacks, examples=examples, progress=False, **options
    )
    plain = deat.evaluate(net, (x, y), threat=THREAT, attacks=attacks, progress=False, **options)
    assert evaluation.verdicts == plain.verdicts
    assert list(examples.images) == attacks
    assert torch.equal(examples.images["natural"], x)
    for name in attacks:
        adv, outputs = examples.images[name], examples.outputs[name]
        assert bool(THREAT.contains(x, adv).all())
        with torch.no_grad():
            assert torch.allclose(net(adv), outputs, atol=1e-5)
        right = (examples.predictions[name] == y).tolist()
        if not options.get("cascade"):
            assert right == evaluation.verdicts[name]
    assert not torch.equal(examples.images["fgsm"], x)


def test_an_example_outside_the_ball_is_kept_as_the_clean_image(net):
    class Far:
        name = "far"

        def __call__(self, model, x, y, threat, generator=None):
            return 1 - x

    x, y = learnable(8)
    examples = deat.AdversarialExamples()
    deat.evaluate(net, (x, y), threat="linf:0.01", attacks=[Far()], examples=examples, progress=False)
    assert torch.equal(examples.images["far"], x)


def test_graded_tasks_keep_the_worst_answer():
    net = torch.nn.Conv2d(3, 2, 1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(6, 3, 4, 4, generator=generator), torch.randint(2, (6, 4, 4), generator=generator)
    examples = deat.AdversarialExamples()
    evaluation = deat.evaluate(
        net, (x, y), task=Segmentation(), threat=THREAT, attacks=["natural", "pgd-3"], examples=examples, progress=False
    )
    scores = Segmentation().score(examples.outputs["pgd-3"], y).tolist()
    assert scores == pytest.approx(evaluation.scores["pgd-3"])


def test_where_examples_cannot_be_whole_they_are_refused(net, tmp_path):
    data, used = learnable(8), deat.AdversarialExamples()
    options = {"attacks": ["natural"], "progress": False}
    deat.evaluate(net, data, threat=THREAT, examples=used, **options)
    for examples, threat, more, words in (
        (used, THREAT, {}, "another evaluation"),
        (True, THREAT, {}, "AdversarialExamples()"),
        (deat.AdversarialExamples(), THREAT, {"resume_log": tmp_path / "log"}, "resume_log"),
        (deat.AdversarialExamples(), "linf:0.1+l2:0.5", {}, "union"),
        (deat.AdversarialExamples(), THREAT, {"distributed": Distributed(rank=0, size=2)}, "single process"),
    ):
        with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
            deat.evaluate(net, data, threat=threat, examples=examples, **options, **more)
