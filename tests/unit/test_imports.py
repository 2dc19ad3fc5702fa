"""The house in order: who may import whom, what importing deat loads."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import deat

ROOT = Path(deat.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYERS: list[tuple[str, ...]] = [
    ("errors", "version"),
    ("utils", "engine.kernels"),
    ("engine", "threat"),
    ("tasks",),
    ("radius_checks", "core"),
    ("attack_schedules",),
    ("methods",),
    ("data", "models", "evaluation"),
    ("checkpoint",),
    ("training",),
    ("integrations",),
    ("runs",),
    ("recipes",),
    ("report",),
    ("integrations.hub",),
    ("bench",),
    ("cli",),
    ("write_report",),
    ("__main__",),
]
"""A layer imports from layers above it in this table, or from itself."""

ONLY: dict[str, tuple[str, ...]] = {
    "errors": (),
    "version": (),
    "utils": ("errors",),
    "engine.kernels": (),
    "engine": ("errors", "utils", "engine.kernels"),
    "tasks": ("errors", "utils"),
    "data": ("errors", "utils", "engine.kernels", "tasks"),
    "models": ("errors", "utils"),
    "checkpoint": ("errors", "utils"),
    "evaluation": (
        "errors",
        "version",
        "utils",
        "engine.kernels",
        "engine",
        "threat",
        "radius_checks",
        "tasks",
        "data",
        "models",
    ),
}
"""Layers that may see less than what lies above them; the evaluation must not depend on training."""

PLACE = {room: place for place, rooms in enumerate(LAYERS) for room in rooms}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room a module of deat lies in; None for the package itself and the folder game."""
    return max((room for room in PLACE if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def imports_of(path: Path) -> set[str]:
    """Every module of deat that a file imports, wherever in the file, without its deat. in front."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if is_module(name)} or {str(node.module)}
    return {name.removeprefix("deat.") for name in found if name.startswith("deat.")}


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def forbidden(path: Path) -> list[str]:
    """The imports of a file that the order does not allow."""
    room = room_of(module_of(path))
    if room is None:
        return []
    wrong = []
    for name in sorted(imports_of(path)):
        other = room_of(name)
        allowed = other is not None and (
            other == room or (other in ONLY[room] if room in ONLY else PLACE[other] < PLACE[room])
        )
        if not allowed:
            wrong.append(name)
    return wrong


def test_modules_import_only_from_packages_above_their_own():
    assert {module_of(path): names for path in FILES if (names := forbidden(path))} == {}


def test_a_file_name_and_a_class_name_have_one_meaning():
    files = Counter(path.stem for path in FILES if path.stem != "__init__")
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (files + classes).items() if count > 1] == []


def test_every_module_has_its_place_in_the_line():
    homeless = {module_of(p) for p in FILES if room_of(module_of(p)) is None}
    assert homeless <= {""}
    assert {room_of(module_of(p)) for p in FILES} - {None} == set(PLACE)


def test_order_is_not_satisfied_by_a_wrong_import(tmp_path, monkeypatch):
    home = tmp_path / "deat"
    (home / "training").mkdir(parents=True)
    (home / "evaluation").mkdir()
    for name in ("training/trainer.py", "errors.py"):
        (home / name).write_text("")
    judge = home / "evaluation" / "attacks.py"
    judge.write_text("def late():\n    from deat.training.trainer import Trainer\nfrom deat.errors import DeatError\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", home)
    assert forbidden(judge) == ["training.trainer"]


TOOLS = ("tensorboard", "wandb", "mlflow", "trackio", "lightning", "accelerate", "transformers")
SLOW = (
    "torch._dynamo",
    "triton",
    "torchvision",
    "timm",
    "tyro",
    "rich",
    "matplotlib",
    "PIL",
    "pyautoattack",
    "ray",
    *TOOLS,
)
"""Whatever takes long to import, or need not be there."""
IMPORTING = f"""import sys, deat
deat.build_model("small")
print([name for name in {SLOW!r} if name in sys.modules])
"""


def test_commands_can_be_imported_on_a_system_without_file_locks(tmp_path):
    code = """import sys, pathlib; sys.modules['fcntl'] = None
import deat.cli.main
import deat.bench.run_claims
import deat.utils.file_locks
try:
    with deat.utils.file_locks.file_lock(pathlib.Path(sys.argv[1])):
        pass
except OSError as error:
    print(error)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "lock")]
    assert "no file locks" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_importing_deat_and_building_a_network_load_nothing_they_do_not_need():
    found = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("[]\n", "")


def test_the_overview_of_commands_does_not_load_torch():
    code = "import sys\nfrom deat.cli.main import main\ntry:\n    main(['--help'])\nfinally:\n    print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("usage: deat")
    assert found.stdout.splitlines()[-1] == "False"


LISTING_AND_TRAINING = """import sys, deat
from deat.cli.main import main
main(["list", "methods"])
images = deat.load_data("digits").train.subset(range(64))
deat.fit(deat.build_model("small", 10, 1, 8), images, method="m+deat", epochs=1, batch_size=32, checkpoints=sys.argv[1])
print("torch._dynamo" in sys.modules)
"""


def test_listing_and_eager_training_do_not_load_torchs_compiler(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", LISTING_AND_TRAINING, str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False"


def test_importing_deat_loads_a_module_when_one_of_its_names_is_used():
    code = """import sys, deat
print([name for name in sys.modules if name in ("torch", "deat.threat", "deat.core")])
print(deat.Linf(0.1).eps, deat.core.Budget is deat.Budget, deat.report.__module__, deat.models.list_models()[0] != "")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "0.1 True deat.write_report True"]


def test_public_names_come_from_the_modules_that_type_checkers_read_them_from():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: node.module for node in imports for alias in node.names if f"{node.module}.".count(".") > 1}
    lazy = {name: module for name, module in typed.items() if module not in ("deat.version", "deat.write_report")}
    lazy = {name: module for name, module in lazy.items() if str(module).startswith("deat.")}
    assert {name: f"deat.{module}" for name, module in deat._MODULE_OF.items()} == lazy
    assert set(deat._MODULE_OF) <= set(deat.__all__)


def test_unknown_names_of_deat_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'adversary'"):
        _ = deat.adversary  # type: ignore[attr-defined]
    assert "fit" in dir(deat)


def test_every_public_name_exists():
    assert len(set(deat.__all__)) == len(deat.__all__)
    assert all(hasattr(deat, name) for name in deat.__all__)
