// The page: controls, the address that holds their state, and the three charts.
"use strict";

(() => {
  const { METHODS, STRETCHES, DEFAULTS, TURN, stretchesOf, stringMost, model } = Formulas;
  const { frame, names, path, rule, level, heat, node, short } = Charts;
  const by = (id) => document.getElementById(id);
  const CELLS = 256, POINTS = 2048;

  const power = (exponents) => exponents.map((n) => 2 ** n);
  const range = (low, high, step = 1) => {
    const values = [];
    for (let n = low; n <= high + 1e-9; n += step) values.push(+n.toFixed(6));
    return values;
  };
  const LENGTHS = range(4, 13, 0.5).map((n) => Math.round(2 ** n));
  // Sliders: label, values that the thumb goes through, and how one is read.
  const SLIDERS = {
    heads: ["Heads", range(1, 32)],
    head: ["Head that is shown", range(1, 32)],
    width: ["Width of a head", range(4, 128, 4), (v) => `${v}, ${v / 2} pairs`],
    base: ["Base", range(1, 7, 0.25).map((n) => Math.round(10 ** n))],
    p: ["Share of pairs that rotate", range(0, 1, 0.05)],
    size: ["Size of the bias", range(0.1, 4, 0.1)],
    shape: ["Shape of the bias", range(0.05, 2, 0.05)],
    trained: ["Trained length", power(range(4, 12)), (v) => `${v} tokens`],
    length: ["Length", LENGTHS, (v) => `${v} tokens`],
    factor: ["Stretch factor", range(1, 16, 0.5), (v) => `${v} ×`],
    distance: ["Distance", null, (v) => `${v} tokens`],
    content: ["Logit at distance 0", range(0.5, 12, 0.5)],
  };
  const ALWAYS = ["trained", "length", "distance", "content"];

  const state = { ...DEFAULTS };

  const nearest = (values, value) =>
    values.reduce((best, _, n) => (Math.abs(values[n] - value) < Math.abs(values[best] - value) ? n : best), 0);
  const valuesOf = (name) =>
    name === "distance" ? null : name === "head" ? range(1, state.heads) : SLIDERS[name][1];

  function read(text) {
    for (const [name, value] of new URLSearchParams(text)) {
      if (name === "method" && METHODS[value]) state.method = value;
      else if (name === "stretch" && (value === "" || STRETCHES[value])) state.stretch = value;
      else if (name === "logn") state.logn = value === "true";
      else if (name in SLIDERS && Number.isFinite(+value)) state[name] = +value;
    }
    for (const name of Object.keys(SLIDERS)) {
      const values = valuesOf(name);
      if (values) state[name] = values[nearest(values, state[name])];
    }
    state.distance = Math.round(Math.min(Math.max(0, state.distance), state.length - 1));
  }

  function address() {
    const changed = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
    return changed.length ? `#${new URLSearchParams(changed)}` : "#";
  }

  function build() {
    for (const [name, { label }] of Object.entries(METHODS)) by("method").append(new Option(label, name));
    for (const [name, [label]] of Object.entries(SLIDERS)) {
      const row = document.createElement("div");
      row.className = "slider";
      row.id = `row-${name}`;
      row.innerHTML = `<label for="${name}">${label}</label><output for="${name}"></output>
        <input type="range" id="${name}">`;
      by("sliders").append(row);
      by(name).addEventListener("input", () => {
        const values = valuesOf(name);
        state[name] = values ? values[+by(name).value] : +by(name).value;
        state.head = Math.min(state.head, state.heads);
        state.distance = Math.min(state.distance, state.length - 1);
        changed();
      });
    }
    by("method").addEventListener("change", () => { state.method = by("method").value; changed(); });
    by("stretch").addEventListener("change", () => { state.stretch = by("stretch").value; changed(); });
    by("logn").addEventListener("change", () => { state.logn = by("logn").checked; changed(); });
    by("reset").addEventListener("click", () => { Object.assign(state, DEFAULTS); changed(); });
    by("copy").addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(location.href);
        by("copy").textContent = "Copied";
      } catch { by("copy").textContent = "Copy it from the address bar"; }
      setTimeout(() => (by("copy").textContent = "Copy link"), 2000);
    });
    by("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  function showControls() {
    const { options, frequencies, label } = METHODS[state.method];
    const fitting = stretchesOf(state.method);
    if (!fitting.includes(state.stretch)) state.stretch = "";
    by("method").value = state.method;
    by("stretch").replaceChildren(
      new Option("none", ""), ...fitting.map((name) => new Option(STRETCHES[name], name)));
    by("stretch").value = state.stretch;
    by("stretch").disabled = !fitting.length;
    by("logn").checked = state.logn;
    const most = stringMost(state.trained);
    by("stretch-note").textContent = !fitting.length
      ? `${label} has none in closed form.`
      : state.stretch === "string" && state.factor > most
        ? `STRING at most doubles the length: the factor counts as ${short(most)}.`
        : "";
    const unscaled = ["", "rerope", "dual_chunk"].includes(state.stretch);
    const shown = new Set([...ALWAYS, ...options, ...(unscaled ? [] : ["factor"])]);
    if (frequencies && state.method !== "sandwich") shown.add("width");
    for (const [name, [, , words = String]] of Object.entries(SLIDERS)) {
      by(`row-${name}`).hidden = !shown.has(name);
      const values = valuesOf(name), input = by(name);
      input.min = 0;
      input.max = values ? values.length - 1 : state.length - 1;
      input.value = values ? nearest(values, state[name]) : state[name];
      const text = words(state[name]);
      input.setAttribute("aria-valuetext", text);
      by(`row-${name}`).querySelector("output").textContent = text;
    }
  }

  // Distances of the curves: all, or so many that the chart can show.
  function distances() {
    const step = Math.max(1, (state.length - 1) / POINTS);
    const found = [];
    for (let n = 0; n < state.length; n += step) found.push(Math.round(n));
    if (found.at(-1) !== state.length - 1) found.push(state.length - 1);
    return found;
  }

  function drawDecay(now, trained) {
    const last = state.length - 1, at = distances();
    const series = [{ name: state.stretch || state.logn ? "stretched" : "", kind: "one", of: now }];
    if (trained) series.unshift({ name: "as trained", kind: "two", of: trained });
    const points = series.map(({ of }) => at.map((d) => [d, of.logit(last, last - d)]));
    const values = points.flat().map(([, y]) => y);
    const low = Math.min(0, ...values), high = Math.max(0, ...values);
    const box = frame(by("decay"), {
      x: [0, last], y: [low, high], xTitle: "distance in tokens", yTitle: "logit",
      height: innerWidth < 736 ? 190 : 280,
    });
    const end = box.across(Math.min(state.trained, last));
    const start = box.across(0);
    box.svg.prepend(node(box.svg, "rect", { class: "shade", x: start, y: box.top, width: end - start, height: box.low - box.top }));
    series.forEach(({ kind }, n) => path(box, kind, points[n]));
    names(box, series.filter(({ name }) => name));
    rule(box, state.distance, `${state.distance} tokens`);
    const value = now.logit(last, last - state.distance);
    node(box.svg, "circle", { class: "spot", cx: box.across(state.distance), cy: box.up(value), r: 6 });
    by("decay").setAttribute("aria-label",
      `Logit of the last query by distance: ${short(now.logit(last, last))} at 0, ` +
      `${short(value)} at ${state.distance}, ${short(now.logit(last, 0))} at ${last} tokens.`);
  }

  let cells = null;
  const spot = { row: 0, column: 0 };

  function drawMap(now) {
    const side = Math.min(CELLS, state.length);
    const place = (n) => Math.round((n * (state.length - 1)) / (side - 1));
    const values = new Float64Array(side * side).fill(NaN);
    let largest = 0, least = Infinity;
    for (let r = 0; r < side; r++)
      for (let c = 0; c <= r; c++) {
        const v = now.logit(place(r), place(c));
        values[r * side + c] = v;
        largest = Math.max(largest, Math.abs(v));
        least = Math.min(least, v);
      }
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).split(",").map(Number);
    const colours = { rise: colour("--rise"), fall: colour("--fall") };
    // A scale from zero would hide values that lie close together, far from it.
    const base = least > largest / 2 && largest - least > 1e-6 * largest ? least : 0;
    heat(by("map"), values, side, { base, largest }, colours);
    cells = { values, side, place };
    const falls = least < 0;
    const [low, strip, high] = by("legend").children;
    low.textContent = short(falls ? -largest : base);
    high.textContent = short(largest);
    strip.style.background = `linear-gradient(90deg, ${falls ? `rgb(${colours.fall}), ` : ""}transparent, rgb(${colours.rise}))`;
    const skipped = side < state.length ? ` ${side} of the ${state.length} positions are drawn.` : "";
    by("skipped").textContent = skipped;
    by("map").setAttribute("aria-label",
      `Map of the logits of ${state.length} queries and keys, from ${short(least)} to ${short(largest)}; empty above the diagonal.${skipped}`);
    spot.row = Math.min(spot.row || side - 1, side - 1);
    spot.column = Math.min(spot.column, spot.row);
    if (by("cell").textContent) tellCell();
  }

  function tellCell() {
    const { values, side, place } = cells;
    const query = place(spot.row), key = place(spot.column);
    const value = values[spot.row * side + spot.column];
    by("cell").textContent = Number.isNaN(value)
      ? `Query ${query}, key ${key}: not visible, it is ahead.`
      : `Query ${query}, key ${key}, distance ${query - key}: logit ${short(value)}.`;
  }

  function listenToMap() {
    const canvas = by("map");
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const cell = (x, size) => Math.min(cells.side - 1, Math.max(0, Math.floor((x / size) * cells.side)));
      spot.row = cell(event.clientY - box.top, box.height);
      spot.column = cell(event.clientX - box.left, box.width);
      tellCell();
    };
    canvas.addEventListener("pointermove", at);
    canvas.addEventListener("click", (event) => {
      at(event);
      const apart = cells.place(spot.row) - cells.place(spot.column);
      if (apart >= 0) { state.distance = apart; changed(); }
    });
    canvas.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? 16 : 1;
      const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const inside = (n) => Math.min(cells.side - 1, Math.max(0, n));
      spot.row = inside(spot.row + move[0]);
      spot.column = inside(spot.column + move[1]);
      tellCell();
    });
  }

  function drawFrequencies(now) {
    by("spectrum-title").textContent = "Frequencies";
    const rotating = now.before.filter((x) => x > 0);
    const changes = now.theta.some((x, t) => x !== now.before[t]);
    const still = now.before.length - rotating.length;
    by("spectrum-note").textContent =
      "Each dot is a pair of features. Below the line a pair does not go all round within the trained length." +
      (still ? ` ${still} pairs do not rotate and have no dot.` : "");
    if (!rotating.length) { by("spectrum").textContent = "No pair rotates."; return; }
    const turn = TURN / state.trained;
    const low = Math.min(turn, ...now.theta.filter((x) => x > 0)), high = Math.max(turn, ...now.before);
    const box = frame(by("spectrum"), {
      x: [0, Math.max(1, now.before.length - 1)], y: [low / 1.5, high * 1.5], logY: true,
      xTitle: "pair", yTitle: "radians a token", height: 300,
    });
    level(box, turn, `one turn in ${state.trained} tokens`);
    const dots = (theta, kind) => theta.forEach((x, t) => {
      if (x > 0) node(box.svg, "circle", { class: kind, cx: box.across(t), cy: box.up(x), r: kind === "one" ? 2.6 : 3.4 });
    });
    if (changes) dots(now.before, "two");
    dots(now.theta, "one");
    names(box, changes ? [{ name: "as trained", kind: "two" }, { name: "stretched", kind: "one" }] : []);
    const seldom = rotating.filter((x) => x < turn).length;
    by("spectrum").setAttribute("aria-label",
      `Frequencies of ${rotating.length} pairs, from ${short(now.theta[0])} to ${short(now.theta.filter((x) => x > 0).at(-1))} radians a token; as trained, ${seldom} do not go all round within ${state.trained} tokens.`);
  }

  function drawHeads(now) {
    by("spectrum-title").textContent = "Heads";
    by("spectrum-note").textContent = state.method === "nope"
      ? "Nothing depends on positions but the causal mask."
      : `Bias of each head at distance ${state.distance}, from the last query.`;
    if (state.method === "nope") { by("spectrum").replaceChildren(); return; }
    const last = state.length - 1;
    const values = Array.from({ length: state.heads }, (_, h) => now.biasOf(h + 1, last, last - state.distance));
    const box = frame(by("spectrum"), {
      x: [0.5, state.heads + 0.5], y: [Math.min(0, ...values), Math.max(0, ...values) || 0.01],
      xTitle: "head", yTitle: "bias", height: 300,
    });
    const wide = (box.across(2) - box.across(1)) * 0.7;
    values.forEach((v, h) => {
      const [top, end] = [box.up(Math.max(0, v)), box.up(Math.min(0, v))];
      node(box.svg, "rect", { class: "one", opacity: h + 1 === state.head ? 1 : 0.4, x: box.across(h + 1) - wide / 2, width: wide, y: top, height: Math.max(1, end - top) });
    });
    by("spectrum").setAttribute("aria-label",
      `Biases of ${state.heads} heads at distance ${state.distance}, from ${short(values[0])} in head 1 to ${short(values.at(-1))} in head ${state.heads}.`);
  }

  function reading(now, trained) {
    const last = state.length - 1, key = last - state.distance;
    const parts = [`${METHODS[state.method].label}${state.stretch ? ` stretched by ${STRETCHES[state.stretch]}` : ""}: ` +
      `at distance ${state.distance} the logit is ${short(now.logit(last, key))}, at distance 0 it is ${short(now.logit(last, last))}.`];
    if (trained) parts.push(`As trained it would be ${short(trained.logit(last, key))}.`);
    const rotated = now.distance(last, key);
    if (Math.abs(rotated - state.distance) > 1e-9) parts.push(`The pair is rotated by a distance of ${short(rotated)}.`);
    if (state.distance >= state.trained) parts.push(`This distance is beyond the trained length.`);
    return parts.join(" ");
  }

  let waiting = 0;
  function draw() {
    const now = model(state);
    const trained = state.stretch || state.logn ? model({ ...state, stretch: "", logn: false }) : null;
    drawDecay(now, trained);
    if (now.before.length) drawFrequencies(now);
    else drawHeads(now);
    drawMap(now);
    clearTimeout(waiting); // screen readers hear the state once the slider rests
    waiting = setTimeout(() => (by("reading").textContent = reading(now, trained)), 250);
  }

  let frameOfChange = 0;
  function changed() {
    showControls();
    history.replaceState(null, "", address());
    cancelAnimationFrame(frameOfChange);
    frameOfChange = requestAnimationFrame(draw);
  }

  try { // the choice made on the other pages of the site
    const mode = localStorage.getItem("mode");
    if (mode === "light" || mode === "dark") document.documentElement.dataset.theme = mode;
  } catch { /* no storage: the system's choice */ }
  build();
  listenToMap();
  read(location.hash.slice(1) || location.search); // links of other pages have no fragment
  changed();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; changed(); } });
  addEventListener("hashchange", () => { Object.assign(state, DEFAULTS); read(location.hash.slice(1)); changed(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
})();
