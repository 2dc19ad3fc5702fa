"""A method of one's own is a few lines: registered, or in a file that is merely named."""

import json

import pytest

import deat
from deat.attack_schedules import Fixed
from deat.errors import UsageError
from deat.methods import method_registry
from deat.recipes import get_recipe
from deat.utils.user_code import hash_code_file
from helpers.games import busy_budget, game_of, trainer_of
from helpers.nets import conv_net, images, same, weights

FILE = '''
import deat
from deat.attack_schedules import Fixed

TWICE = deat.Method("twice", deat.Replay(), Fixed(k=1, alpha_eps=0.5), deat.InnerAttack(start="normal"))


def careful(rules):
    """Knows the rule set."""
    ascent = deat.InnerAttack(start="bernoulli", random_start_at_k0=rules.random_start_at_k0)
    return deat.Method("careful", deat.Craft(), Fixed(k=3, alpha_eps=0.4), ascent, deat.Trades(beta=2.0))


def plain():
    return TWICE


NUMBER = 7


def wrong():
    return 7
'''


@pytest.fixture
def method_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_file.py").write_text(FILE)
    return "my_file.py"


@pytest.fixture
def registering(monkeypatch):
    """Lets a test register methods, and forgets them afterwards."""
    monkeypatch.setattr(method_registry, "_METHODS", dict(method_registry._METHODS))


@pytest.mark.parametrize("name", ["TWICE", "careful", "plain"])
def test_method_from_a_file_trains_without_being_registered(method_file, name):
    before = method_registry.list_methods()
    method = deat.get_method(f"{method_file}:{name}")
    net = conv_net()
    start = weights(net)
    history = trainer_of(method, net).fit().history
    assert [stats.k for stats in history] == [method.schedule.k] * 3
    assert not same(start, weights(net))
    assert method_registry.list_methods() == before


def test_function_in_a_file_receives_the_rule_set(method_file):
    assert not deat.get_method(f"{method_file}:careful").attack.random_start_at_k0
    assert deat.get_method(f"{method_file}:careful", rules="released").attack.random_start_at_k0


def test_method_from_a_file_composes_with_m_plus_and_f_plus(method_file):
    own = deat.get_method(f"{method_file}:careful")
    guided, friendly = deat.mplus(own), deat.friendly(own)
    assert guided.name == "m+careful"
    assert guided.schedule.max_steps == 3
    assert friendly.attack.batch_norm == "eval"
    for method in (guided, friendly):
        game = game_of(method, conv_net())
        method.play(game, *images(), busy_budget(method))
        assert game.meter.read(0).examples == 6


def test_prefixes_stand_before_a_method_in_a_file(method_file):
    assert deat.get_method(f"m+{method_file}:careful") == deat.mplus(deat.get_method(f"{method_file}:careful"))
    assert deat.get_method(f"M+F+{method_file}:careful").schedule.stop_threshold == 3


REGISTERING = """
import deat
from deat.attack_schedules import Fixed


@deat.register_method("bold-K")
def bold(k: int = 3) -> deat.Method:
    return deat.Method("bold", deat.Craft(), Fixed(k=k, alpha_eps=0.5))
"""


@pytest.mark.usefixtures("registering")
@pytest.mark.parametrize(
    ("spelled", "named", "k"),
    [
        ("own.py:bold", "bold", 3),
        ("own.py:bold-2", "bold-2", 2),
        ("own.py:Bold-2", "bold-2", 2),
        ("own.py:m+bold", "m+bold", 3),
        ("own.py:m+bold-2", "m+bold-2", 2),
        ("m+own.py:bold", "m+bold", 3),
        ("M+own.py:bold-5", "m+bold-5", 5),
        ("f+own.py:bold-4", "f+bold-4", 4),
        ("own.py:f+bold-4", "f+bold-4", 4),
        ("m+own.py:f+bold-4", "m+f+bold-4", 4),
        ("./own.py:bold-2", "bold-2", 2),
    ],
)
def test_what_a_file_registers_is_named_behind_its_path(spelled, named, k, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(REGISTERING)
    method = deat.get_method(spelled)
    assert method.name == named
    assert k in (getattr(method.schedule, "max_steps", None), getattr(method.schedule, "k", None))
    assert len(hash_code_file(spelled)) == 64
    row = get_recipe("quick").make_rows([spelled])[0]
    assert row.request.method == spelled.replace("./own.py", "own.py").replace("own.py", str(tmp_path / "own.py"))
    assert deat.get_method(row.request.method).name == named


@pytest.mark.usefixtures("registering")
@pytest.mark.parametrize("name", ["bald-2", "bold-x", "pgd-7", "trades", "m+", ""])
def test_what_a_file_neither_defines_nor_registers_is_refused_with_what_it_has(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(REGISTERING)
    with pytest.raises(UsageError, match=r"name in 'own\.py'.*bold-3"):
        deat.get_method(f"own.py:{name}")


def test_fit_takes_the_name_of_a_method_in_a_file(method_file):
    result = deat.fit(conv_net(), images(12), method=f"{method_file}:TWICE", epochs=2, batch_size=6, val=None)
    assert result.history[-1].backprops == 2 * 2 * 2


@pytest.mark.parametrize(("name", "says"), [("NUMBER", "int"), ("wrong", "int"), ("nobody", "nobody")])
def test_what_is_no_method_in_a_file_is_refused(method_file, name, says):
    with pytest.raises(UsageError, match=says):
        deat.get_method(f"{method_file}:{name}")


@pytest.mark.usefixtures("registering")
def test_registered_method_is_found_by_name_and_number_and_composes():
    @deat.register_method("bold-K")
    def bold(rules, k: int = 4):
        return deat.Method(
            "bold",
            deat.Craft(),
            Fixed(k=k, alpha_eps=0.5),
            deat.InnerAttack(random_start_at_k0=rules.random_start_at_k0),
        )

    assert "bold-4" in method_registry.list_methods()
    assert deat.get_method("bold") == deat.get_method("Bold-4")
    assert deat.get_method("bold-6").schedule.k == 6
    assert deat.get_method("m+bold-6").schedule.max_steps == 6
    assert deat.get_method("m+f+bold").attack.freeze is not None
    assert json.loads(json.dumps(deat.get_method("bold").describe()))["name"] == "bold-4"
    net = conv_net()
    before = weights(net)
    trainer_of("m+bold", net).fit()
    assert not same(before, weights(net))


@pytest.mark.usefixtures("registering")
def test_a_pattern_is_registered_once_and_its_letters_are_parameters():
    with pytest.raises(UsageError, match="already"):
        deat.register_method("pgd-K")(lambda k=1: None)
    with pytest.raises(UsageError, match=r"lacks the parameters \['k'\]"):
        deat.register_method("bold-K")(lambda j=1: None)


@pytest.mark.usefixtures("registering")
def test_a_method_is_listed_with_the_prefixes_that_it_is_registered_with():
    @deat.register_method("bold-K", "m+")
    def bold(k: int = 4):
        return deat.Method("bold", deat.Craft(), Fixed(k=k, alpha_eps=0.5), deat.InnerAttack())

    assert [name for name in method_registry.list_methods() if "bold" in name] == ["bold-4", "m+bold-4"]
    assert all(deat.get_method(name).name == name for name in method_registry.list_methods())
    with pytest.raises(UsageError, match=r"unknown prefix 'x\+'.*m\+"):
        deat.register_method("bolder", "x+")(bold)


def test_registrations_of_the_tests_are_gone():
    assert "bold-4" not in method_registry.list_methods()
    with pytest.raises(UsageError):
        deat.get_method("bold")
