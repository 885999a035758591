"""Pictures of a dashboard: light, dark and on a phone.

    swarm up run.toml --web          # prints the page's address
    python tests/browser/screenshots.py http://127.0.0.1:8765/ docs/images

Needs a Chromium and `pip install playwright`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VIEWS = {
    "dashboard-light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dashboard-dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "dashboard-phone": {
        "viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2
    },
}  # fmt: skip


def find_chromium() -> str | None:
    """A Chromium on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser, as Playwright drives it."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        raise FileNotFoundError("no Chromium on PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


def shrink(path: Path) -> None:
    """To 256 colours, a third of the size, if Pillow is installed."""
    with suppress(ImportError):
        from PIL import Image

        with Image.open(path) as image:
            image.convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--whole", action="store_true", help="the whole page, not one screen")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, options in VIEWS.items():
            page = browser.new_page(**options)
            page.goto(given.url)
            page.wait_for_selector("#loss-plot .uplot, #loss-plot svg")
            page.wait_for_timeout(2500)  # a few updates, so that things move
            path = given.out / f"{name}.png"
            page.screenshot(path=path, full_page=given.whole)
            shrink(path)
            print(path, path.stat().st_size)
            page.close()


if __name__ == "__main__":
    sys.exit(main())
