"""`deat train`: resolve, check, and hand over to a session."""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from deat.commands.display import describe_run, show_plan
from deat.commands.flags import MaybeNumber, MaybeText, MaybeWhole, Norm, Shape, Start, Watch, Whole
from deat.commands.session import Options, Session
from deat.errors import CheckpointError, UsageError
from deat.live import say_aside
from deat.numbers import check_whole
from deat.ranks import Ranks
from deat.training.folder import check_free, check_links, has_checkpoint, is_run, is_unborn
from deat.training.plan import plan
from deat.training.record import Record, check_start, read_record
from deat.training.run import Request, resolve
from deat.training.settings import Settings

Kind = TypeVar("Kind", Request, Options)


@dataclass(frozen=True)
class Train:
    """Train a classifier robustly. Without flags: m+deat on digits, and a table beside natural training."""

    data: str = "digits"
    """digits, cifar10, cifar100, or folder:PATH (a folder or archive with one folder of images a class)."""
    model: str = "auto"
    """A name from `deat list models`, timm:NAME, torchvision:NAME or my_file.py:NAME; auto fits the images."""
    method: str = "m+deat"
    """A name from `deat list methods` (numbers may change, m+ and f+ compose) or my_file.py:NAME, also m+NAME."""
    epochs: MaybeWhole = None
    """How often the training set is seen (30)."""
    eps: MaybeNumber = None
    """The threat model's radius in [0, 1] pixels, such as 8/255; each data set has a default."""
    norm: Norm = None
    """The threat model's norm (linf)."""
    out: MaybeText = None
    """The run's folder, which must not exist; by default a new one under runs/."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Literal["no", "auto"] = "no"
    """auto goes on with the run that is in --out, if there is one of the same settings, and else starts it."""
    inexact: bool = False
    """--resume: go on even where the numbers will differ from an uninterrupted run's."""
    seed: Whole = 0
    """Where every random draw comes from."""
    batch_size: MaybeWhole = None
    """Images in a batch (128; digits 64)."""
    lr: MaybeNumber = None
    """The (peak) learning rate (0.1; digits 0.05; with --init a tenth of that)."""
    rate: Shape = None
    """The learning rate's shape (cyclic)."""
    weight_decay: MaybeNumber = None
    """Weight decay (5e-4)."""
    momentum: MaybeNumber = None
    """SGD's momentum (0.9)."""
    init: MaybeText = None
    """Weights to fine-tune: a safetensors file, a run's folder, or one that `deat export --shard-size` made."""
    rules: Literal["paper", "released"] = "paper"
    """The paper as written, or the code that made its tables."""
    alpha: MaybeNumber = None
    """The adversary's step size, such as 10/255; each method has a default."""
    gamma: MaybeNumber = None
    """M+: how far l_X must outgrow its last threshold (1.01)."""
    max_steps: MaybeWhole = None
    """M+: the largest k."""
    beta: MaybeNumber = None
    """TRADES and MART: the weight of the robust term (6)."""
    tau: MaybeWhole = None
    """FAT and F+: steps granted after an example is misclassified (3)."""
    start: Start = None
    """Where the perturbation starts."""
    persistent: bool = False
    """Carry the perturbation from batch to batch, as FREE originally does."""
    compact: bool = False
    """FAT and F+: shrink the batch instead of masking it."""
    held_out: MaybeWhole = None
    """Training images held out to choose the best epoch (a tenth, at most 1000; 0 where val/ is beside test/)."""
    val_attack: MaybeText = None
    """The attack on them: cw-20 (default), pgd-20, ..., or none."""
    watch: Watch = None
    """On catastrophic overfitting: warn (default where images are held out), stop, roll back and step less, or none."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network: the data's mean and deviation (a folder's own are measured); auto takes a network
    of your own as it is."""
    augment: Literal["auto", "none"] = "auto"
    """Random crops and flips, where the data set has them; none trains on the images as they are."""
    test_images: Whole = 1000
    """Test images scored at the end by natural, FGSM and PGD-20; 0 for none."""
    baseline: Literal["auto", "yes", "no"] = "auto"
    """Also train naturally, to compare; auto does so on digits only."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is bf16 where the hardware is fast at it."""
    sync_bn: bool = False
    """With several processes on GPUs: batch-norm statistics of the whole batch, not of each process's share."""
    engine: Literal["auto", "eager", "graph", "compile"] = "auto"
    """How moves run: graph records them as CUDA graphs, compile compiles them first; auto records on a GPU, and
    compiles where the run is long enough to earn that back."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    threads: MaybeWhole = None
    """CPU threads; small networks use one by default."""
    deterministic: bool = False
    """On a GPU, the same bits every time, so that a resumed run is exact; slower. A CPU is so anyway."""
    workers: MaybeWhole = None
    """Processes that decode images which do not fit in memory."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    download: bool = False
    """Fetch the data set by name if it is not on disk."""
    size: MaybeWhole = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224)."""
    dry_run: bool = False
    """Say what the run would cost in backprops, time and memory, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    @property
    def goes_on(self) -> bool:
        """Whether the same command goes on where it was: there is a run, and it may be taken up."""
        return self.resume == "auto" and self.out is not None and has_checkpoint(Path(self.out).expanduser())

    def run(self) -> int:
        """Train."""
        return run_training(self)


def run_training(order: Train) -> int:
    """Resolve, check, train, score, report."""
    request, options = _pick(Request, order), _pick(Options, order)
    ranks = Ranks.join(order.device)
    going_on = ranks.by_main(lambda: _check_options(options))
    settings: dict[str, Any] = {f.name: vars(order).get(f.name) for f in fields(Settings)}
    request = replace(request, persistent=request.persistent or None, compact=request.compact or None)
    found = _recorded(options) if going_on else None
    with ranks.leader_first():
        run = resolve(request, statistics=found.statistics if found else None, **settings)
    run = found.as_begun(run) if found else run
    goes_on = going_on and ranks.by_main(lambda: _has_begun(options.place or Path(), request))
    trainer = (run := replace(run, goes_on=goes_on)).trainer(ranks=ranks, say=say_aside)
    if options.dry_run:
        if ranks.main and not options.json:
            print(describe_run(run, trainer), flush=True)  # before it is tried out, which takes a while
        return show_plan(plan(trainer), options.json, ranks)
    return Session(run, options, resuming=going_on).play(trainer)


def _recorded(options: Options) -> Record | None:
    """The record of the run that goes on, where it can be read; its checkpoint holds what matters of it too."""
    with suppress(CheckpointError):
        return read_record(options.place or Path())
    return None


def _has_begun(place: Path, request: Request) -> bool:
    """Whether the run in a folder has weights to go on with; other weights to start from are refused."""
    begun = has_checkpoint(place)
    if begun:
        check_start(place, request.init)
    return begun


def _check_options(options: Options) -> bool:
    """Refuse what cannot be, before any data is read; whether the run that is in --out goes on."""
    check_whole("test_images", options.test_images, 0)
    place = options.place
    if place is not None:
        _check_path(place)
    if options.resume == "auto":
        if place is None or options.overwrite:
            raise UsageError("--resume auto needs the run's folder, --out, and goes without --overwrite.")
        check_links(place)
        if place.exists() and (is_run(place) or is_unborn(place)):
            return True
    if place is not None:
        check_free(place, options.overwrite)
    return False


def _check_path(path: Path) -> None:
    """Refuse what no file system takes as a folder's name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = f"{str(path)[:80]!r}" + ("..." if len(str(path)) > 80 else "")
        raise UsageError(f"--out {shown} cannot be a folder: {reason}. Choose another.") from None


def _pick(kind: type[Kind], order: Train) -> Kind:
    """The part of a command line that is of one kind."""
    given = vars(order)
    return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})
