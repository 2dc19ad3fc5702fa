"""The page, in a real browser: sorted, filtered, switched, hovered, by keyboard, in the dark, and harmless."""

import base64
import hashlib
import itertools
import json
import re

import pytest

from deat.cli import report
from deat.cli.main import main
from deat.evaluation.sanity import Flag
from deat.recipes.paper_numbers import PAPER_TABLES
from deat.report.figure_data import Figure, PlotLine, build_radius_panel
from helpers.browser import ABSENT, browser
from helpers.runs import make_bench, make_run, one_run

STANDARD = "cifar10_result_std"
HOSTILE = "<script>window.pwned=1</script><img src=x onerror='window.pwned=1'></script>|\x1b[31m"
ROWS = {"m+deat": (4, 0.48, 0.84), "pgd-7": (8, 0.5, 0.8), "free-4": (5, 0.44, 0.85), HOSTILE: (6, 0.3, 0.7)}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report on four rows of two seeds, one of them hostile and flagged, and a fifth that failed."""
    folder = tmp_path_factory.mktemp("bench")
    rows = []
    for number, (name, (cost, robust, natural)) in enumerate(ROWS.items()):
        flags = (Flag(f"<b>{number}</b>", "<i>seen</i>", "<u>advice</u>"),) if name == HOSTILE else ()
        for seed in (0, 1):
            shares = {"natural": natural, "pgd-20": robust + 0.01 * seed, "aa": robust - 0.02}
            labels = ("<u>cat</u>", "dog")
            make_run(
                folder / f"{number}-{seed}", name, seed=seed, cost=cost, shares=shares, flags=flags, classes=labels
            )
        runs = [one_run(f"{number}-{seed}", seed) for seed in (0, 1)]
        rows.append({"name": name, "method": name, "model": "small", "runs": runs})
    failed = [one_run("gone", 0, "failed", "the loss became NaN <script>window.pwned=1</script>")]
    rows.append({"name": "trades", "method": "trades", "model": "small", "runs": failed})
    make_bench(folder, rows, recipe="<script>window.pwned=1</script>")
    assert main(["report", str(folder), "--no-figures"]) == 0
    return folder / "report" / "index.html"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A report on sixteen rows of the paper, two seeds each, one of which failed."""
    folder, rows = tmp_path_factory.mktemp("large"), []
    for number, name in enumerate([n for n in PAPER_TABLES[STANDARD].rows if n.startswith("preact")] + ["natural"]):
        for seed in (0, 1):
            robust = (160 + 7 * number + seed) / 800
            shares = {"natural": (672 + 2 * seed) / 800, "pgd-100": robust, "cw-20": robust, "aa": robust}
            make_run(folder / f"{number}-{seed}", name, seed=seed, cost=number + 2, shares=shares, images=800)
        runs = [one_run(f"{number}-{seed}", seed) for seed in (0, 1)]
        paper = {"table": STANDARD, "row": name}
        rows.append({"name": name, "method": name, "model": "preact_resnet18", "runs": runs, "paper": paper})
    rows[12]["runs"][1] = one_run(
        "gone", 1, "failed", "the loss became NaN in epoch 17, and again after going on from there"
    )
    make_bench(folder, rows, "standard", STANDARD)
    assert main(["report", str(folder), "--no-figures"]) == 0
    return folder / "report" / "index.html"


def test_page_is_one_file_that_allows_nothing_but_its_own_script(page):
    text = page.read_text()
    assert not re.findall(r"<(?:link|iframe|object|embed|base)\b", text)
    assert not re.findall(r"""(?:src|href|action)=["'](?!data:)""", text)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_embedded_data_cannot_leave_its_element(page):
    text = page.read_text()
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    assert "<" not in held
    assert ">" not in held
    names = [row["name"] for row in json.loads(held)["rows"]]
    assert any("<script>" in name for name in names)
    assert "\x1b" not in text
    assert text.count("<script") == 2
    assert "NaN" not in held


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    if ABSENT:
        pytest.skip(ABSENT)
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def shown(window, page):
    yield from seen(window, page, 1200)


@pytest.fixture
def broad(window, large):
    yield from seen(window, large, 1280)


def seen(window, page, width):
    window.colours("light")
    window.size(width, 900)
    window.open(page)
    yield window
    quiet(window)


def quiet(window):
    """Nothing went wrong, and nothing was fetched."""
    assert [entry for entry in window.logs("browser") if entry["level"] == "SEVERE"] == []
    assert {address.split(":")[0] for address in window.requested()} <= {"file", "data"}


def names(window):
    return window.js(
        "return [...document.querySelectorAll('#table tbody tr')].filter(r => !r.hidden).map(r => r.dataset.row)"
    )


def sorts(window):
    return window.js("return [...document.querySelectorAll('#table thead th')].map(t => t.getAttribute('aria-sort'))")


def test_nothing_is_fetched_and_hostile_names_stay_text(shown, page):
    assert shown.js("return window.pwned") is None
    assert shown.js("return document.querySelectorAll('script').length") == 2
    assert shown.js("return document.querySelectorAll('u, img[src=x]').length") == 0
    assert shown.js("return document.querySelectorAll('.warning b').length") > 0
    text = shown.js("return document.body.innerText")
    assert "<script>window.pwned=1</script>" in text
    assert "the loss became NaN <script>" in text
    assert "<u>advice</u>" in text
    assert shown.requested() == [page.resolve().as_uri()]


def test_sorting_puts_what_is_missing_last_and_says_so_to_a_screen_reader(shown):
    shown.click("#table thead th:nth-child(2) button")
    assert names(shown) == ["2", "0", "1", "3", "4"]
    assert sorts(shown)[:3] == ["none", "descending", "none"]
    shown.click("#table thead th:nth-child(2) button")
    assert names(shown) == ["3", "1", "0", "2", "4"]
    assert sorts(shown)[1] == "ascending"
    shown.click("#table thead th:nth-child(6) button")  # backprops: the cheapest first
    assert names(shown) == ["0", "2", "3", "1", "4"]
    assert sorts(shown)[1:6] == ["none", "none", "none", "none", "ascending"]


def test_filtering_keeps_the_rows_that_have_every_word(shown):
    shown.type("#filter", "FREE small")
    assert names(shown) == ["2"]
    assert shown.js("return document.querySelector('#shown').textContent") == "1 of 5 rows"
    shown.type("#filter", " nowhere")
    assert names(shown) == []
    assert "No row matches" in shown.js("return document.querySelector('.results').innerText")
    shown.click("#clear")
    assert len(names(shown)) == 5
    assert "No row matches" not in shown.js("return document.querySelector('.results').innerText")
    shown.type("#filter", "FREE")
    assert names(shown) == ["2"]
    shown.js("const f = document.querySelector('#filter'); f.value = ''; f.dispatchEvent(new Event('input'))")
    shown.click("#only-front")
    assert names(shown) == ["0", "1"]


def drawn(window):
    return window.js("return [...document.querySelectorAll('#cost-chart .point')].map(p => p.dataset.row)")


def test_switching_a_row_off_takes_it_out_of_every_chart(shown):
    lines = "return document.querySelectorAll('[data-panel=\"0 0\"] .line').length"
    assert drawn(shown) == ["0", "1", "2", "3"]
    assert shown.js(lines) == 4
    shown.click(".chip[data-row='1']")
    assert drawn(shown) == ["0", "2", "3"]
    assert shown.js(lines) == 3
    assert shown.js("return document.querySelector('.chip[data-row=\"1\"]').getAttribute('aria-pressed')") == "false"
    assert shown.js("return document.querySelector('tr[data-row=\"1\"]').classList.contains('off')")
    shown.click("#none")
    assert drawn(shown) == []
    shown.click("#all")
    assert drawn(shown) == ["0", "1", "2", "3"]


def test_equal_numbers_of_steps_lie_beside_each_other_and_are_named_at_their_ends(shown):
    found = shown.js(
        "const all = [...document.querySelectorAll('[data-panel]')];"
        "const k = all.find(p => p.previousSibling.textContent.endsWith(' k'));"
        "return [[...k.querySelectorAll('.line')].map(l => l.getAttribute('d')), "
        "[...k.querySelectorAll('.end')].map(e => e.textContent), "
        "[...k.querySelectorAll('.end')].map(e => +e.getAttribute('y')), "
        "[...k.querySelectorAll('.end')].map(e => e.getBoundingClientRect().right - k.getBoundingClientRect().right)]"
    )
    paths, ends, heights, beyond = found
    assert max(beyond) <= 1  # no name is cut off
    shapes = {tuple(re.findall(r"H[\d.]+", path)) for path in paths}
    assert len(set(paths)) == len(paths) == 4
    assert len(shapes) == 1  # the same staircase, moved
    assert {"m+deat", "pgd-7", "free-4"} < set(ends)
    assert all(b - a >= 12 for a, b in itertools.pairwise(heights))


def test_gains_are_bars_that_no_other_row_covers(broad):
    box = "const r = n.getBoundingClientRect(); return [r.top, r.bottom]"
    found = broad.js(
        "const all = [...document.querySelectorAll('[data-panel]')];"
        "const home = all.find(p => p.previousSibling.textContent === 'robustness gain');"
        f"const place = (n) => {{ {box} }};"
        "return [[...home.querySelectorAll('.bars')].map(place), home.querySelectorAll('.end').length, "
        "place(home.querySelector('svg')), home.innerHTML.match(/a lane is ([0-9.]+) high/)[1]]"
    )
    lanes, names, whole, high = found
    lanes.sort()
    assert len(lanes) == names == 16
    assert all(a[1] <= b[0] + 0.5 for a, b in itertools.pairwise(lanes))
    assert whole[0] < lanes[0][0] < lanes[-1][1] < whole[1]
    assert 5 < float(high) < 100


def test_the_front_is_drawn_and_follows_the_chosen_attack(shown):
    front = "return [...document.querySelectorAll('#cost-chart .point:not(.beaten)')].map(p => p.dataset.row)"
    assert shown.js(front) == ["0", "1"]
    shown.js(
        "const s = document.querySelector('#cost-attack'); s.value = 'natural'; s.dispatchEvent(new Event('change'))"
    )
    assert shown.js(front) == ["0", "2"]


@pytest.mark.parametrize("doubted", [["b"], ["a", "b", "c"]], ids=["the best", "all"])
def test_a_flagged_row_is_never_on_the_front_unless_all_are_flagged(window, tmp_path, doubted):
    for name, cost, robust in (("a", 4, 0.4), ("b", 3, 0.6), ("c", 8, 0.5)):
        flags = (Flag("masked", "x", "y"),) if name in doubted else ()
        make_run(tmp_path / name, name, cost=cost, shares={"natural": 0.9, "pgd-20": robust}, flags=flags)
    runs = [str(tmp_path / name) for name in "abc"]
    assert main(["report", *runs, "--no-figures", "--out", str(tmp_path / "report")]) == 0
    window.size(1200, 900)
    window.open(tmp_path / "report" / "index.html")
    front = "return [...document.querySelectorAll('#cost-chart .point:not(.beaten)')].map(p => p.dataset.row)"
    pills = "return [...document.querySelectorAll('tr[data-front]')].map(p => p.dataset.row)"
    assert window.js(front) == window.js(pills) == (["1"] if len(doubted) > 1 else ["0", "2"])
    line = "return document.querySelector('#cost-chart .front').getAttribute('d').match(/V/g)?.length ?? 0"
    assert window.js(line) == (0 if len(doubted) > 1 else 1)
    window.hover("#cost-chart .point[data-row='1'] .dot")
    assert ("on the Pareto front" in window.js(TIP)) == (len(doubted) > 1)
    assert "do not rely on it" in window.js("return document.querySelector('.point[data-row=\"1\"]').ariaLabel")
    quiet(window)


def test_rows_that_were_not_evaluated_alike_have_no_front_until_the_others_are_switched_off(window, tmp_path):
    for number, name in enumerate("abc"):
        folder = make_run(tmp_path / name, name, shares={"natural": 0.9, "pgd-20": 0.4 + number / 10})
        found = json.loads((folder / "evaluation.json").read_text())
        found["settings"]["threat"]["eps"] = 0.05 if name == "c" else 0.15
        found.pop("checksum", None)
        (folder / "evaluation.json").write_text(json.dumps(found))
    assert main(["report", *(str(tmp_path / n) for n in "abc"), "--no-figures", "--out", str(tmp_path / "r")]) == 0
    window.size(1200, 900)
    window.open(tmp_path / "r/index.html")
    front = "return [...document.querySelectorAll('#cost-chart .point:not(.beaten)')].map(p => p.dataset.row)"
    assert window.js(front) == []
    assert window.js("return document.querySelectorAll('#cost-chart .front, .pill.front, #only-front').length") == 0
    assert "none of them is the best" in window.js("return document.body.innerText")
    window.click('.chip[data-row="2"]')
    assert window.js(front) == ["1"]
    assert window.js("return document.querySelectorAll('#cost-chart .front').length") == 1
    quiet(window)


@pytest.mark.parametrize("width", [1200, 390])
def test_a_row_far_below_does_not_squeeze_the_others_and_no_name_is_lost(window, tmp_path, width):
    shares = {"natural": 0.1, "free-4": 0.8, "pgd-7": 0.78, "deat-3": 0.79} | {
        f"m+a-rather-long-{n}": 0.79 for n in "abc"
    }
    for name, share in shares.items():
        make_run(tmp_path / name, name, cost=9, shares={"natural": 0.9, "pgd-20": share})
    assert main(["report", *(str(tmp_path / n) for n in shares), "--no-figures", "--out", str(tmp_path / "r")]) == 0
    window.size(width, 900)
    window.open(tmp_path / "r" / "index.html")
    heights = "return [...document.querySelectorAll('#cost-chart .dot')].map(d => d.getBoundingClientRect().y)"
    dots = sorted(window.js(heights))
    assert dots[-2] - dots[0] > 15  # of two points of accuracy, in a chart of 300 pixels
    shown = window.js("return [...document.querySelectorAll('#cost-chart .name')].map(n => n.textContent)")
    assert "natural ↓ 10.00 %" in shown
    note = window.js("return document.querySelector('#cost-note').textContent")
    assert "below the axis" in note
    lost = len(shares) - len(shown)
    assert (f"no room for {lost} names" if lost > 1 else "no room for one name") in note
    buttons = window.js("return [...document.querySelectorAll('.chip[data-row]')].map(n => n.innerText)")
    assert buttons == list(shares)
    quiet(window)


def test_long_names_beside_points_do_not_run_into_each_other(window, tmp_path):
    rows = [("best", 18, 0.8), ("second", 8, 0.78), ("a rather long name of a method 1", 3, 0.14)]
    rows += [("a rather long name of a method 2", 9, 0.3), ("a rather long name of a method 3", 12, 0.2)]
    for name, cost, robust in rows:
        for seed in (0, 1):
            shares = {"natural": 0.9, "pgd-20": robust + seed / 50}
            make_run(tmp_path / f"{name}-{seed}", name, seed=seed, cost=cost, shares=shares)
    folders = [str(tmp_path / f"{name}-{seed}") for name, _, _ in rows for seed in (0, 1)]
    assert main(["report", *folders, "--no-figures", "--out", str(tmp_path / "r")]) == 0
    window.size(1200, 900)
    window.open(tmp_path / "r/index.html")
    boxes = window.js(
        "return [...document.querySelectorAll('#cost-chart .name')].map(n => n.getBoundingClientRect())"
        ".map(b => [b.left, b.top, b.right, b.bottom])"
    )
    assert len(boxes) > 2
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 3 or b[3] <= a[1] + 3
    quiet(window)


def test_hovering_a_point_or_a_curve_shows_its_values(shown):
    shown.hover("#cost-chart .point[data-row='0'] .dot")
    tip = shown.js("return document.querySelector('#tip').innerText")
    assert "m+deat" in tip
    assert "46.00 ± 0.00 %" in tip
    shown.hover("[data-panel='0 1'] svg")
    tip = shown.js("return document.querySelector('#tip').innerText")
    assert "epoch" in tip
    assert "pgd-7" in tip
    assert re.search(r"\d\d\.\d %", tip)


def test_everything_works_from_the_keyboard(shown):
    shown.js("document.querySelector('.chip[data-row]').focus()")
    shown.press("space")
    assert drawn(shown) == ["1", "2", "3"]
    shown.js("document.querySelector('#table thead th button').focus()")
    shown.press("tab", "enter")
    assert sorts(shown)[1] == "descending"
    shown.js("document.querySelector('#cost-chart .point').focus()")
    assert "pgd-7" in shown.js("return document.querySelector('#tip').innerText")
    shown.js("document.querySelector('[data-panel=\"0 0\"] svg').focus()")
    shown.press("right", "right")
    assert "epoch 2" in shown.js("return document.querySelector('#tip').innerText")
    shown.press("left")
    assert "epoch 1" in shown.js("return document.querySelector('#tip').innerText")


GROUND = "return getComputedStyle(document.body).backgroundColor"


def test_dark_follows_the_system_and_the_button(shown):
    light = shown.js(GROUND)
    shown.colours("dark")
    dark = shown.js(GROUND)
    assert dark != light
    shown.click("#theme")
    assert shown.js(GROUND) == light
    shown.click("#theme")
    assert shown.js(GROUND) == dark


def test_a_phone_scrolls_in_one_direction_only(shown, page):
    shown.size(390, 800)
    shown.open(page)
    assert shown.js("return document.documentElement.scrollWidth") <= 390
    assert shown.js("return document.querySelector('#cost-chart svg').clientWidth") <= 390


@pytest.mark.parametrize(("width", "seeds"), [(1200, 1), (390, 2)])
def test_a_single_row_opens_with_scores_and_curves_and_is_compared_with_nobody(window, tmp_path, width, seeds):
    runs = [make_run(tmp_path / f"{seed}", seed=seed, shares={"natural": 0.9, "pgd-20": 0.5}) for seed in range(seeds)]
    score = {"accuracy": {"natural": 0.9}, "images": 200, "backprops": 40, "seconds": 1.0}
    (runs[0] / "scores.json").write_text(json.dumps([{"name": name, **score} for name in ("m+deat", "natural")]))
    assert main(["report", *map(str, runs), "--no-figures", "--out", str(tmp_path / "report")]) == 0
    window.size(width, 900)
    window.open(tmp_path / "report" / "index.html")
    heads = window.js("return [...document.querySelectorAll('main section > h2')].map(h => h.innerText)")
    assert heads[:3] == ["Test scores of deat train", "The training process", "Results"]
    assert window.js("return document.querySelectorAll('#cost-chart, #filter, .pill.front').length") == 0
    drawn = "return document.querySelectorAll('[data-panel] .line').length"
    assert window.js(drawn) == window.js("return document.querySelectorAll('[data-panel]').length") > 8
    if seeds > 1:
        window.click("#seeds")
        assert window.js(drawn) > 16
    assert window.js("return document.documentElement.scrollWidth") <= width
    quiet(window)


def test_labels_of_axes_are_whole_and_those_of_k_are_whole_numbers(window, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "pgd-3", shares={"natural": 0.9, "pgd-20": 0.5})
    line = PlotLine("pgd-3", 0, [n / 255 for n in (0, 4, 8, 12, 16, 24)], [0.9, 0.7, 0.5, 0.4, 0.3, 0.2])
    sweep = Figure("sweep", "Accuracy by radius", [build_radius_panel("PGD-20", [line])])
    monkeypatch.setattr(report, "make_sweep_figure", lambda *_: sweep)
    assert main(["report", str(run), "--no-figures", "--sweep", "10", "--out", str(tmp_path / "report")]) == 0
    window.size(1200, 900)
    window.open(tmp_path / "report" / "index.html")
    texts = window.js(
        "return [...document.querySelectorAll('[data-panel]')].map(p => [p.previousSibling.textContent, "
        "[...p.querySelectorAll('svg > text')].map(t => [t.textContent, "
        "t.getBoundingClientRect().right - p.querySelector('svg').getBoundingClientRect().right])])"
    )
    labels = {title: [text for text, _ in shown] for title, shown in texts}
    assert {"0", "8/255", "24/255"} < set(labels["PGD-20"])
    assert max(beyond for _, shown in texts for _, beyond in shown) <= 0.5
    steps = [text for text in labels["adversarial steps k"] if text[0].isdigit()]
    assert len(steps) > 1
    assert all(text.isdigit() for text in steps)
    quiet(window)


def test_flags_failures_and_every_setting_can_be_read(shown):
    text = shown.js("return [...document.querySelectorAll('details')].map(d => (d.open = true, d.innerText)).join(' ')")
    for setting in ("epochs", "radius eps", "step size alpha", "examples attacked at once"):
        assert setting in text
    assert shown.js("return document.querySelectorAll('.pill.flag').length") >= 1
    assert "0 of 1 complete" in shown.js("return document.querySelector('tr[data-row=\"4\"]').innerText")


TIP = "return document.querySelector('#tip').textContent"  # whether or not the mouse, which lies elsewhere, hides it
SEED = r"seed \d\s*\d+\.\d %"


def test_seeds_are_shown_on_demand_and_named(shown):
    thin = "return [...document.querySelectorAll('[data-panel=\"0 0\"] .line.seed')].map(p => p.dataset.seed)"
    assert shown.js(thin) == []
    shown.js("document.querySelector('#seeds').focus()")
    shown.press("space")
    assert shown.js(thin) == ["0", "1"] * 4
    assert shown.js("return document.querySelectorAll('#cost-chart circle.seed').length") == 8
    shown.hover("#cost-chart .point[data-row='0'] .dot")
    assert re.search(r"seed 0\s*46.00 %\s*seed 1\s*46.00 %", shown.js(TIP))
    shown.js("document.querySelector('[data-panel=\"0 0\"] svg').focus()")
    shown.press("right")
    first = shown.js(TIP)
    assert len(re.findall(SEED, first)) == 2  # of one row, so that sixteen rows stay readable
    shown.press("down")
    assert re.findall(SEED, shown.js(TIP)) != re.findall(SEED, first)
    shown.click("#seeds")
    assert shown.js(thin) == []


@pytest.mark.parametrize("width", [1280, 1600, 1920])
def test_the_whole_table_is_in_sight_on_a_screen_and_its_head_stays(broad, large, width):
    broad.size(width, 900)
    broad.open(large)
    box = "const b = document.querySelector('.results'), t = document.querySelector('#table'); "
    assert broad.js(box + "return [t.scrollWidth - b.clientWidth, b.scrollWidth - b.clientWidth]") == [0, 0]
    assert broad.js("return document.documentElement.scrollWidth") == width
    assert "NaN in epoch 17" in broad.js("return document.querySelector('tr[data-row=\"12\"] th').innerText")
    broad.js("document.querySelector('tr[data-row=\"12\"]').scrollIntoView({block: 'center'})")
    gap = "document.querySelector('#table thead th').getBoundingClientRect().top - document.querySelector('.legend')"
    assert abs(broad.js(f"return {gap}.getBoundingClientRect().bottom")) < 3


def test_on_a_phone_the_tables_head_and_names_stay(broad, large):
    broad.size(390, 800)
    broad.open(large)
    broad.js("const b = document.querySelector('.results'); b.scrollLeft = 300; b.scrollTop = 400")
    place = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.left, r.top]"
    left, top = broad.js(place, ".results")
    assert broad.js(place, "#table thead th") == pytest.approx([left + 1, top + 1], abs=1)
    assert broad.js(place, "tr[data-row='9'] th")[0] == pytest.approx(left + 1, abs=1)


def test_a_number_is_rounded_in_one_place(broad):
    assert "84.12 %" in broad.js("return document.querySelector('.answer').innerText")  # 84.125, a tie
    assert "84.12" in broad.js("return document.querySelector('tr[data-row=\"0\"] td').innerText")
    broad.js(
        "const s = document.querySelector('#cost-attack'); s.value = 'natural'; s.dispatchEvent(new Event('change'))"
    )
    broad.js("document.querySelector('#cost-chart .point').focus()")
    assert "84.12 ± 0.18 %" in broad.js(TIP)


def test_a_row_has_one_mark_wherever_it_is_named(broad):
    broad.js("document.querySelector('[data-panel=\"0 0\"] svg').focus()")
    broad.press("right")
    for row, kind in ((0, "circle"), (11, "path")):
        assert broad.js("return document.querySelector(arguments[0]).tagName", f".point[data-row='{row}'] .dot") == kind
        name = broad.js("return document.querySelector(arguments[0]).title", f".chip[data-row='{row}']")
        marks = broad.js(
            "return [...document.querySelectorAll('.chip, #table tbody th > div, #tip div')]"
            ".filter(n => n.innerText.startsWith(arguments[0])).map(n => n.querySelector('.mark').className)",
            name,
        )
        assert len(marks) == 3
        assert set(marks) == {f"mark h{row % 10} m{row % 3}"}


CONTRAST = """
const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m[3] ?? 1]; };
const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
const bend = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * bend(c[i] / 255), 0.05);
const paint = (n) => parse(getComputedStyle(n).backgroundColor);
const ground = (n) => (n ? over(paint(n), ground(n.parentElement)) : [255, 255, 255, 1]);
const told = [...document.querySelectorAll("body *")].filter((n) => n.getClientRects().length && n.tagName !== "SCRIPT"
  && [...n.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim()));
return [told.length, told.map((n) => {
  const style = getComputedStyle(n), below = ground(n);
  const ink = over(parse(n.ownerSVGElement ? style.fill : style.color), below);
  const ratio = light(ink) / light(below);
  return [n.textContent.slice(0, 30), Math.max(ratio, 1 / ratio)];
}).filter(([, ratio]) => ratio < 4.5)];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_as_wcag_asks(broad, scheme):
    broad.colours(scheme)
    broad.click(".chip[data-row='1']")
    broad.click("#seeds")
    count, faint = broad.js(CONTRAST)
    assert count > 300
    assert faint == []


def test_fingers_can_hit_everything_on_a_phone(broad, large):
    broad.size(390, 800)
    broad.open(large)
    sizes = broad.js(
        "return [...document.querySelectorAll('button, select, input, summary')].filter(n => n.getClientRects().length)"
        ".map(n => n.type === 'checkbox' ? n.closest('label') : n)"
        ".map(n => [n.innerText, n.offsetWidth, n.offsetHeight])"
    )
    assert len(sizes) > 30
    assert [size for size in sizes if min(size[1:]) < 40] == []


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_page_on_runs_that_are_not_evaluated_shows_their_held_out_figures_and_what_to_do(
    window, tmp_path, width, scheme
):
    for name in ("m+deat", "pgd-7"):
        make_run(tmp_path / name, name, kept=3)
    assert main(["report", *(str(tmp_path / name) for name in ("m+deat", "pgd-7")), "--no-figures"]) == 0
    window.colours(scheme)
    window.size(width, 900)
    window.open(tmp_path / "report/index.html")
    quiet(window)
    heads, rows = (
        window.js(f"return [...document.querySelectorAll('.apart {part}')].map(n => n.innerText)")
        for part in ("thead th", "tbody tr")
    )
    assert heads[:3] == ["row", "held-out natural", "held-out PGD-20"]
    assert len(rows) == 2
    assert window.js("return document.querySelector('pre').innerText").splitlines() == [
        f"deat evaluate {tmp_path / name}" for name in ("m+deat", "pgd-7")
    ]
    assert window.js("return [document.querySelector('#table'), document.querySelector('.answer')]") == [None, None]
    assert window.js("return document.documentElement.scrollWidth") <= width
    assert window.js("return document.querySelectorAll('svg.chart').length") > 3  # the script ran to its end
    assert window.js(CONTRAST)[1] == []
    window.click("#theme")
    quiet(window)
