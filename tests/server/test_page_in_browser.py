"""The store's page in Debian's Chromium: what it shows, by keyboard too, and that a store's words stay words."""

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
from harness.waiting import WAIT_S, wait_until
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
        """Return an element's text once it is shown. The page may draw it anew between finding and reading it."""
        (text,) = self.until(lambda: (self.find(selector).text,))
        return str(text)

    def texts(self, selector: str) -> list[str]:
        (texts,) = self.until(lambda: ([each.text for each in self.all(selector)],))
        return list(texts)

    def click(self, selector: str) -> None:
        """Click the first of such elements once it is shown, although the page may draw it anew meanwhile."""

        def is_clicked() -> bool:
            self.find(selector).click()
            return True

        self.until(is_clicked)

    def freeze(self) -> None:
        """Let the page ask its store no more, not even for what it has just asked. So what a test draws stays."""
        self.driver.execute_async_script("ask = () => new Promise(() => {}); window.stop(); setTimeout(arguments[0]);")


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
    put_all(LocalStore(root), make_segment(page_hashes(TOKENS, 1), 0, 32))
    put_all(LocalStore(root), make_segment(page_hashes(TOKENS[1:], 1), 0, 4, model=EVIL))
    using(LocalStore(root), lambda store: publish_profile(store, save(root.parent), NO_KEYS))
    (token := root.parent / "token").write_text("secret")
    with StoreProcess(root, extra_args=["--capacity", "1GiB", "--token-file", str(token)]) as store:
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
    """Title and heading name the store, and a model is called what a writer says."""
    name = f"{socket.gethostname()}:"
    assert page.text("h1").startswith(f"kvfetch store {name}/")
    assert page.driver.title.startswith(f"{name}/")
    assert "of 1.0 GiB" in page.text("#bars")
    assert "conformance," in {row.split()[0] for row in page.texts("#folders tbody tr")}
    assert EVIL in page.text("#folders")
    assert not page.all("#folders img")
    (row,) = page.texts("#profiles tbody tr")
    assert row.startswith("numbers ")
    assert "take it" in row
    page.click("#folders tbody a")
    page.click("#segments tbody a")
    assert "pages of 1" in page.text("#segment dl")


def test_a_segment_has_an_address(page: Browser) -> None:
    """A link that somebody was sent opens the same segment, and the browser's Back goes where they were."""
    page.click("#folders tbody a")
    name = str(page.find("#segments tbody a").get_attribute("title"))
    page.click("#segments tbody a")
    page.until(lambda: name in page.text("#segment dl"))
    address = page.driver.current_url
    page.driver.back()
    page.until(lambda: not page.driver.find_element(By.ID, "segment").is_displayed())
    assert page.find("#segments").is_displayed()
    page.driver.get("about:blank")
    page.driver.get(address)
    page.until(lambda: name in page.text("#segment dl"))
    page.click("#siblings")
    page.find("#segments tbody a")


LONG = "organisation/a-model-of-a-name-that-is-longer-than-most-70B-Instruct"


def test_failures_clients_audits_and_long_names(page: Browser) -> None:
    """Failures are grouped by cause, what audits found comes with what to do, and a laptop shows names whole."""
    page.freeze()
    page.driver.execute_script(
        """
        const failure = (at_s, client, cause) => ({ at_s, client, cause, what: `PUT ${at_s}`, message: "" });
        latest.now_s = 100;
        latest.failures = [failure(10, "a", "io:EIO"), failure(20, "b", "full"), failure(30, "c", "io:EIO")];
        latest.history.at(-1).values["failures_total:io:EIO"] = 7;
        latest.clients = [{ address: "10.0.0.7", lookups: 1200, reads: 3, writes: 4, read_bytes: 2048,
            written_bytes: 1, last_s: 40 }];
        const told = (client, typical, advice, off = "") => ({ client, told_s: 40, says: "it fits",
            advice, audits: { typical, ratio: 2 * typical, off } });
        latest.folders[0].audits = [told("a", 0.5, ""), told("b", 1.75, "calibrate"), told("c", 0, "see", "wrong")];
        latest.folders[0].model = arguments[0];
        for (const part of [drawFailures, drawClients, drawAudits, drawFolders]) part(latest);""",
        LONG,
    )
    assert page.texts("#clients tbody tr") == ["10.0.0.7 1,200 3 2.0 KiB 4 1 B 60 s ago"]
    assert any(LONG in row.replace("\n", "") for row in page.texts("#folders tbody tr"))
    rows = [" ".join(row.split()) for row in page.texts("#audits tbody tr")]
    assert [row.partition("it fits")[2] for row in rows] == [". What to do: see", ". What to do: calibrate", ""]
    assert " b " in rows[1]
    assert " 1.75x 3.50x " in rows[1]
    assert page.texts("#causes tbody tr") == ["io:EIO 7 70 s ago a, c PUT 30:", "full 1 80 s ago b PUT 20:"]
    page.click("#causes tbody a")
    wait_until(lambda: [row.split()[-2:] for row in page.texts("#cause tbody tr")] == [["PUT", "30:"], ["PUT", "10:"]])


def test_segments_are_found_by_the_beginning_of_their_names(page: Browser) -> None:
    page.click("#folders tbody a")
    name = page.find("#segments tbody a").text.rstrip("…")
    page.find("#prefix").send_keys("9-", Keys.ENTER)
    page.until(lambda: not page.all("#segments tbody tr"))
    page.find("#prefix").clear()
    page.find("#prefix").send_keys(name[:8], Keys.ENTER)
    page.until(lambda: len(page.all("#segments tbody tr")) == 1)


def test_charts_and_tiles_say_what_was_when_and_leave_out_what_was_not_asked(page: Browser) -> None:
    page.freeze()
    before = page.driver.execute_script("""
        window.of = (at_s, values) => ({ at_s, values });
        latest.history = [0, 10, 20].map((at_s) => of(at_s, { "request_seconds_count:lookup": at_s * at_s }));
        drawCharts();
        const svg = document.querySelectorAll("#charts svg")[1], box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left }));
        return svg.parentElement.textContent;""")
    assert "lookups 10" in before  # 100 in the first 10 s; then 300
    one_sample = page.driver.execute_script("""
        latest.history = latest.history.slice(-1);
        drawCharts();
        return [...document.querySelectorAll("#charts .legend")].map((each) => each.textContent);""")
    assert one_sample[:2] == ["found –", "lookups –"]
    shares = page.driver.execute_script("""
        const at = (at_s, hit, miss, seconds) => of(at_s, { "lookup_pages_total:hit": hit,
            "lookup_pages_total:miss": miss,
            "request_seconds_sum:read": seconds, "request_seconds_count:read": hit });
        const history = [at(0, 0, 0, 0), at(10, 3, 1, 0.3), at(20, 3, 1, 0.3)];
        const both = [sharesFound(history), meanSeconds(history, ["read"])];
        return both.map((all) => all.map(({ values }) => values[0]));""")
    assert shares == [[pytest.approx(0.75), None], [pytest.approx(0.1), None]]
    tiles = page.driver.execute_script("""
        latest.history = [of(0, {}), of(600, { "request_seconds_sum:read": 2, "request_seconds_count:read": 20 })];
        latest.answer_times = { read: { half_s: 0.03, most_s: null } };
        return tiles(latest).filter(([term]) => term.endsWith("takes"));""")
    assert tiles == [
        ["A lookup takes", "–", "mean, last 10 min"],
        ["A read takes", "100 ms", "mean, last 10 min; half within 30 ms, 95% over 30 s"],
    ]


VERDICTS = [
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
    ("last.segments = 0", "Empty: nothing is stored yet, and nobody has asked"),
    (
        "last.segments = 0, last['request_seconds_count:lookup'] = 3",
        "Empty: servers look up, and nothing is stored yet",
    ),
    (
        "s.folders = [{audits: [{audits: {off: 'wrong'}}, {audits: {off: ''}}]}]",
        "Audits: not used by 1 server, where it would be wrong",
    ),
]


def test_the_verdict_comes_first(page: Browser) -> None:
    for change, verdict in VERDICTS:
        script = f"""
            const last = {{ stored_bytes: 10, segments: 50, evicted_segments_total: 0 }};
            const s = {{ now_s: 1001, capacity_bytes: 100, write_problem: null, failures: [], folders: [],
                         history: [{{ at_s: 900, values: {{}} }}, {{ at_s: 1000, values: last }}] }};
            {change};
            return verdict(s)[0];"""
        assert page.driver.execute_script(script) == verdict


def test_a_table_s_place_survives_an_update(page: Browser) -> None:
    """Somebody at the keyboard stays in the row where they are."""
    second = "document.querySelectorAll('#folders tbody a')[1]"
    page.driver.execute_script(f"window.before = {second}; window.before.focus()")
    page.until(lambda: page.driver.execute_script("return !window.before.isConnected"))
    assert page.driver.execute_script(f"return document.activeElement === {second}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_the_background(page: Browser, scheme: str) -> None:
    """By WCAG 2.2, 1.4.3: a contrast of 4.5 at least."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    colours: dict[str, str] = page.driver.execute_script(
        "const style = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['back', 'panel', 'front', 'faint', 'first', 'bad', 'good']"
        ".map(name => [name, style.getPropertyValue('--' + name).trim()]))"
    )
    for name in ("front", "faint", "first", "bad", "good"):
        for back in ("back", "panel"):
            assert contrast(colours[name], colours[back]) >= 4.5, (name, back)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, ``#rgb`` or ``#rrggbb``, as WCAG defines it."""

    def luminance(colour: str) -> float:
        width = len(colour) // 3
        parts = [int((colour[i : i + width] * 2)[:2], 16) / 255 for i in range(1, len(colour), width)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_nothing_was_refused_or_failed_in_the_page(page: Browser) -> None:
    """No script or style breaks the page's content security policy."""
    page.find("#charts svg")
    messages = [entry["message"] for entry in page.driver.get_log("browser")]
    assert [text for text in messages if "Content Security Policy" in text or "Uncaught" in text] == []


def test_an_empty_store_says_how_to_use_it(browser: Browser, tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store") as store:
        browser.driver.get(store.url)
        assert f'{{"store": "{store.url}"}}' in browser.text("#how")
        assert "--host 0.0.0.0" in browser.text("#how-far")
        assert not browser.driver.find_element(By.ID, "models").is_displayed()
        assert browser.text("#status") == "Empty: nothing is stored yet, and nobody has asked"
        tiles = dict(zip(browser.texts("#tiles dt"), browser.texts("#tiles dd:not(.note)"), strict=True))
        assert tiles["Requests in flight"] == "0"  # the page does not count itself


def test_a_phone_shows_two_tiles_side_by_side_and_nothing_sticks_out(page: Browser) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.until(lambda: page.driver.execute_script("return innerWidth") == 390)
        lefts = page.until(lambda: {tile.rect["x"] for tile in page.all("#tiles > div")})
        assert len(lefts) == 2
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == 390
        # Tables are not cut: no part of a row is beside what is seen, and each value has its column's title.
        page.click("#folders tbody a")
        page.click("#segments tbody a")
        page.freeze()
        page.driver.execute_script(
            """const at_s = latest.now_s;
            latest.clients = [{ address: "10.0.0.7", lookups: 1200, reads: 3, writes: 4, read_bytes: 2048,
                written_bytes: 1, last_s: at_s }];
            latest.failures = [{ at_s, client: "a", cause: "io:EIO", what: "PUT x", message: "no room ".repeat(20) }];
            draw(latest);"""
        )
        tables = page.driver.execute_script(
            "return [...document.querySelectorAll('.scroll')].filter((each) => each.offsetParent)"
            ".map((each) => [each.clientWidth, each.scrollWidth])"
        )
        assert len(tables) >= 5
        assert [table for table in tables if table[1] > table[0]] == []
        first = page.driver.execute_script(
            "const cell = document.querySelector('#folders tbody tr').cells[1];"
            "return [getComputedStyle(cell, '::before').content, cell.textContent]"
        )
        assert first == ['"Quantiser and KV cache"', "exact, bfloat16, pages of 1, layers 0"]
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
