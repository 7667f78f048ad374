// Draws the charts of the page from the data beside it. Colours come from the style sheet, so that they follow light and dark.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const symbols = { skip: "x", attempt: "triangle-left", checkpoint: "circle", certified: "diamond", finish: "star", stop: "square", verdict: "x",
    lr_event: "triangle-down", noted: "circle-open", ordered: "circle-open" };

  function lineTrace(line) {
    const look = line.look;
    const style = { color: colour(look), width: look === "raw" ? 1 : 2 };
    if (line.dashed) { style.dash = "dash"; style.width = 1; }
    if (look === "abandoned") { style.dash = "dot"; style.width = 1.5; }
    return {
      x: line.x, y: line.y, name: line.name, mode: line.dots ? "lines+markers" : "lines", line: style,
      marker: { size: 6 }, connectgaps: false, showlegend: line.legend, legendgroup: line.name,
      hovertemplate: "%{y:.4~g}<extra>" + line.name + "</extra>",
    };
  }

  // Every event is a mark on a rail under the curves; what changed the course of the run is a line through them as well.
  function railTrace(moments) {
    return {
      x: moments.map((m) => m.batch), y: moments.map(() => 0.5), yaxis: "y2", mode: "markers", showlegend: false,
      marker: {
        symbol: moments.map((m) => symbols[m.kind] || "circle-open"), size: 8,
        color: moments.map((m) => colour(m.tone === "plain" ? "soft" : m.tone)),
        opacity: moments.map((m) => (m.survives ? 1 : 0.4)),
      },
      text: moments.map((m) => m.hover), hovertemplate: "%{text}<extra></extra>",
    };
  }

  // What the guard did, where it happened on the curve itself.
  function markTrace(marks) {
    return {
      x: marks.map((m) => m.batch), y: marks.map((m) => m.y), mode: "markers", showlegend: false,
      marker: {
        symbol: marks.map((m) => symbols[m.kind] || "circle-open"), size: 10, line: { width: 1, color: colour("ground") },
        color: marks.map((m) => colour("warning")), opacity: marks.map((m) => (m.survives ? 1 : 0.4)),
      },
      text: marks.map((m) => m.hover), hovertemplate: "%{text}<extra></extra>",
    };
  }

  function courseLines(moments) {
    return moments.filter((m) => m.line).map((m) => ({
      type: "line", x0: m.batch, x1: m.batch, yref: "paper", y0: 0, y1: 1, layer: "below",
      line: { color: colour(m.tone === "plain" ? "soft" : m.tone), width: 1, dash: "dot" },
    }));
  }

  // 1, 2 and 5 of every decade the values span, or only the decades where those are many.
  function logarithmicTicks(chart) {
    const values = chart.lines.flatMap((line) => line.y).filter((y) => y > 0);
    if (!values.length) return {};
    const low = Math.floor(Math.log10(values.reduce((a, b) => Math.min(a, b))));
    const high = Math.ceil(Math.log10(values.reduce((a, b) => Math.max(a, b))));
    const steps = high - low > 3 ? [1] : [1, 2, 5];
    const ticks = [];
    for (let k = low; k <= high; k++) steps.forEach((s) => ticks.push(Number((s * Math.pow(10, k)).toPrecision(1))));
    return { tickmode: "array", tickvals: ticks, ticktext: ticks.map((t) => (t >= 1e4 || t < 1e-3 ? t.toExponential(0) : String(t))) };
  }

  function draw(chart, place) {
    const grid = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), fixedrange: touch };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("text"), size: 13 },
      margin: { l: 52, r: 8, t: 30, b: 40 }, hovermode: "closest", dragmode: touch ? false : "zoom",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, itemclick: touch ? false : "toggle" },
      xaxis: Object.assign({ title: { text: "batch", standoff: 6, font: { size: 12 } }, anchor: "y2", range: data.range }, grid),
      yaxis: Object.assign({ title: { text: chart.unit, standoff: 6, font: { size: 12 } }, domain: [0.09, 1], automargin: true,
        type: chart.logarithmic ? "log" : "linear", rangemode: chart.from_zero ? "tozero" : "normal" }, grid,
        chart.logarithmic ? logarithmicTicks(chart) : {}),
      yaxis2: { domain: [0, 0.06], range: [0, 1], visible: false, fixedrange: true },
      shapes: courseLines(data.moments), hoverlabel: { align: "left", namelength: -1 },
    };
    const traces = chart.lines.map(lineTrace).concat(chart.marks.length ? [markTrace(chart.marks)] : [], [railTrace(data.moments)]);
    Plotly.react("chart-" + place, traces, layout, { displayModeBar: false, responsive: true, scrollZoom: false });
  }

  const drawAll = () => data.charts.forEach(draw);
  drawAll();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
