// What pages do beyond plain HTML: live refresh, theme, curves, logs. Everything works
// without it except these; nothing here decides what a person may see.
"use strict";
(() => {
  const $ = (selector, from = document) => from.querySelector(selector);
  const refresh = () => document.body.dispatchEvent(new CustomEvent("refresh"));

  // -- live: one event stream says "changed"; while it is down, poll -----------------------------------
  const POLL_MS = 5000;
  function live(url) {
    const badge = $("#live");
    let timer = 0;
    const say = (state, text) => { badge.dataset.state = state; $(".live-text", badge).textContent = text; };
    const poll = () => { if (!timer) timer = setInterval(() => { if (!document.hidden) refresh(); }, POLL_MS); };
    const quiet = () => { clearInterval(timer); timer = 0; };
    if (!window.EventSource) { say("poll", "every 5 s"); poll(); return; }
    let source = null;
    const open = () => {
      source = new EventSource(url);
      // What changed between the page's making and this moment was told to nobody: look once.
      source.addEventListener("hello", () => { quiet(); say("live", "live"); refresh(); });
      source.addEventListener("changed", refresh);
      source.onerror = () => {
        say("poll", "every 5 s");
        poll();
        if (source.readyState === EventSource.CLOSED) setTimeout(open, POLL_MS);
      };
    };
    open();
    window.addEventListener("pagehide", () => source && source.close());
  }

  // -- theme ----------------------------------------------------------------------------------------
  function theme(button) {
    const root = document.documentElement, order = ["auto", "light", "dark"];
    const show = () => { $("[data-theme-name]", button).textContent = root.dataset.theme || "auto"; };
    button.addEventListener("click", () => {
      const next = order[(order.indexOf(root.dataset.theme || "auto") + 1) % order.length];
      if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
      try { localStorage.setItem("busbar-theme", next); } catch { /* only for this page then */ }
      show();
      document.dispatchEvent(new CustomEvent("themed"));
    });
    show();
  }

  // -- curves ---------------------------------------------------------------------------------------
  function curves(section) {
    const plots = [...section.querySelectorAll(".plot")].map((box) => ({ box, chart: null }));
    const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const draw = (plot, data) => {
      const width = plot.box.clientWidth || 320;
      if (plot.chart && plot.width === width) { plot.chart.setData(data); return; }
      if (plot.chart) plot.chart.destroy();
      plot.width = width;
      const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
      plot.chart = new uPlot({
        width, height: 190, cursor: { y: false }, legend: { live: true },
        scales: { x: { time: false } },
        axes: [axis, { ...axis, size: 56 }],
        series: [{ label: "Step" }, { label: plot.box.getAttribute("aria-label").split(" by ")[0], stroke: style("--accent"), width: 2, points: { show: data[0].length < 3 } }],
      }, data, plot.box);
    };
    let last = null;
    const paint = () => {
      if (!last) return;
      for (const plot of plots) {
        const key = plot.box.dataset.series, points = last.filter((point) => point[key] !== null && point[key] !== undefined);
        plot.box.classList.toggle("none", points.length === 0);
        if (points.length === 0) { plot.box.textContent = "no samples yet"; continue; }
        if (!plot.chart) plot.box.textContent = "";
        // After a restart steps repeat; the newest value of a step counts.
        const byStep = new Map(points.map((point) => [point.step, point[key]]));
        const steps = [...byStep.keys()].sort((a, b) => a - b);
        draw(plot, [steps, steps.map((step) => byStep.get(step))]);
      }
    };
    const load = async () => {
      try {
        const answer = await fetch(section.dataset.samples, { headers: { Accept: "application/json" } });
        if (!answer.ok) return;
        last = (await answer.json()).items;
        paint();
      } catch { /* the next refresh tries again */ }
    };
    let waiting = 0;
    document.body.addEventListener("refresh", () => { if (!waiting) waiting = setTimeout(() => { waiting = 0; load(); }, 1500); });
    const again = () => { for (const plot of plots) plot.width = -1; paint(); };
    document.addEventListener("themed", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(paint).observe(section);
    load();
  }

  // -- logs -----------------------------------------------------------------------------------------
  const MAX_LOG_CHARS = 400000;
  function log(section) {
    const text = $("[data-log-text]", section), rank = $("[data-log-rank]", section), follow = $("[data-log-follow]", section);
    let running = null, retry = 0;
    const read = async () => {
      if (running) running.abort();
      clearTimeout(retry);
      const control = running = new AbortController();
      try {
        const answer = await fetch(`${section.dataset.log}?tail=500&follow=${follow.checked}&rank=${rank.value}`, { signal: control.signal });
        if (!answer.ok) {
          text.textContent = (await answer.json()).error.message;
          retry = setTimeout(read, 4000);
          return;
        }
        text.textContent = "";
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
          text.append(value);
          if (text.textContent.length > MAX_LOG_CHARS) text.textContent = text.textContent.slice(-MAX_LOG_CHARS / 2);
          if (atEnd) text.scrollTop = text.scrollHeight;
        }
        if (!text.textContent) text.textContent = "The log is empty.";
      } catch (error) {
        if (error.name !== "AbortError") retry = setTimeout(read, 4000);
      }
    };
    rank.addEventListener("change", read);
    follow.addEventListener("change", read);
    window.addEventListener("pagehide", () => running && running.abort());
    read();
  }

  // -- small things ---------------------------------------------------------------------------------
  function copy(button) {
    button.addEventListener("click", async () => {
      const source = $("[data-copy-source]");
      source.select();
      try { await navigator.clipboard.writeText(source.value); button.textContent = "Copied"; } catch { document.execCommand("copy"); }
    });
  }
  function closeMenus(event) {
    for (const menu of document.querySelectorAll("details.menu[open], details.confirm[open]")) {
      if (event.type === "keydown" ? event.key === "Escape" : !menu.contains(event.target)) {
        menu.open = false;
        if (event.type === "keydown") $("summary", menu).focus();
      }
    }
  }

  document.addEventListener("keydown", closeMenus);
  document.addEventListener("click", closeMenus);
  if (document.body.dataset.live) live(document.body.dataset.live);
  document.querySelectorAll("[data-theme-switch]").forEach(theme);
  document.querySelectorAll("[data-samples]").forEach(curves);
  document.querySelectorAll("[data-log]").forEach(log);
  document.querySelectorAll("[data-copy]").forEach(copy);
})();
