"""The report in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import page
from bench.report.sections import sections
from bench.report.table import Table
from tests.bench.sample_results import sample_results

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

SMALLEST_TEXT = """() => Math.min(...[...document.querySelectorAll('p, td, th, a, code, figcaption, summary')]
  .map(node => parseFloat(getComputedStyle(node).fontSize)),
  ...[...document.querySelectorAll('svg')].flatMap(svg => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return [...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize) * scale);
  }))"""

CONTRAST = """() => {
  const luminance = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const ratio = (a, b) => {
    const [lighter, darker] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (lighter + 0.05) / (darker + 0.05);
  };
  const nodes = [...document.querySelectorAll('p, td, th, a, code, pre, figcaption, summary, svg text')];
  return Math.min(...nodes.map(node => {
    const style = getComputedStyle(node);
    return ratio(node.tagName === 'text' ? style.fill : style.color, behind(node));
  }));
}"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        profile = tmp_path_factory.mktemp("profile")
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=list(FLAGS)
        )
        yield context
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_whole_and_legible(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    results = sample_results()
    path = tmp_path / "report.html"
    path.write_text(page.html(results), encoding="utf-8")
    tab = browser.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: said.append(request.url) if not request.url.startswith("data:") else None)
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    tab.goto(path.as_uri())
    assert said == [path.as_uri()]
    shown = tab.eval_on_selector_all("svg[data-plot]", "all => all.map(svg => svg.getBoundingClientRect().height)")
    assert len(shown) == sum(len(section.plots) for section in sections(Table(results)))
    assert min(shown) > 100
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(SMALLEST_TEXT) >= 11
    assert tab.evaluate(CONTRAST) >= 4.5
    tab.close()
