"""Installed packages add names by entry points; a bad one harms nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.children import Children

ROOT = Path(__file__).parents[2]
HEAD = """
import json, sys, warnings
warnings.simplefilter("always")
sys.path[:0] = sys.argv[1:]
import deat
from deat.cli.main import main
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template package of examples/plugin, installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "site"


def run(children: Children, folder: Path, code: str, *sites: Path) -> str:
    """What a script prints that sees the packages in some folders."""
    (folder / "script.py").write_text(HEAD + code)
    status = children.run_script(folder / "script.py", *map(str, sites), cwd=folder)
    assert status == 0, (folder / "err").read_text()
    return (folder / "out").read_text()


def write_package(site: Path, module: str, code: str, **groups: str) -> None:
    """An installed package: one module, and its entry points by the end of the group's name."""
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(code)
    info = site / f"{module}-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 3.1\n")
    lines = [f"[deat.{group}]\n{entries}\n" for group, entries in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def test_the_template_package_adds_a_method_a_task_an_attack_a_model_and_a_logger(installed, children, tmp_path):
    code = """
assert main("train --method m+bold-2 --model linear --epochs 2 --out run --baseline no --log lines".split()) == 0
main(["evaluate", "run", "--attacks", "natural,random-signs", "--n", "50"])
import torch
x = torch.rand(60, 2)
net = torch.nn.Linear(2, 1)
options = {"epochs": 1, "lr": 0.05, "batch_size": 20, "val": 0.2, "val_attack": "pgd-2", "progress": False}
deat.fit(net, (x, torch.atan2(x[:, 1], x[:, 0])), method="pgd-2", task="angles", threat="linf:0.05", **options)
sys.stdout.flush(); open("out", "w").close()
main(["list", "plugins", "--json"])
"""
    rows = json.loads(run(children, tmp_path, code, installed))
    assert {(row["group"], row["name"]) for row in rows} == {
        ("deat.methods", "bold-K"),
        ("deat.tasks", "angles"),
        ("deat.attacks", "random-signs"),
        ("deat.models", "linear"),
        ("deat.loggers", "lines"),
    }
    assert {(row["package"], row["problem"]) for row in rows} == {("deat-example 1.0", "")}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["plugins"] == {"method": "deat-example 1.0", "model": "deat-example 1.0"}
    assert record["method"]["summary"].startswith("PGD with k steps of half the radius")
    (lines,) = (tmp_path / "run").rglob("lines.txt")
    assert "epoch 2: " in lines.read_text()
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert set(found["accuracy"]) == {"natural", "random-signs", "worst"}

    newer = tmp_path / "newer"
    shutil.copytree(installed, newer)
    metadata = next(newer.glob("*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))
    run(children, tmp_path, "assert main(['resume', 'run']) == 2", newer)
    assert 'plugins.method: "deat-example 1.0", now "deat-example 2.0"' in (tmp_path / "err").read_text()


def test_a_plugin_that_fails_is_named_and_the_others_work(children, tmp_path):
    site = tmp_path / "site"
    write_package(site, "broken", "raise RuntimeError('no engine')", methods="broken = broken:method")
    write_package(site, "leaves", "raise SystemExit(3)", models="leaves = leaves:net")
    good = "import deat\nfrom deat.attack_schedules import Fixed\n"
    good += "def zap(k=2):\n    return deat.Method('zap', deat.Craft(), Fixed(k=k, alpha_eps=1.0))"
    write_package(site, "good", good, methods="zap-K = good:zap\nmissing = good:missing\nnumber = good:__name__")
    code = """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    steps = deat.get_method("m+zap-5").schedule.max_steps
    deat.get_method("zap"), deat.get_method("f+zap-3"), deat.build_model("small")
    try:
        deat.build_model("leaves")
    except deat.errors.UsageError as error:
        unknown = str(error)
print(json.dumps([steps, unknown, [str(one.message) for one in seen]]))
"""
    steps, unknown, seen = json.loads(run(children, tmp_path, code, site))
    assert steps == 5
    assert "unknown model 'leaves'" in unknown
    assert len(seen) == 4
    for text in ("'broken' of broken 3.1", "no engine", "'missing' of good 3.1", "'number' of good 3.1", "'leaves' of"):
        assert any(text in message for message in seen), text


def test_a_plugin_never_replaces_a_name_that_there_is(children, tmp_path):
    site = tmp_path / "site"
    code = """
import deat, torch
def method(n=1, k=1, m=1):
    return deat.Method("other", deat.Craft(), deat.attack_schedules.Fixed(k=1, alpha_eps=1.0))
def net():
    return torch.nn.Flatten()
class Other(deat.tasks.Task):
    name = "classification"
class Attack:
    name = "pgd-20"
    def __call__(self, model, x, y, threat, generator=None):
        return x
"""
    groups = {
        "methods": "pgd-N = clash:method\npgd = clash:method\nfree-K = clash:method\nm+new = clash:method\nnew-K = clash:method",
        "models": "small = clash:net\nSmall = clash:net",
        "tasks": "classification = clash:Other",
        "attacks": "pgd-20 = clash:Attack\naa = clash:Attack",
    }
    write_package(site, "clash", code, **groups)
    write_package(site, "second", code, methods="new-M = second:method")
    script = """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    before = [repr(deat.get_method("pgd-7")), type(deat.get_method("free")).__name__]
    main(["list", "plugins", "--json"])
    assert [repr(deat.get_method("pgd-7")), type(deat.get_method("free")).__name__] == before
    assert deat.get_method("pgd").name == "pgd-7"
    assert type(deat.build_model("small")).__name__ != "Flatten"
    assert type(deat.tasks.get_task("classification")).__name__ == "Classification"
    from deat.evaluation.attack_registry import get_attack
    assert type(get_attack("pgd-20")).__module__ == type(get_attack("aa")).__module__.replace("autoattack", "attacks")
    deat.get_method("new-3")
"""
    rows = json.loads(run(children, tmp_path, script, site))
    assert [row["name"] for row in rows if not row["problem"]] == ["new-K"]
    refused = [row["name"] for row in rows if row["problem"] and "taken" not in row["problem"]]
    assert refused == ["m+new", "aa"]  # a name that is none, and one that is not the attack's own


def test_known_names_import_no_plugin(children, tmp_path):
    site = tmp_path / "site"
    write_package(
        site,
        "eager",
        "open('imported', 'w')",
        **dict.fromkeys(("methods", "tasks", "attacks", "models"), "eager = eager:thing"),
    )
    code = """
deat.get_method("m+pgd-10"), deat.build_model("small", in_channels=1, image_size=8), deat.tasks.get_task("regression")
deat.evaluate(deat.build_model("small", in_channels=1, image_size=8), deat.load_data("digits"), attacks="fgsm", n=8)
assert main(["train", "--epochs", "1", "--out", "run", "--baseline", "no", "--test-images", "0"]) == 0
"""
    run(children, tmp_path, code, site)
    assert not (tmp_path / "imported").exists()
