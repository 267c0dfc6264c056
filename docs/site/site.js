/* What the theme leaves to whoever uses neither eyes nor a pointer: names, and tables that keys can scroll. */

document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
for (const nav of document.querySelectorAll("nav[aria-labelledby]")) {
  const label = document.getElementById(nav.getAttribute("aria-labelledby"));
  if (label?.textContent.trim()) continue;
  nav.removeAttribute("aria-labelledby");
  nav.setAttribute("aria-label", label?.previousElementSibling?.textContent.trim() || "Pages");
}
/* The theme wraps tables, and gives code its buttons, once it has started. */
const mend = () => {
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((table) => (table.tabIndex = 0));
  const navs = document.querySelectorAll(".md-code__nav");
  navs.forEach((nav, place) => nav.setAttribute("aria-label", `Code ${place + 1}`));
};
mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
