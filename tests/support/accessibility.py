"""Whether everybody can use a page: what axe-core finds in it, what the keyboard does not reach, and what a screen
reader is given to say."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Page

#: What somebody may do without a pointer. Of a group of radio buttons the Tab key reaches one.
_CONTROLS = """() => {
  const all = "button, a[href], input, select, textarea, summary, [tabindex='0']";
  const within = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document;
  const usable = [...within.querySelectorAll(all)].filter(
    (one) => one.checkVisibility() && !one.disabled && !(one.type === "radio" && !one.checked),
  );
  usable.forEach((one, place) => (one.dataset.place = place));
  return usable.map((one) => one.id || one.name || one.title || one.textContent.trim() || one.tagName);
}"""
_FOCUSED = """() => {
  const { place } = document.activeElement.dataset;
  return place === undefined ? null : Number(place);
}"""
#: The text of each live region after each of its changes, but for alerts: a busy machine has them.
_HEAR_READER = """(host) => {
  window.saidByReader = [];
  const root = host ? document.querySelector(host).shadowRoot : document;
  for (const region of root.querySelectorAll("[role=status], [aria-live]:not([aria-live=off])")) {
    const note = () => region.textContent.trim() && saidByReader.push(region.textContent.trim());
    new MutationObserver(note).observe(region, { childList: true, characterData: true, subtree: true });
  }
}"""
# What lies behind a dialog was judged without it.
_RUN = """async () => (await axe.run([...document.querySelectorAll("dialog[open]")].at(-1) ?? document,
  { resultTypes: ["violations"] })).violations.flatMap(({ id, nodes }) =>
  nodes.map(({ target, failureSummary }) => [id, target.join(" "), failureSummary]))"""


async def load_axe(page: Page) -> None:
    """Load axe-core into a page, whatever its policy."""
    await page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())


async def violations(page: Page) -> list[Any]:
    """Return what axe-core finds: the rule, the element and the reason of each."""
    found: list[Any] = await page.evaluate(_RUN)
    return found


async def hear_screen_reader(page: Page, host: str = "") -> None:
    """Keep from now on what a screen reader says unasked while nothing is wrong. ``host`` is the selector of an element
    with a shadow, where it is that which is heard."""
    await page.evaluate(_HEAR_READER, host)


async def said_by_screen_reader(page: Page) -> list[str]:
    said: list[str] = await page.evaluate("saidByReader")
    return said


async def out_of_reach_by_keyboard(page: Page) -> list[str]:
    """Return the names of the controls in sight to which no number of Tab keys leads."""
    names = await page.evaluate(_CONTROLS)
    assert names
    reached = set()
    # The browser's own frame and the body are stops, too, and so are frames on the wire that came meanwhile.
    for _ in range(2 * len(names) + 4):
        await page.keyboard.press("Tab")
        reached.add(await page.evaluate(_FOCUSED))
        if len(reached - {None}) == len(names):
            break
    return [name for place, name in enumerate(names) if place not in reached]
