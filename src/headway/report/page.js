"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 34rem)");
  const options = { displayModeBar: false, responsive: true };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function dressed(layout) {
    const axis = { exponentformat: "power", automargin: true, gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--rule") };
    return {
      margin: { l: 58, r: 12, t: 8, b: 44 }, ...layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false,
      font: { color: colour("--ink"), family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13 },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--rule"), font: { color: colour("--ink") } },
      xaxis: { ...axis, ...layout.xaxis, fixedrange: true }, yaxis: { ...axis, ...layout.yaxis, fixedrange: true },
    };
  }

  // For values of both signs: zero is the colour of the page.
  const signed = () => [[0, colour("--map-low")], [0.5, colour("--map-zero")], [1, colour("--map-high")]];
  const rising = () => [[0, colour("--map-zero")], [1, colour("--map-high")]];

  // -- figures of the run -------------------------------------------------------------------------------------

  const chosen = {};

  function drawChart(element) {
    const name = element.dataset.chart;
    const spec = data.charts[name];
    const frame = spec.frames[chosen[name] ?? spec.frames.length - 1];
    const traces = (frame ? frame.data : spec.data).map((trace) => (
      trace.type === "heatmap" ? { ...trace, colorscale: trace.zmin === 0 ? rising() : signed() } : trace));
    return Plotly.react(element, traces, dressed(spec.layout), options);
  }

  function slide(input) {
    const name = input.dataset.chart;
    const frames = data.charts[name].frames;
    chosen[name] = Number(input.value) - 1;
    input.setAttribute("aria-valuetext", frames[chosen[name]].name);
    document.getElementById("at-" + name).textContent = input.value;
    document.getElementById("told-" + name).textContent = frames[chosen[name]].text;
    return drawChart(document.getElementById("chart-" + name));
  }

  // -- heads --------------------------------------------------------------------------------------------------

  const looks = data.looks;
  const sides = data.sides;
  let head = looks.order.length ? looks.order[0] : 0;
  let sample = 0;
  let query = 0;
  // Of a pattern there is one for each sequence.
  const keyOf = (element) => (element.dataset.what === "P" ? "P" + looks.samples[sample].number : element.dataset.what);
  const noteOf = (element) => document.getElementById("note-" + element.dataset.what + "-" + element.dataset.side);

  async function inflated(text, bytes) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    return bytes === 1 ? new Int8Array(buffer) : new Int16Array(buffer);
  }

  async function matrix(index, what, side) {
    const packed = data.heads[index][what];
    if (side === "true" && packed.difference === undefined) return null;
    let steps = await inflated(packed.learned, packed.bytes);
    if (side === "true") {
      const change = await inflated(packed.difference, packed.bytes);
      steps = steps.map((value, i) => value + change[i]); // a typed array: it wraps as it did when it was made
    }
    const rows = [];
    for (let r = 0; r < packed.rows; r += 1) {
      const row = new Float32Array(packed.columns);
      for (let c = 0; c < packed.columns; c += 1) row[c] = steps[r * packed.columns + c] * packed.step;
      rows.push(row);
    }
    return rows;
  }

  async function drawMap(element) {
    const { what, side } = element.dataset;
    const key = keyOf(element);
    const packed = data.heads[head][key];
    const note = noteOf(element);
    const drawn = head;
    const rows = await matrix(drawn, key, side);
    if (drawn !== head || key !== keyOf(element)) return;
    if (rows === null) {
      Plotly.purge(element);
      note.textContent = sides.none;
      return;
    }
    if (packed.positive) {
      await drawPattern(element, packed, rows);
      return;
    }
    const x = Array.from({ length: packed.columns }, (_, i) => i + 1);
    const y = Array.from({ length: packed.rows }, (_, i) => i + 1);
    element.cursor = null;
    await Plotly.react(element, [{
      type: "heatmap", z: rows, x, y, zmin: -packed.shade, zmax: packed.shade,
      colorscale: signed(), hovertemplate: what + "[%{y}, %{x}] = %{z:.4g}<extra></extra>",
      colorbar: { thickness: 10, len: 0.9, outlinewidth: 0, tickfont: { size: 11 } },
    }], dressed({
      margin: { l: 34, r: 8, t: 6, b: 26 },
      xaxis: { constrain: "domain", showgrid: false, zeroline: false },
      yaxis: { autorange: "reversed", scaleanchor: "x", constrain: "domain", showgrid: false, zeroline: false },
    }), options);
    const words = (packed.bytes === 1 ? "; entries to 1/127 of it" : "")
      + (packed.shade < packed.top ? "; colours end at " + packed.shade.toPrecision(2) : "");
    const largest = rows.reduce((most, row) => row.reduce((m, v) => Math.max(m, Math.abs(v)), most), 0);
    note.textContent = data.heads[head].name + ", largest entry " + largest.toPrecision(3) + words + ".";
    element.caption = note.textContent;
    element.dataset.head = String(head + 1);
  }

  // -- patterns on tokens -------------------------------------------------------------------------------------

  const gaps = { " ": "␣", "\n": "↵", "\t": "→", "\r": "↵" };
  const strip = document.getElementById("strip");
  const stripKeys = document.getElementById("strip-keys");
  let weights = { learned: null, true: null }; // of the head and the sequence that are shown

  function visible(token) {
    if (!token.trim()) return Array.from(token, (c) => gaps[c] ?? "␣").join("") || "∅";
    return token.replace(/^ /, "␣").replace(/[\n\t\r]/g, (c) => gaps[c]);
  }

  function cut(token, most) {
    const letters = Array.from(visible(token));
    return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : letters.join("");
  }

  // Plotly takes some markup in texts, and <s> is a token.
  const plainly = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const quoted = (tokens, i, most = 60) => (looks.named ? "‘" + cut(tokens[i], most) + "’ (" + (i + 1) + ")" : "token " + tokens[i]);

  function ticks(tokens, pixels) {
    const every = Math.ceil((tokens.length * 15) / pixels);
    const at = tokens.map((_, i) => i).filter((i) => i % every === 0);
    const names = at.map((i) => plainly(cut(tokens[i], 9)));
    return { tickmode: "array", tickvals: at.map((i) => i + 1), ticktext: names, tickfont: { size: 11 } };
  }

  function drawPattern(element, packed, rows) {
    const { queries, keys } = looks.samples[sample];
    const pixels = element.clientWidth * 0.62;
    const across = ticks(keys, pixels);
    const words = queries.map((_, a) => keys.map((_, b) => plainly(quoted(queries, a) + " looks at " + quoted(keys, b))));
    const most = [0, 0];
    // Where one key alone is in sight there is nothing to see.
    const chosen = (a) => rows[a].filter((value) => value > 0).length > 1;
    rows.forEach((row, a) => row.forEach((value, b) => {
      if (chosen(a) && (!chosen(most[0]) || value > rows[most[0]][most[1]])) most.splice(0, 2, a, b);
    }));
    const note = noteOf(element);
    note.textContent = data.heads[head].name + ", largest weight " + rows[most[0]][most[1]].toFixed(3) + ": "
      + quoted(queries, most[0]) + " looks at " + quoted(keys, most[1]) + ".";
    element.caption = note.textContent;
    element.cursor = null;
    element.dataset.head = String(head + 1);
    element.dataset.sample = String(looks.samples[sample].number);
    return Plotly.react(element, [{
      type: "heatmap", z: rows, x: keys.map((_, i) => i + 1), y: queries.map((_, i) => i + 1), zmin: 0,
      zmax: packed.shade, colorscale: rising(), customdata: words,
      hovertemplate: "%{customdata}: %{z:.3f}<extra></extra>",
      colorbar: { thickness: 10, len: 0.9, outlinewidth: 0, tickfont: { size: 11 } },
    }], dressed({
      margin: { l: 34, r: 8, t: 6, b: 26 },
      xaxis: {
        ...across, tickangle: across.ticktext.some((name) => name.length > 2) ? -90 : 0, constrain: "domain",
        showgrid: false, zeroline: false,
      },
      yaxis: {
        ...ticks(queries, pixels), autorange: "reversed", scaleanchor: "x", constrain: "domain", showgrid: false,
        zeroline: false,
      },
    }), options);
  }

  // From the colour of the page to that of large values.
  function shades() {
    const [low, high] = ["--map-zero", "--map-high"].map((name) => {
      const hex = colour(name);
      return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    });
    return (share) => low.map((value, i) => Math.round(value + share * (high[i] - value)));
  }

  async function drawThumb(canvas) {
    const index = Number(canvas.dataset.head);
    const key = "P" + looks.samples[sample].number;
    const packed = data.heads[index][key];
    const rows = await matrix(index, key, canvas.dataset.side);
    canvas.hidden = rows === null;
    if (rows === null || key !== "P" + looks.samples[sample].number) return;
    canvas.width = packed.columns;
    canvas.height = packed.rows;
    const image = new ImageData(packed.columns, packed.rows);
    const shade = shades();
    rows.forEach((row, a) => row.forEach((value, b) => {
      const share = Math.min(1, Math.max(0, value / packed.shade));
      image.data.set([...shade(share), 255], 4 * (a * packed.columns + b));
    }));
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  function chips(element, tokens, role) {
    element.replaceChildren(...tokens.map((token, i) => {
      const chip = document.createElement("span");
      if (role) chip.setAttribute("role", role);
      chip.id = element.id + "-" + i;
      chip.append(cut(token, 14), document.createElement("small"));
      return chip;
    }));
  }

  function drawStrip() {
    const { queries, keys } = looks.samples[sample];
    const shade = shades();
    const row = weights.learned[query];
    const other = weights.true && weights.true[query];
    const told = (b, digits) => row[b].toFixed(digits) + (other ? " (" + sides.true + " " + other[b].toFixed(digits) + ")" : "");
    Array.from((stripKeys || strip).children).forEach((chip, b) => {
      // Text has to be read on it, so half of the way is the most.
      chip.style.backgroundColor = "rgb(" + shade(0.5 * Math.max(row[b], 0) ** 0.7).join(",") + ")";
      chip.lastChild.textContent = row[b] >= 0.05 ? row[b].toFixed(2) : "";
      chip.title = quoted(keys, b, Infinity) + ": " + told(b, 3);
    });
    Array.from(strip.children).forEach((chip, a) => chip.setAttribute("aria-selected", String(a === query)));
    strip.setAttribute("aria-activedescendant", strip.id + "-" + query);
    const top = keys.map((_, b) => b).sort((p, q) => row[q] - row[p]).slice(0, 3).filter((b) => row[b] >= 0.01);
    document.getElementById("note-strip").textContent = data.heads[head].name + ": " + quoted(queries, query)
      + " looks at " + (top.map((b) => quoted(keys, b) + " " + told(b, 2)).join(", ") || "nothing in particular") + ".";
  }

  function step(event) {
    const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    query = Math.min(Math.max(query + moves[event.key], 0), strip.children.length - 1);
    drawStrip();
  }

  function drawWrites() {
    const table = document.getElementById("writes");
    if (!table) return;
    table.replaceChildren(...looks.samples[sample].writes[head].map(({ token, words }) => {
      const row = document.createElement("tr");
      const name = document.createElement("th");
      name.scope = "row";
      name.textContent = looks.named ? "‘" + cut(token, 24) + "’" : "token " + token;
      name.title = token;
      const raised = document.createElement("td");
      raised.textContent = words.map(([word, value]) => (
        "‘" + cut(word, 24) + "’ " + (value < 0 ? "−" : "+") + Math.abs(value).toPrecision(3))).join(", ");
      row.append(name, raised);
      return row;
    }));
  }

  async function drawLooks() {
    if (!looks.samples.length) return;
    const [index, at] = [head, sample];
    const key = "P" + looks.samples[at].number;
    const found = { learned: await matrix(index, key, "learned"), true: await matrix(index, key, "true") };
    if (index !== head || at !== sample) return;
    weights = found;
    document.getElementById("does").textContent = data.heads[head].name + ". " + looks.does[head];
    drawStrip();
    drawWrites();
  }

  function enter() {
    if (!looks.samples.length) return;
    const { queries, keys } = looks.samples[sample];
    chips(strip, queries, "option");
    if (stripKeys) chips(stripKeys, keys);
    query = queries.length - 1; // of a causal layer the last one sees most
  }

  function drawSpectra() {
    const spectra = data.heads[head].spectra;
    // The two learned ones come first.
    const given = [["#0072B2", "circle", 1], ["#D55E00", "square", 1], ["#56B4E9", "circle-open", 2],
      ["#E69F00", "square-open", 2]];
    const looks = Object.fromEntries(Object.keys(spectra).map((name, i) => [name, given[i]]));
    const many = Object.values(spectra)[0].length > 100;
    const sizes = Object.values(spectra).flat();
    const decades = Math.log10(Math.max(...sizes) / Math.max(Math.min(...sizes), 1e-17));
    const traces = Object.entries(spectra).map(([name, values]) => ({
      type: "scatter", mode: many ? "lines" : looks[name][2] === 1 ? "lines+markers" : "markers", name, x: values.map((_, i) => i + 1),
      y: values.map((v) => Math.max(v, 1e-17)),
      line: { color: looks[name][0], width: looks[name][2] * 1.5, dash: looks[name][2] === 1 ? "solid" : "dot" },
      marker: { color: looks[name][0], symbol: looks[name][1], size: looks[name][2] * 6 },
      hovertemplate: name + ": %{y:.3g} (number %{x})<extra></extra>",
    }));
    const told = Object.entries(spectra).map(([name, v]) => {
      const rank = data.heads[head].ranks[name];
      return name + " from " + v[0].toPrecision(3) + ", rank " + rank + " of " + v.length;
    });
    document.getElementById("note-spectra").textContent = data.heads[head].name + ": " + told.join("; ") + ".";
    return Plotly.react(document.getElementById("spectra"), traces, dressed({
      height: 300, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, xaxis: { title: { text: "number" } },
      yaxis: {
        type: "log", title: { text: "singular value" },
        ...(decades > 1.5 ? { dtick: Math.max(1, Math.round(decades / 5)) } : {}),
      },
    }), options);
  }

  function walk(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    const element = event.currentTarget;
    if (!move || !element.data) return;
    event.preventDefault();
    const packed = data.heads[head][keyOf(element)];
    const at = element.cursor || [-Math.max(move[0], 0), -Math.max(move[1], 0)];
    const r = Math.min(Math.max(at[0] + move[0], 0), packed.rows - 1);
    const c = Math.min(Math.max(at[1] + move[1], 0), packed.columns - 1);
    element.cursor = [r, c];
    Plotly.Fx.hover(element, { xval: c + 1, yval: r + 1 }, "xy");
    const value = element.data[0].z[r][c];
    const { queries, keys } = packed.positive ? looks.samples[sample] : {};
    noteOf(element).textContent = packed.positive
      ? quoted(queries, r) + " looks at " + quoted(keys, c) + ": " + value.toFixed(3) + "."
      : "Row " + (r + 1) + ", column " + (c + 1) + ": " + value.toPrecision(4) + ".";
  }

  function leave(event) {
    const element = event.currentTarget;
    if (!element.cursor) return;
    element.cursor = null;
    Plotly.Fx.unhover(element);
    noteOf(element).textContent = element.caption;
  }

  // -- all of it ----------------------------------------------------------------------------------------------

  const maps = Array.from(document.querySelectorAll(".map"));
  const drawHeads = async () => {
    await drawLooks();
    for (const element of maps) await drawMap(element);
    if (data.heads.length) await drawSpectra();
  };

  const drawThumbs = () => Promise.all(Array.from(document.querySelectorAll(".thumbs canvas"), drawThumb));

  async function draw() {
    await Promise.all(Array.from(document.querySelectorAll(".chart"), drawChart));
    await drawThumbs();
    await drawHeads();
    document.documentElement.dataset.drawn = "yes";
  }

  // A head is chosen in two places, which agree.
  const pickers = document.querySelectorAll("input[name=head], input[name=look]");
  const agree = () => pickers.forEach((input) => { input.checked = Number(input.value) === head; });
  agree();
  pickers.forEach((input) => input.addEventListener("change", () => {
    head = Number(input.value);
    agree();
    drawHeads();
  }));
  document.querySelectorAll("input[name=sample]").forEach((input) => input.addEventListener("change", async () => {
    sample = Number(input.value);
    enter();
    await drawThumbs();
    await drawLooks();
    for (const element of maps) if (element.dataset.what === "P") await drawMap(element);
  }));
  if (strip) {
    strip.addEventListener("keydown", step);
    strip.addEventListener("click", (event) => {
      const at = Array.from(strip.children).indexOf(event.target.closest("[role=option]"));
      if (at < 0) return;
      query = at;
      drawStrip();
    });
  }
  document.querySelectorAll(".slide input").forEach((input) => input.addEventListener("input", () => slide(input)));
  maps.forEach((element) => {
    element.addEventListener("keydown", walk);
    element.addEventListener("blur", leave);
  });
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  enter();
  draw();
})();
