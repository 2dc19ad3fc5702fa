"""The parts of the page that are plain HTML, readable without a script."""

from collections.abc import Iterator, Sequence
from typing import Any

from deat.report.alarms import alarms
from deat.report.cells import Cell, cell, cost, front, mean_under, title
from deat.report.claims import Checked, given
from deat.report.collect import OneRun, Row
from deat.report.escape import markup
from deat.report.gallery import Gallery, data_uri
from deat.report.gather import UNEVALUATED, Subject, flags_of, troubles, unchecked
from deat.report.tables import (
    CLAIMED,
    FLAGGED,
    Sheet,
    backprops,
    chance,
    claimed,
    comments,
    compared,
    deviation,
    difference,
    interval,
    last_epoch,
    mean,
    minutes,
    notes,
    paper_accuracy,
    paper_cost,
    scores_note,
    whole,
)
from deat.report.winners import SURE, doubt, rivals

HUES, SHAPES = 10, 3
APART = "These rows were judged on different data sets or under different threat models, so none of them is the best."
EMPTY = "No run is evaluated yet, so there is nothing to rank."
NOTHING = (
    '<p class="empty" id="nothing" hidden>No row is left. '
    '<button type="button" class="button" id="clear">Clear the filter</button></p>'
)
Ranked = tuple[int, Row, float, float]
"""A row's place, the row, its accuracy under the headline attack, and its backprops."""


def answer(of: Sheet) -> str:
    """Who wins, in three sentences: the most robust row, the cheapest that comes close, the best on clean images.

    Each says whom its row is not told apart from.
    """
    ranked = ranking(of)
    if not ranked or not of.headline:
        return f'<p class="note">{APART if of.headline else EMPTY}</p>'
    best = max(ranked, key=lambda item: (item[2], -item[3]))
    clean = max(ranked, key=lambda item: (mean_under(item[1], "natural"), -item[3]))
    name = "the worst of all attacks" if of.headline == "worst" else title(of.headline)
    tidy = f"{percent(mean_under(clean[1], 'natural'))}; {percent(clean[2])} under {name}"
    parts = [
        (best, f"Most robust under {name}", f"{percent(best[2])} for {best[3]:,.0f} backprops", ranked, of.headline),
        *((*card, of.headline) for card in _cheaper(ranked, best)),
        (clean, "Best on clean images", tidy, ranked, "natural"),
    ]
    items = "".join(
        f'<li class="h{item[0] % HUES}"><div class="what">{markup(what)}</div>'
        f'<div class="who">{mark(item[0])}{markup(item[1].name)}{_raised(item[1])}</div>'
        f'<div class="how">{markup(how)}{_doubted(item, rivals, attack)}</div></li>'
        for item, what, how, rivals, attack in parts
    )
    return f'<ul class="answer">{items}</ul>'


def mark(i: int) -> str:
    """The sign of row i wherever it is named: a colour, and a shape that tells colours apart for eyes that cannot."""
    return f'<i class="mark h{i % HUES} m{i % SHAPES}"></i>'


def percent(share: float) -> str:
    """A share in percent, for people."""
    return f"{100 * share:.2f} %"


def _doubted(best: Ranked, rivals: Sequence[Ranked], attack: str) -> str:
    """Whom a card's row is not told apart from, on a line of its own."""
    text = doubt(best[1], [item[1] for item in rivals], attack)
    return f"<br>{markup(text)}" if text else ""


def _cheaper(ranked: Sequence[Ranked], best: Ranked) -> Iterator[tuple[Ranked, str, str, Sequence[Ranked]]]:
    """The cheapest row within a point of the best, or else the most robust one that costs less; and its rivals."""
    near = [item for item in ranked if item[3] < best[3] and item[2] > best[2] - 0.01]
    less = [item for item in ranked if item[3] < best[3]]
    found = min(near, key=lambda item: item[3]) if near else max(less, key=lambda item: item[2], default=None)
    if found:
        what = "Cheapest within a point of it" if near else "Most robust of those that cost less"
        share = f"{percent(found[2])} for {100 * found[3] / best[3]:.0f} % of the backprops"
        yield found, what, share, [] if near else less


def ranking(of: Sheet) -> list[Ranked]:
    """Every row that may be the best and has an accuracy under the headline attack and a cost."""
    ranked = [
        (i, row, found.mean, spent.backprops)
        for i, row in enumerate(of.rows)
        if of.headline and (found := cell(row, of.headline)) and (spent := cost(row))
    ]
    sound = {id(row) for row in rivals([item[1] for item in ranked])}
    return [item for item in ranked if id(item[1]) in sound]


def several(of: Sheet) -> bool:
    """Whether there are rows to compare with each other."""
    return len(of.rows) > 1


def on_front(of: Sheet) -> set[int]:
    """The places of the rows that may be believed and that no such row beats in robustness and backprops."""
    ranked = ranking(of) if several(of) else []
    good = front([(spent, share) for _, _, share, spent in ranked])
    return {item[0] for item, is_good in zip(ranked, good, strict=True) if is_good}


def warnings_of(subject: Subject) -> str:
    """Sanity flags, collapses, runs that are not whole, rows that cannot be compared; empty where all is well."""
    flags = [
        f"<b>{markup(row.name)}</b>, seed {seed}: <b>{markup(flag.name)}</b>, {markup(flag.seen)}. "
        f"{markup(flag.advice)}"
        for row in subject.rows
        for seed, flag in flags_of(row)
    ]
    broken = [
        f"<b>{markup(row.name)}</b>, {markup(text)}" for row in subject.rows for text in troubles(row, UNEVALUATED)
    ]
    seen = [f"<b>{markup(row.name)}</b>, {markup(text)}" for row in subject.rows for text in alarms(row)]
    parts = [
        ("Sanity flags: these numbers should not be believed as they stand", flags),
        ("Training that collapsed on its way, as the overfit watch saw it", seen),
        ("Runs that are not whole", broken),
        ("Before you compare", [markup(note) for note in subject.notes]),
    ]
    return "".join(_warning(head, items) for head, items in parts if items)


def chips(rows: Sequence[Row]) -> str:
    """A button for each row, which switches it on and off."""
    return "".join(
        f'<button type="button" class="chip" data-row="{i}" aria-pressed="true" title="{markup(row.name)}">'
        f"{mark(i)}<span>{markup(row.name)}</span></button>"
        for i, row in enumerate(rows)
    )


def table(of: Sheet) -> str:
    """The table, which a script sorts and filters."""
    good = on_front(of)
    attacks = {a: f'<span class="one">{markup(title(a))}</span>' for a in of.attacks}
    heads = [("text", "row", ""), *(("number", attacks[a], "") for a in of.attacks), ("number", "backprops", "up")]
    if of.against and of.headline:
        versus = [("number", f"vs {markup(of.against.name)}, {attacks[of.headline]}", "")]
    else:
        versus = []
    heads += [("number", "minutes", "up"), ("number", "seeds", ""), *versus]
    cells = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{kind}" data-first="{first}"><button type="button"><span>'
        f"{text}</span></button></th>"
        for kind, text, first in heads
    )
    body = "".join(_table_row(of, i, row, i in good) for i, row in enumerate(of.rows))
    remarks = "".join(f'<p class="note">{markup(text)}</p>' for text in [*_top_notes(of), *notes(of, "below them")])
    return (
        '<div class="stage"><div class="scroll results" tabindex="0" role="region" aria-label="Results">'
        f'<table id="table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{NOTHING}</div></div>{remarks}'
    )


def front_of(of: Sheet) -> str:
    """By what the table's front is judged."""
    return f"{title(of.headline or '')} accuracy against backprops"


def _top_notes(of: Sheet) -> list[str]:
    """What the front is, and how the rows at the top of the page were told apart."""
    if not ranking(of) or not several(of):
        return []
    alike = "At the top of the page, rows are not told apart where the paired test against the named row leaves p ≥"
    tested = [f"{alike} {SURE}."] if of.against else []
    return [f"On the front: no other row is as good and cheaper, by {front_of(of)}.", *tested]


def claims_section(claims: Sequence[Checked]) -> str:
    """The paper's sentences beside our numbers; those that nothing here can be held against are counted only."""
    shown, lacking = [c for c in claims if not c.missing], [c for c in claims if c.missing]
    rows = "".join(
        f'<tr><td class="wide">{markup(c.claim.text)}</td>'
        + "".join(f"<td>{text}</td>" for text in claimed(c))
        + "</tr>"
        for c in shown
    )
    head = f"<tr>{''.join(f'<th>{text}</th>' for text in CLAIMED)}</tr>"
    box = '<div class="scroll" tabindex="0" role="region" aria-label="Claims beside these runs">'
    text = f"{box}<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>" if shown else ""
    text += "".join(f'<p class="note">{markup(line)}</p>' for line in given(shown))
    if lacking:
        items = "".join(f"<li>{markup(c.claim.text)}: {markup(c.missing)}</li>" for c in lacking)
        head = f"{len(lacking)} claims that these runs cannot answer"
        text += f'<details><summary>{head}</summary><ul class="note">{items}</ul></details>'
    return text


def scores_section(rows: Sequence[Row]) -> str:
    """The tables that runs of `deat train` ended with, where they have more than their own row; else nothing."""
    return "".join(_scores(row, run) for row, run in compared(rows))


def gallery_section(gallery: Gallery) -> str:
    """Adversarial examples."""
    items = "".join(
        '<li><div class="trio">'
        + "".join(
            f'<img src="{data_uri(image)}" alt="{markup(alt)}">'
            for image, alt in zip(tile.images, _alts(tile), strict=True)
        )
        + f"</div><p>{markup(tile.label)}: seen as {markup(tile.before)}, attacked as "
        f'<span class="{"" if tile.stands else "wrong"}">{markup(tile.after)}</span></p></li>'
        for tile in gallery.tiles
    )
    return (
        f'<p class="note">Attacks on <b>{markup(gallery.row)}</b>, {markup(gallery.attack)}: image, perturbation '
        f'(grey is none), and their sum. Images are {gallery.choice}.</p><ul class="gallery">{items}</ul>'
    )


def _table_row(of: Sheet, i: int, row: Row, good: bool) -> str:
    spent = cost(row)
    cells = [_accuracy(cell(row, a), last_epoch(of, row, a), paper_accuracy(row, a)) for a in of.attacks]
    cells.append(_number(spent.backprops if spent else None, backprops(row), paper_cost(row, "per_batch")))
    cells.append(_number(spent.minutes if spent else None, minutes(spent), paper_cost(row, "minutes", "hours")))
    cells.append(_number(len(row.done), whole(row)))
    cells.append(_versus(of, row))
    pills = "".join(_pills(row, f"by {front_of(of)}" if good else ""))
    told = [*alarms(row, short=True), *comments(row)]
    model = f"<small>{markup(row.model)}</small>" if len({other.model for other in of.rows}) > 1 else ""
    why = "".join(f'<small class="why">{markup(text)}</small>' for text in told)
    mine = f'<th scope="row"><div>{mark(i)}{markup(row.name)}{model}{pills}{why}</div></th>'
    text = markup(" ".join([row.name, row.method, row.model, *told, *(f.name for _, f in flags_of(row))]))
    is_front = ' data-front="1"' if good else ""
    return f'<tr class="h{i % HUES}" data-row="{i}" data-text="{text}"{is_front}>{mine}{"".join(cells)}</tr>'


def _raised(row: Row) -> str:
    """A mark beside the name of a row that a sanity flag speaks against."""
    return f' <span class="pill flag">{FLAGGED} flagged</span>' if flags_of(row) else ""


def _versus(of: Sheet, row: Row) -> str:
    if not of.against or not of.headline:
        return ""
    found = of.versus[of.headline].get(row.name)
    if found is None:
        return f'<td data-v="">{"" if row is of.against else "—"}</td>'
    return f'<td data-v="{found.difference!r}">{difference(found)}<small>{markup(chance(found))}</small></td>'


def _pills(row: Row, front: str) -> Iterator[str]:
    if front:
        yield f' <span class="pill front" title="{markup(front)}">on the front</span>'
    for name in sorted({flag.name for _, flag in flags_of(row)}):
        yield f' <span class="pill flag">{FLAGGED} {markup(name)}</span>'
    if unchecked(row):
        yield ' <span class="pill flag">sanity not checked</span>'
    if len(row.done) < len(row.runs):
        yield f' <span class="pill failed">{len(row.done)} of {len(row.runs)} whole</span>'


def _accuracy(found: Cell | None, last: str, paper: Sequence[str]) -> str:
    beside = (f"<small>{last}</small>" if last else "") + _small(paper)
    if found is None:
        return f'<td data-v="">—{beside}</td>'
    behind = f"<small>{markup(found.behind)}</small>" if found.behind else ""
    shown = f"<b>{mean(found)}</b>{deviation(found)}<small>{interval(found)}</small>{behind}"
    return f'<td data-v="{found.mean!r}">{shown}{beside}</td>'


def _number(value: float | None, shown: str, paper: Sequence[str] = ()) -> str:
    return f'<td data-v="{"" if value is None else repr(value)}">{markup(shown)}{_small(paper)}</td>'


def _small(paper: Sequence[str]) -> str:
    return "".join(f"<small>paper {markup(text)}</small>" for text in paper)


def record_row(name: str, texts: Sequence[str], sign: str = "") -> str:
    """A row of a table of plain text."""
    cells = "".join(f"<td>{markup(text)}</td>" for text in texts)
    return f'<tr><th scope="row"><div>{sign}{markup(name)}</div></th>{cells}</tr>'


def _scores(row: Row, run: OneRun) -> str:
    attacks = list(run.scores[0].accuracy)
    head = "".join(f"<th>{markup(text)}</th>" for text in (*map(title, attacks), "backprops", "seconds"))
    body = "".join(
        record_row(s.name, [*(f"{s.accuracy[a]:.1%}" for a in attacks), f"{s.backprops:,}", f"{s.seconds:.1f}"])
        for s in run.scores
    )
    return (
        f'<p class="note">{markup(scores_note(row, run))}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Scores of {markup(row.name)}, seed {run.seed}"><table>'
        f"<thead><tr><th>model</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _warning(head: str, items: Sequence[str]) -> str:
    return f'<section class="warning"><h2>{head}</h2><ul>{"".join(f"<li>{item}</li>" for item in items)}</ul></section>'


def _alts(tile: Any) -> tuple[str, str, str]:
    return f"a {tile.label}", "perturbation", f"attacked, seen as {tile.after}"
