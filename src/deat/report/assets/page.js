"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
  const rowOf = new Map(data.rows.map((row, i) => [row.name, i]));
  const off = new Set();
  const redraws = [];

  // ---- small things -------------------------------------------------------------------------------------------
  const svg = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const html = (tag, className, ...children) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  };
  const hue = (i) => `h${i % 10}`;
  const shape = (i) => i % 3; // for readers who cannot distinguish some colours
  const mark = (i) => html("i", `mark ${hue(i)} m${shape(i)}`);
  const compact = (v) => {
    const size = Math.abs(v);
    if (size >= 1e6) return `${+(v / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(v / 1e3).toPrecision(3)}k`;
    return size && size < 0.01 ? v.toExponential(0) : `${+v.toPrecision(3)}`;
  };
  const bare = (v, panel) => (panel.percent ? (100 * v).toFixed(1) : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : `${+v.toPrecision(4)}`);
  const number = (v, panel) => `${bare(v, panel)}${panel.unit && ` ${panel.unit}`}`;
  const ticks = (low, high, count) => {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
    return found;
  };
  const logTicks = (low, high) => {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const m of [1, 2, 5]) if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) found.push(+(m * 10 ** e).toPrecision(3));
    return found;
  };
  const marker = (i, x, y, r) => {
    const kind = shape(i);
    if (kind === 1) return svg("rect", { class: "dot", x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8 });
    if (kind === 2) return svg("path", { class: "dot", d: `M${x} ${y - r * 1.2}L${x + r * 1.2} ${y}L${x} ${y + r * 1.2}L${x - r * 1.2} ${y}Z` });
    return svg("circle", { class: "dot", cx: x, cy: y, r });
  };
  const scale = (low, high, from, to, log) => {
    const f = log ? Math.log : (v) => v;
    const span = f(high) - f(low) || 1;
    return (v) => from + ((f(v) - f(low)) / span) * (to - from);
  };

  // ---- the tip ------------------------------------------------------------------------------------------------
  const tip = $("#tip");
  const showTip = (x, y, lines) => {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - box.width - 16 : x + 16; // next to the pointer, where there is room
    tip.style.left = `${Math.max(6, Math.min(left, innerWidth - box.width - 6))}px`;
    tip.style.top = `${Math.max(6, Math.min(y - box.height / 2, innerHeight - box.height - 6))}px`;
    if (left < 6) tip.style.top = `${Math.max(6, y - box.height - 18 < 6 ? y + 22 : y - box.height - 18)}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const pair = (left, right, i) => {
    const name = html("span", "", ...(i === undefined ? [] : [mark(i)]), left);
    return html("div", i === undefined ? "k" : "", name, html("span", "", right));
  };
  const seedLine = (seed, text) => html("div", "k seed", html("span", "", `seed ${seed}`), html("span", "", text));

  // ---- rows on and off ----------------------------------------------------------------------------------------
  const chips = $$(".chip[data-row]");
  const apply = () => {
    chips.forEach((chip) => chip.setAttribute("aria-pressed", String(!off.has(+chip.dataset.row))));
    $$("tr[data-row]").forEach((tr) => tr.classList.toggle("off", off.has(+tr.dataset.row)));
    redraws.forEach((draw) => draw());
  };
  chips.forEach((chip) => {
    const i = +chip.dataset.row;
    chip.addEventListener("click", () => { off.has(i) ? off.delete(i) : off.add(i); apply(); });
    const heat = (on) => () => {
      document.body.classList.toggle("some", on && !off.has(i));
      $$(`.chart [data-row="${i}"]`).forEach((node) => node.classList.toggle("hot", on));
    };
    chip.addEventListener("pointerenter", heat(true));
    chip.addEventListener("pointerleave", heat(false));
  });
  $("#all")?.addEventListener("click", () => { off.clear(); apply(); });
  $("#none")?.addEventListener("click", () => { data.rows.forEach((_, i) => off.add(i)); apply(); });
  const seeds = $("#seeds");
  const each = () => seeds?.getAttribute("aria-pressed") === "true";
  seeds?.addEventListener("click", () => { seeds.setAttribute("aria-pressed", String(!each())); apply(); });

  // ---- axes ---------------------------------------------------------------------------------------------------
  const frame = (width, height, pad, xs, ys, px, py, xText, yText, asPercent, xWhole, xNames = new Map()) => {
    const node = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}` });
    for (const v of ys) {
      node.append(svg("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: py(v), y2: py(v) }));
      node.append(svg("text", { x: pad.left - 7, y: py(v) + 4, "text-anchor": "end" }, asPercent ? `${+(100 * v).toFixed(4)}` : compact(v)));
    }
    let right = -Infinity;
    for (const v of xs.filter((v) => !xWhole || Number.isInteger(v))) {
      if (px(v) - right < (xNames.size ? 46 : 34)) continue;
      right = px(v);
      const name = xNames.get(v) ?? compact(v), isCut = right + 3.2 * name.length > width;
      node.append(svg("text", { x: isCut ? width : right, y: height - pad.bottom + 17, "text-anchor": isCut ? "end" : "middle" }, name));
    }
    node.append(svg("text", { x: width - pad.right, y: height - 3, "text-anchor": "end" }, xText));
    node.append(svg("text", { x: 0, y: 11 }, yText));
    return node;
  };

  // ---- robustness against cost --------------------------------------------------------------------------------
  const unflagged = (points) => { const candidates = points.filter((p) => !p.row.flags.length); return candidates.length ? candidates : points; };
  const rankable = (points) => { const candidates = unflagged(points); return candidates.every((p) => p.row.setup === candidates[0].row.setup) ? candidates : []; };
  const beaten = (a, points) => points.some((b) => b.x <= a.x && b.y >= a.y && (b.x < a.x || b.y > a.y));
  const farBelow = (points) => { // outliers, as in the static figure: they would leave little room for the others
    const half = Math.max(...points.map((p) => p.y)) / 2, rest = points.filter((p) => p.y >= half), below = points.filter((p) => p.y < half);
    const low = Math.min(...rest.map((p) => p.y));
    return rest.length > 1 && below.length && low - Math.max(...below.map((p) => p.y)) > 2 * half - low ? below : [];
  };
  const place = (node, points, width, pad) => { // returns how many names have no room
    let unnamed = 0;
    const taken = points.map((p) => [p.px - 7, p.py - 7, p.px + 7, p.py + 7]);
    const free = (box) => box[0] >= pad.left - 4 && box[2] <= width && box[1] > 12 && taken.every((t) => box[2] < t[0] || box[0] > t[2] || box[3] < t[1] || box[1] > t[3]);
    for (const p of [...points].sort((a, b) => a.beaten - b.beaten || b.y - a.y)) {
      const label = $(".name", p.node), wide = label.getComputedTextLength();
      const spots = [[10, 4, "start"], [-10, 4, "end"], [0, -12, "middle"], [0, 21, "middle"], [9, -9, "start"], [9, 17, "start"], [-9, -9, "end"], [-9, 17, "end"]];
      const boxOf = ([dx, dy, anchor]) => {
        const left = p.px + dx - (anchor === "end" ? wide : anchor === "middle" ? wide / 2 : 0);
        return [left, p.py + dy - 11, left + wide, p.py + dy + 3];
      };
      const spot = (p.low ? [spots[4], ...spots] : spots).find((s) => free(boxOf(s)));
      if (!spot) { label.remove(); unnamed++; continue; }
      taken.push(boxOf(spot));
      label.setAttribute("x", p.px + spot[0]);
      label.setAttribute("y", p.py + spot[1]);
      label.setAttribute("text-anchor", spot[2]);
    }
    return unnamed;
  };
  const costChart = () => {
    const home = $("#cost-chart");
    if (!home) return;
    const attack = $("#cost-attack").value, unit = $("#cost-unit").value;
    const points = data.rows.flatMap((row, i) => (off.has(i) || !row.accuracy[attack] || !row[unit] ? [] : [{ i, row, x: row[unit], y: row.accuracy[attack].mean, cell: row.accuracy[attack] }]));
    $("#cost-note").textContent = "";
    if (!points.length) { home.replaceChildren(html("p", "empty", "No visible row has both numbers.")); return; }
    const width = Math.max(home.clientWidth, 280), height = width < 560 ? 320 : 400, pad = { left: 40, right: 24, top: 26, bottom: 36 };
    const xs = points.map((p) => p.x);
    if (each()) points.forEach((p) => { p.seeds = p.row.seeds.filter((s) => s[unit] && s.accuracy[attack] !== undefined); xs.push(...p.seeds.map((s) => s[unit])); });
    const lowX = Math.min(...xs), highX = Math.max(...xs), log = highX / lowX > 6;
    const left = log ? lowX / 1.25 : Math.max(0, lowX - (highX - lowX || highX) * 0.12), right = log ? highX * 1.35 : highX + (highX - lowX || highX) * 0.14;
    const below = farBelow(points), within = points.filter((p) => !below.includes(p));
    below.forEach((p) => { p.low = true; });
    const lowY = Math.min(...within.map((p) => p.cell.low)), highY = Math.max(...within.map((p) => p.cell.high)), room = (highY - lowY || 0.1) * 0.08;
    const bottom = Math.max(0, lowY - room * (below.length ? 2 : 1)), top = Math.min(1, highY + room);
    const px = scale(left, right, pad.left, width - pad.right, log), py = scale(bottom, top, height - pad.bottom, pad.top);
    const unitText = unit === "minutes" ? "minutes of training" : "backprops";
    const node = frame(width, height, pad, log ? logTicks(left, right) : ticks(left, right, 6), ticks(bottom, top, 6), px, py, `${unitText}${log ? " (log)" : ""} →`, `${data.titles[attack]} accuracy, %`, true);
    node.setAttribute("role", "group");
    node.setAttribute("aria-label", `${data.titles[attack]} accuracy against ${unitText}`);
    const candidates = rankable(points); // only these may be on the front
    points.forEach((p) => { p.px = px(p.x); p.py = p.low ? height - pad.bottom - 16 : py(p.y); p.beaten = candidates.includes(p) && !beaten(p, candidates) ? 0 : 1; });
    const best = points.filter((p) => !p.beaten).sort((a, b) => a.x - b.x);
    const steps = best.map((p, n) => (n ? `H${p.px}V${p.py}` : `M${p.px} ${p.py}`)).join("");
    if (best.length) node.append(svg("path", { class: "front", d: `${steps}H${width - pad.right}` }));
    for (const p of points) { // below all points and names
      const under = svg("g", { class: `under ${hue(p.i)}`, "data-row": p.i });
      if (p.low) under.append(svg("path", { class: "beyond", d: `M${p.px} ${p.py}v15m-3.5 -4.5l3.5 4.5l3.5 -4.5` }));
      else under.append(svg("line", { class: "bar95", x1: p.px, x2: p.px, y1: py(p.cell.low), y2: py(p.cell.high) }));
      for (const s of p.low ? [] : p.seeds ?? []) under.append(svg("circle", { class: "seed", cx: px(s[unit]), cy: py(s.accuracy[attack]), r: 3 }));
      node.append(under);
    }
    for (const p of points) {
      const group = svg("g", { class: `point ${hue(p.i)}${p.beaten ? " beaten" : ""}`, "data-row": p.i, tabindex: "0", role: "img" });
      const label = `${p.row.name}: ${p.cell.text} ${data.titles[attack]}, ${p.row.text[unit]} ${unitText}${p.beaten ? "" : ", on the Pareto front"}${p.row.flags.length ? ", flagged: do not rely on it" : ""}`;
      group.setAttribute("aria-label", label);
      group.append(svg("circle", { cx: p.px, cy: p.py, r: 14, fill: "transparent" }), marker(p.i, p.px, p.py, 6));
      const short = p.row.name.length > 28 ? `${p.row.name.slice(0, 14)}…${p.row.name.slice(-13)}` : p.row.name;
      group.append(svg("text", { class: "name", x: p.px, y: p.py }, `${short}${p.row.flags.length ? " ⚑" : ""}${p.low ? ` ↓ ${p.cell.text}` : ""}`));
      const lines = () => [
        html("div", "", html("strong", "", mark(p.i), p.row.name)),
        pair(data.titles[attack], p.cell.text), ...(p.seeds ?? []).map((s) => seedLine(s.seed, s.text[attack])),
        pair("95 % interval", p.cell.interval), ...(p.cell.sample_note ? [pair("from", p.cell.sample_note)] : []), pair("backprops", p.row.text.backprops),
        pair("minutes", `${p.row.text.minutes}${p.row.ran_concurrently ? " several jobs at once" : ""}`),
        ...p.row.flags.map((flag) => pair(`⚑ ${flag}`, "do not rely on it")),
        pair(!p.beaten ? "on the Pareto front" : candidates.includes(p) ? "another row is as good and cheaper" : "not compared with the front", ""),
      ];
      group.addEventListener("pointerenter", (event) => showTip(event.clientX, event.clientY, lines()));
      group.addEventListener("focus", () => { const box = group.getBoundingClientRect(); showTip(box.x + box.width / 2, box.y, lines()); });
      group.addEventListener("pointerleave", hideTip);
      group.addEventListener("blur", hideTip);
      p.node = group;
      node.append(group);
    }
    home.replaceChildren(node);
    const unnamed = place(node, points, width, pad);
    $("#cost-note").textContent = [
      unit === "minutes" && points.some((p) => p.row.ran_concurrently) && "some times were measured while several jobs ran at once",
      below.length && "↓ lies below the axis",
      unnamed && `no room for ${unnamed === 1 ? "one name" : `${unnamed} names`}: see their markers on the buttons above`,
    ].filter(Boolean).join("; ");
  };
  ["#cost-attack", "#cost-unit"].forEach((id) => $(id)?.addEventListener("change", costChart));

  // ---- curves -------------------------------------------------------------------------------------------------
  const merged = (panel) => {
    const setsByRow = new Map();
    for (const line of panel.lines) {
      const i = rowOf.has(line.row) ? rowOf.get(line.row) : null;
      if (i !== null && off.has(i)) continue;
      if (!setsByRow.has(line.row)) setsByRow.set(line.row, { i: i ?? setsByRow.size, row: line.row, own: i !== null, at: new Map(), seeds: [] });
      if (line.seed !== null) setsByRow.get(line.row).seeds.push({ seed: line.seed, points: line.x.map((x, n) => ({ x, y: line.y[n] })).filter((p) => p.y !== null) });
      const at = setsByRow.get(line.row).at;
      line.x.forEach((x, n) => { if (line.y[n] !== null) (at.get(x) ?? at.set(x, []).get(x)).push(line.y[n]); });
    }
    return [...setsByRow.values()].map((s) => ({
      ...s, points: [...s.at].sort((a, b) => a[0] - b[0]).map(([x, v]) => ({ x, y: v.reduce((a, b) => a + b) / v.length, low: Math.min(...v), high: Math.max(...v) })),
    })).filter((s) => s.points.length);
  };
  const several = (s) => each() && s.seeds.length > 1;
  const pathOf = (points, px, py, step) => points.map((p, n) => (n === 0 ? `M${px(p.x)} ${py(p.y)}` : step ? `H${(px(points[n - 1].x) + px(p.x)) / 2}V${py(p.y)}H${px(p.x)}` : `L${px(p.x)} ${py(p.y)}`)).join("");
  const endNames = (node, sets, bars, px, x, lowest) => { // each as near to its line's end as the others let it
    const ends = sets.map((s) => ({ s, at: s.points.at(-1), y: s.up(bars ? 0 : s.points.at(-1).y) + 4 })).sort((a, b) => b.y - a.y);
    const last = Math.max(...ends.map((end) => end.at.x));
    let free = lowest + 4;
    for (const end of ends) { end.y = Math.min(end.y, free); free = end.y - 12; }
    free = 16;
    for (const end of ends.reverse()) { end.y = Math.max(end.y, free); free = end.y + 12; }
    for (const { s, at, y } of ends) {
      // a thin line from the end to its name; where the line ended earlier, it is broken
      if (!bars) node.append(svg("line", { class: `leader ${hue(s.i)}${at.x < last ? " early" : ""}`, x1: px(at.x), y1: s.up(at.y), x2: x - 2, y2: y - 4 }));
      const name = svg("text", { class: `end ${hue(s.i)}`, x, y }, s.row);
      node.append(name);
      for (let left = s.row.length - 1; left > 0 && x + name.getComputedTextLength() > node.width.baseVal.value; left--) name.textContent = `${s.row.slice(0, left).trimEnd()}…`;
    }
  };
  const barsOf = (node, s, px, left, right) => { // up and down from the row's own line, with its mark before it
    const wide = Math.max(1, 0.7 * (px(1) - px(0))), zero = s.up(0);
    node.append(svg("line", { class: "grid", x1: left, x2: right, y1: zero, y2: zero }), svg("g", { class: hue(s.i) }, marker(s.i, left - 12, zero, 4)));
    const d = s.points.map((p) => `M${px(p.x) - wide / 2} ${zero}V${s.up(p.y)}h${wide}V${zero}Z`).join("");
    node.append(svg("path", { class: `line bars ${hue(s.i)}`, "data-row": s.own ? s.i : undefined, d }));
    for (const { seed, points } of several(s) ? s.seeds : []) {
      const marks = points.map((p) => `M${px(p.x) - wide / 2} ${s.up(p.y)}h${wide}`).join("");
      node.append(svg("path", { class: `line seed ${hue(s.i)}`, "data-row": s.own ? s.i : undefined, "data-seed": seed, d: marks }));
    }
  };
  const curve = (home, panel) => {
    const sets = merged(panel);
    if (!sets.length) { home.replaceChildren(html("p", "empty", "Every run with these values is switched off.")); return; }
    const distinct = new Set(sets.map((s) => s.row.slice(0, 11))).size === sets.length; // even if names are cut
    const bars = panel.kind === "bar", lane = Math.max(16, Math.min(149, 176 / sets.length)); // of bars, a lane for each row
    const named = sets.length > 1 && (bars || (panel.kind !== "point" && sets.length <= 12 && distinct));
    const width = Math.max(home.clientWidth, 240), longest = Math.max(...sets.map((s) => s.row.length)), pad = { left: bars ? 22 : 44, right: named ? Math.min(96, 20 + 7.5 * longest) : 10, top: 22, bottom: 34 };
    const height = bars ? pad.top + pad.bottom + lane * sets.length : 205;
    const all = sets.flatMap((s) => s.points), xs = all.map((p) => p.x);
    const left = Math.min(...xs), right = Math.max(...xs), ends = all.flatMap((p) => (bars && !each() ? [0, p.y] : bars ? [0, p.low, p.high] : [p.low, p.high])), lowY = Math.min(...ends), highY = Math.max(...ends);
    const room = (highY - lowY || Math.abs(highY) || 1) * 0.06, bottom = lowY >= 0 ? Math.max(0, lowY - room) : lowY - room, top = highY + room;
    const scatter = panel.kind === "point", side = scatter || left === right ? (right - left || 1) * 0.06 : bars ? 0.5 : 0;
    const px = scale(left - side, right + side || 1, pad.left, width - pad.right), level = scale(bottom, top, height - pad.bottom, pad.top);
    const rise = (lane - 3) / (highY - lowY || 1), apart = panel.kind === "step" ? Math.min(3, 12 / sets.length) : 0;
    sets.forEach((s, n) => { s.up = bars ? (v) => pad.top + n * lane + (highY - v) * rise : (v) => level(v) + ((sets.length - 1) / 2 - n) * apart; });
    const yText = bars ? `${panel.y}; a lane is ${bare(highY - lowY, panel)} high` : panel.y;
    const xNames = new Map(panel.labels), nameX = (v) => xNames.get(v) ?? compact(v);
    const node = frame(width, height, pad, xNames.size ? [...xNames.keys()] : ticks(left - side, right + side, 6), bars ? [] : ticks(bottom, top, 4).filter((v) => panel.kind !== "step" || Number.isInteger(v)), px, level, panel.x, yText, panel.percent, panel.x === "epoch", xNames);
    node.setAttribute("tabindex", "0");
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", `${panel.title}: ${sets.map((s) => `${s.row} ends at ${number(s.points.at(-1).y, panel)}`).join("; ")}. Arrow keys read values${sets.some(several) ? ", up and down the seeds of a row" : ""}.`);
    if (!bars && bottom < 0 && top > 0) node.append(svg("line", { class: "zero", x1: pad.left, x2: width - pad.right, y1: level(0), y2: level(0) }));
    for (const s of [...sets].sort((a, b) => shape(a.i) - shape(b.i))) { // broken lines above whole ones
      const py = s.up;
      if (bars) { barsOf(node, s, px, pad.left, width - pad.right); continue; }
      const look = { class: `line ${hue(s.i)} dash${shape(s.i)}`, "data-row": s.own ? s.i : undefined };
      if (several(s)) {
        for (const { seed, points } of s.seeds) {
          node.append(svg("path", { ...look, class: `${look.class} seed`, "data-seed": seed, d: pathOf(points, px, py, panel.kind === "step") }));
          if (points.length === 1) node.append(svg("circle", { class: `seed ${hue(s.i)}`, cx: px(points[0].x), cy: py(points[0].y), r: 3 }));
        }
      } else if (s.points.some((p) => p.high > p.low)) {
        const d = `${s.points.map((p, n) => `${n ? "L" : "M"}${px(p.x)} ${py(p.high)}`).join("")}${[...s.points].reverse().map((p) => `L${px(p.x)} ${py(p.low)}`).join("")}Z`;
        if (!scatter) node.append(svg("path", { class: `band ${hue(s.i)}`, d }));
      }
      if (!scatter) node.append(svg("path", { ...look, d: pathOf(s.points, px, py, panel.kind === "step") }));
      if (scatter || s.points.length === 1)
        s.points.forEach((p) => node.append(svg("g", { class: `point ${hue(s.i)}` }, marker(s.i, px(p.x), py(p.y), 4.5))));
    }
    const cross = svg("line", { class: "cross", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" });
    node.append(cross);
    const stops = [...new Set(xs)].sort((a, b) => a - b);
    let at = -1, chosen = 0;
    const seedsAt = (s, x) => s.seeds.flatMap(({ seed, points }) => points.filter((p) => p.x === x).map((p) => seedLine(seed, number(p.y, panel))));
    const read = (n, x, y, near) => {
      at = n;
      const here = sets.map((s) => ({ s, p: s.points.find((p) => p.x === stops[n]) })).filter((e) => e.p).sort((a, b) => b.p.y - a.p.y);
      cross.setAttribute("x1", px(stops[n]));
      cross.setAttribute("x2", px(stops[n]));
      cross.setAttribute("visibility", "visible");
      const spread = (p) => (p.high > p.low ? ` (${bare(p.low, panel)} to ${bare(p.high, panel)})` : "");
      const gap = (e) => Math.abs(e.s.up(bars ? 0 : e.p.y) - near);
      chosen = near === undefined ? Math.max(0, Math.min(here.length - 1, chosen)) : here.reduce((best, e, m) => (gap(e) < gap(here[best]) ? m : best), 0);
      const tipLines = here.map((e, m) => [pair(e.s.row, number(e.p.y, panel) + spread(e.p), e.s.i), ...(m === chosen && several(e.s) ? seedsAt(e.s, stops[n]) : [])]);
      showTip(x, y, [pair(`${panel.x} ${nameX(stops[n])}`, ""), ...tipLines.flat()]);
    };
    const leave = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
    node.addEventListener("pointermove", (event) => {
      const box = node.getBoundingClientRect(), x = event.clientX - box.x;
      read(stops.reduce((best, v, n) => (Math.abs(px(v) - x) < Math.abs(px(stops[best]) - x) ? n : best), 0), event.clientX, event.clientY, event.clientY - box.y);
    });
    node.addEventListener("pointerleave", leave);
    node.addEventListener("blur", leave);
    node.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], turn = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (event.key === "Escape") return leave();
      if (!move && !(turn && at >= 0 && sets.some(several))) return;
      event.preventDefault();
      chosen += turn ?? 0;
      const n = turn ? at : Math.max(0, Math.min(stops.length - 1, at < 0 ? (move > 0 ? 0 : stops.length - 1) : at + move));
      const box = node.getBoundingClientRect();
      read(n, box.x + px(stops[n]), box.y + pad.top);
    });
    const foreign = sets.filter((s) => !s.own);
    home.replaceChildren(node, ...(foreign.length ? [html("p", "key", ...foreign.map((s) => html("span", "", mark(s.i), s.row)))] : []));
    if (named) endNames(node, sets, bars, px, width - pad.right + 8, height - pad.bottom); // measured, so it must be in the page
  };
  redraws.push(costChart);
  $$("[data-panel]").forEach((home) => {
    const [figure, panel] = home.dataset.panel.split(" ").map(Number);
    redraws.push(() => curve(home, data.figures[figure].panels[panel]));
  });

  // ---- the table ----------------------------------------------------------------------------------------------
  const body = $("#table tbody");
  const key = (tr, column) => {
    const cell = tr.children[column];
    return cell.dataset.v === undefined ? cell.textContent.trim().toLowerCase() : cell.dataset.v === "" ? null : +cell.dataset.v;
  };
  $$("#table thead th").forEach((th, column) => {
    $("button", th)?.addEventListener("click", () => {
      const numeric = th.dataset.kind === "number", now = th.getAttribute("aria-sort");
      const way = now === "none" || !now ? (numeric && th.dataset.first !== "up" ? "descending" : "ascending") : now === "ascending" ? "descending" : "ascending";
      $$("#table thead th").forEach((other) => { if ($("button", other)) other.setAttribute("aria-sort", other === th ? way : "none"); });
      const sign = way === "ascending" ? 1 : -1;
      const sorted = $$("tr", body).sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        if (x === null || y === null) return (x === null) - (y === null); // missing values come last in both directions
        return sign * (x < y ? -1 : x > y ? 1 : 0);
      });
      body.append(...sorted);
    });
  });
  const filter = () => {
    if (!$("#filter")) return; // a single row needs none
    const words = $("#filter").value.toLowerCase().split(/\s+/).filter(Boolean), only = $("#only-front")?.checked;
    let shown = 0;
    $$("tr", body).forEach((tr) => {
      const text = tr.dataset.text.toLowerCase();
      tr.hidden = !words.every((word) => text.includes(word)) || (only && !tr.dataset.front);
      shown += !tr.hidden;
    });
    $("#shown").textContent = `${shown} of ${data.rows.length} rows`;
    $("#nothing").hidden = shown > 0;
  };
  $("#clear")?.addEventListener("click", () => { $("#filter").value = ""; if ($("#only-front")) $("#only-front").checked = false; filter(); $("#filter").focus(); });
  $("#filter")?.addEventListener("input", filter);
  $("#only-front")?.addEventListener("change", filter);

  // ---- light and dark -----------------------------------------------------------------------------------------
  const theme = $("#theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `switch to ${dark() ? "light" : "dark"} colours`); };
  theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; label(); });
  system.addEventListener("change", label);

  // ---- what stays visible -------------------------------------------------------------------------------------
  const fit = () => {
    const box = $(".results"), style = document.documentElement.style;
    style.setProperty("--legend", `${$(".legend")?.offsetHeight ?? 0}px`);
    if (!box) return; // no run is evaluated
    box.classList.remove("fits"); // a box that scrolls keeps the head at its own top, one that does not at the window's
    box.classList.toggle("fits", box.scrollWidth <= box.clientWidth);
  };

  label();
  filter();
  apply();
  fit();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; fit(); redraws.forEach((draw) => draw()); } });
  addEventListener("scroll", hideTip, { passive: true });
})();
