"use strict";
// Methods without one of the words typed are hidden, in the list and below it.
const box = document.getElementById("find");
const entries = [...document.querySelectorAll("nav li")];
const hideEmpty = (selector, item) => {
  for (const part of document.querySelectorAll(selector)) {
    part.hidden = [...part.querySelectorAll(item)].every((each) => each.hidden);
  }
};
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const entry of entries) {
    const fits = words.every((word) => entry.dataset.words.includes(word));
    entry.hidden = document.getElementById(entry.dataset.method).hidden = !fits;
    shown += fits;
  }
  hideEmpty("nav section", "li");
  hideEmpty("main > section", "article");
  document.getElementById("found").textContent = words.length ? `${shown} of ${entries.length}` : "";
});
