"""The figures of runs that have no test figures, in Markdown and HTML, and what gives them some."""

from collections.abc import Sequence

from deat.plain import markdown, plain
from deat.report.cells import title
from deat.report.collect import Row
from deat.report.escape import markup
from deat.report.held_out import HeldOut, held_out, to_evaluate
from deat.report.sections import mark, record_row
from deat.report.tables import minutes

HEADING = "On held-out images"
NOTE = (
    "Accuracy in percent at the epoch that validation chose as the best, on the very images that it was chosen by: "
    "held out of the training images, or from val/. These are no test figures, and nothing is ranked by them."
)
FILLS = "This evaluates on test images what is not evaluated yet, and fills its columns:"


def heads(found: Sequence[HeldOut]) -> list[str]:
    """The columns of a table of such figures."""
    attacks = {title(one.attack) for one in found}
    under = attacks.pop() if len(attacks) == 1 else "under attack"
    return ["row", "held-out natural", f"held-out {under}", "best epoch", "images", "backprops", "minutes", "seeds"]


def cells(one: HeldOut, found: Sequence[HeldOut]) -> list[str]:
    """A row's figures for people; the attack is named where rows were validated by different ones."""
    apart = f" ({title(one.attack)})" if len({other.attack for other in found}) > 1 else ""
    epochs = f"{', '.join(map(str, one.epochs))} of {one.asked}"
    figures = [one.natural.percent, one.robust.percent + apart, epochs, f"{one.images:,}"]
    return [*figures, f"{one.cost.backprops:,.0f}", minutes(one.cost), ", ".join(map(str, one.seeds))]


def held_out_markdown(rows: Sequence[Row]) -> str:
    """The figures in Markdown, and the command that gives these runs test figures; empty where all runs have them."""
    found, judging = held_out(rows), to_evaluate(rows)
    parts = []
    if found:
        lines = [heads(found), ["---"] + ["---:"] * 7, *([one.row, *cells(one, found)] for one in found)]
        shown = "\n".join(f"| {' | '.join(map(markdown, line))} |" for line in lines)
        parts += [f"## {HEADING}", NOTE, shown]
    if judging:
        parts += [FILLS, "\n".join(["```", *map(plain, judging), "```"])]
    return "".join(f"\n{part}\n" for part in parts)


def held_out_section(rows: Sequence[Row]) -> str:
    """The same as HTML."""
    found, judging = held_out(rows), to_evaluate(rows)
    head = "".join(f'<th scope="col">{markup(text)}</th>' for text in heads(found))
    body = "".join(record_row(one.row, cells(one, found), mark(one.place)) for one in found)
    shown = (
        f'<p class="note">{markup(NOTE)}</p><div class="scroll" tabindex="0" role="region" aria-label="{HEADING}">'
        f'<table class="apart"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    lines = "\n".join(map(markup, judging))
    fills = f'<p class="note">{markup(FILLS)}</p><pre class="scroll" tabindex="0">{lines}</pre>' if judging else ""
    return (shown if found else "") + fills
