"""`deat evaluate`: from a run's folder or a weights file to a table one can believe, or is told not to."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn
from tyro.conf import Positional, arg

from deat.cli.console import Screen, is_one_screen, is_terminal, say_aside
from deat.cli.flags import MaybeNumber, MaybeText, MaybeWhole, Norm, Whole
from deat.cli.train import in_words, say_if_lent
from deat.errors import CheckpointError, Interrupted, UsageError
from deat.evaluation.arguments import check_question
from deat.evaluation.attack_registry import attackers
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.judge import Attacker
from deat.evaluation.progress import Pace, PaceLines, Progress, line
from deat.evaluation.results import Evaluation, held_evaluation
from deat.evaluation.sanity import SLICE, Flag
from deat.methods.tune import LONGEST, check_step
from deat.models.weights import locate
from deat.runs.request import Request, Run, resolve
from deat.runs.run_dir import HISTORY, REPORT, RUN, WEIGHTS, alone, ledger_of, load_model, test_part
from deat.runs.schema import Record, confirmed, read_record, recorded_root
from deat.threat import ThreatModel
from deat.training.messages import command
from deat.training.model_checks import statistics_of
from deat.utils.distributed import Ranks
from deat.utils.files import refuse_links, write_whole
from deat.utils.numbers import level, short_seconds
from deat.utils.paths import at_home
from deat.utils.text import plain

MOST_CLASSES = 20
"""Classes above which the table by class stays in the file."""
FROM_THE_START = "first to fool counts images that are wrong without any attack; name natural first to count them apart"
"""What is said where the first attack is given images that it did not have to fool."""
FEW_CLASSES = (
    "with fewer than four classes its targeted DLR loss is undefined and cross-entropy takes its place, "
    "so this is not the standard AutoAttack"
)
"""What is said of AutoAttack on two or three classes."""


def show(found: Evaluation, out: Path, told: Sequence[Flag] = ()) -> None:
    """Print what was judged, the tables, and what a reader must know to believe them; flags told above, by name."""
    console = Screen(soft_wrap=not is_terminal())
    console.print(plain(_judged_what(found)))
    console.print(_table(found))
    if len(found.classes) <= MOST_CLASSES:
        console.print(_class_table(found))
    if found.results[0].name != "natural":
        console.print(FROM_THE_START)
    if found.settings["sample"]:
        console.print(f"a sample of {len(found.labels):,} images: not comparable with numbers on the whole test set")
    for name, how in found.settings["attacks"].items():
        if how.get("targeted_loss") == "ce" and "apgd-t" in how["parts"]:
            console.print(f"{name}: {FEW_CLASSES}")
    for text in _time(found):
        console.print(text)
    for flag in found.flags:
        console.print(f"FLAG {flag.name}, as said above" if flag in told else flag.line, style="bold red")
    console.print(f"every setting and verdict is in {out}")


def _time(found: Evaluation) -> list[str]:
    """How the time was split, where most of it did not go into attacks."""
    attacks = sum(r.seconds for r in found.results)
    if found.check_seconds <= attacks:
        return []
    images = len(found.labels)
    seen = f"all {images} images" if images <= SLICE else f"{SLICE} images from all over the set"
    return [
        f"sanity checks took {short_seconds(found.check_seconds)} s and the attacks {short_seconds(attacks)} s: the "
        f"checks look at {seen}, and at no more than {SLICE} however many are judged"
    ]


def _judged_what(found: Evaluation) -> str:
    """Whose weights the numbers are about, and on which images."""
    about = found.settings["about"]
    whose = f"the {about['epoch']} epoch's weights, " if about["epoch"] else ""
    return f"judged: {whose}{about['weights']}, on {len(found.labels):,} test images of {about['data']}"


def _table(found: Evaluation) -> Table:
    settings = found.settings
    norm, eps = (settings["threat"][name] for name in ("norm", "eps"))
    sample = f" (a sample of {settings['available']:,})" if settings["sample"] else ""
    title = f"{norm} eps {level(eps)}, {len(found.labels):,} images{sample}, seed {settings['seed']}"
    title += ", cascade: each attack saw survivors only" if settings["cascade"] else ""
    table = Table(
        "attack", "accuracy", "95 % interval", "first to fool", "seconds", title=title, box=None, pad_edge=False
    )
    for r in found.results:
        shown = r.name in found.accuracy
        share = [f"{found.accuracy[r.name]:.2%}", _interval(found.intervals[r.name])] if shown else ["", ""]
        table.add_row(r.name, *share, f"{found.added[r.name]:,}", f"{r.seconds:.1f}")
    table.add_row("worst of all", f"{found.worst:.2%}", _interval(found.intervals["worst"]), "", "", style="bold")
    return table


def _class_table(found: Evaluation) -> Table:
    table = Table("class", "worst of all", "95 % interval", "images", box=None, pad_edge=False)
    for name, (hits, images, pair) in found.per_class().items():
        table.add_row(Text(plain(name)), f"{hits / images:.1%}" if images else "", _interval(pair), f"{images:,}")
    return table


def _interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1%} to {pair[1]:.1%}"


Held = dict[str, Any]
"""An evaluation.json, or a part of one."""


def check_out(out: Path) -> None:
    """Refuse to replace anything but an earlier evaluation, and to write through a link."""
    refuse_links([out])
    if not out.name or out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a folder; name a file, such as evaluation.json.")
    if out.exists() and held_evaluation(out) is None:
        raise UsageError(f"{str(out)!r} exists and is no evaluation, so it is not replaced. Choose another --out.")


def put(found: Evaluation, out: Path) -> None:
    """Write an evaluation, and keep another that is there by then."""
    try:
        keep_other(out, {"settings": found.settings, "images": len(found.labels)})
    except OSError as error:
        raise CheckpointError(f"cannot keep the {out.name} that is there: {error.strerror}.") from None
    found.save(out)


def keep_other(out: Path, found: Held) -> None:
    """Keep an earlier evaluation that the new one does not answer anew, under the next free number."""
    held = held_evaluation(out) if out.exists() else None
    if held is None or _is_answered(old := _asked(held), new := _asked(found)):
        return
    why = "answers another question" if old["model"] == new["model"] else "is about other weights"
    data = out.read_bytes()
    for number in count(1):
        copy = out.with_name(f"{out.stem}-{number}{out.suffix}")
        if not copy.exists():
            write_whole(copy, data)
            say_aside(f"{out.name} {why}; it is kept as {copy.name}.")
        if copy.read_bytes() == data:
            return


def _asked(held: Held) -> Held:
    """What an evaluation was asked: of which weights, on which images and how many, by which attacks, and how.

    Weights are known by their hash, since a file of the same name may hold others.
    """
    settings = held.get("settings", {})
    how = {name: settings.get(name) for name in ("model", "threat", "seed", "block", "cascade")}
    about = {name: settings.get("about", {}).get(name) for name in ("epoch", "data", "size", "normalize")}
    n = held.get("images") if settings.get("sample") else None
    return {"attacks": settings.get("attacks", {}), "n": n, **how, **about}


def _is_answered(old: Held, new: Held) -> bool:
    """Whether the new question is the old one, by the same attacks or by more."""
    rest = [{name: value for name, value in asked.items() if name != "attacks"} for asked in (old, new)]
    return rest[0] == rest[1] and old["attacks"].items() <= new["attacks"].items()


Epoch = Literal["best", "last"]
FLAGGED = 6
"""The exit status of an evaluation that finished but should not be believed."""


@dataclass(frozen=True)
class EvaluateCommand:
    """Judge a run or a weights file by attacks. Exits with 6 where the number should not be believed."""

    goes_on: ClassVar[bool] = True

    target: Annotated[Positional[str], arg(metavar="RUN")]
    """A run's folder, a .safetensors file, or a folder of them that `deat export --shard-size` made."""
    data: MaybeText = None
    """The data set, as for train; a run knows its own. Its test part is judged."""
    model: MaybeText = None
    """The network, as for train; a run knows its own, unless it came from a file."""
    attacks: str = "natural,fgsm,pgd-20,cw-20"
    """Names from `deat list attacks`, with commas: pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square, aa, ..."""
    n: MaybeWhole = None
    """The first images only; the number is then marked as a sample."""
    eps: MaybeNumber = None
    """Another radius than the run's or the data set's."""
    norm: Norm = None
    """Another norm."""
    alpha: MaybeNumber = None
    """The step of pgd and cw (a quarter of eps)."""
    epoch: Epoch = "best"
    """Which of a run's weights."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network of a weights file that says nothing of it, as for train; a run knows."""
    cascade: bool = False
    """Send only survivors on to the next attack; faster, but single attacks then have no accuracy."""
    seed: Whole = 0
    """Where every random draw comes from."""
    block: Whole = 500
    """Images attacked at once; verdicts depend on it, so it is recorded."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """What attacks compute in: auto is fp16 on a GPU and fp32 elsewhere. Verdicts are always settled in float32."""
    engine: Literal["auto", "eager", "graph", "compile"] = "auto"
    """How attacks run on a GPU: graph records passes, compile compiles them too, eager neither; auto sees what pays."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    out: MaybeText = None
    """The result's file (evaluation.json in the run's folder, or beside the weights)."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    size: MaybeWhole = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224)."""
    json: bool = False
    """Print evaluation.json instead of a table."""

    def run(self) -> int:
        """Evaluate."""
        return run_evaluation(self)


def run_evaluation(order: EvaluateCommand) -> int:
    """Evaluate, write evaluation.json and show the table; 6 where a sanity flag was raised."""
    named = attackers(order.attacks)
    check_question(named, order.n, order.block, order.seed)
    ranks = Ranks.join(order.device)
    with ranks.leader_first():
        record = find_record(order)
        run, weights = find_run(order, record)
    chosen = [_with_step(how, order.alpha, run.threat) for how in named]
    target = Path(order.target).expanduser()
    out = Path(order.out).expanduser() if order.out is not None else _beside(target)
    ranks.by_main(lambda: check_out(out))
    model = load_model(run, weights)
    if ranks.main:
        say_if_lent(run)
        if record:
            _say_if_unfinished(target, record)
            _say_if_other_classes(record, run)
        _say_if_normalized(run, weights)
    about = run.about(weights, order.epoch if record else None)
    told: list[Flag] = []
    with ExitStack() as stack:
        ranks.by_main(lambda: stack.enter_context(alone(out)))
        try:
            found = _judged(order, run, model, chosen, out, about, ranks, told)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; what was judged is kept beside {out}; the same command goes on") from None
    if ranks.main:
        print(json.dumps(found.as_json())) if order.json else show(found, out, told if is_one_screen() else ())
    return FLAGGED if found.flags else 0


def _judged(
    order: EvaluateCommand,
    run: Run,
    model: nn.Module,
    chosen: list[Attacker],
    out: Path,
    about: dict[str, Any],
    ranks: Ranks,
    told: list[Flag],
) -> Evaluation:
    """The evaluation that was ordered, with a line that says how far it is, and flags that are told at once."""

    def tell(flag: Flag) -> None:
        """Say a flag before the first attack."""
        told.append(flag)
        say_aside(flag.line)

    with _progress(order.json or not ranks.main) as progress:
        return evaluate(
            model,
            test_part(run),
            threat=run.threat,
            attacks=chosen,
            n=order.n,
            seed=order.seed,
            block=order.block,
            cascade=order.cascade,
            precision=order.precision,
            engine=order.engine,
            threads=run.settings.threads,
            ledger=ledger_of(out),
            save=lambda found: put(found, out),
            about=about,
            progress=progress,
            tell=tell,
            ranks=ranks,
        )


def find_record(order: EvaluateCommand) -> Record | None:
    """The record of the run that is to be judged; None where weights are, which have none."""
    target = Path(order.target).expanduser()
    if not _exists(target):
        raise CheckpointError(f"there is no {order.target!r}; give a run's folder or a .safetensors file.")
    return read_record(target) if (target / RUN).is_file() else None


def find_run(order: EvaluateCommand, record: Record | None) -> tuple[Run, Path]:
    """The run whose data, model and threat are meant, and the weights to judge."""
    target = Path(order.target).expanduser()
    request = _recorded(record, order) if record else _described(target, order)
    given = {name: getattr(order, name) for name in ("data", "model", "norm", "eps", "data_root", "size")}
    given["normalize"] = None if order.normalize == "auto" else order.normalize
    request = replace(request, **{name: value for name, value in given.items() if value is not None})
    weights = _kept_weights(target, order) if record else locate(target)
    statistics = record.statistics if record else statistics_of(weights)
    recorded = order.data_root is None
    return resolve(request, recorded=recorded, statistics=statistics, device=order.device, val_attack="none"), weights


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for anything to have it
        return False


def _say_if_unfinished(target: Path, record: Record) -> None:
    """A run that was cut short is judged like any other, but never taken for a finished one."""
    if not (target / REPORT).is_file():
        done = (target / HISTORY).read_bytes().count(b"\n") if (target / HISTORY).is_file() else 0
        going_on = command("resume", target, vars(record.request))
        say_aside(
            f"this run is not finished: it is at {done} of {record.settings.epochs} epochs. Go on with: {going_on}"
        )


def _say_if_other_classes(record: Record, run: Run) -> None:
    """Labels are numbers, so classes of other names are matched by their order, which may not be meant."""
    pairs = zip(record.classes, map(str, run.corpus.train.classes), strict=False)
    other = [f"{plain(seen)!r} for {plain(mine)!r}" for mine, seen in pairs if mine != seen]
    if other:
        shown = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
        say_aside(f"this data names other classes than the run's, matched by their order: {shown}.")


def _say_if_normalized(run: Run, weights: Path) -> None:
    """A bare file of weights says nothing of normalisation, so what is put before the network is said."""
    if run.statistics and not run.recorded and run.request.normalize == "auto":
        say_aside(
            f"{weights.name} says nothing of normalisation, so the data's goes before the network: "
            f"{in_words(run.statistics)}. With --normalize none it is taken as it is."
        )


def _kept_weights(target: Path, order: EvaluateCommand) -> Path:
    """A run's weights of the epoch that was asked for, and of no other."""
    file = target / order.epoch / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{order.target!r} has no {order.epoch} weights; try --epoch best or --epoch last.")
    return file


def _recorded(found: Record, order: EvaluateCommand) -> Request:
    model = confirmed("model", found.model, order.model)
    if order.eps is None and order.norm not in (None, found.norm):
        raise UsageError(f"norm {order.norm!r} needs an --eps of its own: the run's is for {found.norm}.")
    data, root = at_home(found.request.data), recorded_root(found.request)
    before = Request(size=found.request.size, normalize=found.request.normalize, data_root=root)
    return replace(before, data=data, model=model, norm=found.norm, eps=found.eps)


def _described(target: Path, order: EvaluateCommand) -> Request:
    if order.data is None:
        raise UsageError(
            f"{str(target)!r} does not say which data it is for: add --data, and --model if not the usual."
        )
    return Request()


def _with_step(how: Attacker, alpha: float | None, threat: ThreatModel) -> Attacker:
    if alpha is not None and not 0 <= alpha <= LONGEST:
        raise UsageError(f"alpha must be a step size from 0 to {LONGEST:g}, such as 2/255, not {alpha!r}.")
    if alpha is not None:
        check_step(alpha, threat)
    if alpha is None or not isinstance(how, Attack) or how.start == "zero" or not threat.eps:
        return how  # from the image itself go natural, of no step, and FGSM, whose one step is eps
    return replace(how, alpha=alpha / threat.eps)


def _beside(target: Path) -> Path:
    return target / "evaluation.json" if target.is_dir() else target.with_name(f"{target.stem}.evaluation.json")


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """A line that rich redraws from the clock, however long a ruling takes; in a pipe, lines on standard error."""
    if quiet or not is_terminal():
        yield (lambda pace: None) if quiet else PaceLines()
        return
    known: deque[Pace] = deque(maxlen=1)
    shown = Live(
        get_renderable=lambda: Text(line(known[-1]) if known else ""),
        transient=True,
        refresh_per_second=4,
        redirect_stderr=is_one_screen(),  # what goes into a file is left on its way
    )
    with shown:
        yield known.append
