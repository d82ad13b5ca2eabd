"use strict";
// A click on the head of a column sorts a table by it, another one the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const below = [...(table.tHead.rows[1]?.cells ?? [])];
  // Heads in the order of the columns: those of the second row stand where the first spans them.
  const columns = heads.flatMap((head) => (head.colSpan > 1 || (below.length && head.rowSpan === 1) ? below.splice(0, head.colSpan) : [head]));
  columns.forEach((head, column) => {
    head.querySelector("button.sort")?.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of columns) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? "";
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === ""); // what is missing comes last
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
}
