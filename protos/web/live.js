// An element with data-live="SECONDS" and an id is fetched again from the page's own address and replaced while the
// page is visible. And a link with data-back goes back the way one came, with what was filled in.
"use strict";
for (const link of document.querySelectorAll("a[data-back]")) {
  link.addEventListener("click", (event) => {
    if (history.length > 1) { event.preventDefault(); history.back(); }
  });
}
const again = async (id) => {
  const shown = document.getElementById(id);
  if (!shown) return;
  if (document.hidden || shown.contains(document.activeElement)) return later(shown);
  try {
    const answer = await fetch(location.href, { headers: { "X-Lazaret-Live": "1" }, redirect: "error", cache: "no-store" });
    if (answer.status === 401) return location.reload();
    if (answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById(id);
      if (!fresh) return location.reload();
      const open = new Set([...shown.querySelectorAll("details[open][id]")].map((details) => details.id));
      for (const details of fresh.querySelectorAll("details[id]")) details.open = open.has(details.id);
      if (fresh.outerHTML !== shown.outerHTML) shown.replaceWith(document.adoptNode(fresh));
    }
  } catch { /* the console does not answer: it is asked again */ }
  const now = document.getElementById(id);
  if (now && now.dataset.live) later(now);
};
const later = (element) => setTimeout(again, Math.max(1, Number(element.dataset.live) || 5) * 1000, element.id);
for (const element of document.querySelectorAll("[data-live][id]")) later(element);
document.addEventListener("submit", (event) => {
  // a second press of the same button asks nothing twice
  if (event.defaultPrevented) return;
  const button = event.submitter;
  if (button && event.target.method === "post") {
    setTimeout(() => { button.disabled = true; }, 0);
    setTimeout(() => { button.disabled = false; }, 5000); // a download leaves the page where it is
  }
});
