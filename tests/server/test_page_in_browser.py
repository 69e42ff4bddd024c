"""The store's page in Debian's Chromium: what it shows, by keyboard too, and that a store's words stay words."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium, as in the extra `dev`")
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from harness.small_segments import make_segment, put_segment
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.prompts import page_hashes
from sgl_kvfetch.stores.profiles import publish_profile
from tests.stores.test_profiles import NO_KEYS, save

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="needs chromium and chromium-driver, as Debian has them"),
]
TOKENS = list(range(40))
EVIL = "<img src=x onerror=x()>"


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def find(self, selector: str) -> WebElement:
        """Wait until an element is shown."""
        return self.until(lambda: next((e for e in self.all(selector) if e.is_displayed()), None))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, found: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_S, ignored_exceptions=[Exception]).until(lambda _: found())

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = Options()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.binary_location = str(BROWSER)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("page") / "store"

    async def fill() -> None:
        store = LocalStore(root)
        await put_segment(store, make_segment(page_hashes(TOKENS, 1), 0, 32))
        await put_segment(store, make_segment(page_hashes(TOKENS[1:], 1), 0, 4, model=EVIL))
        await publish_profile(store, save(root.parent), NO_KEYS)
        await store.close()

    asyncio.run(fill())
    with StoreProcess(root, extra_args=["--capacity", "1GiB", "--token", "secret"]) as store:
        yield store.url


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    browser.driver.get(url)
    browser.driver.execute_script("sessionStorage.setItem('token', 'secret')")
    browser.driver.get(url)
    browser.find("#folders tbody tr")
    return browser


def test_it_asks_for_a_token(browser: Browser, url: str) -> None:
    browser.driver.get(url)
    browser.driver.execute_script("sessionStorage.clear()")
    browser.driver.get(url)
    browser.until(lambda: "asks for a token" in browser.text("#status"))
    browser.find("#token").send_keys("wrong", Keys.ENTER)
    browser.until(lambda: "not valid" in browser.text("#status"))
    assert not browser.all("#folders tbody tr")
    browser.find("#token").send_keys("secret", Keys.ENTER)
    browser.find("#folders tbody tr")
    assert browser.text("#status") == "Healthy"
    assert "1 × 401" in browser.text("#errors")  # that of the wrong token: without one, nothing is asked


def test_what_is_stored(page: Browser) -> None:
    assert "of 1.0 GiB" in page.text("#bars")
    rows = {row.text.split()[0]: row.text for row in page.all("#folders tbody tr")}
    assert "conformance," in rows
    page.all("#folders tbody button")[0].click()
    page.find("#segments tbody button").click()
    assert "pages of 1" in page.text("#segment dl")
    page.until(lambda: page.driver.execute_script("return document.querySelector('#segment img').naturalWidth > 0"))
    assert page.find("#segment img").get_attribute("alt")


def test_profiles_are_shown(page: Browser) -> None:
    (row,) = page.all("#profiles tbody tr")
    assert row.text.startswith("numbers ")
    assert "take it" in row.text


def test_dropped_levels_are_shown_if_there_are_any(page: Browser) -> None:
    assert "Dropped levels" not in page.text("#tiles")
    page.driver.execute_script("latest.history.at(-1).values['dropped_levels_total'] = 42; draw(latest)")
    assert "Dropped levels\n42" in page.text("#tiles")


def test_segments_are_found_by_the_beginning_of_their_names(page: Browser) -> None:
    page.all("#folders tbody button")[0].click()
    name = page.find("#segments tbody button").text.rstrip("…")
    page.find("#prefix").send_keys("9-", Keys.ENTER)
    page.until(lambda: not page.all("#segments tbody tr"))
    page.find("#prefix").clear()
    page.find("#prefix").send_keys(name[:8], Keys.ENTER)
    page.until(lambda: len(page.all("#segments tbody tr")) == 1)


def test_a_prompt_is_pinned_and_unpinned(page: Browser) -> None:
    page.find("#text").send_keys(str(TOKENS))
    page.find("#page-size").clear()
    page.find("#page-size").send_keys("1", Keys.ENTER)
    page.find("#pin").click()
    page.until(lambda: "whole pages, pinned" in page.text("#prompt output"))
    page.find("#unpin").click()
    page.until(lambda: "pinned" not in page.text("#prompt output"))


def test_a_chart_says_what_was_when(page: Browser) -> None:
    script = """
        latest.history = [0, 10, 20].map((at_s) => ({ at_s, values: { "lookups_total:hit": at_s * at_s } }));
        drawCharts();
        const svg = document.querySelector("#charts svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left }));
        return svg.parentElement.textContent;"""
    assert "found 10" in page.driver.execute_script(script)  # 100 in the first 10 s; then 300


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ("", "Healthy"),
        ("s.write_problem = 'the disk is full'", "Read only: the disk is full"),
        ("s.failures = [{at_s: 1000, cause: 'io:EIO'}]", "Errors: 1 in 5 minutes, the last one io:EIO"),
        ("s.failures = [{at_s: 600, cause: 'io:EIO'}]", "Healthy"),
        ("last.stored_bytes = 99", "Healthy, and full: the least recently used is evicted"),
        (
            "last.stored_bytes = 99, last.evicted_segments_total = 60",
            "Full and thrashing: 60 segments evicted within the hour, 50 are left",
        ),
        ("last['requests_total:404'] = 10000", "Healthy"),
    ],
)
def test_the_verdict_comes_first(page: Browser, change: str, verdict: str) -> None:
    script = f"""
        const last = {{ stored_bytes: 10, segments: 50, evicted_segments_total: 0 }};
        const s = {{ now_s: 1001, capacity_bytes: 100, write_problem: null, failures: [],
                     history: [{{ at_s: 900, values: {{}} }}, {{ at_s: 1000, values: last }}] }};
        {change};
        return verdict(s)[0];"""
    assert page.driver.execute_script(script) == verdict


def test_names_are_text(page: Browser) -> None:
    """A model is called what a writer says."""
    assert EVIL in page.text("#folders")
    assert not page.all("#folders img")


def test_a_prompt_by_keyboard_alone(page: Browser) -> None:
    page.driver.execute_script("document.querySelector('#text').focus()")
    page.press(str(TOKENS), Keys.TAB, Keys.END, Keys.BACKSPACE, Keys.BACKSPACE, "1", Keys.TAB, Keys.TAB, Keys.ENTER)
    page.until(lambda: "whole pages" in page.text("#prompt output"))
    lines = page.text("#prompt output").splitlines()
    assert lines[0] == "40 tokens, 40 whole pages"
    assert "conformance: 32 of 40 pages are stored" in lines


def test_a_table_s_place_survives_an_update(page: Browser) -> None:
    """Somebody at the keyboard stays in the row where they are."""
    button = page.all("#folders tbody button")[1]
    page.driver.execute_script("window.before = arguments[0]; window.before.focus()", button)
    page.until(lambda: page.driver.execute_script("return !window.before.isConnected"))
    assert page.driver.switch_to.active_element == page.all("#folders tbody button")[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_the_background(page: Browser, scheme: str) -> None:
    """By WCAG 2.2, 1.4.3: a contrast of 4.5 at least."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    colours: dict[str, str] = page.driver.execute_script(
        "const style = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['back', 'panel', 'front', 'faint', 'first', 'bad']"
        ".map(name => [name, style.getPropertyValue('--' + name).trim()]))"
    )
    for name in ("front", "faint", "first", "bad"):
        for back in ("back", "panel"):
            assert contrast(colours[name], colours[back]) >= 4.5, (name, back)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, ``#rgb`` or ``#rrggbb``, as WCAG defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    parts = [digits[i : i + 2] for i in (0, 2, 4)] if len(digits) == 6 else [2 * digit for digit in digits]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (int(p, 16) / 255 for p in parts)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_was_refused_or_failed_in_the_page(page: Browser) -> None:
    """No script or style breaks the page's content security policy."""
    page.find("#charts svg")
    messages = [entry["message"] for entry in page.driver.get_log("browser")]
    assert [text for text in messages if "Content Security Policy" in text or "Uncaught" in text] == []
