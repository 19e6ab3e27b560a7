"""The page in a real browser, without a window: charts, the dial, an image at every width, keys, small screens.

Skipped where Chromium, its driver or selenium are missing (Debian: chromium, chromium-driver).
"""

import argparse
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, ask, images, infer, running

selenium = pytest.importorskip("selenium", reason="the browser tests need selenium")
from PIL import Image  # noqa: E402
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from anyprec.cli import loadtest  # noqa: E402
from anyprec.serve.http.keys import read_keys  # noqa: E402
from anyprec.serve.models import Settings  # noqa: E402
from anyprec.serve.monitoring.metrics import ServedRun  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="the browser tests need chromium and chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_window_size(1280, 1000)
    yield driver
    driver.quit()


def text(browser: webdriver.Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def wait(browser: webdriver.Chrome, until, seconds: int = 20):
    return WebDriverWait(browser, seconds).until(lambda _: until())


def open_page(browser: webdriver.Chrome, server: Running) -> None:
    browser.get(f"http://127.0.0.1:{server.port}/")
    wait(browser, lambda: "in the last" in text(browser, "state") or "over the last" in text(browser, "state"))


def precision(server: Running) -> dict:
    return ask(server.port, "GET", "/v2/models/net/precision").json


def complaints(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def image_file(folder: Path) -> str:
    path = folder / "image.png"
    Image.fromarray(images(size=20)[0].transpose(1, 2, 0)).save(path)
    return str(path)


def test_it_shows_what_is_served(browser, server):
    open_page(browser, server)
    browser.get_log("browser")
    for _ in range(5):
        assert infer(server.port, images()).status == 200
    wait(browser, lambda: text(browser, "now-load")[:1].isdigit() and text(browser, "now-load") != "0.0")
    assert text(browser, "now-target").endswith("ms")
    for chart in ("load", "latency", "bits"):
        label, height = browser.execute_script(  # at once: it is drawn anew every second
            """const drawn = document.querySelector(arguments[0]);
            return [drawn.getAttribute('aria-label'), drawn.getBoundingClientRect().height];""",
            f"#{chart} svg",
        )
        assert label and height > 100
    assert browser.find_elements(By.CSS_SELECTOR, "#load rect")  # a bar for the second with requests in it
    assert complaints(browser) == []


def test_an_idle_server_says_what_to_type(browser, model_path):
    with running({"net": model_path}) as server:
        open_page(browser, server)
        wait(browser, lambda: browser.find_element(By.ID, "empty").is_displayed())
        commands = [code.text for code in browser.find_elements(By.CSS_SELECTOR, "#empty code")]
        address = f"http://127.0.0.1:{server.port}"
        assert commands[0] == f"curl --data-binary @photo.jpg {address}/v2/models/net/classify"
        assert commands[1].startswith(f"anyprec loadtest {address} --model net --arrivals poisson:100")
        assert not browser.find_element(By.ID, "charts").is_displayed()
        drop = browser.find_element(By.ID, "drop")
        assert drop.is_displayed() and drop.location["y"] < 400  # without scrolling
        assert infer(server.port, images()).status == 200
        wait(browser, lambda: browser.find_element(By.ID, "charts").is_displayed())
        assert not browser.find_element(By.ID, "empty").is_displayed()
    parser = argparse.ArgumentParser()
    loadtest.add_arguments(parser)
    assert parser.parse_args(commands[1].split()[2:]).url == address


def test_the_dial_holds_a_width_and_frees_it(browser, server):
    open_page(browser, server)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#choices input"))
    boxes = {box.get_attribute("value"): box for box in browser.find_elements(By.CSS_SELECTOR, "#choices input")}
    boxes["2"].send_keys(Keys.SPACE)  # by keyboard
    wait(browser, lambda: precision(server) == {"policy": "fixed", "bits": 2})
    wait(browser, lambda: "2 bit" in text(browser, "dial-note"))
    boxes["adaptive"].send_keys(Keys.SPACE)
    wait(browser, lambda: precision(server)["policy"] == "adaptive")


def test_an_image_is_answered_at_every_width(browser, server, tmp_path):
    open_page(browser, server)
    browser.find_element(By.ID, "file").send_keys(image_file(tmp_path))
    wait(browser, lambda: "median of 5 runs" in text(browser, "answer"))
    rows = browser.find_elements(By.CSS_SELECTOR, "#answer tbody tr")
    widths = [row.find_element(By.TAG_NAME, "th").text for row in rows]
    assert widths == ["1 bit", "2 bit", "4 bit", "8 bit"]
    assert all("ms" in row.text and "%" in row.text for row in rows)


def test_an_image_can_be_dragged_for_a_while_and_dropped(browser, server):
    open_page(browser, server)
    browser.get_log("browser")
    browser.execute_async_script(
        """const done = arguments[0], moved = window.moved = new DataTransfer();
        document.createElement('canvas').toBlob((bytes) => {
          moved.items.add(new File([bytes], 'dragged.png', {type: 'image/png'}));
          document.body.dispatchEvent(new DragEvent('dragover', {dataTransfer: moved, bubbles: true}));
          done();
        }, 'image/png');"""
    )
    state = browser.execute_script("return last.time")
    wait(browser, lambda: browser.execute_script("return last.time") >= state + 2)  # drawn anew meanwhile
    assert browser.find_element(By.ID, "drop").text.startswith("One image, every level")
    browser.execute_script(
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: window.moved, bubbles: true}))"
    )
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#answer img[alt='dragged.png']"))
    wait(browser, lambda: "median of 5 runs" in text(browser, "answer"))
    assert complaints(browser) == []


def test_a_file_that_is_no_image_is_refused_with_a_sentence(browser, server, tmp_path):
    open_page(browser, server)
    path = tmp_path / "notes.txt"
    path.write_text("no image")
    browser.find_element(By.ID, "file").send_keys(str(path))
    wait(browser, lambda: "notes.txt is not a JPEG or PNG image" in text(browser, "answer"))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    browser.find_element(By.ID, "file").send_keys(str(broken))
    wait(browser, lambda: "cannot" in text(browser, "answer") or "not" in text(browser, "answer"))


@pytest.mark.parametrize("width", [360, 390, 768, 1280, 1920])
def test_nothing_is_wider_than_the_screen(browser, server, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, server)
        wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#latency svg"))
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def contrast(browser: webdriver.Chrome, selector: str) -> float:
    """WCAG contrast of an element's text against the nearest background that is not transparent."""
    rgb = browser.execute_script(
        """const found = document.querySelector(arguments[0]); let back = found;
        while (getComputedStyle(back).backgroundColor.startsWith('rgba(0, 0, 0, 0')) back = back.parentElement;
        return [getComputedStyle(found).color, getComputedStyle(back).backgroundColor];""",
        selector,
    )

    def luminance(color: str) -> float:
        parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        r, g, b = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted((luminance(color) for color in rgb), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_in_dark(browser, server, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    open_page(browser, server)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#choices input:checked"))
    for selector in ("h1", "#state", ".quiet", ".figures b", "#choices input:checked + span", "summary", "footer a"):
        assert contrast(browser, selector) >= 4.5, selector


def test_a_key_can_be_given(browser, model_path, tmp_path):
    file = tmp_path / "keys"
    file.write_text("a-secret-of-some-length\n")
    with running({"net": model_path}, keys=read_keys(str(file))) as server:
        browser.get(f"http://127.0.0.1:{server.port}/")
        field = browser.find_element(By.ID, "key")
        wait(browser, field.is_displayed)
        field.send_keys("a-secret-of-some-length" + Keys.ENTER)
        wait(browser, lambda: "no requests" in text(browser, "state"))
        assert not field.is_displayed()


def test_a_server_that_went_away_is_said_and_its_numbers_are_old(browser, model_path):
    with running({"net": model_path}) as server:
        open_page(browser, server)
    wait(browser, lambda: "does not answer" in text(browser, "trouble"))
    assert "no answer from the server; these numbers are" in text(browser, "state")
    assert "stale" in browser.find_element(By.ID, "figures").get_attribute("class")


# --- It does not flatter ---


@pytest.fixture(scope="module")
def overloaded(model_path) -> Iterator[Running]:
    """A target of 20 ms, and every second 27 of 100 requests answered in 10 ms, 33 in 1.5 s, 40 refused."""
    stop = threading.Event()
    with running({"net": model_path}, settings=Settings(slo_s=0.02, warm_up_s=0.05)) as server:

        def second() -> None:
            for met, latency_s, count in ((True, 0.010, 27), (False, 1.5, 33)):
                for _ in range(count):
                    server.app.metrics.ended("net", 200, met, latency_s, [ServedRun(1, 0.0, 0.01, 1, 1)])
            for _ in range(40):
                server.app.metrics.ended("net", 503, True, 0.0, [])

        def load() -> None:
            while not stop.wait(1.0):
                server.loop.call_soon_threadsafe(second)

        thread = threading.Thread(target=load)
        thread.start()
        yield server
        stop.set()
        thread.join()


def figures(browser: webdriver.Chrome) -> dict[str, str]:
    return {name: text(browser, f"now-{name}") for name in ("load", "attainment", "latency", "slowest", "target")}


def test_an_overload_is_said_in_words(browser, overloaded):
    open_page(browser, overloaded)
    wait(browser, lambda: text(browser, "state-words").startswith("overloaded: 73 % of "))
    words = text(browser, "state-words")
    assert "33 % late, 40 % refused" in words and "over the last 10 s" in words
    assert "bad" in browser.find_element(By.ID, "state").get_attribute("class")
    assert text(browser, "state-mark") == "\u25b2"  # not by color alone
    said = browser.find_element(By.ID, "said")
    assert said.get_attribute("role") == "status" and "overloaded" in said.get_attribute("textContent")
    assert contrast(browser, "#state-words") >= 4.5


def test_every_tile_is_of_the_same_named_window(browser, overloaded):
    open_page(browser, overloaded)
    wait(browser, lambda: figures(browser)["attainment"] == "27.0 %")
    tiles = browser.find_elements(By.CSS_SELECTOR, ".figures > div")
    assert len(tiles) == 6 and all("last 10 s" in tile.text for tile in tiles)
    found = figures(browser)
    assert found["target"] == "20 ms" and found["latency"] == found["slowest"] == "1500 ms"
    seen = ask(overloaded.port, "GET", "/v2/models/net/live?seconds=10").json
    assert seen["window"]["attainment"] == pytest.approx(0.27)
    assert seen["window"]["requests"] == sum(second["requests"] for second in seen["seconds"])
    metrics = ask(overloaded.port, "GET", "/metrics").body.decode()
    assert 'anyprec_attainment_ratio{model="net"} 0.27' in metrics and 'anyprec_overloaded{model="net"} 1.0' in metrics


def test_the_latency_axis_reaches_what_happened(browser, overloaded):
    open_page(browser, overloaded)
    wait(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#latency path")) >= 2)
    drawing = (By.CSS_SELECTOR, "#latency svg")
    wait(browser, lambda: "1500 ms" in browser.find_element(*drawing).get_attribute("aria-label"))
    axis, heights, line = browser.execute_script(
        """const all = (what) => [...document.querySelectorAll(`#latency ${what}`)];
        return [all('text[text-anchor=end]').map((text) => text.textContent),
          all('.grid').map((grid) => grid.y1.baseVal.value), all('path').pop().getBBox().y];"""
    )
    ticks = [1e3 * float(tick[:-2]) if tick.endswith(" s") else float(tick) for tick in axis if tick != "now"]
    assert max(ticks) >= 1500 > sorted(ticks)[-2]  # only the last mark is beyond the slowest second
    assert min(heights) < line  # and the line lies below it, not on the border


def test_late_and_refused_differ_by_more_than_their_color(browser, overloaded):
    open_page(browser, overloaded)
    fills = {'url("#late")', 'url("#missed")'}
    bars = "return [...document.querySelectorAll('#load > svg > rect')].map(bar => getComputedStyle(bar).fill)"
    assert fills <= set(wait(browser, lambda: browser.execute_script(bars)))
    # In one go: the page draws itself anew every second.
    texts = "return [...document.querySelectorAll('#latency text.named')].map(mark => mark.textContent)"
    assert {"p50", "p99", "target"} <= set(browser.execute_script(texts))


def test_nothing_comes_from_elsewhere():
    page = Path(__file__).parents[3] / "src/anyprec/serve/http/page"
    for path in page.iterdir():
        body = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in body and "https:" not in body and "//cdn" not in body, path


def test_what_the_page_reads_is_there(server):
    seen = ask(server.port, "GET", "/v2/models/net/live?seconds=3").json
    assert {"time", "target_ms", "levels", "layers", "seconds", "precision", "queue", "window", "condition"} <= set(
        seen
    )
    assert [second["ago"] for second in seen["seconds"]] == [3, 2, 1]
