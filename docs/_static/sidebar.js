// Names, for screen readers, of the sidebar's buttons that open a page's children.
"use strict";

for (const button of document.querySelectorAll(".bd-sidenav summary")) {
  const page = button.closest("li").querySelector("a").textContent;
  button.setAttribute("aria-label", `+ ${page}`);
}
