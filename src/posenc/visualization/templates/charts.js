"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");

  // Colours come from the style sheet, so that charts and page always agree.
  function config() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
    return {
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      view: { stroke: null },
      axis: {
        labelColor: soft, titleColor: soft, gridColor: line, domainColor: soft, tickColor: soft,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", titlePadding: 10,
      },
      legend: { labelColor: ink, labelFontSize: 12.5, symbolStrokeWidth: 2.4, columns: narrow.matches ? 2 : 4 },
    };
  }

  async function draw() {
    for (const [key, spec] of Object.entries(specs)) {
      const own = structuredClone(spec);
      if (narrow.matches) {
        JSON.stringify(own, (name, value) => {
          if (name === "legend" && value) value.columns = 2;
          return value;
        });
      }
      await vegaEmbed(`#chart-${key}`, own, { actions: false, renderer: "svg", config: config() });
    }
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  }

  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();

  document.getElementById("copy").addEventListener("click", async (event) => {
    await navigator.clipboard.writeText(document.getElementById("command").textContent);
    event.target.textContent = "Copied";
  });
})();
