"use strict";
(() => {
  const written = document.getElementById("charts").textContent;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  let views = [];
  let picked = "";

  // Colours come from the style sheet, so that charts and page always agree.
  function coloured() {
    const style = getComputedStyle(document.documentElement);
    return JSON.parse(written, (key, value) =>
      typeof value === "string" && value.startsWith("--") ? style.getPropertyValue(value).trim() || value : value);
  }

  async function draw() {
    const { theme, specs } = coloured();
    theme.font = getComputedStyle(document.body).fontFamily;
    const made = [];
    for (const [key, spec] of Object.entries(specs)) {
      if (narrow.matches) spec.height = spec.usermeta?.narrow ?? spec.height;
      made.push((await vegaEmbed(`#chart-${key}`, spec, { actions: false, renderer: "svg", config: theme })).view);
    }
    views = made;
    for (const view of views) view.addEventListener("click", (event, item) => item?.datum?.subject && pick(item.datum.subject));
    show();
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  }

  // What is picked stands out in all charts; picked again, all do.
  function pick(name) {
    picked = picked === name ? "" : name;
    show();
  }

  function show() {
    for (const view of views) view.signal("picked", picked).runAsync();
    for (const button of document.querySelectorAll("button.pick")) {
      button.setAttribute("aria-pressed", String(button.dataset.subject === picked));
    }
  }

  for (const button of document.querySelectorAll("button.pick")) {
    button.addEventListener("click", () => pick(button.dataset.subject));
  }
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
    });
  }
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
