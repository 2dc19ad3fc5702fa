"""Networks by name: their sizes, their shapes, normalisation, and what a wrong name says."""

import dataclasses
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from deat import models
from deat.errors import UsageError
from deat.models.model_registry import _MODELS
from deat.models.normalize import Normalized
from deat.models.preact_resnet import PreActBlock
from deat.models.wide_resnet import WideBlock

COUNTS = {
    "small": (25_866, 10, 1, 8),
    "preact_resnet18": (11_172_170, 10, 3, 32),
    "preact_resnet8": (308_266, 10, 3, 32),
    "wide_resnet34_10": (46_160_474, 10, 3, 32),
    "densenet121_12": (1_000_618, 10, 3, 32),
    "densenet121_32": (6_956_298, 10, 3, 32),
    "resnet18": (11_689_512, 1000, 3, 224),
    "resnet50": (25_557_032, 1000, 3, 224),
}
MEAN, STD = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)


@pytest.fixture
def spare_registry():
    before = dict(_MODELS)
    yield
    _MODELS.clear()
    _MODELS.update(before)


@pytest.fixture
def user_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text("from torch import nn\n" + text)
        return f"{path}:NAME"

    return write


def meta_build(name, *shape):
    with torch.device("meta"):
        return models.build_model(name, *shape)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_is_the_published_one(name):
    count, *shape = COUNTS[name]
    assert sum(p.numel() for p in meta_build(name, *shape).parameters()) == count


OTHER_INPUTS = {
    "mlp": (20_738, 2, (30,), (2,)),
    "audio_cnn": (93_194, 10, (1, 4000), (10,)),
    "unet": (472_523, 11, (3, 96, 128), (11, 96, 128)),
}
"""Networks for other inputs or answers: parameters, outputs, and the shapes of one input and one answer."""


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_networks_for_other_inputs_answer_in_the_shape_of_their_task(name):
    count, num_outputs, shape, answer = OTHER_INPUTS[name]
    net = meta_build(name, num_outputs, shape[0])
    assert sum(p.numel() for p in net.parameters()) == count
    assert net(torch.rand(2, *shape, device="meta")).shape == (2, *answer)


def test_listing_tells_the_true_parameter_count_and_input_of_every_model():
    told = {info.name: (info.parameters, info.input) for info in models.list_model_infos()}
    images = {name: (n, f"{c}x{side}x{side}") for name, (n, _, c, side) in COUNTS.items()}
    others = {name: (n, "x".join(map(str, shape))) for name, (n, _, shape, _) in OTHER_INPUTS.items()}
    assert told == images | others
    assert models.list_models() == tuple(sorted({**COUNTS, **OTHER_INPUTS}))
    assert all(info.description for info in models.list_model_infos())


def test_a_listed_model_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.list_model_infos()[0].parameters = 1


@pytest.mark.parametrize(
    ("name", "channels", "side"),
    [
        ("small", 1, 8),
        ("small", 3, 32),
        ("small", 3, 27),
        ("small", 1, 1),
        ("preact_resnet18", 3, 32),
        ("preact_resnet18", 3, 96),
        ("preact_resnet18", 1, 8),
        ("densenet121_12", 3, 32),
        ("densenet121_12", 3, 96),
        ("densenet121_12", 1, 8),
        ("densenet121_32", 3, 32),
        ("resnet18", 3, 96),
        ("resnet18", 1, 32),
        ("resnet50", 3, 96),
    ],
)
def test_forward_gives_one_logit_a_class(name, channels, side):
    model = models.build_model(name, num_classes=7, in_channels=channels, image_size=side).eval()
    with torch.no_grad():
        assert model(torch.rand(2, channels, side, side)).shape == (2, 7)


@pytest.mark.parametrize("side", [32, 96])
def test_wide_resnet_gives_one_logit_a_class_on_the_meta_device(side):
    model = meta_build("wide_resnet34_10", 7)
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", ["small", "preact_resnet18", "densenet121_12", "resnet18", "resnet50"])
def test_gradient_reaches_every_pixel_and_every_parameter(name):
    torch.manual_seed(0)
    model = models.build_model(name)
    x = torch.rand(2, 3, 32, 32, requires_grad=True)
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    assert x.grad.isfinite().all()
    assert (x.grad != 0).float().mean() > 0.5
    assert all(p.grad is not None for p in model.parameters())


def test_gradient_flows_through_a_wide_block():
    x = torch.rand(1, 4, 6, 6, requires_grad=True)
    WideBlock(4, 8, 2)(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_preact_projection_takes_the_raw_input():
    block = PreActBlock(2, 4, 2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(block(x), block.shortcut[0](x))


def test_wide_projection_takes_the_pre_activated_input():
    block = WideBlock(2, 4, 2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(block(x), block.shortcut(torch.relu(block.bn1(x))))


def test_wide_resnet_starts_with_fan_out_convolutions_and_no_linear_bias():
    from deat.models.wide_resnet import WideResNet

    torch.manual_seed(0)
    model = WideResNet(10, 4, 10, 3)
    conv = model.block3[0].conv2
    assert conv.weight.std().item() == pytest.approx((2 / (9 * conv.out_channels)) ** 0.5, rel=0.02)
    assert model.linear.bias.abs().max() == 0
    assert (model.bn.weight.min(), model.bn.bias.abs().max()) == (1, 0)


def test_resnet50_speaks_torchvision_names():
    keys = list(meta_build("resnet50", 1000).state_dict())
    assert keys[:2] == ["conv1.weight", "bn1.weight"]
    assert {"layer1.0.conv1.weight", "layer1.0.downsample.1.running_mean", "layer4.2.bn3.bias"} <= set(keys)
    assert keys[-2:] == ["fc.weight", "fc.bias"]
    assert "layer1.1.downsample.0.weight" not in keys
    assert len(keys) == 320


def test_bottleneck_puts_the_stride_on_the_middle_convolution():
    first = meta_build("resnet50", 1000).layer2[0]
    assert (first.conv1.stride, first.conv2.stride, first.conv3.stride) == ((1, 1), (2, 2), (1, 1))


def test_densenet_refuses_images_it_would_pool_away():
    with pytest.raises(UsageError, match=r"image_size 4 is too small.*at least 8"):
        models.build_model("densenet121_12", image_size=4)


def test_normalisation_is_x_minus_mean_over_std():
    x = torch.rand(2, 3, 4, 5)
    expected = torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], 1)
    assert torch.allclose(models.Normalize(MEAN, STD)(x), expected, rtol=0, atol=1e-6)


def test_build_puts_normalisation_first():
    model = models.build_model("small", normalize=(MEAN, STD))
    x = torch.rand(2, 3, 32, 32)
    assert isinstance(model, Normalized)
    assert torch.equal(model(x), model.net((x - model.normalize.mean) / model.normalize.std))


def test_normalisation_is_part_of_the_state():
    state = models.add_normalization(nn.Flatten(), MEAN, STD).state_dict()
    assert {key: tuple(t.shape) for key, t in state.items()} == {
        "normalize.mean": (1, 3, 1, 1),
        "normalize.std": (1, 3, 1, 1),
    }


@pytest.mark.parametrize(
    ("mean", "std", "told"),
    [
        ([0.5], [0.0], "above 0"),
        ([0.5], [-1.0], "above 0"),
        ([0.5, 0.5], [1.0], "mean has 2 channels and std has 1"),
        ([float("nan")], [1.0], "finite"),
        ([0.5], [float("inf")], "finite"),
        ([], [], "one finite number per channel"),
        (0.5, 0.2, "not a list of numbers"),
        (["a"], [1.0], "not a list of numbers"),
        ([127.0] * 3, [60.0] * 3, "look like numbers of 0-255 pixels, and images are in .0, 1.: divide both by 255"),
        ([0.0], [255.0], "divide both by 255"),
    ],
)
def test_bad_normalisation_is_refused(mean, std, told):
    with pytest.raises(UsageError, match=told):
        models.Normalize(mean, std)


def test_normalisation_must_have_the_channels_of_the_images():
    with pytest.raises(UsageError, match="normalize has 3 channels, the images have 1"):
        models.build_model("small", in_channels=1, image_size=8, normalize=(MEAN, STD))


def test_pixel_scale_is_the_std_wherever_the_normalisation_sits():
    inner = models.add_normalization(nn.Flatten(), MEAN, STD)
    assert models.get_input_std(nn.Sequential(nn.Identity(), inner)).flatten().tolist() == pytest.approx(STD)


def test_pixel_scale_of_a_bare_network_is_none():
    assert models.get_input_std(nn.Linear(1, 1)) is None


def test_unknown_name_suggests_the_nearest_and_the_other_sources():
    with pytest.raises(UsageError, match=r"unknown model 'preact_resnet19'.*'preact_resnet18'.*timm:NAME"):
        models.build_model("preact_resnet19")


def test_names_are_accepted_in_any_case():
    assert len(models.build_model("Small")) == len(models.build_model("small"))


@pytest.mark.parametrize("field", ["num_classes", "in_channels", "image_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_impossible_shape_is_refused(field, value):
    with pytest.raises(UsageError, match=f"{field} {value} is not accepted"):
        models.build_model("small", **{field: value})


def test_a_shape_may_be_counted_by_numpy():
    built = models.build_model("small", num_classes=np.int64(3), in_channels=np.int32(1), image_size=np.int64(8))
    assert built(torch.zeros(1, 1, 8, 8)).shape == (1, 3)


@pytest.mark.usefixtures("spare_registry")
def test_a_registered_model_is_built_with_what_its_signature_names():
    @models.register_model("flat", description="one layer")
    def flat(num_classes, image_size):
        return nn.Linear(image_size, num_classes)

    model = models.build_model("flat", num_classes=4, image_size=6)
    assert (model.in_features, model.out_features) == (6, 4)
    assert "flat" in models.list_models()


@pytest.mark.usefixtures("spare_registry")
def test_a_definition_may_be_registered_again_but_not_taken_over():
    for _ in range(2):

        @models.register_model("again")
        def again():
            return nn.Identity()

    with pytest.raises(UsageError, match="'again' is already registered"):
        models.register_model("again")(nn.Identity)


@pytest.mark.parametrize("name", ["", "a:b", "Big"])
def test_a_name_that_build_could_not_reach_is_refused(name):
    with pytest.raises(UsageError, match="must be lower case"):
        models.register_model(name)(nn.Identity)


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_absent_package_says_how_to_install_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"needs {package}, which is not installed: pip install {package}"):
        models.build_model(f"{package}:resnet18")


def test_package_broken_at_import_shows_its_error(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(UsageError, match=r"cannot be imported.*operator nms does not exist"):
        models.build_model("torchvision:resnet18")


def stand_in(name, code, monkeypatch):
    """Put a package of our own in the place of an optional one."""
    package = ModuleType(name)
    exec(code, vars(package))
    monkeypatch.setitem(sys.modules, name, package)


FAKE_TIMM = """
from types import SimpleNamespace
from torch import nn
MODELS = ["resnet18", "vit_tiny"]
def list_models(): return MODELS
def is_model(name): return name in MODELS
def get_pretrained_cfg(name, allow_unregistered): return SimpleNamespace(fixed_input_size=name == "vit_tiny")
def create_model(model_name, num_classes, in_chans, **options):
    if options.get("img_size", 16) % 16: raise AssertionError("not a multiple of 16")
    net = nn.Linear(in_chans, num_classes)
    net.options = options
    return net
"""


@pytest.fixture
def timm(monkeypatch):
    stand_in("timm", FAKE_TIMM, monkeypatch)


@pytest.mark.usefixtures("timm")
def test_timm_models_get_classes_and_channels_and_a_size_only_if_fixed():
    plain = models.build_model("timm:resnet18", 5, 2, 64)
    assert (plain.out_features, plain.in_features, plain.options) == (5, 2, {})
    assert models.build_model("timm:vit_tiny", 5, 2, 64).options == {"img_size": 64}


@pytest.mark.usefixtures("timm")
def test_unknown_name_inside_timm_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"unknown timm model 'resnet81'.*'resnet18'.*lists all 2"):
        models.build_model("timm:resnet81")


@pytest.mark.usefixtures("timm")
def test_a_timm_model_that_cannot_take_the_images_is_a_usage_error():
    with pytest.raises(UsageError, match=r"timm:vit_tiny could not be built.*not a multiple of 16"):
        models.build_model("timm:vit_tiny", image_size=8)


FAKE_TORCHVISION = """
from types import SimpleNamespace
from torch import nn
models = SimpleNamespace(
    list_models=lambda module: ["resnet18"],
    get_model_builder=lambda name: lambda weights, num_classes: nn.Linear(3, num_classes),
)
"""


@pytest.fixture
def torchvision(monkeypatch):
    stand_in("torchvision", FAKE_TORCHVISION, monkeypatch)


@pytest.mark.usefixtures("torchvision")
def test_torchvision_models_get_classes_and_refuse_other_channels():
    assert models.build_model("torchvision:resnet18", 5).out_features == 5
    with pytest.raises(UsageError, match="takes 3 channels, the images have 1"):
        models.build_model("torchvision:resnet18", in_channels=1)
    with pytest.raises(UsageError, match="unknown torchvision model 'resnet9'"):
        models.build_model("torchvision:resnet9")


def test_a_function_in_a_file_is_called_with_the_classes_it_asks_for(user_file):
    spec = user_file("def NAME(num_classes): return nn.Linear(2, num_classes)")
    assert models.build_model(spec, num_classes=3).out_features == 3


def test_a_function_with_open_options_gets_the_classes_alone(user_file):
    spec = user_file("def NAME(**options): return nn.Linear(2, sum(options.values()))")
    assert models.build_model(spec, num_classes=3).out_features == 3


def test_a_class_in_a_file_that_asks_for_nothing_is_called_with_nothing(user_file):
    spec = user_file("class NAME(nn.Linear):\n    def __init__(self): super().__init__(2, 9)")
    assert models.build_model(spec).out_features == 9


def test_an_instance_in_a_file_is_used_as_is_and_fresh_each_time(user_file):
    spec = user_file("NAME = nn.Linear(2, 9)")
    assert models.build_model(spec).out_features == 9
    assert models.build_model(spec) is not models.build_model(spec)


def test_a_network_that_normalises_is_not_normalised_twice(user_file):
    spec = user_file("from deat.models import add_normalization\nNAME = add_normalization(nn.Flatten(), [0.5], [0.25])")
    model = models.build_model(spec, in_channels=1, normalize=([0.1], [0.1]))
    assert model.normalize.std.item() == 0.25
    assert isinstance(model.net, nn.Flatten)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NAME = 3", "NAME is a int, not a model"),
        ("def NAME(): return 'net'", r"NAME\(...\) is a str, not a model"),
        ("def NAME(num_classes): return nn.Linear(2, -num_classes)", "could not be built.*RuntimeError"),
        ("def NAME(layers): return nn.Identity()", "could not be built.*'layers'"),
        (
            "class NAME(nn.Module):\n    def __init__(self, width): super().__init__()",
            "could not be built.*'width'.*need defaults, or a function that passes them",
        ),
    ],
)
def test_a_file_that_gives_no_model_is_a_usage_error(user_file, text, told):
    with pytest.raises(UsageError, match=told):
        models.build_model(user_file(text))
