"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const interval = Number(document.body.dataset.interval) * 1000;
  const frames = [$("first"), $("second")];
  let shown = 0;
  let version = null;
  let loading = false;

  const ago = (seconds) => {
    if (seconds === null) return "";
    if (seconds < 90) return `${Math.round(seconds)} s ago`;
    return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
  };
  const percent = (share) => (share === null ? "" : `${(100 * share).toFixed(1)}%`);
  const cell = (content) => {
    const node = document.createElement("td");
    node.append(content);
    return node;
  };
  const showRuns = (runs) => {
    const rows = runs.map((run) => {
      const row = document.createElement("tr");
      const meter = document.createElement("meter");
      meter.max = run.epochs || 1;
      meter.value = run.epoch;
      const epoch = document.createElement("span");
      epoch.append(meter, ` ${run.epoch}/${run.epochs ?? "?"}`);
      row.append(cell(run.name), cell(run.state), cell(epoch), cell(run.k === null ? "" : `${run.k}`));
      row.append(cell(run.loss === null ? "" : run.loss.toFixed(3)), cell(percent(run.natural)), cell(percent(run.robust)));
      row.append(cell(ago(run.changed)));
      return row;
    });
    $("runs").replaceChildren(...rows);
  };
  // The new page is loaded out of sight, scrolled to where the old one is, and then shown in its place.
  const showPage = (next) => {
    loading = true;
    const hidden = frames[1 - shown];
    hidden.onload = () => {
      const place = frames[shown].contentWindow.scrollY;
      hidden.contentWindow.scrollTo(0, place);
      frames[shown].className = "waiting";
      hidden.className = "";
      shown = 1 - shown;
      version = next;
      loading = false;
    };
    hidden.src = `/report?${encodeURIComponent(next)}`;
  };
  const poll = async () => {
    try {
      const answer = await fetch("/status", { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const found = await answer.json();
      $("state").textContent = `checked at ${new Date().toLocaleTimeString()}`;
      $("problem").textContent = found.problems.join("\n");
      showRuns(found.runs);
      if (found.version !== null && found.version !== version && !loading) showPage(found.version);
    } catch (error) {
      $("state").textContent = "deat watch does not answer; what is shown may be old";
    }
    setTimeout(poll, interval);
  };
  poll();
})();
