// A list of the published versions in the header, where there are several: leads to the same page in another one.
"use strict";

{
  const root = document.documentElement;
  const home = new URL(root.dataset.content_root, location.href);
  const own = home.pathname.split("/").at(-2);
  const header = document.querySelector(".navbar-header-items__start");

  if (versions.length > 1 && versions.includes(own)) {
    const select = document.createElement("select");
    select.className = "versions";
    select.setAttribute("aria-label", root.lang.startsWith("zh") ? "版本" : "Version");
    for (const name of versions) select.add(new Option(name, name, name === own, name === own));
    select.addEventListener("change", async () => {
      const other = new URL(`../${select.value}/`, home);
      const page = new URL(location.href.slice(home.href.length), other);
      const asked = location.protocol === "file:" ? null : await fetch(page, { method: "HEAD" }).catch(() => null);
      location.href = asked?.ok ? page : new URL("index.html", other);
    });
    header.append(select);
  }
}
