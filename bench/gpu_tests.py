"""Run the tests that need a GPU (tests/gpu), in several processes at once, and write a page with their outcomes.

    python bench/gpu_tests.py --out docs/results/gpu-tests.md

CI has no GPU, so the page records a run by hand. The command fails if a test fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree

import torch
from shared import command_block, paragraph

from deat.version import get_versions

ROOT = Path(__file__).parents[1]
RECORDED, RESUMED, SLOW, AGREE = "recorded", "resumed", "synchronisation", "agree_with_eager"
TWO_PASSES, ONE_STEP = "(trades or mart or amata)", "(fgsm or gradalign or auto)"
LATER = "(averaged or union or fgsm or gradalign or awp or g+deat or auto)"
SHARES = (
    ("tests/gpu/test_kernels.py", "tests/gpu/test_network_ends.py"),
    ("tests/gpu/test_quick.py",),
    ("tests/gpu/test_ranks.py", "tests/gpu/test_checks.py"),
    ("tests/gpu/test_cuda.py", "-k", f"{RECORDED} and {LATER}"),
    ("tests/gpu/test_cuda.py", "-k", f"{RECORDED} and not ({RESUMED} or {LATER})"),
    ("tests/gpu/test_cuda.py", "-k", f"{RESUMED} and auto"),
    ("tests/gpu/test_cuda.py", "-k", f"{RESUMED} and not auto"),
    ("tests/gpu/test_cuda.py", "-k", f"{SLOW} and {TWO_PASSES}"),
    ("tests/gpu/test_cuda.py", "-k", f"{SLOW} and {ONE_STEP}"),
    ("tests/gpu/test_cuda.py", "-k", f"{SLOW} and not ({TWO_PASSES} or {ONE_STEP})"),
    ("tests/gpu/test_cuda.py", "-k", "precision"),
    ("tests/gpu/test_cuda.py", "-k", f"{AGREE} and {TWO_PASSES}"),
    ("tests/gpu/test_cuda.py", "-k", f"{AGREE} and not {TWO_PASSES}"),
    ("tests/gpu/test_cuda.py", "-k", f"not ({RECORDED} or {RESUMED} or {SLOW} or precision or {AGREE})"),
    ("tests/gpu/test_engines.py", "-k", "compil"),
    ("tests/gpu/test_engines.py", "-k", "not compil"),
)
"""What each process runs; most of their time goes into compiling and recording, on a core each."""


def main() -> None:
    """Run them, and write the page."""
    parser = argparse.ArgumentParser(description="Run the tests that need a GPU, and write a page with their outcomes.")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that they may take")
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{number}.xml" for number in range(len(SHARES))]
        started = [start(*pair) for pair in zip(SHARES, reports, strict=True)]
        until = monotonic() + args.timeout
        for process in started:
            wait(process, until)
        found = [test for pair in zip(SHARES, reports, strict=True) for test in read(*pair)]
    args.out.write_text(render(found), encoding="utf-8")
    print(Counter(outcome for _, outcome in found))
    sys.exit(any(process.returncode for process in started))


def start(share: tuple[str, ...], report: Path) -> "subprocess.Popen[bytes]":
    """A process of pytest, on one core: threads of many would wait for each other."""
    options = ("-q", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", f"--junitxml={report}")
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "pytest", *share, *options, "--durations=3"], cwd=ROOT, env=alone)


def wait(process: "subprocess.Popen[bytes]", until: float) -> None:
    """Wait for a process, and end it when its time is up."""
    try:
        process.wait(max(0.0, until - monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read(share: tuple[str, ...], report: Path) -> list[tuple[str, str]]:
    """Each test of a share's report with its outcome; a share that left none has failed."""
    if not report.exists():
        return [(" ".join(share), "did not finish")]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [(str(case.get("name")), next((child.tag for child in case), "passed")) for case in cases]


def render(found: list[tuple[str, str]]) -> str:
    """The outcomes as a page of Markdown, a row for each promise."""
    known = get_versions()
    lines = [
        "# Tests that need a GPU",
        "",
        *command_block("python bench/gpu_tests.py --out docs/results/gpu-tests.md"),
        "",
        *paragraph(
            f"Machine: {torch.cuda.get_device_name()}, torch {known['torch']}, Python {known['python']}. A promise is the "
            "name of a test. Cases are the parameters that it ran with."
        ),
        "",
        "| promise | cases | outcome |",
        "|---|---|---|",
    ]
    promises: dict[str, Counter[str]] = {}
    for name, outcome in found:
        promises.setdefault(name.partition("[")[0], Counter())[outcome] += 1
    for name, outcomes in promises.items():
        summary = ", ".join(
            f"{count} {outcome}" if len(outcomes) > 1 else outcome for outcome, count in outcomes.items()
        )
        lines.append(f"| {name.removeprefix('test_').replace('_', ' ')} | {outcomes.total()} | {summary} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
