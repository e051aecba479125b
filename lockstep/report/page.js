"use strict";
// The curves of the page, drawn by uPlot: each chart can be read by mouse, by touch and by keys, and all are zoomed together.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const light = { ink: "#3d4650", grid: "#e3e7eb", mark: "#7a5200",
    curves: ["#0b5cad", "#b8400a", "#046a4a", "#8f1d6b", "#6f5600", "#4a5563"] };
  const dark = { ink: "#b6c0ca", grid: "#2b333b", mark: "#e3b341",
    curves: ["#6cb6ff", "#ffa368", "#6fdcaa", "#f29bd4", "#e6cf6a", "#c4ccd4"] };
  const dashes = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 5], [5, 2, 2, 2, 2, 2]];
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const plots = [];
  const ends = charts.flatMap(({ curves }) => curves.flatMap(({ steps }) => [steps[0], steps[steps.length - 1]]));
  const whole = { min: Math.min(...ends), max: Math.max(...ends) };
  if (whole.min === whole.max) whole.max += 1;
  let isPrinting = false, isZooming = false;

  const palette = () => (darkness.matches && !isPrinting ? dark : light);
  const colour = (place) => palette().curves[place % dashes.length];
  const dash = (place) => dashes[(place + Math.floor(place / dashes.length)) % dashes.length];
  const wholeSteps = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  function short(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return new Intl.NumberFormat("en", { maximumSignificantDigits: 5 }).format(value);
  }

  class Plot {
    constructor(figure, chart) {
      this.figure = figure;
      this.chart = chart;
      this.place = figure.querySelector(".plot");
      this.reading = figure.querySelector(".reading");
      this.log = figure.querySelector(".log");
      this.hidden = new Set();
      this.legend = chart.curves.map((curve, place) => this.legendOf(curve, place));
      this.listen();
      this.draw();
    }

    legendOf(curve, place) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.innerHTML = '<svg viewBox="0 0 36 8" width="36" height="8" aria-hidden="true"><path d="M0 4H36"/></svg>';
      const name = document.createElement("span");
      name.textContent = curve.name;
      const value = document.createElement("b");
      button.append(name, value);
      button.addEventListener("click", () => {
        this.hidden.has(place) ? this.hidden.delete(place) : this.hidden.add(place);
        button.setAttribute("aria-pressed", String(!this.hidden.has(place)));
        this.plot.setSeries(place + 1, { show: !this.hidden.has(place) });
      });
      const item = document.createElement("li");
      item.append(button);
      this.figure.querySelector(".legend").append(item);
      return { line: button.querySelector("path"), value };
    }

    listen() {
      const controls = { in: 0.5, out: 2, all: Infinity };
      for (const [name, factor] of Object.entries(controls))
        this.figure.querySelector(`.zoom-${name}`).addEventListener("click", () => this.zoom(factor));
      this.log.addEventListener("change", () => this.draw());
      this.place.addEventListener("keydown", (event) => {
        const far = event.shiftKey ? 10 : 1;
        const actions = {
          ArrowLeft: () => this.move(-far), ArrowRight: () => this.move(far),
          Home: () => this.move(-Infinity), End: () => this.move(Infinity),
          "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
          0: () => this.zoom(Infinity), Escape: () => this.zoom(Infinity),
        };
        if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        actions[event.key]();
      });
      new ResizeObserver(() => {
        const width = this.width();
        if (width > 0 && !isPrinting && width !== this.plot.width) this.plot.setSize({ width, height: this.height() });
      }).observe(this.place);
    }

    width() { return isPrinting ? 640 : this.place.clientWidth; }
    height() { return this.width() < 480 ? 200 : 260; }

    data() {
      const isLog = this.log.checked;
      const of = (value) => (isLog && value <= 0 ? null : value);
      return uPlot.join(this.chart.curves.map((curve) => [curve.steps, curve.values.map(of)]));
    }

    draw() {
      const { min, max } = this.plot ? this.plot.scales.x : whole;
      if (this.plot) this.plot.destroy();
      const { ink, grid } = palette();
      const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
      const values = (_, splits) => splits.map((value) => (value == null ? "" : short(value)));
      const series = this.chart.curves.map((curve, place) => ({
        label: curve.name, stroke: colour(place), dash: dash(place), width: 1.75, show: !this.hidden.has(place),
        points: { show: curve.steps.length < 40, size: 6, stroke: colour(place), fill: colour(place) },
      }));
      this.legend.forEach(({ line }, place) => {
        line.setAttribute("stroke", colour(place));
        line.setAttribute("stroke-dasharray", dash(place).join(" "));
      });
      this.plot = new uPlot({
        width: this.width(), height: this.height(),
        scales: {
          x: { time: false, auto: false },
          y: this.log.checked ? { distr: 3 } : { range: { min: { pad: 0.1, soft: 0, mode: this.chart.from_zero ? 1 : 3 },
            max: { pad: 0.1, soft: 0, mode: 3 } } },
        },
        axes: [
          { ...axis, space: 70, size: 34, values: (_, splits) => splits.map((step) => wholeSteps.format(step)),
            incrs: [1, 10, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].flatMap((each) => [each, 2 * each, 5 * each]) },
          { ...axis, size: 66, values },
        ],
        series: [{ label: "step" }, ...series],
        legend: { show: false },
        cursor: { drag: { x: true, y: false }, y: false,
          sync: { key: "steps", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
          bind: { dblclick: () => () => this.zoom(Infinity) } },
        hooks: {
          setCursor: [() => this.read()],
          setScale: [(_, key) => key === "x" && this.share()],
          draw: [() => this.drawMarks()],
        },
      }, this.data(), this.place);
      this.plot.setScale("x", { min, max });
    }

    drawMarks() {
      const { ctx, bbox } = this.plot, ratio = uPlot.pxRatio;
      let free = -Infinity;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = palette().mark;
      ctx.lineWidth = ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.textAlign = "left";
      ctx.textBaseline = "alphabetic";
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      for (const mark of this.chart.marks) {
        const at = this.plot.valToPos(mark.step, "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        const wide = ctx.measureText(mark.name).width + 8 * ratio;
        const left = Math.min(at + 4 * ratio, bbox.left + bbox.width - wide);
        if (left < free) continue;
        ctx.fillText(mark.name, left, bbox.top + 12 * ratio);
        free = left + wide;
      }
      ctx.restore();
    }

    // Where curves have points at different steps, the nearest of each is read, and named if it is not this step's.
    read() {
      const { idx } = this.plot.cursor, { data } = this.plot;
      const said = [];
      this.legend.forEach(({ value }, place) => {
        const found = idx == null ? null : nearest(data[place + 1], idx);
        const at = found == null || found === idx ? "" : ` (step ${wholeSteps.format(data[0][found])})`;
        value.textContent = found == null ? "" : short(data[place + 1][found]) + at;
        if (found != null && !this.hidden.has(place)) said.push(`${this.chart.curves[place].name} ${value.textContent}`);
      });
      const step = idx == null ? "" : `step ${wholeSteps.format(data[0][idx])}`;
      this.reading.textContent = step;
      if (document.activeElement === this.place && idx != null)
        this.figure.querySelector(".spoken").textContent = `${step}: ${said.join(", ")}`;
    }

    move(count) {
      const { data, scales: { x }, cursor } = this.plot, steps = data[0];
      const first = steps.findIndex((step) => step >= x.min), last = steps.findLastIndex((step) => step <= x.max);
      const now = cursor.idx ?? (count > 0 ? first - 1 : last + 1);
      const to = Math.max(first, Math.min(last, now + count));
      if (to < 0) return;
      this.plot.setCursor({ left: this.plot.valToPos(steps[to], "x"), top: this.plot.over.clientHeight / 2 }, true, true);
    }

    zoom(factor) {
      const { data: [steps], scales: { x }, cursor } = this.plot;
      const middle = cursor.idx == null ? (x.min + x.max) / 2 : steps[cursor.idx];
      const span = Math.min((x.max - x.min) * factor, whole.max - whole.min);
      if (span < 2 && factor < 1) return;
      const min = Math.max(whole.min, Math.min(middle - span / 2, whole.max - span));
      this.plot.setScale("x", { min, max: min + span });
    }

    share() {
      if (isZooming) return;
      isZooming = true;
      const { min, max } = this.plot.scales.x;
      for (const other of plots) if (other !== this) other.plot.setScale("x", { min, max });
      isZooming = false;
    }
  }

  function nearest(values, idx) {
    for (let far = 0; far < values.length; far++) {
      if (values[idx - far] != null) return idx - far;
      if (values[idx + far] != null) return idx + far;
    }
    return null;
  }

  for (const figure of document.querySelectorAll("figure.chart")) {
    figure.classList.add("drawn");
    plots.push(new Plot(figure, charts[Number(figure.dataset.chart)]));
  }
  const redraw = () => plots.forEach((plot) => plot.draw());
  darkness.addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    isPrinting = true;
    redraw();
    for (const autopsy of document.querySelectorAll("details.autopsy")) autopsy.open = true;
  });
  addEventListener("afterprint", () => { isPrinting = false; redraw(); });
  document.documentElement.dataset.drawn = String(plots.length);
})();
