"""The store's page in Debian's Chromium: what it shows, and that a store's words stay words."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
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

from harness.small_segments import make_segment
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.prompts import page_hashes
from sgl_kvfetch.stores import publish_profile
from tests.segments import put_all, using
from tests.stores.test_profiles import NO_KEYS, save

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="needs chromium and chromium-driver, as Debian has them"),
]
TOKENS = list(range(40))
EVIL = "<img src=x onerror=x()>"


class Page:
    """A page that may draw each part anew at any time: every look waits until it finds something."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.run = driver.execute_script

    def until(self, found: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_S, ignored_exceptions=[Exception]).until(lambda _: found())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def find(self, selector: str) -> WebElement:
        return self.until(lambda: next((e for e in self.all(selector) if e.is_displayed()), None))

    def text(self, selector: str) -> str:
        (text,) = self.until(lambda: (self.find(selector).text,))
        return str(text)

    def texts(self, selector: str) -> list[str]:
        (texts,) = self.until(lambda: ([" ".join(each.text.split()) for each in self.all(selector)],))
        return list(texts)

    def click(self, selector: str) -> None:
        def is_clicked() -> bool:
            self.find(selector).click()
            return True

        self.until(is_clicked)

    def open(self, url: str, token: str = "") -> None:
        self.driver.get(url)
        self.run("sessionStorage.setItem('token', arguments[0])", token)
        self.driver.get(url)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    options = Options()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.binary_location = str(BROWSER)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("page") / "store"
    put_all(LocalStore(root), make_segment(page_hashes(TOKENS, 1), 0, 32))
    put_all(LocalStore(root), make_segment(page_hashes(TOKENS[1:], 1), 0, 4, model=EVIL))
    using(LocalStore(root), lambda store: publish_profile(store, save(root.parent), NO_KEYS))
    (token := root.parent / "token").write_text("secret")
    with StoreProcess(root, extra_args=["--capacity", "1GiB", "--token-file", str(token)]) as store:
        yield store.url


def test_it_asks_for_a_token(page: Page, url: str) -> None:
    page.open(url)
    page.until(lambda: "asks for a token" in page.text("#status"))
    page.find("#token").send_keys("wrong", Keys.ENTER)
    page.until(lambda: "not valid" in page.text("#status"))
    assert not page.all("#folders tbody tr")
    page.find("#token").send_keys("secret", Keys.ENTER)
    page.find("#folders tbody tr")
    assert page.text("#status") == "Healthy"
    assert "1 × 401" in page.text("#errors")  # that of the wrong token: without one, nothing is asked


def test_what_is_stored(page: Page, url: str) -> None:
    """Also a segment, by a link that somebody was sent; and no script or style breaks the content security policy."""
    page.driver.get_log("browser")  # what was before
    page.open(url, "secret")
    page.find("#folders tbody tr")
    assert page.text("h1").startswith(f"kvfetch store {socket.gethostname()}:/")
    assert "of 1.0 GiB" in page.text("#bars")
    assert any(row.startswith("conformance, ") for row in page.texts("#folders tbody tr"))
    assert EVIL in page.text("#folders")
    assert not page.all("#folders img")
    (row,) = page.texts("#profiles tbody tr")
    assert row.startswith("numbers ")
    assert "take it" in row
    page.click("#folders tbody a")
    name = str(page.find("#segments tbody a").get_attribute("title"))
    page.click("#segments tbody a")
    page.until(lambda: name in page.text("#segment dl"))
    address = page.driver.current_url
    page.driver.back()
    page.until(lambda: not page.driver.find_element(By.ID, "segment").is_displayed())
    page.driver.get("about:blank")
    page.driver.get(address)
    page.until(lambda: name in page.text("#segment dl"))
    page.find("#charts svg")
    messages = [entry["message"] for entry in page.driver.get_log("browser")]
    assert [text for text in messages if "Content Security Policy" in text or "Uncaught" in text] == []


def test_failures_and_audits(page: Page, url: str) -> None:
    """Failures are grouped by cause, and what audits found comes with what to do."""
    page.open(url, "secret")
    page.find("#folders tbody tr")
    page.driver.execute_async_script("ask = () => new Promise(() => {}); window.stop(); setTimeout(arguments[0]);")
    page.run(
        """
        const failure = (at_s, client, cause) => ({ at_s, client, cause, what: `PUT ${at_s}`, message: "" });
        latest.now_s = 100;
        latest.failures = [failure(10, "a", "io:EIO"), failure(20, "b", "full"), failure(30, "c", "io:EIO")];
        latest.history.at(-1).values["failures_total:io:EIO"] = 7;
        const told = (client, typical, advice, off = "") => ({ client, told_s: 40, says: "it fits",
            advice, audits: { typical, ratio: 2 * typical, off } });
        latest.folders[0].audits = [told("a", 0.5, ""), told("b", 1.75, "calibrate"), told("c", 0, "see", "wrong")];
        drawFailures(latest);
        drawAudits(latest);"""
    )
    rows = page.texts("#audits tbody tr")
    assert [row.partition("it fits")[2] for row in rows] == [". What to do: see", ". What to do: calibrate", ""]
    assert " 1.75x 3.50x " in rows[1]
    assert page.texts("#causes tbody tr") == ["io:EIO 7 70 s ago a, c PUT 30:", "full 1 80 s ago b PUT 20:"]
    page.click("#causes tbody a")
    page.until(lambda: [row.split()[-1] for row in page.texts("#cause tbody tr")] == ["30:", "10:"])


VERDICTS = {
    "": "Healthy",
    "s.write_problem = 'the disk is full'": "Read only: the disk is full",
    "s.failures = [{at_s: 1000, cause: 'io:EIO'}]": "Errors: 1 in 5 minutes, the last one io:EIO",
    "s.failures = [{at_s: 600, cause: 'io:EIO'}]": "Healthy",
    "last.stored_bytes = 99": "Healthy, and full: the least recently used is evicted",
    "last.stored_bytes = 99, last.evicted_segments_total = 60": (
        "Full and thrashing: 60 segments evicted within the hour, 50 are left"
    ),
    "s.folders = [{audits: [{audits: {off: 'wrong'}}, {audits: {off: ''}}]}]": (
        "Audits: not used by 1 server, where it would be wrong"
    ),
}


def test_the_verdict_and_what_charts_are_made_of(page: Page, url: str) -> None:
    page.open(url)
    for change, verdict in VERDICTS.items():
        script = f"""
            const last = {{ stored_bytes: 10, segments: 50, evicted_segments_total: 0 }};
            const s = {{ now_s: 1001, capacity_bytes: 100, write_problem: null, failures: [], folders: [],
                         history: [{{ at_s: 900, values: {{}} }}, {{ at_s: 1000, values: last }}] }};
            {change};
            return verdict(s)[0];"""
        assert page.run(script) == verdict
    shares = page.run("""
        const at = (at_s, hit, miss, seconds) => ({ at_s, values: { "lookup_pages_total:hit": hit,
            "lookup_pages_total:miss": miss,
            "request_seconds_sum:read": seconds, "request_seconds_count:read": hit } });
        const history = [at(0, 0, 0, 0), at(10, 3, 1, 0.3), at(20, 3, 1, 0.3)];
        const both = [sharesFound(history), meanSeconds(history, ["read"])];
        return both.map((all) => all.map(({ values }) => values[0]));""")
    assert shares == [[pytest.approx(0.75), None], [pytest.approx(0.1), None]]


def test_an_empty_store_says_how_to_use_it(page: Page, tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as store:
        page.open(store.url)
        assert f'{{"store": "{store.url}"}}' in page.text("#how")
        assert page.text("#status") == "Empty: nothing is stored yet, and nobody has asked"
