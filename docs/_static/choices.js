// Filters above the table of methods: a choice a column, a field for words, and the number of rows shown.
"use strict";

for (const box of document.querySelectorAll(".choices")) {
  const rows = [...box.querySelectorAll("tbody tr")];
  const columns = box.dataset.filters.split(" ");
  const value = (row, column) => row.querySelector(`[data-column="${column}"]`).textContent;
  const heads = [...box.querySelectorAll("thead th")].map((head) => head.textContent);
  const cells = [...rows[0].children].map((cell) => cell.dataset.column);
  const controls = document.createElement("form");
  const fields = [];

  const add = (text, control) => {
    const label = document.createElement("label");
    label.append(text, control);
    controls.append(label);
    control.addEventListener("input", update);
    return control;
  };

  for (const column of columns) {
    const select = document.createElement("select");
    const parts = column === "used"
      ? ["a released model"]
      : [...new Set(rows.flatMap((row) => value(row, column).split(", ")))].sort();
    for (const part of ["any", ...parts]) {
      const option = document.createElement("option");
      option.value = part === "any" ? "" : part;
      option.textContent = part;
      select.append(option);
    }
    fields.push([column, add(heads[cells.indexOf(column)], select)]);
  }
  const words = document.createElement("input");
  words.type = "search";
  add("words", words);
  const count = document.createElement("output");
  controls.append(count);
  controls.addEventListener("submit", (event) => event.preventDefault());
  box.prepend(controls);

  function update() {
    const fits = (row) => fields.every(([column, select]) => {
      const parts = value(row, column).split(", ");
      if (column === "used") return !select.value || parts[0] !== "";
      const any = column === "axes" || column === "causal";
      return !select.value || parts.includes(select.value) || (any && /^(any|either)$/.test(parts[0]));
    }) && row.textContent.toLowerCase().includes(words.value.toLowerCase());
    let shown = 0;
    for (const row of rows) {
      row.hidden = !fits(row);
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length} methods`;
  }
  update();
}
