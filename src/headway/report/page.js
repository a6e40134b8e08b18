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

  let head = 0;

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
    const packed = data.heads[head][what];
    const note = document.getElementById("note-" + what + "-" + side);
    const drawn = head;
    const rows = await matrix(drawn, what, side);
    if (drawn !== head) return;
    if (rows === null) {
      Plotly.purge(element);
      note.textContent = "This head stands for no true one.";
      return;
    }
    const letter = packed.positive ? "P" : what;
    const x = Array.from({ length: packed.columns }, (_, i) => i + 1);
    const y = Array.from({ length: packed.rows }, (_, i) => i + 1);
    element.cursor = null;
    await Plotly.react(element, [{
      type: "heatmap", z: rows, x, y, zmin: packed.positive ? 0 : -packed.shade, zmax: packed.shade,
      colorscale: packed.positive ? rising() : signed(),
      hovertemplate: letter + "[%{y}, %{x}] = %{z:.4g}<extra></extra>",
      colorbar: { thickness: 10, len: 0.9, outlinewidth: 0, tickfont: { size: 11 } },
    }], dressed({
      margin: { l: 34, r: 8, t: 6, b: 26 },
      xaxis: { constrain: "domain", showgrid: false, zeroline: false },
      yaxis: { autorange: "reversed", scaleanchor: "x", constrain: "domain", showgrid: false, zeroline: false },
    }), options);
    const words = (packed.bytes === 1 ? "; entries to 1/127 of it" : "")
      + (packed.shade < packed.top ? "; colours end at " + packed.shade.toPrecision(2) : "");
    const largest = rows.reduce((most, row) => row.reduce((m, v) => Math.max(m, Math.abs(v)), most), 0);
    note.textContent = "Head " + (head + 1) + ", largest entry " + largest.toPrecision(3) + words + ".";
    element.caption = note.textContent;
    element.dataset.head = String(head + 1);
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
    document.getElementById("note-spectra").textContent = "Head " + (head + 1) + ": " + told.join("; ") + ".";
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
    const packed = data.heads[head][element.dataset.what];
    const at = element.cursor || [-Math.max(move[0], 0), -Math.max(move[1], 0)];
    const r = Math.min(Math.max(at[0] + move[0], 0), packed.rows - 1);
    const c = Math.min(Math.max(at[1] + move[1], 0), packed.columns - 1);
    element.cursor = [r, c];
    Plotly.Fx.hover(element, { xval: c + 1, yval: r + 1 }, "xy");
    const value = element.data[0].z[r][c];
    document.getElementById("note-" + element.dataset.what + "-" + element.dataset.side).textContent =
      "Row " + (r + 1) + ", column " + (c + 1) + ": " + value.toPrecision(4) + ".";
  }

  function leave(event) {
    const element = event.currentTarget;
    if (!element.cursor) return;
    element.cursor = null;
    Plotly.Fx.unhover(element);
    document.getElementById("note-" + element.dataset.what + "-" + element.dataset.side).textContent = element.caption;
  }

  // -- all of it ----------------------------------------------------------------------------------------------

  const maps = Array.from(document.querySelectorAll(".map"));
  const drawHeads = async () => {
    for (const element of maps) await drawMap(element);
    if (data.heads.length) await drawSpectra();
  };

  async function draw() {
    await Promise.all(Array.from(document.querySelectorAll(".chart"), drawChart));
    await drawHeads();
    document.documentElement.dataset.drawn = "yes";
  }

  document.querySelectorAll("input[name=head]").forEach((input) => input.addEventListener("change", () => {
    head = Number(input.value);
    drawHeads();
  }));
  document.querySelectorAll(".slide input").forEach((input) => input.addEventListener("input", () => slide(input)));
  maps.forEach((element) => {
    element.addEventListener("keydown", walk);
    element.addEventListener("blur", leave);
  });
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
