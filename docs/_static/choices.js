// Filters above long tables: a choice for each column of few values, a field for words, and the number of rows shown.
// Cells get their column's head, which stands before them on a phone.
"use strict";

const MOST = 10; // values of a column that is chosen by

for (const table of document.querySelectorAll("table.filtered")) {
  const { filters, given } = table.dataset; // columns to choose by, and one whose cells may be empty, if not as found
  const english = { any: "any", words: "words", "# of # methods": "# of #" };
  const words = table.dataset.words ? JSON.parse(table.dataset.words) : english;
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = [...table.tBodies[0].rows];
  const parts = (row, column) => row.cells[column].textContent.split(", ");
  const distinct = (column) => [...new Set(rows.flatMap((row) => parts(row, column)))].filter(Boolean);
  const shared = (column, part) => rows.every((row) => parts(row, column).some((x) => x === part || x === words.any));
  const telling = (column) => distinct(column).filter((part) => !shared(column, part)); // values that leave rows out
  const few = (column) => telling(column).length > 0 && distinct(column).length <= MOST;
  const columns = filters ? filters.split(" ").map(Number) : [...heads.keys()].filter(few);
  const controls = document.createElement("form");
  const fields = [];

  for (const row of rows) {
    for (const [column, head] of heads.entries()) row.cells[column].dataset.head = head;
  }

  const add = (text, control) => {
    const label = document.createElement("label");
    label.append(text, control);
    controls.append(label);
    control.addEventListener("input", update);
    return control;
  };

  for (const column of columns) {
    const select = document.createElement("select");
    const offered = column === Number(given) ? [words["a released model"]] : telling(column).sort();
    for (const part of [words.any, ...offered.filter((part) => part !== words.any)]) {
      const option = document.createElement("option");
      option.value = part === words.any ? "" : part;
      option.textContent = part;
      select.append(option);
    }
    fields.push([column, add(heads[column], select)]);
  }
  const search = document.createElement("input");
  search.type = "search";
  add(words.words, search);
  const count = document.createElement("output");
  controls.append(count);
  controls.className = "filters";
  controls.addEventListener("submit", (event) => event.preventDefault());
  table.parentElement.before(controls);

  function update() {
    const typed = search.value.toLowerCase().split(/\s+/);
    const fits = (row) => fields.every(([column, { value }]) => {
      if (column === Number(given)) return !value || parts(row, column)[0] !== "";
      return !value || parts(row, column).some((part) => part === value || part === words.any);
    }) && typed.every((word) => row.textContent.toLowerCase().includes(word));
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
