// Filters above the table of methods: a choice a column, a field for words, and the number of rows shown.
"use strict";

for (const box of document.querySelectorAll(".choices")) {
  const rows = [...box.querySelectorAll("tbody tr")];
  const columns = box.dataset.filters.split(" ");
  const words = JSON.parse(box.dataset.words);
  const cell = (row, column) => row.querySelector(`[data-column="${column}"]`);
  const value = (row, column) => cell(row, column).textContent;
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
      ? [words["a released model"]]
      : [...new Set(rows.flatMap((row) => value(row, column).split(", ")))].sort();
    for (const part of [words.any, ...parts.filter((part) => part !== words.any)]) {
      const option = document.createElement("option");
      option.value = part === words.any ? "" : part;
      option.textContent = part;
      select.append(option);
    }
    fields.push([column, add(heads[cells.indexOf(column)], select)]);
  }
  const search = document.createElement("input");
  search.type = "search";
  add(words.words, search);
  const count = document.createElement("output");
  controls.append(count);
  controls.addEventListener("submit", (event) => event.preventDefault());
  box.prepend(controls);

  function update() {
    const fits = (row) => fields.every(([column, select]) => {
      const parts = value(row, column).split(", ");
      if (column === "used") return !select.value || parts[0] !== "";
      return !select.value || parts.includes(select.value) || "any" in cell(row, column).dataset;
    }) && row.textContent.toLowerCase().includes(search.value.toLowerCase());
    let shown = 0;
    for (const row of rows) {
      row.hidden = !fits(row);
      shown += row.hidden ? 0 : 1;
    }
    const numbers = [shown, rows.length];
    count.textContent = words["# of # methods"].replace(/#/g, () => numbers.shift());
  }
  update();
}
