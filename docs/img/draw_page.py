"""Takes page_desktop.png, page_dark.png and page_phone.png: the server's page in a real browser, during a load step.

python docs/img/draw_page.py [MODEL] [SLO_MS] [LOAD_PER_S]; needs selenium, Chromium and its driver, and a network that
takes 32 x 32 pixels. The server gets half of the load for 40 s, then twice the load in bursts; meanwhile the script
posts a drawn aeroplane at every width.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from selenium import webdriver
from selenium.webdriver.common.by import By

HERE = Path(__file__).parent
CALM_S, BUSY_S = 40, 90
SIZE = 32, 32  # of the images sent
COLORS = 256  # of a picture's palette: a third of the bytes
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
DESKTOP, PHONE = (1280, 1440), (390, 2700)


def main(model: str = "cifar10-vgg", slo_ms: str = "50", load: str = "100") -> None:
    command = [sys.executable, "-m", "anyprec"]
    serve = [*command, "serve", model, "--slo", f"{slo_ms}ms", "--port", "0", "--pin"]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        browser = None
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" on ")[1].split(",")[0]
            os.nice(10)  # the browser shares the machine with the server
            browser = open_browser(url, Path(folder) / "profile")
            steps = f"steps:{0.5 * float(load)}@{CALM_S},{2 * float(load)}@{BUSY_S}:2"
            images = Path(folder) / "images.npy"
            np.save(images, np.random.default_rng(0).integers(0, 256, (64, *SIZE, 3), np.uint8))
            loading = [*command, "loadtest", url, "--arrivals", steps, "--slo", f"{slo_ms}ms", "--real-time"]
            loading += ["--images", str(images)]
            with subprocess.Popen(loading, stdout=subprocess.DEVNULL) as generator:
                time.sleep(CALM_S + 20)
                browser.find_element(By.ID, "file").send_keys(draw_aeroplane(Path(folder) / "aeroplane.png"))
                wait_for_medians(browser)
                take_pictures(browser)
                assert generator.poll() is None, "the load ended before the pictures were taken"
                generator.terminate()
        finally:
            if browser is not None:
                browser.quit()
            server.terminate()


def open_browser(url: str, profile: Path) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in FLAGS:
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={profile}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    browser.get(url)
    return browser


def wait_for_medians(browser: webdriver.Chrome) -> None:
    """At most 20 s: a busy server may refuse some of the runs."""
    for _ in range(40):
        if "median of 5" in browser.find_element(By.ID, "answer").text:
            return
        time.sleep(0.5)


def take_pictures(browser: webdriver.Chrome) -> None:
    for name, size, scheme in (("desktop", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "light")):
        scheme_is = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme_is})
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": name == "phone"}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        time.sleep(2.5)
        sheet = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        reduced(sheet).save(HERE / f"page_{name}.png", optimize=True)


def reduced(sheet: Image.Image) -> Image.Image:
    """With its most frequent colors only, exactly: grounds, text and widths keep theirs."""
    counted = sorted(sheet.getcolors(sheet.width * sheet.height) or [], reverse=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for _, color in counted[:COLORS] for value in color])
    return sheet.quantize(palette=palette, dither=Image.Dither.NONE)


def draw_aeroplane(path: Path) -> str:
    sheet = Image.new("RGB", (160, 160), (126, 172, 222))
    pen = ImageDraw.Draw(sheet)
    pen.ellipse((18, 70, 142, 92), fill=(236, 238, 240))
    pen.polygon([(70, 80), (104, 82), (62, 128), (48, 128)], fill=(205, 210, 216))
    pen.polygon([(66, 74), (92, 73), (64, 42), (52, 42)], fill=(220, 224, 229))
    pen.polygon([(20, 76), (42, 76), (24, 48), (12, 48)], fill=(196, 60, 52))
    sheet.resize(SIZE, Image.Resampling.LANCZOS).save(path)
    return str(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
